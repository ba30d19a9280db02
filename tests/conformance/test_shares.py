"""Reductions that give the sum of squares and the non-finite count of this rank's share in the same pass."""

from __future__ import annotations

import pytest
import torch

from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from tests.conformance.worlds import SMALL_CHUNK, environment
from tests.kernels.ways import ISAS
from tests.ranks import run_ranks

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-6, "float64": 1e-13}  # all but float64 add up rows of 512 in float32
CHUNK = SMALL_CHUNK // 4
# Nothing, one element, around a slot, around a row of the kernel, in parts of their own (zero-copy: from 8 KiB on).
COUNTS = (0, 1, 521, CHUNK - 1, CHUNK + 1, 8209, 150_001)


def inputs(comm, count, dtype, seed):
    numbers = [torch.randn(count, generator=torch.Generator().manual_seed(31 * seed + r)) for r in range(comm.size)]
    return [each.to(dtype) for each in numbers]


def result_of(comm, op, arrays):
    """Give the result in float64, not rounded."""
    wide = torch.stack([each.double() for each in arrays])
    if op == "max":
        return wide.amax(0)
    return wide.mean(0) if op == "avg" else (wide * op).sum(0) if op != "sum" else wide.sum(0)


def zeros():
    return torch.zeros(2, dtype=torch.float64)


def all_ranks(comm, share):
    total = share.clone()
    comm.all_reduce(total)
    return total.tolist()


def wrong_sum(found, want, dtype):
    return abs(found - want) > TOLERANCE[str(dtype).removeprefix("torch.")] * want


def all_reduces(comm, make, dtype, count, op, seed):
    """Compare with the call that gives no share and with float64; twice, for the same bits."""
    arrays = inputs(comm, count, dtype, seed)

    def given():
        t = make(count, dtype=dtype)
        t.copy_(arrays[comm.rank])
        return t

    plain, shares = given(), []
    comm.all_reduce(plain, op)
    for _ in range(2):
        t, share = given(), zeros()
        comm.all_reduce(t, op, share=share)
        shares.append(share)
        if not torch.equal(t, plain):
            yield "the result has other bits than without a share"
    if not torch.equal(*shares):
        yield f"two runs: {shares[0].tolist()} and {shares[1].tolist()}"
    total, want = all_ranks(comm, shares[0]), result_of(comm, op, arrays).square().sum().item()
    if wrong_sum(total[0], want, dtype) or total[1]:
        yield f"all shares are {total}, expected {want} and 0"
    if count == COUNTS[-1] and not 0.8 < shares[0][0] / (want / comm.size) < 1.2:
        yield f"this rank's share is {shares[0][0]} of {want}"


def reduce_scatters(comm, make, dtype, count, op, seed):
    arrays = inputs(comm, count * comm.size, dtype, seed)
    inp, plain = make(count * comm.size, dtype=dtype), make(count, dtype=dtype)
    inp.copy_(arrays[comm.rank])
    comm.reduce_scatter(plain, inp, op)
    for form in ("apart", "in place"):
        out, share = make(count, dtype=dtype) if form == "apart" else inp.view(comm.size, count)[comm.rank], zeros()
        comm.reduce_scatter(out, inp, op, share=share)
        if not torch.equal(out, plain):
            yield f"{form}: the result has other bits than without a share"
        want = result_of(comm, op, arrays).view(comm.size, count)[comm.rank].square().sum().item()
        if wrong_sum(share[0].item(), want, dtype) or share[1]:
            yield f"{form}: the share is {share.tolist()}, expected {want} and 0"


def everything(ctx):
    comm, found = ctx.communicator(), []
    ways = {"staged": torch.empty, "zero-copy": comm.empty}
    cases = [(dtype, count, "sum") for dtype in (torch.float32, torch.bfloat16, torch.float64) for count in COUNTS]
    # 0.3 as the type has it: by this each rank's array is multiplied.
    ops = ("avg", torch.tensor(0.3).item(), "max")
    cases += [(torch.float32, count, op) for count in (1, CHUNK + 1, 8209) for op in ops]
    for seed, (dtype, count, op) in enumerate(cases):
        for way, make in ways.items():
            for function in (all_reduces, reduce_scatters):
                for text in function(comm, make, dtype, count, op, seed):
                    found.append(f"{function.__name__} {way} {dtype} count={count} op={op} rank={comm.rank}: {text}")
    special(ctx, comm, ways)
    return found


