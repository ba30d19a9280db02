"""Groups: mixed calls, nesting, errors inside, cancelling, all ranks in one thread. See also test_sequences."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.errors import InvalidArgument, InvalidUsage
from tests.buffers import memory_of
from tests.conformance.cases import COLLECTIVES, REDUCTIONS, Case, PreMulOps, Prepared, run_cases, run_group
from tests.conformance.worlds import WORLDS, check
from tests.rank_process import HOST_LIBRARY, open_ranks
from tests.ranks import run_ranks


def mixed_cases(n, rng, length=8):
    for i in range(length):
        name = rng.choice([*COLLECTIVES, "transfer", "transfer"])
        yield Case(
            name,
            rng.choice(["int8", "int32", "float32", "bfloat16", "float64"]),
            rng.choice([0, 1, 5, 200, 1024, 3000]),
            op=rng.choice(["sum", "prod", "max", "min", "avg", "premul"]) if name in REDUCTIONS else "sum",
            root=rng.randrange(n),
            peer=rng.randrange(n),
            inplace=rng.random() < 0.5 and name != "all_to_all",
            seed=20 + i,
        )


def mixed(ctx):
    found = []
    for seed in range(12):
        cases = list(mixed_cases(ctx.size, random.Random(seed)))
        found += run_group(ctx, [ctx.comm()], cases)
    return found


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_collectives_and_transfers_mixed(engine, n):
    check(mixed, engine, n, needs="ncclGather")


def nested(ctx):
    comm, library = ctx.comm(), ctx.library
    memory = memory_of(ctx.engine)
    cases = list(mixed_cases(ctx.size, random.Random(5), length=6))
    premul = PreMulOps([comm])
    prepared = [Prepared(case, comm, memory, premul, ctx.engine == "host") for case in cases]
    library.group_start()
    prepared[0].issue()
    library.group_start()
    prepared[1].issue()
    prepared[2].issue()
    library.group_start()
    library.group_end()
    library.group_end()
    if ctx.engine == "host":  # an inner end starts nothing: other ranks may still be outside of the group
        assert all(p.recv is p.send or p.recv.still_poisoned() for p in prepared)
    for p in prepared[3:]:
        p.issue()
    library.group_end()
    memory.synchronize()
    found = [text for p in prepared for text in p.problems()]
    premul.destroy()
    library.group_start()  # an empty group does nothing
    library.group_end()
    return found


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_nested(engine, n):
    check(nested, engine, n, needs="ncclGather")


def wrong_groups(ctx):
    """What ends a group with an error, or without a call of it; the communicator goes on each time."""
    comm, library, found = ctx.comm(), ctx.library, []

    def prepared(**how):
        case = Case(**{"collective": "all_reduce", "dtype": "float32", "count": 10} | how)
        return Prepared(case, comm, memory_of("host"), PreMulOps([comm]), True)

    def goes_on(what, *calls):
        for call in calls:
            found.extend([f"a call of a group that was {what} was carried out"] * (not call.recv.still_poisoned()))
        ctx.barrier()
        after = run_cases(ctx, [Case("all_reduce", "int8", 9)])
        found.extend(f"after a group that was {what}: {text}" for text in after)

    good = prepared()
    library.group_start()
    good.issue()
    with pytest.raises(InvalidArgument):
        comm.all_reduce(good.send.address, good.recv.address, 10, 99, 0)
    with pytest.raises(InvalidArgument):
        library.group_end()
    goes_on("refused", good)
    with pytest.raises(InvalidUsage, match="(?i)group"):
        library.group_end()
    goes_on("never begun")
    library.group_start()
    library.group_start()
    good.issue()
    library.group_cancel()
    goes_on("cancelled", good)
    # A send to oneself needs its receive in the same group: without one it must not wait for ever.
    alone = prepared(collective="transfer", root=ctx.rank, peer=ctx.rank)
    with pytest.raises(InvalidUsage):
        comm.send(alone.send.address, 4, alone.dtype.code, ctx.rank)
    with pytest.raises(InvalidUsage):
        library.group_start()
        comm.recv(alone.recv.address, 4, alone.dtype.code, ctx.rank)
        library.group_end()
    goes_on("half of a transfer", alone)
    return found


@pytest.mark.parametrize("n", [1, 3])
def test_wrong_groups(n):
    check(wrong_groups, "host", n)


def all_in_one_process(ctx, n, seed):
    """One thread drives n ranks, which is legal inside of groups only."""
    comms = open_ranks(ctx.library, n)
    assert [(c.rank, c.size) for c in comms] == [(r, n) for r in range(n)]
    memory = memory_of("host")
    found = []
    rng = random.Random(seed)
    for case in mixed_cases(n, rng, length=6):
        premul = PreMulOps(comms)
        prepared = [Prepared(Case(**{**case.__dict__, "comm": r}), comms[r], memory, premul, True) for r in range(n)]
        for r in rng.sample(range(n), n):  # a pre-multiplied sum is made outside of the group
            if case.op == "premul":
                premul.code(r, prepared[r].dtype)
        ctx.library.group_start()
        for r in rng.sample(range(n), n):
            prepared[r].issue()
        ctx.library.group_end()
        found += [text for p in prepared for text in p.problems()]
        premul.destroy()
    for comm in comms:
        comm.destroy()
    return found


@pytest.mark.parametrize("n", [1, 2, 16])
def test_all_ranks_in_one_process_and_thread(n):
    (found,) = run_ranks(all_in_one_process, 1, n, 3, timeout=60, env={"COLLECTIVES_HOST_CHUNK": "4096"})
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def without_cancel(tmp_path_factory):
    """A library with NCCL's groups and no way to cancel one, which carries data without a GPU."""
    path = tmp_path_factory.mktemp("groups") / "libnccl_groups.so"
    source = Path(__file__).with_name("nccl_groups.c")
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", f'-DHOST="{HOST_LIBRARY}"']
    subprocess.run(["gcc", *flags, str(source), "-o", str(path), "-ldl"], check=True, timeout=60)
    return str(path)


