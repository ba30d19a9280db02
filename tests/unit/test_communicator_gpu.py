"""Communicator on NCCL: a world of one, and two ranks on one GPU where the library allows that."""

import pytest
import torch

from collectives.engine import get_engine
from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

# Two ranks on one GPU need NCCL 2.30, few resources each, and a time limit: with too few left it hangs.
TOGETHER = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
}
FIRST_TOGETHER = 23000

RANKS = pytest.mark.parametrize("ranks", [1, 2])


def on_gpu(function, ranks, *args, **env):
    """Run on `ranks` ranks that share the first GPU."""
    if ranks > 1 and get_engine("nccl").library.version < FIRST_TOGETHER:
        pytest.skip("several ranks on one GPU need NCCL 2.30")
    settings = {**(TOGETHER if ranks > 1 else {}), **env}
    return run_ranks(function, ranks, *args, engine="nccl", timeout=120, env=settings, fresh=True)


def every_operation(ctx, use_async):
    comm = ctx.communicator()
    size, rank = comm.size, comm.rank
    assert comm.device == torch.device("cuda:0") and comm.engine.name == "nccl"

    def full(value, *shape):
        return torch.full(shape, float(value), device=comm.device)

    def do(name, *args, **options):
        work = getattr(comm, name)(*args, async_op=use_async, **options)
        assert (work is not None) == use_async
        if work is not None:
            assert work.wait()

    total = size * (size + 1) / 2
    t = full(rank + 1, 1000)
    do("all_reduce", t)
    assert t.unique().tolist() == [total]
    do("all_reduce", t, "avg")
    assert t.unique().tolist() == [total]
    do("all_reduce", t, 0.5)
    assert t.unique().tolist() == [total * size / 2]
    t = full(rank + 1, 5)
    do("reduce", t, size - 1, "max")
    assert t.unique().tolist() == [size if rank == size - 1 else rank + 1]
    t = full(rank + 1, 5)
    do("broadcast", t, size - 1)
    assert t.unique().tolist() == [size]
    out = full(0, 5)
    do("reduce_scatter", out, full(rank + 1, size, 5))
    assert out.unique().tolist() == [total]
    out = full(0, size, 5)
    out[rank] = rank + 1
    do("all_gather", out, out[rank])  # in place
    assert out[:, 0].tolist() == [r + 1 for r in range(size)]
    inp = torch.arange(size, device=comm.device) + 10 * rank
    out = torch.zeros_like(inp)
    do("all_to_all", out, inp)
    assert out.tolist() == [rank + 10 * r for r in range(size)]
    rows = [rank + p + 1 for p in range(size)]
    inp = full(rank + 1, sum(rows), 3)
    out = full(0, sum(rows), 3)
    do("all_to_all", out, inp, rows, rows)
    assert out[:, 0].tolist() == [r + 1 for r in range(size) for _ in range(r + rank + 1)]
    for root in range(size):
        out = full(0, size, 2) if rank == root else None
        do("gather", out, full(rank + 1, 2), root)
        assert out is None or out[:, 0].tolist() == [r + 1 for r in range(size)]
        inp = torch.arange(size, device=comm.device) if rank == root else None
        out = torch.zeros(1, dtype=torch.int64, device=comm.device)
        do("scatter", out, inp, root)
        assert out.item() == rank
    to, of = (rank + 1) % size, (rank - 1) % size
    flags = torch.tensor([True, False, rank == 0], device=comm.device)
    got = torch.zeros(3, dtype=torch.bool, device=comm.device)
    with comm.group():
        works = [comm.send(flags, to, async_op=use_async), comm.recv(got, of, async_op=use_async)]
    if use_async:
        assert all(work.wait() for work in works)
    assert got.tolist() == [True, False, of == 0]
    for shape in ((), (0,)):
        do("all_reduce", full(1, *shape))
    comm.barrier()
    comm.close()


@RANKS
@pytest.mark.parametrize("use_async", [False, True])
def test_every_operation(ranks, use_async):
    on_gpu(every_operation, ranks, use_async)


def streams_and_futures(ctx):
    comm = ctx.communicator()
    t = torch.ones(1 << 20, device=comm.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    comm.all_reduce(t, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    assert t[0].item() == comm.size
    work = comm.all_reduce(t, async_op=True)
    assert work.future().wait() is not None
    assert t[-1].item() == comm.size**2
    assert work.wait(timeout=30) and work.done() and work.exception() is None
    for _ in range(50):  # nobody keeps tensor or Work
        comm.all_reduce(torch.ones(1 << 18, device=comm.device), async_op=True)
    comm.barrier()
    comm.close()


@RANKS
def test_streams_and_futures(ranks):
    on_gpu(streams_and_futures, ranks)


def checks(ctx):
    comm = ctx.communicator()
    with pytest.raises(InvalidArgument, match=r"on cpu.*\.to\('cuda:0'\)"):
        comm.all_reduce(torch.ones(3))
    t = torch.ones(8, device=comm.device)
    with pytest.raises(InvalidArgument, match=r"\.contiguous\(\)"):
        comm.all_reduce(t[::2])
    with pytest.raises(InvalidArgument, match="overlap"):
        comm.all_gather(t[: comm.size * 2], t[1:3]) if comm.rank == 0 else comm.all_gather(
            t[1 : 1 + comm.size * 2], t[:2]
        )
    comm.close()
    with pytest.raises(InvalidUsage, match="closed"):
        comm.all_reduce(t)


@RANKS
def test_checks(ranks):
    on_gpu(checks, ranks)


def memory(ctx):
    comm = ctx.communicator()
    t = comm.empty(1000, torch.bfloat16)
    assert t.device == comm.device and t.dtype == torch.bfloat16
    t.fill_(1.0)
    view = t[10:20]
    registration = comm.register(t)
    comm.all_reduce(t)
    assert view.float().unique().tolist() == [comm.size]
    comm.deregister(registration)
    del t, view
    child = comm.split(0, key=-comm.rank)
    assert child.rank == comm.size - 1 - comm.rank
    child.all_reduce(torch.ones(3, device=comm.device))
    child.close()
    comm.close()


@RANKS
def test_memory_and_split(ranks):
    on_gpu(memory, ranks)


def cupy_arrays(ctx):
    import cupy

    comm = ctx.communicator()
    array = cupy.ones(5, cupy.float32)
    cupy.cuda.Device().synchronize()
    comm.all_reduce(array)
    torch.cuda.synchronize()
    assert array.tolist() == [comm.size] * 5
    with pytest.raises(InvalidArgument, match="ascontiguousarray"):
        comm.all_reduce(array[::2])
    comm.close()


@RANKS
def test_cupy_arrays(ranks):
    pytest.importorskip("cupy")
    on_gpu(cupy_arrays, ranks)


def mismatch(ctx):
    comm = ctx.communicator()
    comm.all_reduce(torch.ones(3, device=comm.device))
    with pytest.raises(Mismatch) as caught:
        comm.all_reduce(torch.ones(3 + comm.rank, device=comm.device))
    comm.barrier()  # nothing was sent
    comm.close()
    return str(caught.value)


def test_mismatch_is_found_where_asked_for():
    for text in on_gpu(mismatch, 2, COLLECTIVES_CHECK="1"):
        assert "rank 0: all_reduce float32 count=3" in text and "rank 1: all_reduce float32 count=4" in text
