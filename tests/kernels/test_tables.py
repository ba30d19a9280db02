"""Tables of tensors, and bad input of pack and unpack: refused before anything is written, with the tensor's index."""

from __future__ import annotations

import gc
import random
import re
import weakref

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument
from collectives.layout import bucket_layout

ONE = torch.ones(1, dtype=torch.float32)


def refused(message: str, op: str = "pack"):
    return pytest.raises(InvalidArgument, match=f"^{op}: {re.escape(message)}")


# ---- What a table says.
def test_attributes():
    tensors = [torch.empty(3), torch.empty(0), torch.empty(2, 5).half(), torch.empty(())]
    table = kernels.Table(tensors, torch.bfloat16)
    assert table.offsets == (0, 8, 8, 24) and table.total == 32 and table.nbytes == 64
    assert table.offsets == bucket_layout([3, 0, 10, 1], 2).offsets
    assert len(table) == 4 and table.dtype is torch.bfloat16 and table.device == torch.device("cpu")
    assert all(a is b for a, b in zip(table.tensors, tensors, strict=True))
    assert repr(table) == "<Table of 4 tensors, 32 elements of bfloat16 on cpu>"


def test_any_iterable_and_none():
    assert kernels.Table((torch.ones(n) for n in range(5)), torch.float32).total == 16
    empty = kernels.Table([], torch.float32)
    assert empty.total == 0 and empty.offsets == () and len(empty) == 0
    kernels.pack(empty, torch.empty(0))
    kernels.unpack(torch.empty(3), empty)
    kernels.pack([], np.empty(0, dtype=np.float16))


def test_dtypes():
    """torch's, NumPy's and their names."""
    kernels.pack(kernels.Table([ONE], "bfloat16"), torch.zeros(8, dtype=torch.bfloat16))
    for dtype in (np.float32, np.dtype("float32"), "float32"):
        table = kernels.Table([ONE], dtype)
        assert table.dtype is torch.float32
        kernels.pack(table, np.zeros(4, dtype=np.float32))
    assert kernels.Table([], ">f4").dtype == np.dtype(">f4")  # torch has none
    for dtype in ("nothing", 3.5, torch.qint8, torch.bits8, np.dtype("V12"), object(), None, {"a": 1}, ONE):
        with pytest.raises(InvalidArgument, match="^Table: (the flat buffer's dtype must|there are no flat)"):
            kernels.Table([], dtype)


def test_a_table_keeps_its_tensors():
    tensor = torch.ones(5)
    alive = weakref.ref(tensor)
    table = kernels.Table([tensor], torch.float32)
    del tensor
    gc.collect()
    flat = torch.zeros(8)
    kernels.pack(table, flat)
    assert alive() is not None and flat.sum() == 5


def shrunk(count=1000, nbytes=100, dtype=torch.float32):
    tensor = torch.ones(count, dtype=dtype)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def test_an_empty_view_needs_no_memory():
    whole = torch.ones(10)
    whole.untyped_storage().resize_(0)
    kernels.pack([whole[5:5], ONE], torch.zeros(4))


