"""Memory that the ranks share: operations give the bits that they give on ordinary memory, whoever shares what."""

from __future__ import annotations

import functools
import mmap
import os

import numpy as np
import pytest
import torch

from collectives import _nccl
from collectives.errors import InvalidArgument, InvalidUsage
from tests.conformance.worlds import check
from tests.ranks import run_ranks

SANITIZED = "libasan" in os.environ.get("LD_PRELOAD", "")


@functools.cache
def filled(rank, count, dtype, seed):
    numbers = np.random.default_rng(1000 * seed + rank).integers(-40, 40, count)
    return torch.from_numpy(numbers).to(dtype)


def operations(comm, count, make, dtype, seed):
    """Call everything; `make(n)` allocates. Gives the results by name."""
    n, rank, results = comm.size, comm.rank, {}

    def given(elements):
        t = make(elements)
        t.copy_(filled(rank, elements, dtype, seed))
        return t

    def keep(name, *tensors):
        results[name] = [t.clone() for t in tensors]

    for op in ("sum", "avg", "max", "prod", 3):
        if op == "prod" and dtype is torch.uint8:
            continue
        t = given(count)
        comm.all_reduce(t, op)
        keep(f"all_reduce {op}", t)
    for root in {0, n - 1}:
        t = given(count)
        comm.reduce(t, root)
        keep(f"reduce to {root}", t)
        t = given(count)
        comm.broadcast(t, root)
        keep(f"broadcast from {root}", t)
        inp, out = given(count), make(count * n) if rank == root else None
        comm.gather(out, inp, root)
        keep(f"gather to {root}", inp, *([out] if rank == root else []))
        inp, out = given(count * n) if rank == root else None, make(count)
        comm.scatter(out, inp, root)
        keep(f"scatter from {root}", out, *([inp] if rank == root else []))
        whole = given(count * n)
        part = whole.view(n, count)[rank]
        comm.gather(whole if rank == root else None, part, root)
        keep(f"gather in place to {root}", whole)
        comm.scatter(part, whole if rank == root else None, root)
        keep(f"scatter in place from {root}", whole)
    inp, out = given(count * n), make(count)
    comm.reduce_scatter(out, inp)
    keep("reduce_scatter", out, inp)
    inp = given(count * n)
    comm.reduce_scatter(inp.view(n, count)[rank], inp)
    keep("reduce_scatter in place", inp)
    inp, out = given(count), make(count * n)
    comm.all_gather(out, inp)
    keep("all_gather", out, inp)
    out = given(count * n)
    comm.all_gather(out, out.view(n, count)[rank])
    keep("all_gather in place", out)
    inp, out = given(count * n), make(count * n)
    comm.all_to_all(out, inp)
    keep("all_to_all", out, inp)
    works = [comm.all_reduce(t, async_op=True) for t in (given(count), given(count + 1))]
    for work in works:
        assert work.wait(30)
    keep("queued", *(work.result() for work in works))
    return results


def same_as_ordinary(ctx):
    comm, found = ctx.communicator(), []
    ways = {
        "shared": lambda n, dtype: comm.empty(n, dtype),
        "shared, from the second element on": lambda n, dtype: comm.empty(n + 1, dtype)[1:],
        "shared by rank 0 alone": lambda n, dtype: (comm.empty if comm.rank == 0 else torch.empty)(n, dtype=dtype),
        "shared by all but rank 0": lambda n, dtype: (comm.empty if comm.rank else torch.empty)(n, dtype=dtype),
        "now this, now that": lambda n, dtype: (comm.empty if next(turn) % 2 else torch.empty)(n, dtype=dtype),
    }
    if SANITIZED:  # three times as slow there; what these touch, the others touch too
        del ways["shared"], ways["shared by rank 0 alone"]
    turn = iter(range(10**6))
    # Below and above the size from which memory is used in place, odd, and of several rounds of slots.
    sizes = (
        (torch.float32, 2047),
        (torch.float32, 100_003),
        (torch.bfloat16, 9001),
        (torch.int64, 70_001),
        (torch.uint8, 300_001),
    )
    for seed, (dtype, count) in enumerate(sizes):
        want = operations(comm, count, functools.partial(torch.empty, dtype=dtype), dtype, seed)
        for way, make in ways.items():
            got = operations(comm, count, functools.partial(make, dtype=dtype), dtype, seed)
            for name, tensors in want.items():
                if not all(torch.equal(a, b) for a, b in zip(tensors, got[name], strict=True)):
                    found.append(f"{name} of {count} x {dtype}, {way}, rank {comm.rank}")
    return found


