"""Communicator in a world of one: every check that comes before something is sent, Work, groups, memory, the end."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist

import collectives
from collectives import errors
from collectives.arrays import Reader
from collectives.communicator import Communicator
from collectives.engine import get_engine

ONE_SIDED = ("send", "recv")
IN_PLACE = ("all_reduce", "reduce", "broadcast")
PAIRS = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")


@pytest.fixture
def comm():
    engine = get_engine("host")
    with Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu") as opened:
        yield opened


@pytest.fixture
def gate(comm):
    """Hold the communicator's queue until the event is set."""
    comm.all_reduce(torch.zeros(1), async_op=True).wait()
    event = threading.Event()
    comm._lane._queue.call(lambda: event.wait(30))
    yield event
    event.set()


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


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, dtype) for name in PAIRS for dtype in (torch.float32, torch.bfloat16)),
        *((name, dtype) for name in PAIRS[1:] for dtype in (torch.int16, torch.bool, torch.complex64)),
    ],
)
def test_pairs_copy_in_a_world_of_one(comm, name, dtype):
    inp = torch.tensor([1, 0, 3, 1, 0]).to(dtype)
    out = torch.zeros(5, dtype=dtype)
    getattr(comm, name)(out, inp)
    assert torch.equal(out, inp)


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
@pytest.mark.parametrize("name", [*IN_PLACE, *PAIRS, *ONE_SIDED])
@pytest.mark.parametrize("case", REFUSED)
def test_refused_arrays(comm, case, name):
    make, mend = REFUSED[case]
    if name in ("gather", "scatter") and case == "None":
        mend = "None"
    with pytest.raises(errors.InvalidArgument, match=mend) as caught:
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


def test_tensors_inside_vmap(comm):
    def body(row):
        comm.all_reduce(row)
        return row

    with pytest.raises(errors.InvalidArgument, match="no memory of its own"):
        torch.func.vmap(body)(torch.ones(2, 3))


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
        reader.numbers(torch.ones(3), "all_reduce")
    with pytest.raises(errors.InvalidArgument, match=r"NumPy array in host memory.*\.to\('cuda:1'\)"):
        reader.place(np.ones(3), "broadcast", writes=True)


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
    memory = torch.arange(6.0)
    for name in PAIRS:
        with pytest.raises(errors.InvalidArgument, match="overlap"):
            getattr(comm, name)(memory[1:5], memory[:4])
        if name == "all_to_all":
            with pytest.raises(errors.InvalidArgument, match="no form in place"):
                comm.all_to_all(memory, memory)
        else:
            getattr(comm, name)(memory, memory)
        getattr(comm, name)(memory[:3], memory[3:])  # neighbours are apart
        memory = torch.arange(6.0)


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


# ---- Work.


def test_work(comm):
    array = torch.ones(3)
    work = comm.all_reduce(array, 2.0, async_op=True)
    assert work.wait() is True and work.wait(timeout=0) is True
    assert work.done() and work.is_completed() and work.exception() is None
    assert work.result() is array and array.tolist() == [2, 2, 2]
    assert work.future().wait() is array and "done" in repr(work)
    assert work.op == "all_reduce" and work.nbytes == 12


def test_wait_that_runs_out_can_be_repeated(comm, gate):
    array = torch.ones(3)
    work = comm.all_reduce(array, async_op=True)
    assert not work.done() and work.exception() is None and "in flight" in repr(work)
    started = time.monotonic()
    with pytest.raises(errors.CollectiveTimeout, match="stays in flight") as caught:
        work.wait(timeout=0.1)
    assert 0.09 < time.monotonic() - started < 5
    assert caught.value.op == "all_reduce" and caught.value.nbytes == 12
    with pytest.raises(TimeoutError):
        work.wait(0)
    gate.set()
    assert work.wait(timeout=10)


def test_future_is_fulfilled_by_the_queue(comm, gate):
    array = torch.ones(3)
    work = comm.all_reduce(array, async_op=True)
    future = work.future()
    assert future is work.future() and not future.done()
    chained = future.then(lambda done: done.value().sum().item())
    gate.set()
    assert chained.wait() == 3.0 and future.wait() is array


def test_a_dropped_work_holds_its_arrays(comm, gate):
    array = torch.ones(1000)
    gone = weakref.ref(array)
    comm.all_reduce(array, async_op=True)
    del array
    gc.collect()
    assert gone() is not None
    gate.set()
    comm.all_reduce(torch.zeros(1), async_op=True).wait()
    gc.collect()
    assert gone() is None


def test_blocking_calls_come_after_queued_ones(comm, gate):
    array = torch.ones(1)
    comm.all_reduce(array, 3.0, async_op=True)
    threading.Timer(0.2, gate.set).start()
    comm.all_reduce(array, 2.0)
    assert array.item() == 6.0


