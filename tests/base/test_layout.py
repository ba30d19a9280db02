"""Offsets, padding and tiles as pure functions."""

from __future__ import annotations

import re

import pytest

from collectives import layout
from collectives.errors import InvalidArgument

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

counts = st.lists(st.integers(0, 1 << 34), max_size=60)
itemsizes = st.sampled_from([1, 2, 4, 8, 16])


@hypothesis.given(counts, itemsizes, st.sampled_from([16, 32, 512]))
def test_a_bucket_is_aligned_ordered_and_tight(counts, itemsize, alignment):
    offsets, total = layout.bucket_layout(counts, itemsize, alignment)
    assert len(offsets) == len(counts)
    for offset, count, end in zip(offsets, counts, [*offsets, total][1:], strict=True):
        assert offset * itemsize % alignment == 0
        assert end - offset == layout.pad_count(count, itemsize, alignment)
        assert count <= end - offset and (end - offset - count) * itemsize < alignment
    assert total * itemsize % alignment == 0


@hypothesis.given(st.integers(0, 1 << 34), itemsizes)
def test_padded(count, itemsize):
    assert layout.pad_count(count, itemsize) == next(n for n in range(count, count + 16) if n * itemsize % 16 == 0)


@pytest.mark.parametrize("itemsize", [0, -4, 3, 12, 32])
def test_sizes_that_can_not_be_padded(itemsize):
    for call in (lambda: layout.pad_count(1, itemsize), lambda: layout.bucket_layout([1], itemsize)):
        with pytest.raises(InvalidArgument, match=f"elements of {itemsize} bytes can't be padded"):
            call()


def test_nothing():
    assert layout.bucket_layout([], 4) == ((), 0)
    assert layout.bucket_layout([0, 0], 4) == ((0, 0), 0)
    assert layout.check_offsets([], []) == ((), 0)


@hypothesis.given(st.integers(0, 1 << 40))
def test_tiles(count):
    tiles = layout.count_tiles(count)
    assert (tiles - 1) * layout.TILE < count <= tiles * layout.TILE or (count == 0 and tiles == 0)


@hypothesis.given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=9))
def test_offsets_are_refused_where_tensors_overlap(pieces):
    counts, offsets = [count for count, _ in pieces], [offset for _, offset in pieces]
    taken = [set(range(offset, offset + count)) for count, offset in pieces]
    overlap = sum(map(len, taken)) != len(set().union(*taken))
    if not overlap:
        assert layout.check_offsets(offsets, counts) == (
            tuple(offsets),
            max((o + c for c, o in pieces if c), default=0),
        )
        return
    with pytest.raises(InvalidArgument, match=r"tensor \d+ overlaps tensor \d+ in the flat buffer") as caught:
        layout.check_offsets(offsets, counts, op="pack")
    second, first = map(int, re.findall(r"tensor (\d+)", str(caught.value))[:2])
    assert first < second and taken[first] & taken[second]
    assert caught.value.op == "pack"


@pytest.mark.parametrize(
    "offset, message",
    [
        (-1, "the offset of tensor 1 is -1: it must be 0 or more"),
        (1 << 62, "the offset of tensor 1 is 4611686018427387904"),
        (1.0, "the offset of tensor 1 must be an int, not 1.0"),
        ("1", "the offset of tensor 1 must be an int, not '1'"),
        (True, "the offset of tensor 1 must be an int, not True"),
        (None, "the offset of tensor 1 must be an int, not None"),
    ],
)
def test_offsets_that_are_none(offset, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        layout.check_offsets([0, offset], [1, 1])


def test_as_many_offsets_as_tensors():
    for offsets in ([], [0], [0, 1, 2]):
        with pytest.raises(InvalidArgument, match=f"there are {len(offsets)} offsets for 2 tensors"):
            layout.check_offsets(offsets, [1, 1])