# ---- Tensors that won't do.
BAD_TENSORS = {
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3)]), "tensor 1 is a nested tensor"),
    "negated": (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "tensor 1 of shape (3,) and strides (2,)"),
    "negated alone": (lambda: torch.ones(1, dtype=torch.complex64).conj().imag, "tensor 1 is a lazy view"),
    "int64": (lambda: torch.ones(3, dtype=torch.int64), "tensor 1 is int64, the flat buffer float32: only"),
    "bool": (lambda: torch.ones(3, dtype=torch.bool), "tensor 1 is bool, the flat buffer float32: only"),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), "tensor 1 is complex64, the flat buffer float32: only"),
    "other fp8": (lambda: torch.ones(3).to(torch.float8_e4m3fnuz), "tensor 1 is float8_e4m3fnuz, the flat buffer"),
    "big endian": (lambda: np.ones(3, dtype=">f4"), "tensor 1 is >f4, the flat buffer float32"),
    "objects": (lambda: np.array([1, None]), "tensor 1 of dtype object holds Python objects"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "tensor 1 is quantized"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_bad_tensors(kind):
    make, message = BAD_TENSORS[kind]
    bad = make()
    flat = torch.full((64,), 7.0)
    with refused(message):
        kernels.pack([ONE, bad], flat)
    with refused(message, "unpack"):
        kernels.unpack(flat, [ONE.clone(), bad])
    with refused(message, "Table"):
        kernels.Table([ONE, bad], torch.float32)
    assert (flat == 7).all()


@pytest.mark.filterwarnings("ignore")
def test_lazy_and_quantized_tensors_are_not_bytes():
    flat = torch.zeros(64, dtype=torch.uint8)
    for bad in (
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ):
        with refused("tensor 0 is "):
            kernels.pack([bad], flat)
    with refused("tensor 0 is a lazy view"):
        kernels.pack([torch.ones(3, dtype=torch.complex64).conj()], torch.zeros(4, dtype=torch.complex64))


def test_other_types_are_only_copied():
    ints = torch.arange(5)
    with refused("tensor 0 is float32, the flat buffer int64: only"):
        kernels.pack([ONE], torch.zeros(4, dtype=torch.int64))
    with refused("tensor 1 is int32, the flat buffer int64: such types are only copied"):
        kernels.pack([ints, ints.int()], torch.zeros(16, dtype=torch.int64))
    for dtype in (torch.int64, torch.uint8):
        flat = torch.zeros(64, dtype=dtype)
        with refused(f"a flat buffer of {dtype} is only copied, without a scale"):
            kernels.pack([ints], flat, scale=2.0)
        with refused(f"a flat buffer of {dtype} is only copied, without a scale"):
            kernels.pack([ints], flat, scale=ONE)
        with refused(f"a flat buffer of {dtype} is only copied, without adding", "unpack"):
            kernels.unpack(flat, [ints], add=True)
        with refused(f"a flat buffer of {dtype} is only copied, without statistics"):
            kernels.pack([ints], flat, statistics=kernels.Statistics())
        kernels.pack([ints], flat, scale=1)


def test_not_a_list():
    for thing in (torch.ones(3), np.ones(3), "abc", b"abc", {"a": ONE}, 3, None):
        with refused(f"the tensors must come as a list of tensors, not as {type(thing).__name__}"):
            kernels.pack(thing, torch.zeros(9))


# ---- The flat buffer.
def test_bad_flat_buffers():
    table = kernels.Table([ONE, torch.ones(5)], torch.float32)
    assert table.total == 12
    for flat, message in (
        (torch.zeros(11), "the flat buffer has 11 elements, the tensors need 12 of float32 (their padding included)"),
        (torch.zeros(12).half(), "the flat buffer is float16, the table was made for float32"),
        (torch.zeros(12, dtype=torch.int32), "the flat buffer is int32, the table was made for float32"),
    ):
        with refused(message):
            kernels.pack(table, flat)
        with refused(message, "unpack"):
            kernels.unpack(flat, table)
    with refused("the flat buffer has 3 elements, the tensors need 4 of float32"):
        kernels.pack([ONE], torch.zeros(3))
    kernels.pack([ONE], torch.zeros(1), offsets=[0])


def test_an_array_that_became_read_only():
    flat = np.zeros(8, dtype=np.float32)
    array = np.zeros(4, dtype=np.float32)
    table = kernels.Table([array], torch.float32)
    kernels.unpack(flat, table)
    array.flags.writeable = False
    with refused("tensor 0 is a read-only NumPy array", "unpack"):
        kernels.unpack(flat, table)


# ---- Overlaps.
def test_destinations_that_overlap():
    memory = torch.zeros(100)
    flat = torch.ones(300)
    for tensors, message in (
        ([memory[:10], memory[9:20]], "tensor 1 overlaps tensor 0"),
        ([memory[50:60], ONE.clone(), memory[40:51]], "tensor 2 overlaps tensor 0"),
        ([memory, memory[3:4]], "tensor 1 overlaps tensor 0"),
        ([memory[3:4], memory[50:60], memory], "tensor 2 overlaps tensor 0"),
        ([memory[:60], memory[1:3], memory[50:70]], "tensor 1 overlaps tensor 0"),
        ([memory, ONE, memory], "tensor 2 overlaps tensor 0"),
    ):
        with refused(message, "unpack"):
            kernels.unpack(flat, tensors)
        with refused(message, "unpack"):
            kernels.unpack(flat, kernels.Table(tensors, torch.float32))
        kernels.pack(tensors, torch.empty(300))  # sources may
    assert not memory.any()
    kernels.unpack(flat, [memory[:50], memory[50:50], memory[20:20], memory[50:]])
    assert memory.all()


def test_sources_that_overlap_the_flat_buffer():
    memory = torch.arange(100.0)
    for tensors, flat in (
        ([memory[:10]], memory[5:50]),
        ([ONE, memory[4:10]], memory[:40]),  # its own place would be memory[4:10]; this is it
        ([ONE, memory[5:10]], memory[:40]),
        ([ONE, memory[4:10].view(torch.int32).view(torch.float32)], memory[1:41]),
    ):
        own = tensors[-1].data_ptr() == flat.data_ptr() + 16 and len(tensors) == 2
        if own:
            kernels.pack(tensors, flat)
            assert memory[4:10].tolist() == [4, 5, 6, 7, 8, 9]
            continue
        index = len(tensors) - 1
        with refused(f"tensor {index} overlaps the flat buffer"):
            kernels.pack(tensors, flat)
        with refused(f"tensor {index} overlaps the flat buffer", "unpack"):
            kernels.unpack(flat, tensors)
    with refused("tensor 0 overlaps the flat buffer"):  # at its own place, with another type
        kernels.pack([memory[:10]], memory.view(torch.int32).view(torch.bfloat16))
    kernels.pack([memory[50:60]], memory[:50])  # side by side
    assert memory[:10].tolist() == list(range(50, 60))
    table = kernels.Table([memory[:10]], torch.float32)
    kernels.pack(table, memory[10:22])
    with refused("tensor 0 overlaps the flat buffer"):
        kernels.pack(table, memory[1:22])


# ---- Offsets, scales, statistics.
def test_bad_offsets():
    flat = torch.zeros(64)
    two = [torch.ones(3), torch.ones(4)]
    for offsets, message in (
        ([0], "there are 1 offsets for 2 tensors"),
        ([0, 2], "tensor 1 overlaps tensor 0 in the flat buffer: tensor 0 takes elements 0 to 2"),
        ([3, 0], "tensor 1 overlaps tensor 0 in the flat buffer: tensor 1 takes elements 0 to 3"),
        ([0, -4], "the offset of tensor 1 is -4"),
        ([0, 4.0], "the offset of tensor 1 must be an int, not 4.0"),
        ([0, 61], "the flat buffer has 64 elements, the tensors need 65"),
        ([0, 1 << 61], "the flat buffer has 64 elements"),
        (5, "the offsets must be whole numbers, not 5"),
        ([0, 10**5000], "the offsets must be whole numbers"),
        ([0, 10**400], "the offset of tensor 1 is 1000"),
    ):
        with refused(message):
            kernels.pack(two, flat, offsets=offsets)
    with refused("the table has offsets of its own"):
        kernels.pack(kernels.Table(two, torch.float32), flat, offsets=[0, 4])
    assert not flat.any()


def test_the_largest_scales():
    flat, wide = torch.zeros(4), torch.zeros(2, dtype=torch.float64)
    kernels.pack([ONE], flat, scale=3.4028235677973362e38)
    assert flat[0] == torch.finfo(torch.float32).max
    kernels.pack([ONE], wide, scale=1e300)
    assert wide[0] == 1e300


def test_a_scale_inside_of_what_is_read():
    flat, target = torch.ones(16), torch.ones(5)
    kernels.pack([target], flat, scale=target[2:3])
    kernels.pack([target], flat[:8], scale=flat[8])


# ---- Anything at all: an InvalidArgument or the right thing, never a crash.
def test_a_storm_of_calls():
    draw = random.Random(1)
    memory = torch.arange(4096.0)
    pieces = [  # the last ones won't do
        lambda: memory[draw.randrange(4000) :][: draw.randrange(60)],
        lambda: torch.ones(draw.randrange(50), dtype=draw.choice([torch.float16, torch.bfloat16, torch.float64])),
        lambda: np.ones(draw.randrange(50), dtype=draw.choice([np.float32, np.float16, np.int32])),
        lambda: torch.ones(5, 5)[:, : draw.randrange(6)],
        lambda: draw.choice([None, 3, shrunk(), torch.ones(3, device="meta")]),
    ]
    weights = [8, 8, 4, 1, 0.3]
    refusals, done = 0, {"pack": 0, "unpack": 0}
    for _ in range(1500):
        tensors = [draw.choices(pieces, weights)[0]() for _ in range(draw.randrange(4))]
        dtype = draw.choice([torch.float32, torch.bfloat16, torch.float64, torch.uint8])
        flat = torch.zeros(draw.choice([0, 64, 1500]), dtype=dtype)
        flat = draw.choice([flat, flat, memory[draw.randrange(4000) :]])
        offsets = draw.choice([None, None, [0] * len(tensors), [draw.randrange(100) for _ in tensors]])
        scale = draw.choice([1.0, 1.0, 0.5, ONE, "a"])
        found = draw.choice([None, kernels.Statistics()])
        unpacks, add = draw.random() < 0.5, draw.random() < 0.5
        try:
            table = kernels.Table(tensors, flat.dtype, offsets=offsets)
            views = [torch.as_tensor(each).view(-1) for each in tensors]
            olds, flat_before = [each.clone() for each in views], flat.clone()
            if unpacks:
                kernels.unpack(flat, tensors, offsets=offsets, scale=scale, statistics=found, add=add)
            else:
                kernels.pack(tensors, flat, offsets=offsets, scale=scale, statistics=found)
        except InvalidArgument:
            refusals += 1
            continue
        done["unpack" if unpacks else "pack"] += any(len(each) for each in views)
        for view, old, offset in zip(views, olds, table.offsets, strict=True):
            raw = flat.dtype is torch.uint8
            count = view.numel() * (view.element_size() if raw else 1)
            piece = slice(offset, offset + count)
            if unpacks:
                want = flat_before[piece]
                want = want if raw else (want.double() * float(scale) + add * old.double()).to(view.dtype)
                assert torch.equal(view.view(torch.uint8) if raw else view, want)
            else:
                want = old.view(torch.uint8) if raw else (old.double() * float(scale)).to(flat.dtype)
                assert torch.equal(flat[piece], want)
    assert min(done.values()) > 50 and refusals > 100


# ---- On a GPU.
