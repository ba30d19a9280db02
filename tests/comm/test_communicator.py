"""Communicator in a world of one: every check that comes before something is sent."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from collectives import errors
from collectives.arrays import Reader
from collectives.comm.communicator import Communicator
from collectives.comm.engine import get_engine

ONE_SIDED = ("send", "recv")
IN_PLACE = ("all_reduce", "reduce", "broadcast")
PAIRS = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")


@pytest.fixture
def comm():
    engine = get_engine("host")
    with Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu") as opened:
        yield opened


def call(comm, name, array, **options):
    """Call an operation with one array in every place."""
    if name in ONE_SIDED:
        with comm.group():
            comm.send(array if name == "send" else torch.ones(3), 0, **options)
            comm.recv(array if name == "recv" else torch.ones(3), 0, **options)
    elif name in IN_PLACE:
        return getattr(comm, name)(array, **options)
    else:
        return getattr(comm, name)(torch.ones(3), array, **options)


# ---- What is done.


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0, 3)])
def test_any_shape(comm, shape):
    array = torch.full(shape, 3.0)
    comm.all_reduce(array, "avg")
    comm.all_reduce(array, 2)
    assert torch.equal(array, torch.full(shape, 6.0))
    out = torch.zeros(shape)
    comm.all_gather(out, array)
    assert torch.equal(out, array)


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint16", "float16", "bool", "datetime64[s]", ">f8", "V3"])
def test_numpy_arrays_move(comm, dtype):
    inp = np.frombuffer(bytes(range(48)), np.uint8).view(dtype) if dtype != "bool" else np.array([True, False])
    out = np.zeros_like(inp)
    comm.all_gather(out, inp)  # the input may be read-only
    assert out.tobytes() == inp.tobytes()


def test_numpy_reduces_in_place(comm):
    array = np.arange(6, dtype=np.float64).reshape(2, 3)
    comm.all_reduce(array, 0.5)
    assert np.array_equal(array, np.arange(6).reshape(2, 3) / 2)


def test_leaf_that_requires_grad_is_taken_as_data(comm):
    leaf = torch.nn.Parameter(torch.ones(3))
    comm.all_reduce(leaf, 2.0)
    assert leaf.tolist() == [2.0, 2.0, 2.0] and leaf.requires_grad


# ---- What is refused, and how to mend it.


class Holder(torch.Tensor):
    """A subclass without memory of its own, as DTensor is."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)

    __torch_function__ = torch._C._disabled_torch_function_impl


def read_only():
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    return array


def fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


REFUSED = {
    "strided": (lambda: torch.ones(6)[::2], r"\.contiguous\(\)"),
    "transposed": (lambda: torch.ones(2, 3).t(), r"\.contiguous\(\)"),
    "expanded": (lambda: torch.ones(1).expand(3), r"\.contiguous\(\)"),
    "meta": (lambda: torch.ones(3, device="meta"), "no data"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"\.to_dense\(\)"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), r"\.to_dense\(\)"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), r"\.to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), "nested"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), r"\.int_repr\(\)"),
    "one imaginary": (lambda: torch.tensor([1 + 2j]).conj().imag, r"lazy view.*other values: use \.resolve_neg\(\)"),
    "conjugate": (lambda: torch.ones(3, dtype=torch.complex64).conj(), r"\.resolve_conj\(\)"),
    "negative": (lambda: torch._neg_view(torch.ones(3)), r"\.resolve_neg\(\)"),
    "wrapper": (Holder, "no memory of its own"),
    "fake": (fake, "no memory of its own"),
    "numpy strided": (lambda: np.ones((2, 3), np.float32)[:, :2], "ascontiguousarray"),
    "numpy fortran": (lambda: np.ones((2, 3), np.float32, order="F"), "ascontiguousarray"),
    "numpy objects": (lambda: np.array([1, None]), "Python objects"),
    "numpy masked": (lambda: np.ma.masked_array([1.0, 2.0, 3.0], [0, 1, 0]), r"\.filled\(\)"),
    "numpy scalar": (lambda: np.float32(3), "must be a torch tensor, a NumPy array or a CuPy array, not numpy.float32"),
    "list": (lambda: [1.0, 2.0], "not list"),
    "None": (lambda: None, "NoneType"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays(comm, case):
    make, mend = REFUSED[case]
    for name in (*IN_PLACE, *PAIRS, *ONE_SIDED):
        text = "None" if name in ("gather", "scatter") and case == "None" else mend
        with pytest.raises(errors.InvalidArgument, match=text) as caught:
            call(comm, name, make())
        assert caught.value.op == name and caught.value.rank == 0
        comm.barrier()  # nothing was sent, the communicator goes on


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
def test_read_only_output(comm, name):
    with pytest.raises(errors.InvalidArgument, match=r"read-only.*\.copy\(\)"):
        call(comm, name, read_only())


def test_read_only_input_is_fine(comm):
    out = np.zeros(3, np.float32)
    comm.all_gather(out, read_only())
    comm.broadcast(read_only(), 0)  # the root only reads
    assert out.tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    "make, mend",
    [
        (lambda: torch.ones(3, dtype=torch.bool), "torch.uint8"),
        (lambda: torch.ones(3, dtype=torch.complex64), "view_as_real"),
        (lambda: torch.ones(3, dtype=torch.int16), "int16.*take int8, uint8"),
        (lambda: np.ones(3, ">f4"), ">f4"),
    ],
)
def test_dtypes_that_cannot_be_reduced(comm, name, make, mend):
    array = make()
    with pytest.raises(errors.InvalidArgument, match=mend):
        if name == "reduce_scatter":
            comm.reduce_scatter(array, array)
        else:
            getattr(comm, name)(array)