def special(ctx, comm, ways):
    """What is not finite, queues, groups, a share that has something in it, addresses that are not aligned."""
    n, rank = comm.size, comm.rank
    for make in ways.values():
        # One element of each rank's, at places that lie in one rank's piece or in several.
        t = make(20_000, dtype=torch.float32)
        t.fill_(1.0)
        t[rank] = float("inf")
        t[-1 - rank] = float("nan")
        share = zeros()
        comm.all_reduce(t, share=share)
        total = all_ranks(comm, share)
        assert total[1] == 2 * n and total[0] != total[0], total

        # Squares so large that the pass looks at each element: those that float16 holds are finite.
        t = make(9001, dtype=torch.float16)
        t.fill_(60_000)
        share = zeros()
        comm.all_reduce(t, "max", share=share)
        total = all_ranks(comm, share)
        assert total[1] == 0 and abs(total[0] / (9001 * 60_000.0**2) - 1) < 1e-3, total
        t.fill_(60_000)
        comm.all_reduce(t, 2.0, share=share)  # rounded to infinity on the way out
        assert all_ranks(comm, share)[1] == 9001

        # In a queue: nothing is lost where several operations add to one share, nor what was in it.
        share = torch.tensor([1.0, 2.0], dtype=torch.float64)
        arrays = [make(count, dtype=torch.float32).fill_(1.0) for count in (3000, 4001, 5)]
        works = [comm.all_reduce(each, share=share, async_op=True) for each in arrays]
        assert all(work.wait(30) for work in works)
        assert all_ranks(comm, share) == [n + 7006.0 * n * n, 2.0 * n]
        share = zeros()
        with comm.group():
            comm.all_reduce(arrays[0].fill_(1.0), share=share)
            comm.all_reduce(arrays[1].fill_(1.0), "avg", share=share)
        assert all_ranks(comm, share) == [3000.0 * n * n + 4001, 0]

        # Ranks may mix: it is the same call.
        share = zeros()
        comm.all_reduce(arrays[1].fill_(1.0), share=share if rank == 0 else None)
        assert arrays[1].eq(n).all()
        assert (share[0] > 0) == (rank == 0)

    # By address: what is not aligned goes through a block of its own.
    native, codes = comm._native, {"float32": 7, "sum": 0}
    memory, result, share = torch.zeros(4 * 3001 + 1, dtype=torch.uint8), torch.full((3001,), 1.0), zeros()
    at = memory.data_ptr() + 1
    native.all_reduce_share(result.data_ptr(), at, 3001, codes["float32"], codes["sum"], share.data_ptr())
    assert memory[1:].clone().view(torch.float32).eq(n).all()
    assert all_ranks(comm, share) == [3001.0 * n * n, 0]

    refusals(ctx, comm, native, share)


def refusals(ctx, comm, native, share):
    before, t = share.clone(), torch.ones(8)
    for text, array, given in (
        ("int32, of which there is no share", torch.ones(8, dtype=torch.int32), share),
        ("share is 2 x float32: use torch.zeros", t, torch.zeros(2)),
        ("share is 3 x float64: use torch.zeros", t, torch.zeros(3, dtype=torch.float64)),
        ("share overlaps the array", share, share),
    ):
        with pytest.raises(InvalidArgument, match=text):
            comm.all_reduce(array, share=given)
        if given is not array:
            out = array[: len(array) // comm.size].clone()
            with pytest.raises(InvalidArgument, match=text):
                comm.reduce_scatter(out, array[: len(out) * comm.size], share=given)
    with pytest.raises(InvalidUsage, match="native algorithm, not of 'ring'"):
        comm.all_reduce(t, share=share, algorithm="ring")
    with pytest.raises(InvalidArgument, match="must be the address of two doubles"):
        native.all_reduce_share(t.data_ptr(), t.data_ptr(), 8, 7, 0, 0)
    with pytest.raises(InvalidArgument, match="the data is int32, must be a floating type"):
        native.reduce_scatter_share(t.data_ptr(), t.data_ptr(), 1, 2, 0, share.data_ptr())
    if comm.size > 1:
        with pytest.raises(Mismatch):
            comm.all_reduce(t[: 5 + comm.rank], share=share)
    assert torch.equal(share, before), "a failed operation leaves the share as it was"
    assert t.eq(1).all()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_shares(n):
    results = run_ranks(everything, n, env=environment("host"))
    assert [text for result in results for text in result] == []


def of_this_set(ctx):
    comm, shares = ctx.communicator(), []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.float8_e5m2):
        shares.append(zeros())
        t = inputs(comm, 5003, torch.float32, 7)[comm.rank].to(dtype)
        comm.all_reduce(t, "avg", share=shares[-1])
    return [share.tolist() for share in shares]


def test_the_same_on_every_instruction_set():
    results = [run_ranks(of_this_set, 2, env={"COLLECTIVES_ISA": name}) for name in ISAS]
    assert all(result == results[0] for result in results[1:])
    assert all(share[0] > 0 for result in results[0] for share in result)
