"""The short way from an array to the library: what it reads, what it leaves to the longer way, and that it is taken."""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives import _nccl, arrays, errors
from collectives.arrays import TORCH_CODES, Reader
from collectives.comm.communicator import Communicator
from collectives.comm.engine import get_engine
from tests.comm.test_communicator import REFUSED, read_only
from tests.comm.test_communicator_ranks import plain_operations
from tests.ranks import run_ranks

CPU = torch.device("cpu")
HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
needs_table = pytest.mark.skipif(not HAS_TABLE, reason="torch has no DLPack exchange table before 2.10")


def reader_without_table() -> Reader:
    """A reader as it is where torch has no exchange table, and that leaves NumPy's arrays to Python too."""
    reader = Reader(CPU)
    reader.array_reader = _nccl.ArrayReader(1, 0)
    return reader


SHORT, LONG = Reader(CPU), reader_without_table()


def open_alone() -> Communicator:
    engine = get_engine("host")
    return Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu")


@pytest.fixture
def comm():
    with open_alone() as opened:
        yield opened


# ---- What is read.


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


def without_storage():
    array = torch.ones(4)
    array.untyped_storage().resize_(0)
    return array


def inferred():
    with torch.inference_mode():
        return torch.ones(3)


def complex_ones(n):
    return torch.complex(torch.ones(n), torch.ones(n))


def found_again():
    """A tensor's .grad, which autograd alone has held before it is found by a weak reference."""
    owner, gradient = torch.ones(4), torch.full((4,), 2.0)
    weak = weakref.ref(gradient)
    owner.grad = gradient
    del gradient
    return weak()


def with_memory_of(other):
    """A tensor that was given another one's memory, as module.half() does."""
    changed = torch.ones(4)
    changed.data = other
    return changed


def negative_in_inference():
    with torch.inference_mode():
        return torch._neg_view(torch.ones(4))


# Read by both ways alike.
TAKEN = {
    **{str(dtype): lambda dtype=dtype: torch.ones(2, 3).to(dtype) for dtype in TORCH_CODES},
    "no dimension": lambda: torch.tensor(3.0),
    "no element": lambda: torch.ones(0),
    "no element in 3-d": lambda: torch.ones(2, 0, 3),
    "no element, odd strides": lambda: torch.ones(4, 0).t(),
    "new": lambda: torch.Tensor(),
    "slice": lambda: torch.arange(12.0)[5:9],
    "rows": lambda: torch.arange(12.0).view(4, 3)[1:3],
    "one of many": lambda: torch.arange(12.0)[3:4:1],
    "one element, stride 5": lambda: torch.ones(5)[::5],
    "one element, expanded": lambda: torch.ones(1).expand(1, 1),
    "channels last of one": lambda: torch.ones(1, 3, 1, 1).to(memory_format=torch.channels_last),
    "flat channels last": lambda: torch.ones(1, 1, 4, 4).to(memory_format=torch.channels_last),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)) if hasattr(torch.nn, "Buffer") else torch.ones(3),
    "requires grad": lambda: torch.ones(3, requires_grad=True),
    "of a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "real part": lambda: torch.view_as_real(complex_ones(3)),
    "inference": inferred,
    "copy on write": lambda: torch._lazy_clone(torch.arange(4.0)),
    "shared memory": lambda: torch.ones(4).share_memory_(),
    "resized": lambda: torch.empty(0).resize_(5),
    "found again by a weak reference": found_again,
    "other memory": lambda: with_memory_of(torch.zeros(3)),
    "doubly negative": lambda: torch._neg_view(torch._neg_view(torch.ones(3))),
    **{f"numpy {code}": lambda code=code: np.ones((2, 3), code) for code in "bBiIlLqQefd"},
    "numpy scalar array": lambda: np.array(3.0),
    "numpy part": lambda: np.arange(12.0)[3:7],
    "numpy empty": lambda: np.ones((0, 3)),
}
# Left by the short way: the longer one takes them, or says what is wrong, as of all that it refuses.
LEFT = {
    **{case: make for case, (make, _) in REFUSED.items()},
    "channels last": lambda: torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "imaginary": lambda: complex_ones(3).imag,
    "negative, resized": lambda: torch._neg_view(torch.ones(4)).resize_(2),
    "negative, strided": lambda: torch._neg_view(torch.ones(4)).as_strided((3,), (1,)),
    "negative parameter": lambda: torch.nn.Parameter(torch._neg_view(torch.ones(4))),
    "negative in inference": negative_in_inference,
    "other memory, negative": lambda: with_memory_of(torch._neg_view(torch.ones(4))),
    "negative integers": lambda: torch._neg_view(torch.ones(3, dtype=torch.int32)),
    "complex": lambda: complex_ones(3),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "int16": lambda: torch.ones(3, dtype=torch.int16),
    "float8 of another kind": lambda: torch.ones(3).to(torch.float8_e4m3fnuz),
    "complex32": lambda: torch.zeros(3, dtype=torch.complex32),
    "subclass": lambda: torch.ones(3).as_subclass(Plain),
    "meta, empty": lambda: torch.ones(0, device="meta"),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged),
    "functional": lambda: torch._to_functional_tensor(torch.ones(3)),
    "zero tensor": lambda: torch._efficientzerotensor(3),
    "no storage": without_storage,
    "numpy read-only": read_only,
    **{
        f"numpy {code}": lambda code=code: np.zeros(2, code)
        for code in ("?", "h", "g", "F", ">f4", "V4", "S2", "M8[s]")
    },
    "numpy record": lambda: np.zeros(2, [("x", "f4")]),
}


