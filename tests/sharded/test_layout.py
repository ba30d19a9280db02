"""Plans of flat buffers: what lies where, what is cut, and how much is empty."""

import itertools
import math
import random

import pytest

from collectives.sharded.layout import ALIGNMENT, MOST_PADDING, MOST_PADDING_OF_BLOCKS, plan_layout


def llama(width=4096, inner=14336, keys=1024):
    return [(width, width), (keys, width), (keys, width), (width, width), (inner, width), (inner, width),
            (width, inner), (width,), (width,)]  # fmt: skip


def gpt2(width=1600):
    return [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,),
            (width, 4 * width), (4 * width,), (4 * width, width), (width,)]  # fmt: skip


def bert(width=768, inner=3072):
    return [*[(width, width), (width,)] * 4, (width,), (width,), (inner, width), (inner,), (width, inner), (width,),
            (width,), (width,)]  # fmt: skip


BLOCKS = {
    "Llama-8B": llama(), "GPT2-XL": gpt2(), "BERT": bert(), "BERT-large": bert(1024, 4096),
    "Llama-8B's embeddings": [(128256, 4096), (4096,), (128256, 4096)],
    "GPT2-XL's embeddings": [(50257, 1600), (1024, 1600), (1600,), (1600,)],
}  # fmt: skip


def plan(shapes, ranks, block=1, itemsize=4, multiple=1):
    sizes = list(map(math.prod, shapes))
    rows = [max(1, math.prod(shape[1:])) for shape in shapes]
    grains = [row * block if row > 1 else 1 for row in rows]
    layout = plan_layout(sizes, grains, ranks, rows=rows, itemsize=itemsize, multiple=multiple)
    check(layout, sizes, rows, grains, ranks, itemsize, multiple)
    return layout, layout.part * ranks / max(1, sum(sizes)) - 1


def check(layout, sizes, rows, grains, ranks, itemsize, multiple):
    """Parameters don't overlap, are within the buffer, aligned, and cut where the plan says."""
    align = max(1, ALIGNMENT // itemsize)
    assert layout.part % align == 0 == layout.part % multiple
    ends = [offset + size for offset, size in zip(layout.offsets, sizes, strict=True)]
    assert all(offset % align == 0 for offset in layout.offsets)
    assert all(end <= begin for end, begin in zip(ends, layout.offsets[1:], strict=False))
    assert ends[-1] <= layout.part * ranks
    for index, size in enumerate(sizes):
        cuts = layout.cuts(index, size, ranks)
        assert cuts[0] == 0 and cuts[-1] == size and all(a <= b for a, b in itertools.pairwise(cuts))
        for units, says in ((rows, layout.by_rows), (grains, layout.by_grains)):
            assert says[index] == all(cut % units[index] == 0 or cut == size for cut in cuts)
        assert layout.by_rows[index] or not layout.by_grains[index]
    padding, share = layout.part * ranks - sum(sizes), MOST_PADDING if rows == grains else MOST_PADDING_OF_BLOCKS
    assert padding <= max(share * sum(sizes), align * (len(sizes) + ranks), ranks * multiple) + ranks * align


@pytest.mark.parametrize("name", BLOCKS)
def test_padding_of_transformers(name):
    for ranks in range(2, 65):
        layout, padding = plan(BLOCKS[name], ranks)
        assert padding <= MOST_PADDING
        assert layout.by_rows.count(False) <= 1  # of all parameters only those with the largest rows
        if name.startswith("Llama") or ranks in (2, 4, 8):
            assert all(layout.by_rows)


@pytest.mark.parametrize("block", [32, 128])
def test_blocks_of_rows(block):
    for name, shapes in BLOCKS.items():
        for ranks in (2, 3, 4, 8, 16, 24, 32, 64):
            layout, padding = plan(shapes, ranks, block)
            assert padding <= MOST_PADDING_OF_BLOCKS, (name, ranks)
        if name == "Llama-8B":
            layout, _ = plan(shapes, 2, block)
            assert all(layout.by_grains)


def test_small_units_waste_bytes_not_shares():
    for shapes in ([(10, 8), (10,), (4, 10), (4,)], [(1,)], [()], [(3,)] * 20, [(5, 1000)], [(2, 0), (3, 3)], [(0,)]):
        for ranks, itemsize in itertools.product((1, 2, 3, 8, 64), (1, 2, 4, 8)):
            plan(shapes, ranks, itemsize=itemsize)


def test_random_units():
    chosen = random.Random(3)
    for _ in range(150):
        lengths = [chosen.randint(0, 3) for _ in range(chosen.randint(1, 12))]
        shapes = [tuple(chosen.choice((1, 2, 3, 7, 16, 33, 64, 100)) for _ in range(length)) for length in lengths]
        block, itemsize, multiple = chosen.choice((1, 4, 32)), chosen.choice((1, 2, 4, 8)), chosen.choice((1, 64))
        plan(shapes, chosen.randint(1, 64), block, itemsize, multiple)
