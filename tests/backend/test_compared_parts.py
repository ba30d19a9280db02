"""Calls that are made of sends, receives or several collectives are compared with what the other ranks call."""

import datetime
import functools
import os
import time

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives.errors import CollectivesError, InvalidArgument, Mismatch, RemoteError
from tests.backend.groups import over
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation

LIMIT = 30.0  # of the group: what takes as long was found by the time limit alone


def part_of(rank, size):
    return torch.arange(float(size)) + 10 * rank


CALLS = {
    "splits": lambda comm, async_op: comm.all_to_all(
        torch.empty(comm.size), part_of(comm.rank, comm.size), [1] * comm.size, [1] * comm.size, async_op=async_op
    ),
    "lists": lambda comm, async_op: comm.all_to_all(
        [torch.empty(1) for _ in range(comm.size)], list(part_of(comm.rank, comm.size).split(1)), async_op=async_op
    ),
    "equal": lambda comm, async_op: comm.all_to_all(
        torch.empty(comm.size), part_of(comm.rank, comm.size), async_op=async_op
    ),
}


def outcome(function, asynchronous=False):
    """Return the error that a call raises, or its Work does, else None; it must not come by the time limit."""
    begun = time.monotonic()
    try:
        work = function()
        if asynchronous:
            work.wait()
    except (CollectivesError, RuntimeError) as error:
        assert time.monotonic() - begun < LIMIT / 2, error
        return type(error).__name__, str(error)
    return None


def mixed_calls(ctx, asynchronous):
    comm = ctx.new_communicator(timeout=LIMIT)
    found = {}
    for name, call in CALLS.items():
        for at in range(ctx.size):  # the rank that calls it, where the others call another one
            x = torch.ones(3)
            mine = (lambda: call(comm, asynchronous)) if ctx.rank == at else (  # noqa: B023
                lambda: comm.all_reduce(x, async_op=asynchronous)  # noqa: B023
            )
            found[name, at] = outcome(mine, asynchronous)
        y = torch.ones(2)
        comm.all_reduce(y)  # the communicator goes on
        assert y.tolist() == [ctx.size] * 2
    comm.close()
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_another_call_is_a_mismatch_on_all_ranks(asynchronous):
    for found in run_ranks(mixed_calls, 3, asynchronous):
        for (name, at), (kind, text) in found.items():
            assert kind == "Mismatch", text
            what = "all_to_all with splits dtype=float32" if name != "equal" else "ncclAlltoAll"
            assert f"rank {at}: {what}" in text and "ncclAllReduce" in text, text


def disagreeing(ctx, case, asynchronous):
    comm = ctx.new_communicator(timeout=LIMIT)
    size, rank = ctx.size, ctx.rank
    out, sent = torch.full((size + 1,), -1.0), torch.arange(float(size + 1))
    receives, sends = [1] * size, [1] * size
    if case == "counts" and rank == 1:  # it expects two rows of rank 0, which sends one
        receives[0] = 2
    if case == "self" and rank == 1:  # it contradicts itself
        receives[1] = 2
    if case == "sum" and rank == 1:
        sends[0] = 7
    inp = sent[:size].double() if case == "dtype" and rank == 1 else sent[:size]
    out = out[: sum(receives)].to(inp.dtype)
    found = outcome(lambda: comm.all_to_all(out, inp, receives, sends, async_op=asynchronous), asynchronous)
    before = out.tolist()
    x = torch.ones(2)
    comm.all_reduce(x)
    assert x.tolist() == [size] * 2
    out = torch.empty(size)
    comm.all_to_all(out, part_of(rank, size), [1] * size, [1] * size)
    comm.close()
    return found, before, out.tolist()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("case", ["counts", "self", "sum", "dtype"])
def test_parts_that_disagree(case, asynchronous):
    expected = {
        "counts": "rank 0 sends 1 to rank 1, which expects 2",
        "self": "rank 1 takes no part, since it raised: InvalidArgument: all_to_all [rank 1]: rank 1 sends 1 elements "
        "to itself and receives 2",
        "sum": "input_split_sizes add up to 9, but inp has 3 rows",
        "dtype": "rank 1: all_to_all with splits dtype=float64",
    }[case]
    for rank, ((kind, text), before, after) in enumerate(run_ranks(disagreeing, 3, case, asynchronous)):
        own = rank == 1 and case in ("self", "sum")
        assert kind == ("InvalidArgument" if own else "Mismatch"), text
        assert own or expected in text, text
        assert set(before) == {-1.0}, "what was received before the comparison had failed"
        assert after == [rank, 10.0 + rank, 20.0 + rank]


