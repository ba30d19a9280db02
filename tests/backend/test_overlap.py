"""Inputs that share memory with outputs: the same on all ranks, and the values of copies."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist

from tests.backend.groups import over
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation


def memory(rank, n):
    return torch.arange(float(n)) + 100 * rank


def overlapping_calls(comm, asynchronous):
    """Yield (name, out, expected) of calls whose input and output share memory, on ranks of their own alone too."""
    rank, size, n = comm.rank, comm.size, 4
    everyone = [memory(r, 64) for r in range(size)]

    def wait(work):
        if asynchronous:
            work.wait()

    for shift in (0, 1, n, 3 * n):  # where the input begins in the output, 3 * n: behind it
        at = [shift if r != size - 1 else 0 for r in range(size)]  # the last rank's lies elsewhere
        m = memory(rank, 64)
        out, inp = m[: size * n], m[at[rank] : at[rank] + n]
        wait(comm.all_gather(out, inp, async_op=asynchronous))
        yield f"all_gather {shift}", out, torch.cat([everyone[r][at[r] : at[r] + n] for r in range(size)])

        m = memory(rank, 64)
        out, inp = m[at[rank] : at[rank] + n], m[: size * n]
        wait(comm.reduce_scatter(out, inp, async_op=asynchronous))
        yield f"reduce_scatter {shift}", out, sum(each[rank * n : (rank + 1) * n] for each in everyone)

        m = memory(rank, 64)
        out, inp = m[at[rank] : at[rank] + n], m[:n]
        wait(comm.all_reduce(inp, out=out, async_op=asynchronous))
        yield f"all_reduce {shift}", out, sum(each[:n] for each in everyone)

        for splits in (None, [n] * size):
            m = memory(rank, 64)
            out, inp = m[at[rank] : at[rank] + size * n], m[: size * n]
            wait(comm.all_to_all(out, inp, splits, splits, async_op=asynchronous))
            yield f"all_to_all {shift} {splits}", out, torch.cat([each[rank * n : (rank + 1) * n] for each in everyone])

        m = memory(rank, 64)
        outs, inps = list(m[at[rank] : at[rank] + size * n].split(n)), list(m[: size * n].split(n))
        wait(comm.all_to_all(outs, inps, async_op=asynchronous))
        yield f"lists {shift}", torch.cat(outs), torch.cat([each[rank * n : (rank + 1) * n] for each in everyone])

        m = memory(rank, 64)
        whole, part = m[: size * n], m[at[rank] : at[rank] + n]
        wait(comm.gather(whole if rank == 0 else None, part, 0, async_op=asynchronous))
        if rank == 0:
            yield f"gather {shift}", whole, torch.cat([everyone[r][at[r] : at[r] + n] for r in range(size)])

        m = memory(rank, 64)
        whole, part = m[: size * n], m[at[rank] : at[rank] + n]
        wait(comm.scatter(part, whole if rank == 0 else None, 0, async_op=asynchronous))
        yield f"scatter {shift}", part, everyone[0][rank * n : (rank + 1) * n]


def on_a_communicator(ctx, machines, asynchronous):
    with joined(ctx, machines) if machines else contextlib.nullcontext(ctx.communicator()) as comm:
        found = [(name, out.tolist(), want.tolist()) for name, out, want in overlapping_calls(comm, asynchronous)]
    return [each for each in found if each[1] != each[2]], len(found)


@pytest.mark.parametrize(("machines", "asynchronous"), [("", False), ("", True), ("aab", False)])
def test_a_communicator_copies_first(machines, asynchronous):
    for wrong, calls in run_ranks(on_a_communicator, 3, machines, asynchronous):
        assert not wrong
        assert calls >= 28


def behind_another(ctx, machines, asynchronous):
    """The input is written by a call before, for which another rank still waits."""
    with joined(ctx, machines) if machines else contextlib.nullcontext(ctx.communicator()) as comm:
        size, rank, n = comm.size, comm.rank, 12
        total = sum(memory(r, n) for r in range(size))
        part, mine = n // size, slice(rank * n // size, (rank + 1) * n // size)

        def calls(m, x):
            """Yield (name, call, what it writes from m[1] on); x is the beginning of m, and has the total."""
            yield "all_gather", lambda a: comm.all_gather(m[1 : 1 + size * n], x, async_op=a), total.repeat(size)
            yield "all_reduce", lambda a: comm.all_reduce(x, out=m[1 : 1 + n], async_op=a), size * total
            yield "reduce_scatter", lambda a: comm.reduce_scatter(m[1 : 1 + part], x, async_op=a), size * total[mine]
            outs, inps = list(m[1 : 1 + n].split(part)), list(x.split(part))
            yield "lists", lambda a: comm.all_to_all(outs, inps, async_op=a), total[mine].repeat(size)
            direct = {"out": m[1 : 1 + n], "algorithm": "direct"}
            yield "direct", lambda a: comm.all_reduce(x, async_op=a, **direct), size * total

        wrong = []
        for number in range(5):
            for grouped in (False, True):
                m = memory(rank, 64).to(comm.device)
                name, call, want = list(calls(m, m[:n]))[number]
                if grouped and name == "direct":
                    continue
                comm.barrier()
                if rank == size - 1:
                    time.sleep(0.05)
                works = [comm.all_reduce(m[:n], async_op=True)]
                with comm.group() if grouped else contextlib.nullcontext():
                    works.append(call(asynchronous))
                for work in works[: 1 + asynchronous]:
                    work.wait()
                if m[1 : 1 + len(want)].tolist() != want.tolist():
                    wrong.append((name, grouped))
    return wrong


@pytest.mark.parametrize(("machines", "asynchronous"), [("", False), ("", True), ("aab", True)])
def test_the_copy_is_made_in_the_order_of_the_calls(machines, asynchronous):
    assert run_ranks(behind_another, 3, machines, asynchronous) == [[]] * 3


@needs_simulation
def test_the_copy_is_made_in_the_order_of_the_calls_on_gpus():
    assert run_ranks(behind_another, 2, "", True, device="simulated") == [[]] * 2


def algorithms(ctx):
    comm = ctx.communicator()
    for algorithm in ("ring", "direct"):
        m = memory(ctx.rank, 40000)
        comm.all_reduce(m[:30000], out=m[7:30007], algorithm=algorithm)
        assert torch.equal(m[7:30007], sum(memory(r, 30000) for r in range(ctx.size))), algorithm
        m = memory(ctx.rank, 40000)
        comm.all_gather(m[: ctx.size * 10000], m[3:10003], algorithm=algorithm)
        want = torch.cat([memory(r, 40000)[3:10003] for r in range(ctx.size)])
        assert torch.equal(m[: ctx.size * 10000], want), algorithm
        m = memory(ctx.rank, 40000)
        comm.reduce_scatter(m[3:10003], m[: ctx.size * 10000], algorithm=algorithm)
        want = sum(memory(r, 40000)[ctx.rank * 10000 : (ctx.rank + 1) * 10000] for r in range(ctx.size))
        assert torch.equal(m[3:10003], want), algorithm


def test_other_algorithms_copy_first():
    run_ranks(algorithms, 2)


@over("gloo")
def as_gloo(ctx):
    """The same calls of torch.distributed on Gloo and on ours; returns what differs."""
    size, rank, n = ctx.size, ctx.rank, 3
    groups = {"gloo": dist.group.WORLD, "ours": dist.new_group(backend="collectives")}

    def gather_list(m, group):
        outs = list(m[: size * n].split(n))
        dist.all_gather(outs, m[1 : 1 + n], group=group)
        return m

    def gather_uneven(m, group):
        outs = [m[4 * r : 4 * r + r + 1] for r in range(size)]
        dist.all_gather(outs, m[2 : 2 + rank + 1], group=group)
        return torch.cat(outs)

    def gather_single(m, group):
        dist.all_gather_into_tensor(m[: size * n], m[1 : 1 + n], group=group)
        return m

    def scatter_single(m, group):
        dist.reduce_scatter_tensor(m[1 : 1 + n], m[: size * n], group=group)
        return m[1 : 1 + n]

    def scatter_list(m, group):
        dist.reduce_scatter(m[1 : 1 + n], list(m[: size * n].split(n)), group=group)
        return m[1 : 1 + n]

    def all_to_all(m, group):
        dist.all_to_all_single(m[1 : 1 + size * n], m[: size * n], group=group)
        return m[1 : 1 + size * n]

    def all_to_all_splits(m, group):
        dist.all_to_all_single(m[1 : 1 + size * n], m[: size * n], [n] * size, [n] * size, group=group)
        return m[1 : 1 + size * n]

    def gather(m, group):
        outs = list(m[: size * n].split(n)) if rank == 0 else None
        dist.gather(m[1 : 1 + n], outs, group=group, group_dst=0)
        return m[: size * n]

    def scatter(m, group):
        inps = list(m[: size * n].split(n)) if rank == 0 else None
        dist.scatter(m[1 : 1 + n], inps, group=group, group_src=0)
        return m[1 : 1 + n]

    found = {}
    for call in (
        gather_list, gather_uneven, gather_single, scatter_single, scatter_list, all_to_all, all_to_all_splits, gather,
        scatter,
    ):  # fmt: skip
        values = {}
        for name, group in groups.items():
            try:
                values[name] = call(memory(rank, 24), group).tolist()
            except (RuntimeError, ValueError) as error:
                values[name] = f"{type(error).__name__}: {error}"
        found[call.__name__] = values["gloo"], values["ours"]
    return found


def test_values_of_gloo(tmp_path):
    copied = {"gather_list", "gather_single", "scatter_single", "gather"}  # so Gloo's values are right
    for found in run_ranks(as_gloo, 2, str(tmp_path / "store")):
        for name, (gloo, ours) in found.items():
            assert isinstance(ours, list), (name, ours)
            if name in copied:
                assert ours == gloo, name


@over("collectives")
def sparse_of_two_shapes(ctx, what):
    shape = (5, 2) if what != "shape" or ctx.rank == 0 else (4, 2)
    dtype = torch.float32 if what != "dtype" or ctx.rank == 0 else torch.float64
    values = torch.ones((1, 2) if what != "dense_dim" or ctx.rank == 0 else (1,), dtype=dtype)
    indices = torch.tensor([[1]]) if values.dim() == 2 else torch.tensor([[1], [0]])
    op = dist.ReduceOp.AVG if what == "op" and ctx.rank else dist.ReduceOp.SUM
    sparse = torch.sparse_coo_tensor(indices, values, shape)
    if what == "other" and ctx.rank == 0:
        sparse = torch.ones(2)
    try:
        dist.all_reduce(sparse, op)
    except RuntimeError as error:
        found = type(error).__name__, str(error)
    else:
        found = "", str(sparse.to_dense().tolist())
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == ctx.size
    return found


@pytest.mark.parametrize("what", ["same", "shape", "dtype", "dense_dim", "op", "other"])
def test_sparse_tensors_are_compared(tmp_path, what):
    for kind, text in run_ranks(sparse_of_two_shapes, 2, str(tmp_path / "store"), what):
        assert kind == ("" if what == "same" else "Mismatch"), text
        assert what in ("same", "other") or {"dtype": "float64", "op": "AVG"}.get(what, what) in text, text