def test_same_as_ordinary_memory():
    check(same_as_ordinary, "host", 3)


def large(ctx):
    """Past the caches, in place and not, where stores go another way."""
    comm = ctx.communicator()
    count = 10 << 20
    a, b = comm.empty(count), comm.empty(count)
    a.copy_(torch.arange(count) % 1000)
    a *= comm.rank + 1
    want = (torch.arange(count) % 1000).float() * sum(range(1, comm.size + 1))
    comm.all_reduce(a)
    assert torch.equal(a, want)
    plain = want / comm.size
    comm.all_reduce(plain)
    assert torch.equal(plain, want)
    out = comm.empty(count * comm.size)
    comm.all_gather(out, a)
    assert torch.equal(out.view(comm.size, count), want.expand(comm.size, count))
    comm.all_to_all(b, a)
    assert torch.equal(b.view(comm.size, -1), a.view(comm.size, -1)[comm.rank].expand(comm.size, -1))


def registered(ctx):
    """Memory that the ranks share can be registered; it is used in place before, meanwhile and afterwards."""
    comm = ctx.communicator()
    library = comm.engine.library
    t = comm.empty(100_000)
    address = t.data_ptr()
    assert library.memory_shared(address, t.nbytes) and not library.memory_shared(address, t.nbytes + (4 << 20))
    registration = comm.register(t[5:1000])  # a view: its whole allocation
    assert registration.zero_copy and t.data_ptr() == address
    array = comm.register(t.numpy())
    comm.all_reduce(t.fill_(1))
    assert t.eq(comm.size).all()
    comm.deregister(registration)
    comm.deregister(array)
    comm.all_reduce(t)
    assert t.eq(comm.size**2).all() and library.memory_shared(address, t.nbytes)
    for ordinary in (torch.ones(8), torch.ones(20 << 20), np.arange(10 << 20)):
        with pytest.raises(InvalidArgument, match=r"allocate the array with Communicator.empty"):
            comm.register(ordinary)
    assert not comm._registrations
    before = library.memory_in_use()
    own = comm.register(t)
    del t, registration, array
    assert library.memory_in_use() == before
    comm.deregister(own)
    del own
    assert library.memory_in_use() < before  # it was the last that held the tensor