def by_the_long_way(array):
    """(address, count, code) by Python, None where that refuses the array or has no code for it."""
    try:
        buffer = LONG.read(array, "all_reduce", writes=True)
        LONG.check_reducible(buffer, "all_reduce")
    except errors.InvalidArgument:
        return None
    return buffer.ptr, buffer.count, buffer.code


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TAKEN)
def test_both_ways_read_the_same(case):
    if not HAS_TABLE and not case.startswith("numpy"):
        pytest.skip("torch has no DLPack exchange table before 2.10")
    array = TAKEN[case]()
    assert SHORT.array_reader.read(array) == by_the_long_way(array) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_plain_is_left(case):
    array = LEFT[case]()
    before = sys.getrefcount(array)
    assert SHORT.array_reader.read(array) is None
    assert sys.getrefcount(array) == before or array is None


@needs_table
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(sorted(TORCH_CODES, key=str)),
    order=st.randoms(),
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=4),
    expand=st.booleans(),
)
def test_any_view_is_read_alike_or_left(shape, dtype, order, steps, expand):
    """What both take is the same; what the long way refuses the short one leaves; and no plain tensor is left."""
    array = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    array = array.permute(order.sample(range(array.dim()), array.dim()))
    for dimension, (start, step) in enumerate(steps[: array.dim()]):
        array = array[(slice(None),) * dimension + (slice(start, None, step),)]
    if expand:
        array = array.unsqueeze(0).expand(2, *array.shape)
    assert SHORT.array_reader.read(array) == by_the_long_way(array)


def test_a_read_only_array_is_read_where_it_is_not_written():
    array = read_only()
    assert SHORT.array_reader.read(array, False) == (array.ctypes.data, 3, _nccl.DTYPES["float32"])
    assert SHORT.array_reader.read(array) is None


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
def test_inside_functorch(comm, transform):
    """The tensors there are plain torch.Tensor to look at, and have no memory of their own."""
    seen = []

    def body(x):
        seen.append(SHORT.array_reader.read(x))
        with pytest.raises(errors.InvalidArgument, match="no memory of its own"):
            comm.all_reduce(x)
        return x.sum()

    one = torch.ones(2, 3)
    if transform == "jvp":
        torch.func.jvp(body, (one,), (one,))
    else:
        getattr(torch.func, transform)(body)(one)
    assert seen == [None]


def test_inside_other_modes(comm):
    """A device context and a fake tensor mode are none of a plain tensor's concern."""
    from torch._subclasses import FakeTensorMode

    array = torch.ones(3)
    with torch.device("meta"):
        comm.all_reduce(array)
    with FakeTensorMode():
        comm.all_reduce(array)
    with torch.no_grad():
        comm.all_reduce(array, "avg")
    assert array.tolist() == [1, 1, 1]


def test_another_device_is_left():
    reader = Reader(torch.device("cuda", 1), 0)
    assert reader.array_reader.read(torch.ones(3)) is None
    assert reader.array_reader.read(np.ones(3)) is None


# ---- The exchange table.


class Table(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("functions", ctypes.c_void_p * 5),
    ]


def capsule(table: Table | None, name: bytes = b"dlpack_exchange_api"):
    new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(("PyCapsule_New", ctypes.pythonapi))(ctypes.addressof(table), name, None)


def real_table() -> Table:
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    found = get(("PyCapsule_GetPointer", ctypes.pythonapi))(arrays._EXCHANGE, b"dlpack_exchange_api")
    return Table.from_buffer_copy(Table.from_address(found))


def reader_with(exchange):
    return _nccl.ArrayReader(1, 0, exchange=exchange, tensors=(torch.Tensor,), is_lazy=torch.Tensor.is_neg)


@needs_table
def test_versions_of_the_table():
    one = torch.ones(3)
    table = real_table()
    assert table.major == 1 and SHORT.array_reader.reads_tensors
    assert reader_with(capsule(table)).read(one) == (one.data_ptr(), 3, 7)
    newer = Table(major=2)
    assert not reader_with(capsule(newer)).reads_tensors
    assert reader_with(capsule(newer)).read(one) is None
    newer.older = ctypes.addressof(table)  # a library that still has the first version
    assert reader_with(capsule(newer)).read(one) == (one.data_ptr(), 3, 7)
    assert not reader_with(capsule(Table(major=0))).reads_tensors
    assert not reader_with(capsule(Table(major=1))).reads_tensors  # without the function that is needed
    assert not reader_with(None).reads_tensors
    assert not reader_with(capsule(table, b"something else")).reads_tensors
    assert not reader_with(12345).reads_tensors  # an address, as the attribute of an earlier draft was
    with pytest.raises(errors.InvalidArgument, match="is_lazy"):
        _nccl.ArrayReader(1, 0, exchange=capsule(table), tensors=(torch.Tensor,))