def interrupted(ctx, path):
    """Ctrl-C between the start and the end of a group, after half of its calls: no call of it is launched."""
    from collectives._nccl import DTYPES, OPS, Library
    from collectives.comm.group import Call, issue

    library = Library(path) if path else ctx.library
    unique_id = ctx.exchange(library.get_unique_id() if ctx.rank == 0 else None)[0]
    native = library.comm_init_rank(ctx.size, unique_id, ctx.rank)
    engine = SimpleNamespace(library=library)
    comm = SimpleNamespace(engine=engine, _native=native)

    def call(array):
        address = array.ctypes.data
        steps = (("all_reduce", (address, address, array.size, DTYPES["float32"], OPS["sum"])),)
        return Call(comm, "all_reduce", steps, (array,), array.nbytes)

    presses = SimpleNamespace(recv=lambda *args: signal.raise_signal(signal.SIGINT))
    bad = Call(SimpleNamespace(engine=engine, _native=presses), "recv", (("recv", ()),), (), 0)
    x, y = (np.full(10, ctx.rank + value, np.float32) for value in (1, 10))
    found = []
    if ctx.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            issue([call(x), bad, call(x)], [0, 0, 0])
        if x[0] != 1:
            found.append("half of the group was launched")
    issue([call(y), call(y)], [0, 0])
    if y[0] != ctx.size * sum(rank + 10 for rank in range(ctx.size)):
        found.append(f"what comes after the group gives {y[0]}")
    native.destroy()
    return found


@pytest.mark.parametrize("library", ["host", "nccl's rules"])
def test_ctrl_c_inside(library, without_cancel):
    check(interrupted, "host", 2, None if library == "host" else without_cancel, timeout=20)
