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