@needs_table
def test_an_error_while_reading_is_no_error_of_the_call():
    one = torch.ones(3)

    def failing(array):
        raise KeyError(array)

    reader = _nccl.ArrayReader(1, 0, exchange=arrays._EXCHANGE, tensors=(torch.Tensor,), is_lazy=failing)
    assert reader.read(one) is None
    reader = _nccl.ArrayReader(1, 0, exchange=arrays._EXCHANGE, tensors=(str,), is_lazy=failing)
    assert reader.read("no tensor at all") is None


# ---- The calls.


class Unused:
    """In place of the binding's communicator: the longer way fails, so what works took the short one."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} went the longer way")


def every_call(ctx, how):
    """All blocking calls by one way; returns how many there were."""
    comm = ctx.communicator()
    native, rank, size = comm._native, comm.rank, comm.size
    if how == "without a table":
        comm._reader = reader_without_table()
        comm._fast_path = _nccl.ArrayCalls(native, comm._reader.array_reader, {})
    else:
        comm._native = Unused()
    as_array = (lambda t: t if t is None else t.numpy()) if how == "numpy" else lambda t: t
    base = [torch.arange(6.0) * (r + 2) for r in range(size)]
    before = native.sequence()
    try:

        def do(name, *args, **options):
            arrays = [as_array(each) if isinstance(each, torch.Tensor) else each for each in args]
            options = {key: as_array(each) if key == "out" else each for key, each in options.items()}
            assert getattr(comm, name)(*arrays, **options) is None

        plain_operations(do, rank, base, [torch.stack([each + r for r in range(size)]) for each in base])
        for op, fold in (("max", torch.amax), ("min", torch.amin), ("prod", torch.prod), ("avg", torch.mean)):
            t, out = base[rank].clone(), torch.zeros(6)
            do("all_reduce", t, op, out=out)
            assert torch.equal(out, fold(torch.stack(base), 0)) and torch.equal(t, base[rank]), op
        t = base[rank].clone()
        if rank == 0:
            do("send", t, 1)
        elif rank == 1:
            do("recv", t, peer=0)
            assert torch.equal(t, base[0])
        if how != "numpy":
            t = torch.nn.Parameter(base[rank].clone())
            do("all_reduce", t)
            assert torch.equal(t, sum(base))
    finally:
        comm._native = native
    comm.barrier()
    return native.sequence() - before


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", [pytest.param("tensors", marks=needs_table), "numpy", "without a table"])
def test_every_call(how, ranks):
    assert len(set(run_ranks(every_call, ranks, how))) == 1  # sends and receives are not counted


# ---- What a call costs in memory.

CALLS = {
    "all_reduce": lambda comm, a, b: comm.all_reduce(a),
    "all_reduce, max": lambda comm, a, b: comm.all_reduce(a, "max"),
    "reduce": lambda comm, a, b: comm.reduce(a, 0),
    "broadcast": lambda comm, a, b: comm.broadcast(a, 0),
    "all_gather": lambda comm, a, b: comm.all_gather(a, b),
    "reduce_scatter": lambda comm, a, b: comm.reduce_scatter(a, b),
    "all_to_all": lambda comm, a, b: comm.all_to_all(a, b),
}


@pytest.mark.parametrize("kind", [pytest.param("tensors", marks=needs_table), "numpy"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_allocates_nothing_and_keeps_nothing(comm, name, kind):
    a, b = torch.zeros(4), torch.ones(4)
    if kind == "numpy":
        a, b = a.numpy(), b.numpy()
    call = CALLS[name]
    for _ in range(20):
        call(comm, a, b)
    held = a, b, comm, comm._fast_path, False, None
    gc.collect()
    gc.disable()
    counts = [sys.getrefcount(each) for each in held]
    tracemalloc.start()
    try:
        call(comm, a, b)
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        for _ in range(500):
            call(comm, a, b)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    # The loop's own numbers are what there is, and while NumPy lends an array its own note of that.
    assert after - before < 200 and peak - before < (200 if kind == "tensors" else 400)
    assert all(abs(sys.getrefcount(each) - n) < 50 for each, n in zip(held, counts, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_what_is_left_is_not_kept():
    for make in (*LEFT.values(), *TAKEN.values()):
        array = make()
        before = sys.getrefcount(array)
        for _ in range(50):
            SHORT.array_reader.read(array)
        assert sys.getrefcount(array) - before < 10, array  # None and small objects are everybody's
