"""The public Communicator against the oracle: reductions of torch tensors of every type, blocking and as Work."""

from __future__ import annotations

import numpy as np
import pytest

from tests import oracle
from tests.conformance.cases import is_refused_by_nccl
from tests.conformance.worlds import WORLDS, check
from tests.oracle import DTYPES

ALL_OPS = (*oracle.OPS, "premul")
SEED = 40


def torch_dtype(name):
    import torch

    names = {"float8e4m3": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}
    return getattr(torch, names.get(name, name))


def tensor_of(ctx, dtype, stored):
    """A tensor on the communicator's device whose elements have these bits."""
    import torch

    raw = torch.from_numpy(np.array(stored).view(np.uint8)).to("cpu" if ctx.engine == "host" else "cuda:0")
    return raw.view(torch_dtype(dtype.name))


def stored_in(dtype, tensor):
    import torch

    return tensor.detach().cpu().view(torch.uint8).numpy().view(dtype.storage)


def compare(ctx, dtype, op, got, inputs, scalars, where) -> list[str]:
    want = oracle.rank_ordered(dtype, op, inputs, scalars)
    if ctx.engine == "host":
        good = oracle.same(dtype, got, want, zeros_alike=op in ("max", "min"))
    else:
        good = oracle.within(dtype, got, op, inputs, scalars, narrow_sums=True)
    if good.all():
        return []
    i = int(np.argmin(good))
    return [f"{where} on rank {ctx.rank}: {(~good).sum()} elements differ, first {i}: got {got[i]!r}, want {want[i]!r}"]


def reductions(ctx):
    comm, n = ctx.communicator(), ctx.size
    found = []
    for index, (name, dtype) in enumerate(DTYPES.items()):
        for k, op in enumerate(ALL_OPS):
            if is_refused_by_nccl(ctx.engine, n, dtype, op):
                continue
            count = (0, 1, 97, 1500)[(index + k) % 4]
            as_work = (index + k) % 2 == 1
            inputs = [oracle.make(dtype, count * n, SEED + r) for r in range(n)]
            scalar = 2 if not dtype.is_float else 0.5 + comm.rank
            scalars = [2] * n if not dtype.is_float else [0.5 + r for r in range(n)]
            how = scalar if op == "premul" else op
            scalars = scalars if op == "premul" else None
            mine = tensor_of(ctx, dtype, inputs[comm.rank])

            def finish(work, as_work=as_work):
                assert (work is not None) == as_work
                if work is not None:
                    work.wait()

            t = mine.clone()
            finish(comm.all_reduce(t, how, async_op=as_work))
            found += compare(ctx, dtype, op, stored_in(dtype, t), inputs, scalars, f"all_reduce {name} {op}")
            root = (index + k) % n
            t = mine.clone()
            finish(comm.reduce(t, root, how, async_op=as_work))
            if comm.rank == root:
                found += compare(ctx, dtype, op, stored_in(dtype, t), inputs, scalars, f"reduce {name} {op}")
            elif stored_in(dtype, t).tobytes() != inputs[comm.rank].tobytes():
                found.append(f"reduce {name} {op} changed the array of rank {comm.rank}")
            out = tensor_of(ctx, dtype, np.zeros(count, dtype.storage))
            finish(comm.reduce_scatter(out, mine, how, async_op=as_work))
            parts = [x[comm.rank * count : (comm.rank + 1) * count] for x in inputs]
            found += compare(ctx, dtype, op, stored_in(dtype, out), parts, scalars, f"reduce_scatter {name} {op}")
    return found


@pytest.mark.parametrize(("engine", "n"), [w for w in WORLDS if "7" not in w.id])
def test_reductions_of_tensors(engine, n):
    check(reductions, engine, n)