def good_parts(ctx, asynchronous):
    comm = ctx.new_communicator(timeout=LIMIT)
    rank, size = ctx.rank, ctx.size

    def rows(sender, receiver):
        return (sender + 2 * receiver) % 3  # none, for some pairs

    def finish(work):
        if asynchronous:
            work.wait()

    for dtype in (torch.float32, torch.int16, torch.complex64, torch.bool):
        sends, receives = [rows(rank, r) for r in range(size)], [rows(r, rank) for r in range(size)]
        inp = torch.cat([torch.full((rows(rank, r), 2), rank + 1) for r in range(size)]).to(dtype)
        want = torch.cat([torch.full((rows(r, rank), 2), r + 1) for r in range(size)]).to(dtype)
        out = torch.zeros((sum(receives), 2), dtype=dtype)
        finish(comm.all_to_all(out, inp, receives, sends, async_op=asynchronous))
        assert torch.equal(out, want)
        outs = [torch.zeros((count, 2), dtype=dtype) for count in receives]
        finish(comm.all_to_all(outs, list(inp.split(sends)), async_op=asynchronous))
        assert torch.equal(torch.cat(outs), want)
    first, second = torch.zeros(2), torch.zeros(2)  # in a group, beside others
    x, peer = torch.ones(1), torch.zeros(1)
    with comm.group():
        works = [
            comm.all_to_all(first[:size], part_of(rank, size), [1] * size, [1] * size, async_op=asynchronous),
            comm.all_reduce(x, async_op=asynchronous),
            comm.send(torch.full((1,), float(rank)), (rank + 1) % size, async_op=asynchronous),
            comm.recv(peer, (rank - 1) % size, async_op=asynchronous),
            comm.all_to_all(second[:size], part_of(rank, size), [1] * size, [1] * size, async_op=asynchronous),
        ]
    for work in works:
        finish(work)
    assert first.tolist() == second.tolist() == [10.0 * r + rank for r in range(size)]
    assert (x.item(), peer.item()) == (size, (rank - 1) % size)
    comm.close()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_parts_that_agree(asynchronous):
    run_ranks(good_parts, 2, asynchronous)