def test_another_device_is_named():
    reader = Reader(torch.device("cuda", 1), 0)
    with pytest.raises(errors.InvalidArgument, match=r"on cpu, the communicator on cuda:1: use \.to\('cuda:1'\)"):
        reader.read(torch.ones(3), "all_reduce", writes=True)
    with pytest.raises(errors.InvalidArgument, match=r"NumPy array in host memory.*\.to\('cuda:1'\)"):
        reader.read(np.ones(3), "broadcast", writes=True)


@pytest.mark.parametrize("op", ["mean", "SUM", "", None, True, np.True_, 1j, "0.5", dist.ReduceOp.BAND, [1]])
def test_unknown_op_lists_the_known(comm, op):
    for name in ("all_reduce", "reduce"):
        with pytest.raises(errors.InvalidArgument, match="'sum', 'prod', 'max', 'min', 'avg', a number"):
            getattr(comm, name)(torch.ones(3), op=op)


@pytest.mark.parametrize(
    "op",
    [
        "sum", "prod", "max", "min", "avg", dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX,
        dist.ReduceOp.MIN, dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.SUM), 1, 1.0, np.float32(1), np.int64(1),
    ],
)  # fmt: skip
def test_ops_leave_a_world_of_one_alone(comm, op):
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        array = torch.tensor([1, 2, 5], dtype=dtype)
        comm.all_reduce(array, op)
        comm.all_reduce(array, op, async_op=True).wait()
        assert array.tolist() == [1, 2, 5]


def test_premultiplied_sum(comm):
    array = torch.tensor([2.0, 4.0])
    comm.all_reduce(array, 0.5)
    comm.reduce(array, op=-3)
    comm.all_reduce(array, dist._make_nccl_premul_sum(2.0))
    out = torch.zeros(2)
    comm.reduce_scatter(out, array, 0.5)
    assert out.tolist() == [-3.0, -6.0]
    comm.all_reduce(out, float("nan"))
    assert out.isnan().all()


@pytest.mark.parametrize(
    "dtype, scalar",
    [(torch.int32, 0.5), (torch.int8, 200), (torch.uint8, -1), (torch.int64, float("inf")), (torch.float16, 1e6)],
)
def test_premultiplied_sum_refuses_what_the_dtype_cannot_hold(comm, dtype, scalar):
    with pytest.raises(errors.InvalidArgument, match=f"isn't a value of {str(dtype)[6:]}"):
        comm.all_reduce(torch.ones(3, dtype=dtype), scalar)


@pytest.mark.parametrize("root", [1, -1, True, 0.0, "0", None, torch.tensor([0, 1])])
def test_root_and_peer(comm, root):
    one = torch.ones(1)
    for use in (
        lambda: comm.broadcast(one, root),
        lambda: comm.reduce(one, root),
        lambda: comm.gather(torch.ones(1), one, root),
        lambda: comm.scatter(torch.ones(1), one, root),
        lambda: comm.send(one, root),
        lambda: comm.recv(one, root),
    ):
        with pytest.raises(errors.InvalidArgument, match="root|peer"):
            use()


def test_sizes_and_dtypes_of_pairs(comm):
    for name in PAIRS:
        with pytest.raises(errors.InvalidArgument, match="3|elements"):
            getattr(comm, name)(torch.ones(4), torch.ones(3))
        with pytest.raises(errors.InvalidArgument, match="one dtype"):
            getattr(comm, name)(torch.ones(3, dtype=torch.float64), torch.ones(3))


def test_overlap(comm):
    for name in PAIRS:
        memory = torch.arange(6.0)
        getattr(comm, name)(memory[1:5], memory[:4])
        assert memory.tolist() == [0, 0, 1, 2, 3, 5], name  # as with a copy of the input
        getattr(comm, name)(memory, memory)
        getattr(comm, name)(memory[:3], memory[3:])  # neighbours are apart
        assert memory.tolist() == [2, 3, 5, 2, 3, 5], name


def test_the_root_must_give_its_array(comm):
    with pytest.raises(errors.InvalidArgument, match="out is None"):
        comm.gather(None, torch.ones(1))
    with pytest.raises(errors.InvalidArgument, match="inp is None"):
        comm.scatter(torch.ones(1), None)


@pytest.mark.parametrize(
    "sizes, text",
    [([2], "add up to 2"), ([1, 2], "1 entries"), ([3.0], "int"), ([-3], "int"), ([True], "int")],
)
def test_split_sizes(comm, sizes, text):
    for which in ("input_split_sizes", "output_split_sizes"):
        with pytest.raises(errors.InvalidArgument, match=text):
            comm.all_to_all(torch.ones(3, 2), torch.ones(3, 2), **{which: sizes})


def test_streams_are_for_nccl(comm):
    with pytest.raises(errors.InvalidArgument, match="async_op=True"):
        comm.all_reduce(torch.ones(1), stream=7)