def forked(ctx):
    """What a forked child writes stays with it, and it sees what was there when it was forked."""
    comm = ctx.communicator()
    t = comm.empty(100_000)
    t.fill_(1)
    child = os.fork()
    if child == 0:
        good = t.eq(1).all().item()
        t.fill_(7)
        os._exit(0 if good and t.eq(7).all().item() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert t.eq(1).all()
    comm.all_reduce(t)
    assert t.eq(comm.size).all()


def children_have_communicators_of_their_own(ctx):
    """A split's ranks know each other's memory, too, and memory outlives the communicator it came from."""
    comm = ctx.new_communicator()
    t = comm.empty(50_000)
    t.fill_(comm.rank)
    part = comm.split(comm.rank % 2)
    part.all_reduce(t)
    assert t.eq(sum(r for r in range(comm.size) if r % 2 == comm.rank % 2)).all()
    comm.close()
    part.all_reduce(t, "max")
    again = ctx.communicator()
    again.all_reduce(t, "min")
    assert t.eq(min(sum(range(k, ctx.size, 2)) for k in (0, 1))).all()
    part.close()
    assert torch.isfinite(t).all()


def allocated_again_and_again(ctx):
    """Places in the file are used again, by other sizes, and peers see what is there now."""
    comm = ctx.communicator()
    kept = []
    for i in range(60):
        t = comm.empty(3000 + 37_003 * (i * 7 % 11))
        t.fill_(comm.rank + i)
        comm.all_reduce(t)
        assert t.eq(comm.size * i + sum(range(comm.size))).all(), i
        if i % 5 == 0:
            kept.append((t, i))
    for t, i in kept:
        assert t.eq(comm.size * i + sum(range(comm.size))).all()


def casts(ctx):
    """The data is rounded once on the way in, summed in fp32, and not rounded again."""
    comm = ctx.communicator()
    codes = _nccl.DTYPES
    for wire in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        for count in (0, 1, 1000, 300_001):
            parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(comm.size)]
            t = parts[comm.rank].clone()
            code = codes[{torch.float8_e5m2: "float8e5m2"}.get(wire, str(wire).removeprefix("torch."))]
            comm._native.all_reduce_cast(
                t.data_ptr(), t.data_ptr(), count, codes["float32"], code, _nccl.OPS["sum"], 0.5
            )
            want = (parts[0] * 0.5).to(wire).float()
            for part in parts[1:]:
                want += (part * 0.5).to(wire).float()
            assert torch.equal(t, want), (wire, count)
    t = torch.ones(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be float32 or float64"):
        comm._native.all_reduce_cast(t.data_ptr(), t.data_ptr(), 4, codes["int32"], codes["float16"], _nccl.OPS["sum"])
    t = torch.ones(4)
    with pytest.raises(ValueError, match="must be a floating one"):
        comm._native.all_reduce_cast(t.data_ptr(), t.data_ptr(), 4, codes["float32"], codes["int8"], _nccl.OPS["sum"])


def test_forked_child():
    run_ranks(forked, 2, fresh=True)


def ordinary(ctx):
    """What the system says of ordinary memory, before and after many calls: none of it is replaced."""
    comm = ctx.communicator()
    tensor, array = torch.ones(2 << 20), np.ones(2 << 20, np.float32)
    own = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped = torch.frombuffer(own, dtype=torch.float32).fill_(1)
    used = comm.engine.library.memory_in_use()
    found = []
    for each in (tensor, torch.from_numpy(array), mapped):
        address, before = each.data_ptr(), mappings_of(each)
        for _ in range(40):
            comm.all_reduce(each, "max")
            comm.broadcast(each, 0)
            comm.all_reduce(each[: len(each) // 2], "max", async_op=True).wait()
        assert each.data_ptr() == address and each.eq(1).all()
        assert not comm.engine.library.memory_shared(address, each.nbytes)
        found.append((before, mappings_of(each)))
    assert comm.engine.library.memory_in_use() == used
    return found


def mappings_of(tensor):
    """Return access, device, inode and name of the process's mappings that hold a tensor."""
    found, first = set(), tensor.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            places, access, _, *rest = line.split()
            begin, end = (int(each, 16) for each in places.split("-"))
            if begin < first + tensor.nbytes and end > first:
                found.add((access, *rest))
    return found


def test_ordinary_memory_is_never_replaced():
    for found in run_ranks(ordinary, 2):
        for before, after in found:
            assert before == after and all(access == "rw-p" and inode == "0" for access, _, inode, *_ in after), after


def let_go_in_flight(ctx):
    """A registration can't end while operations are in flight, and a freed tensor's memory stays until they end."""
    comm = ctx.new_communicator()
    mine, theirs = (comm.empty(10 << 20).fill_(ctx.rank + 1.0) for _ in range(2))
    registration = comm.register(mine)
    ctx.barrier()
    works = []
    if ctx.rank == 0:
        works = [comm.all_reduce(each, async_op=True) for each in (mine, theirs)]
        with pytest.raises(InvalidUsage, match="in flight"):
            comm.deregister(registration)
        del theirs
    ctx.barrier()
    works = works or [comm.all_reduce(each, async_op=True) for each in (mine, theirs)]
    assert all(work.wait(30) for work in works)
    comm.deregister(registration)
    assert all((work.result() == 3).all() for work in works)
    comm.close()


PROGRAMS = [
    (large, 2), (casts, 1), (casts, 2), (casts, 3), (registered, 1), (registered, 2),
    (children_have_communicators_of_their_own, 3), (allocated_again_and_again, 2), (let_go_in_flight, 2),
]  # fmt: skip


@pytest.mark.parametrize(("program", "n"), PROGRAMS, ids=lambda value: getattr(value, "__name__", None))
def test_shared_memory(program, n):
    run_ranks(program, n)