@over("collectives")
def in_torch(ctx):
    """As a program of torch's makes the calls: found by a name, of each rank (class, text) or a value."""
    rank, size = ctx.rank, ctx.size
    limit = datetime.timedelta(seconds=LIMIT)
    group = dist.new_group(timeout=limit)
    x = torch.arange(float(size))
    lists = [torch.empty(1) for _ in range(size)]

    def reduce():
        dist.all_reduce(torch.ones(3), group=group)

    def gather(own, sizes):
        outs = [torch.full((n,), -1.0) for n in sizes]
        dist.all_gather(outs, torch.full((own,), float(rank)), group=group)
        return outs

    def scatter(own, sizes):
        out = torch.full((own,), -1.0)
        dist.reduce_scatter(out, [torch.ones(n) for n in sizes], group=group)
        return out

    uneven = [r + 1 for r in range(size)]
    calls = {
        "splits": lambda: dist.all_to_all_single(torch.empty(size), x.clone(), [1] * size, [1] * size, group=group),
        "lists": lambda: dist.all_to_all(lists, list(x.split(1)), group=group),
        "uneven all_gather": lambda: gather(rank + 1, uneven),
        "uneven reduce_scatter": lambda: scatter(rank + 1, uneven),
    }
    found = {}
    for name, call in calls.items():
        assert outcome(call) is None
        found[name] = outcome(call if rank == 0 else reduce)
    # Rank 1's own arguments contradict each other; another rank's differ from those of the others.
    found["own gather"] = outcome(lambda: gather(rank + 1, uneven if rank != 1 else [1, 5, 3][:size]))
    found["own scatter"] = outcome(lambda: scatter(rank + 1 + (rank == 1), uneven))
    found["own lists"] = outcome(
        lambda: dist.all_to_all(lists, [torch.ones(2 if rank == 1 else 1) for _ in range(size)], group=group)
    )
    found["gather"] = outcome(lambda: gather(rank + 1, uneven if rank != size - 1 else [4, *uneven[1:]]))
    found["scatter"] = outcome(lambda: scatter(rank + 1, uneven if rank != size - 1 else [4, *uneven[1:]]))
    # Rank 1's lists are short, or long.
    ones = [torch.ones(1) for _ in range(size)]
    wrong = ones[1:] if rank == 1 else ones
    root = dist.get_global_rank(group, 1)
    shorts = {
        "all_gather": lambda: dist.all_gather(wrong, torch.ones(1), group=group),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(1), wrong, group=group),
        "all_to_all": lambda: dist.all_to_all(ones, wrong, group=group),
        "all_to_all outputs": lambda: dist.all_to_all(wrong, ones, group=group),
        "gather": lambda: dist.gather(torch.ones(1), wrong if rank == 1 else None, root, group=group),
        "scatter": lambda: dist.scatter(torch.ones(1), wrong if rank == 1 else None, root, group=group),
    }
    found |= {f"short {name}": outcome(call) for name, call in shorts.items()}
    y = torch.ones(2)
    dist.all_reduce(y, group=group)
    assert y.tolist() == [size] * 2
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_in_torch_distributed(tmp_path, size):
    for rank, found in enumerate(run_ranks(in_torch, size, str(tmp_path / "store"))):
        for name in ("splits", "lists", "uneven all_gather", "uneven reduce_scatter"):
            kind, text = found[name]
            what = name if name.startswith("uneven") else "all_to_all with splits"
            assert kind == "Mismatch" and f"rank 0: {what} dtype=float32" in text, text
        for name in ("own gather", "own scatter", "own lists"):
            kind, text = found[name]
            assert (rank == 1) == (kind != "Mismatch"), (rank, name, kind, text)
            assert rank == 1 or "rank 1 takes no part, since it raised: " in text, text
        shorts = {name: each for name, each in found.items() if name.startswith("short ")}
        assert len(shorts) == 6
        for name, (kind, text) in shorts.items():
            assert kind == ("InvalidArgument" if rank == 1 else "Mismatch"), (rank, name, text)
            assert "all_to_all" not in name or "takes a list of" in text, text
        last = size - 1
        assert found["gather"][0] == found["scatter"][0] == "Mismatch", found
        assert f"rank 0 sends 1 to rank {last}, which expects 4" in found["gather"][1]
        assert f"rank {last} sends 4 to rank 0, which expects 1" in found["scatter"][1]


def bad_arguments(ctx, asynchronous):
    """Rank 1 alone can't make a call, or none can; the others get its error, and all go on."""
    comm = ctx.new_communicator(timeout=LIMIT)
    rank, size = ctx.rank, ctx.size
    x, whole = torch.ones(2), torch.ones(2 * size)
    calls = {
        "dtype": lambda bad: comm.all_reduce(x.cfloat() if bad else x, async_op=asynchronous),
        "op": lambda bad: comm.all_reduce(x, "sun" if bad else "sum", async_op=asynchronous),
        "root": lambda bad: comm.broadcast(x, size if bad else 0, async_op=asynchronous),
        "out": lambda bad: comm.all_gather(whole[:3] if bad else whole, x, async_op=asynchronous),
        "inp": lambda bad: comm.reduce_scatter(x, whole[:3] if bad else whole, async_op=asynchronous),
        "strides": lambda bad: comm.reduce(torch.ones(2, 2).t() if bad else x, async_op=asynchronous),
        "equal": lambda bad: comm.all_to_all(whole, whole.double() if bad else whole.clone(), async_op=asynchronous),
        "whole": lambda bad: comm.scatter(x, whole if bad or rank == 0 else None, async_op=asynchronous),
    }
    found = {}
    for name, call in calls.items():
        for who in ((1,), range(size)):
            found[name, len(who)] = outcome(lambda: call(rank in who), asynchronous)  # noqa: B023
            y = torch.ones(2)
            comm.all_reduce(y)
            assert y.tolist() == [size] * 2
    comm.close()
    return found


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
def test_a_rank_that_can_not_make_its_call(asynchronous):
    for rank, found in enumerate(run_ranks(bad_arguments, 3, asynchronous)):
        for (name, who), (kind, text) in found.items():
            if rank == 1 or (who == 3 and (name, rank) != ("whole", 0)):
                assert kind == "InvalidArgument", (name, text)
            else:
                assert kind == "Mismatch" and "which raised: InvalidArgument: " in text, (name, text)
                assert "rank 1: " in text, text