def test_abort_ends_what_is_in_flight(comm, gate):
    work = comm.all_reduce(torch.ones(1), async_op=True)
    threading.Timer(0.2, gate.set).start()  # what holds the queue here isn't the engine's
    comm.abort()
    with pytest.raises(errors.Aborted):
        work.wait()
    assert isinstance(work.exception(), errors.Aborted) and work.done()
    with pytest.raises(errors.InvalidUsage, match="was aborted"):
        comm.barrier()


def test_an_error_that_nobody_waits_for_is_warned_of(comm, gate):
    comm.all_reduce(torch.ones(1), async_op=True)
    threading.Timer(0.2, gate.set).start()
    with pytest.warns(RuntimeWarning, match="all_reduce failed and nobody waited for it"):
        comm.abort()


def test_two_threads(comm):
    arrays = [torch.ones(17) for _ in range(2)]
    failures = []

    def work(array):
        try:
            for _ in range(100):
                comm.all_reduce(array, 1.5, async_op=True).wait()
                comm.all_reduce(array, 1 / 1.5)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(array,)) for array in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and all(torch.allclose(array, torch.ones(17)) for array in arrays)


# ---- Groups.


def test_group_is_issued_at_its_end(comm):
    a, b = torch.ones(2), torch.zeros(2)
    with comm.group():
        comm.send(a, 0)
        comm.recv(b, 0)
        comm.all_reduce(a, 5)
        assert b.tolist() == [0, 0] and a.tolist() == [1, 1]
    assert a.tolist() == [5, 5] and b.sum() > 0


def test_group_that_raises_is_dropped(comm):
    a = torch.ones(2)
    with pytest.raises(KeyError), comm.group():
        comm.all_reduce(a, 5)
        raise KeyError
    comm.barrier()
    assert a.tolist() == [1, 1]


def test_groups_nest(comm):
    a, b = torch.ones(1), torch.ones(1)
    with comm.group():
        comm.all_reduce(a, 2)
        with comm.group():
            comm.all_reduce(b, 3)
        with pytest.raises(ZeroDivisionError), comm.group():
            comm.all_reduce(a, 100)
            1 / 0  # noqa: B018
        assert b.item() == 1
    assert (a.item(), b.item()) == (2, 3)


def test_async_group(comm):
    a, b = torch.ones(1), torch.zeros(1)
    with comm.group():
        sent = comm.send(a, 0, async_op=True)
        received = comm.recv(b, 0, async_op=True)
        with pytest.raises(errors.InvalidUsage, match="leave its `with` block"):
            sent.wait()
        assert "not issued" in repr(sent)
    assert sent.wait(10) and received.result().item() == 1


def test_group_refuses(comm):
    with comm.group():
        comm.all_reduce(torch.ones(1))
        with pytest.raises(errors.InvalidUsage, match="all blocking or all async_op"):
            comm.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(errors.InvalidUsage, match="barrier"):
            comm.barrier()
        with pytest.raises(errors.InvalidUsage, match="inside a group"):
            comm.close()
    for name in ONE_SIDED:
        with pytest.raises(errors.InvalidUsage, match="same `with comm.group"):
            getattr(comm, name)(torch.ones(1), 0)


def test_group_over_two_communicators(comm):
    child = comm.split(0)
    a, b = torch.ones(1), torch.ones(1)
    with comm.group():
        comm.all_reduce(a, 2)
        child.all_reduce(b, 3)
    with child.group():
        works = [comm.all_reduce(a, 2, async_op=True), child.all_reduce(b, 3, async_op=True)]
    assert [work.wait(10) for work in works] == [True, True]
    assert (a.item(), b.item()) == (4, 9)
    child.close()


# ---- Memory.


def test_empty_is_freed_with_its_last_view(comm):
    library = comm.engine.library
    before = library.memory_in_use()
    tensor = comm.empty(1 << 20)
    assert tensor.shape == (1 << 20,) and tensor.dtype == torch.float32 and tensor.device == comm.device
    assert library.memory_in_use() >= before + (4 << 20)
    view = tensor[10:].view(torch.int32)
    tensor.fill_(2.0)
    comm.all_reduce(tensor, 0.5)
    kept = view.numpy()
    del tensor, view
    gc.collect()
    assert library.memory_in_use() >= before + (4 << 20) and (kept.view(np.float32) == 1.0).all()
    del kept
    gc.collect()
    assert library.memory_in_use() == before


def test_empty_outlives_the_communicator():
    engine = get_engine("host")
    comm = Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cpu")
    tensor = comm.empty(7, torch.int16)
    comm.close()
    tensor.fill_(3)
    assert pickle.loads(pickle.dumps(tensor)).tolist() == copy.deepcopy(tensor).tolist() == [3] * 7


def test_empty_refuses(comm):
    assert comm.empty(0, torch.bool).shape == (0,)
    for n in (-1, 1.5, True, (2, 3)):
        with pytest.raises(errors.InvalidArgument, match="n must be an int"):
            comm.empty(n)
    with pytest.raises(errors.InvalidArgument, match="torch.dtype"):
        comm.empty(3, np.float32)