def closes_at_once(ctx):
    """Rank 1 can't make a call to which the other rank doesn't come."""
    comm = ctx.new_communicator(timeout=LIMIT)
    if ctx.rank == 1:
        begun = time.monotonic()
        with pytest.raises(InvalidArgument):
            comm.broadcast(torch.ones(1), 9)
        comm.close()
        assert time.monotonic() - begun < LIMIT / 2
        ctx.barrier()
        return True
    ctx.barrier()
    with pytest.raises(RemoteError, match="rank 1"):
        comm.broadcast(torch.ones(1), 0)
    comm.close()
    return True


def test_a_rank_that_can_not_make_its_call_closes_at_once():
    assert run_ranks(closes_at_once, 2) == [True, True]


@over("collectives")
def bad_in_torch(ctx):
    rank, size = ctx.rank, ctx.size
    group = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT))
    x, whole = torch.ones(2), torch.ones(2 * size)
    calls = {
        "op": lambda bad: dist.all_reduce(x, dist.ReduceOp.BOR if bad else dist.ReduceOp.SUM, group=group),
        "later": lambda bad: dist.all_reduce(
            x, dist.ReduceOp.BOR if bad else dist.ReduceOp.SUM, group=group, async_op=True
        ).wait(),
        "out": lambda bad: dist.all_gather_into_tensor(whole[:3] if bad else whole, x, group=group),
        "list": lambda bad: dist.all_gather([torch.ones(2)] * (size + bad), x, group=group),
        "inp": lambda bad: dist.reduce_scatter(x, [torch.ones(2)] * (size + bad), group=group),
        "sparse": lambda bad: dist.broadcast(torch.eye(2).to_sparse() if bad else x, 0, group=group),
        "none": lambda bad: dist.all_to_all(*([], []) if bad else (list(whole.chunk(size)), [x] * size), group=group),
    }

    def block(bad):  # torch leaves the block open where a call in it raises
        with dist._coalescing_manager(group, device=torch.device("cpu")):
            dist.all_reduce(x, dist.ReduceOp.BOR if bad else dist.ReduceOp.SUM, group=group)

    calls["block"] = block
    found = {}
    for name, call in calls.items():
        found[name] = outcome(lambda: call(rank == 1))  # noqa: B023
        y = torch.ones(2)
        dist.all_reduce(y, group=group)
        assert y.tolist() == [size] * 2
    return found


def test_a_rank_that_can_not_make_its_call_in_torch(tmp_path):
    for rank, found in enumerate(run_ranks(bad_in_torch, 3, str(tmp_path / "store"))):
        for name, (kind, text) in found.items():
            assert kind == ("InvalidArgument" if rank == 1 else "Mismatch"), (name, text)
            assert rank == 1 or ("rank 1: " in text and "which raised: InvalidArgument: " in text), text


def refused_between_nodes(ctx, machines):
    """Over several nodes a rank's wrong arguments are its own affair, as before its call."""
    with joined(ctx, machines, timeout=LIMIT) as comm:
        x = torch.ones(3)
        if comm.rank == 1:
            with pytest.raises(InvalidArgument):
                comm.all_gather(torch.ones(4), x)
        comm.all_reduce(x)
        return x.tolist()


@pytest.mark.parametrize("machines", ["ab", "aab"])
def test_a_rank_that_can_not_make_its_call_between_nodes(machines):
    assert run_ranks(refused_between_nodes, len(machines), machines) == [[float(len(machines))] * 3] * len(machines)