def test_registration_holds_its_array(comm):
    tensor = torch.ones(1 << 16)
    gone = weakref.ref(tensor)
    registration = comm.register(tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    comm.deregister(registration)
    with pytest.raises(errors.InvalidArgument, match="ended before"):
        comm.deregister(registration)
    del registration
    gc.collect()
    assert gone() is None


# ---- Other communicators, and the end.


def test_split_and_shrink(comm):
    child = comm.split(3, key=-5)
    assert (child.rank, child.size, child.engine, child.timeout) == (0, 1, comm.engine, comm.timeout)
    assert comm.split(None) is None and comm.split(-1) is None
    for color in (-2, 0.5, True):
        with pytest.raises(errors.InvalidArgument, match="color"):
            comm.split(color)
    with pytest.raises(errors.InvalidArgument, match="must not call shrink"):
        comm.shrink([0])
    with pytest.raises(errors.InvalidArgument, match="exclude"):
        comm.shrink([1])
    child.close()


def test_timeout(comm):
    assert comm.timeout == 1800
    comm.timeout = None
    comm.timeout = 2.5
    assert comm.timeout == 2.5
    with pytest.raises(errors.InvalidArgument, match="above 0"):
        comm.timeout = 0


def test_after_close(comm):
    comm.close()
    comm.close()
    assert comm.closed and "closed" in repr(comm)
    one = torch.ones(1)
    for use in (
        lambda: comm.all_reduce(one),
        lambda: comm.all_reduce(one, async_op=True),
        lambda: comm.all_gather(torch.ones(1), one),
        lambda: comm.send(one, 0),
        lambda: comm.group().__enter__(),
        lambda: comm.empty(1),
        lambda: comm.register(one),
        lambda: comm.split(0),
        comm.barrier,
    ):
        with pytest.raises(errors.InvalidUsage, match="closed|same `with"):
            use()


def test_close_waits_for_what_is_queued(comm, gate):
    array = torch.ones(1)
    work = comm.all_reduce(array, 2.0, async_op=True)
    threading.Timer(0.2, gate.set).start()
    comm.close()
    assert work.done() and work.wait() and array.item() == 2.0


def test_is_not_pickled(comm):
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(errors.InvalidUsage, match="open one in each process"):
            use(comm)


@pytest.mark.parametrize("rank, size", [(1, 1), (-1, 2), (True, 2), (0, 0), (0, 1.0), (0.0, 1)])
def test_rank_and_size(rank, size):
    engine = get_engine("host")
    with pytest.raises(errors.InvalidArgument):
        Communicator(engine, engine.library.get_unique_id(), rank, size, device="cpu")


def test_device_of_the_engine():
    engine = get_engine("host")
    with pytest.raises(errors.InvalidArgument, match="cpu"):
        Communicator(engine, engine.library.get_unique_id(), 0, 1, device="cuda:0")
    with pytest.raises(errors.InvalidArgument, match="get_engine"):
        Communicator("host", bytes(128), 0, 1, device="cpu")


def test_a_forked_child_can_use_nothing(comm, gate):
    tensor = comm.empty(4)
    work = comm.all_reduce(torch.ones(1), async_op=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12: fork beside threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            uses = [lambda: comm.all_reduce(torch.ones(1)), comm.barrier, work.wait, lambda: comm.empty(1)]
            refused = 0
            for use in uses:
                try:
                    use()
                except errors.InvalidUsage:
                    refused += 1
            comm.close()
            del tensor
            gc.collect()
            code = 0 if refused == len(uses) and comm.forked else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.set()
    assert work.wait(10)
    tensor.fill_(1.0)
    comm.all_reduce(tensor)


# ---- init() and the end of the interpreter, in processes of their own.


def run_python(text, limit=60, **env):
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=limit, env={**clean, **env}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr, time.monotonic() - started


def test_init_alone():
    out, _, _ = run_python(
        """
import collectives, torch
from collectives import errors
comm = collectives.init()
assert collectives.init() is comm and collectives.init("host", device="cpu") is comm
assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)
for wrong in (lambda: collectives.init("nccl"), lambda: collectives.init("other")):
    try:
        wrong()
    except (errors.InvalidUsage, errors.InvalidArgument) as error:
        print("refused", error)
comm.close()
again = collectives.init()
assert again is not comm and not again.closed
t = torch.ones(2)
again.all_reduce(t, 2)
print(t.tolist())
"""
    )
    assert out.count("refused") == 2 and "[2.0, 2.0]" in out


def test_exit_with_work_in_flight_is_bounded():
    out, err, seconds = run_python(
        """
import collectives, torch, time, threading
comm = collectives.init()
t = torch.ones(2)
comm.all_reduce(t, async_op=True)
comm._lane._queue.call(lambda: time.sleep(1))
work = comm.all_reduce(t, async_op=True)
future = work.future().then(lambda f: print("settled", flush=True))
"""
    )
    assert "settled" in out and not err and seconds < 40


def test_public_names():
    for name in collectives.__all__:
        assert getattr(collectives, name) is not None
    assert sorted(collectives.__all__) == collectives.__all__
    for name in errors.__all__:
        assert getattr(collectives.errors, name) is getattr(errors, name)