def between_nodes(ctx, machines, case, asynchronous):
    """Another call between nodes ends the communicator, on all ranks at once; parts that disagree don't."""
    try:
        with joined(ctx, machines, timeout=LIMIT) as comm:
            size, rank = comm.size, comm.rank
            receives = [1] * size
            if rank == size - 1:
                receives[{"counts": 0, "self": rank, "other": 0, "agree": 0}[case]] += case in ("counts", "self")
            out = torch.empty(sum(receives))
            if case == "other" and rank == 0:
                comm.all_reduce(torch.ones(3))
            call = functools.partial(
                comm.all_to_all, out, part_of(rank, size), receives, [1] * size, async_op=asynchronous
            )
            if case not in ("counts", "self"):
                work = call()
                if asynchronous:
                    work.wait()
                return out.tolist()
            found = outcome(call, asynchronous)
            x = torch.ones(2)
            comm.all_reduce(x)
            assert x.tolist() == [size] * 2
            return found
    except CollectivesError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("case", ["agree", "counts", "self", "other"])
def test_between_nodes(case, asynchronous):
    size = 3
    for rank, found in enumerate(run_ranks(between_nodes, size, "aab", case, asynchronous)):
        if case == "agree":
            assert found == [10.0 * r + rank for r in range(size)]
            continue
        kind, text = found
        own = case == "self" and rank == size - 1
        assert kind == ("InvalidArgument" if own else "Mismatch"), text
        if case == "counts":
            assert "rank 0 sends 1 to rank 2, which expects 2" in text
        elif case == "self" and not own:
            assert "rank 2 takes no part, since it raised: InvalidArgument" in text
        elif case == "other":
            assert "all_reduce" in text and "all_to_all" in text


def checked_on_gpus(ctx):
    comm = ctx.new_communicator(timeout=LIMIT)
    rank, size, device = ctx.rank, ctx.size, ctx.device
    found = []
    for receives in ([1, 1], [1 + (rank == 1), 1], [1, 1 + (rank == 1)]):  # right; counts differ; rank 1 with itself
        out = torch.empty(sum(receives), device=device)
        inp = part_of(rank, size).to(device)
        found.append(outcome(lambda: comm.all_to_all(out, inp, receives, [1] * size)))  # noqa: B023
        if found[-1] is None:
            assert out.tolist() == [10.0 * r + rank for r in range(size)]
            outs = [torch.empty(1, device=device) for _ in range(size)]
            comm.all_to_all(outs, list(inp.split(1)))
            assert torch.cat(outs).tolist() == out.tolist()
    x = torch.ones(2, device=device)
    found.append(outcome(lambda: comm.all_to_all(x, x, [1, 1], [1, 1]) if rank == 0 else comm.all_reduce(x)))
    overlapping = torch.arange(8.0, device=device)
    comm.all_gather(overlapping[1 : 1 + size], overlapping[:1])
    assert overlapping.tolist() == [0, 0, 0, 3, 4, 5, 6, 7]
    comm.close()
    return found


@needs_simulation
def test_on_gpus_where_asked_for():
    results = run_ranks(checked_on_gpus, 2, device="simulated", env={"COLLECTIVES_CHECK": "1"})
    for rank, (right, counts, own, other) in enumerate(results):
        assert right is None
        assert counts[0] == "Mismatch" and "rank 0 sends 1 to rank 1, which expects 2" in counts[1]
        assert counts[1].startswith(f"all_to_all with splits [rank {rank}]: "), counts
        assert own[0] == ("InvalidArgument" if rank else "Mismatch"), own
        assert "rank 1 sends 1 elements to itself and receives 2" in own[1]
        assert other[0] == "Mismatch" and "rank 0: all_to_all with splits float32" in other[1], other


def test_one_rank_compares_nothing():
    assert os.environ.get("WORLD_SIZE", "1") == "1"
    with collectives.init() as comm:
        out = torch.zeros(3)
        comm.all_to_all(out, torch.arange(3.0), [3], [3])
        assert out.tolist() == [0.0, 1.0, 2.0]
        outs = [torch.zeros(2)]
        comm.all_to_all(outs, [torch.ones(2)])
        assert outs[0].tolist() == [1.0, 1.0]
        with pytest.raises(InvalidArgument, match="a list of 1 arrays, one a rank, not list of 2"):
            comm.all_to_all(outs, [torch.ones(2), torch.ones(2)])
    assert issubclass(Mismatch, CollectivesError)
