"""Groups: mixed calls, several communicators in any order, nesting, errors inside, simulation, cancelling."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.buffers import memory_of
from tests.conformance.cases import COLLECTIVES, REDUCTIONS, Case, PreMulOps, Prepared, run_cases
from tests.conformance.worlds import WORLDS, check
from tests.rank_process import HOST_LIBRARY, open_ranks
from tests.ranks import run_ranks

HOST_WORLDS = [w for w in WORLDS if "host" in w.id]


def issue_group(ctx, comms, cases, order=None, stream=0) -> list[str]:
    """One group of cases over ``comms`` (``case.comm`` says which), posted in ``order``."""
    memory = memory_of(ctx.engine)
    premul = PreMulOps(comms)
    prepared = [Prepared(case, comms[case.comm], memory, premul, ctx.engine == "host") for case in cases]
    ctx.library.group_start()
    for i in order or range(len(prepared)):
        prepared[i].issue(stream)
    ctx.library.group_end()
    memory.synchronize()
    found = [text for p in prepared for text in p.problems()]
    premul.destroy()
    return found


def interleaved(cases, rng) -> list[int]:
    """An order of the cases that differs from rank to rank and keeps the order within each communicator."""
    lanes: dict[int, list[int]] = {}
    for i, case in enumerate(cases):
        lanes.setdefault(case.comm, []).append(i)
    order = []
    while any(lanes.values()):
        lane = rng.choice([lane for lane in lanes.values() if lane])
        order.append(lane.pop(0))
    return order


def mixed_cases(n, rng, ncomms=1, length=8):
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
            comm=rng.randrange(ncomms),
            seed=20 + i,
        )


def mixed(ctx):
    found = []
    for seed in range(12):
        cases = list(mixed_cases(ctx.size, random.Random(seed)))
        found += issue_group(ctx, [ctx.comm()], cases)
    return found


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_collectives_and_transfers_mixed(engine, n):
    check(mixed, engine, n, needs="ncclGather")


def several_communicators(ctx):
    comms = [ctx.comm(), ctx.new_comm(), ctx.new_comm()]
    found = []
    for seed in range(10):
        cases = list(mixed_cases(ctx.size, random.Random(100 + seed), ncomms=3, length=10))
        found += issue_group(ctx, comms, cases, interleaved(cases, random.Random(1000 * ctx.rank + seed)))
    for comm in comms[1:]:
        comm.destroy()
    return found


@pytest.mark.parametrize(("engine", "n"), HOST_WORLDS)
def test_several_communicators_in_different_orders(engine, n):
    check(several_communicators, engine, n)


def parts_of_a_split(ctx):
    """A group over the whole and over parts with other ranks: in each communicator this rank has another number."""
    parts = ctx.comm().split(ctx.rank % 2, -ctx.rank)
    found = []
    for seed in range(6):
        rng = random.Random(seed + 7)
        whole = list(mixed_cases(ctx.size, rng, length=4))
        part_rng = random.Random(50 + seed)
        mine = [
            Case(name, "float32", 700, op="avg", root=part_rng.randrange(parts.size), comm=1, seed=77 + seed)
            for name in ("all_reduce", "broadcast", "all_gather")
        ]
        cases = whole + mine
        found += issue_group(ctx, [ctx.comm(), parts], cases, interleaved(cases, random.Random(ctx.rank + seed)))
    parts.destroy()
    return found


@pytest.mark.parametrize(("engine", "n"), HOST_WORLDS)
def test_a_communicator_and_parts_of_it(engine, n):
    check(parts_of_a_split, engine, n)


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


def bad_call_inside(ctx):
    """A call refused inside a group makes the group end with an error on every rank; the communicator lives on."""
    from collectives.errors import InvalidArgument

    comm, library = ctx.comm(), ctx.library
    memory = memory_of(ctx.engine)
    good = Prepared(Case("all_reduce", "float32", 10), comm, memory, PreMulOps([comm]), True)
    library.group_start()
    good.issue()
    with pytest.raises(InvalidArgument):
        comm.all_reduce(good.send.address, good.recv.address, 10, 99, 0)
    with pytest.raises(Exception) as caught:
        library.group_end()
    found = [] if isinstance(caught.value, InvalidArgument) else [f"group_end raised {caught.value!r}"]
    if not good.recv.still_poisoned():
        found.append("a call of a group that failed was carried out")
    ctx.barrier()
    return found + run_cases(ctx, [Case("all_reduce", "float32", 10)])


@pytest.mark.parametrize("n", [1, 3])
def test_bad_call_inside(n):
    check(bad_call_inside, "host", n)


def unmatched_end(ctx):
    from collectives.errors import InvalidUsage

    with pytest.raises(InvalidUsage, match="(?i)group"):
        ctx.library.group_end()
    return run_cases(ctx, [Case("all_reduce", "float32", 10)])


def test_group_end_without_a_start():
    check(unmatched_end, "host", 2)


def cancelled(ctx):
    comm, library = ctx.comm(), ctx.library
    p = Prepared(Case("all_reduce", "float32", 10), comm, memory_of("host"), PreMulOps([comm]), True)
    library.group_start()
    library.group_start()
    p.issue()
    library.group_cancel()
    found = [] if p.recv.still_poisoned() else ["a cancelled call was carried out"]
    return found + run_cases(ctx, [Case("all_reduce", "float32", 10, seed=8)])


def test_cancel():
    check(cancelled, "host", 3)


def self_send_alone(ctx):
    """A send to oneself needs its receive in the same group; without one it is refused and does not wait for ever."""
    from collectives.errors import InvalidUsage

    comm = ctx.comm()
    p = Prepared(
        Case("transfer", "int32", 4, root=ctx.rank, peer=ctx.rank), comm, memory_of("host"), PreMulOps([comm]), True
    )
    with pytest.raises(InvalidUsage):
        comm.send(p.send.address, 4, p.dtype.code, ctx.rank)
    with pytest.raises(InvalidUsage):
        ctx.library.group_start()
        comm.recv(p.recv.address, 4, p.dtype.code, ctx.rank)
        ctx.library.group_end()
    return run_cases(ctx, [Case("all_reduce", "float32", 10, seed=9)])


@pytest.mark.parametrize("n", [1, 2])
def test_send_to_oneself_without_its_receive(n):
    check(self_send_alone, "host", n)


def group_of_ring_and_queue(ctx):
    """A group whose calls name different queues of this rank, and the NULL stream."""
    comm, library = ctx.comm(), ctx.library
    queues = [library.queue_create(), library.queue_create()]
    streams = [queues[0].handle, queues[1].handle, 0]
    memory = memory_of("host")
    premul = PreMulOps([comm])
    cases = list(mixed_cases(ctx.size, random.Random(11), length=9))
    prepared = [Prepared(case, comm, memory, premul, True) for case in cases]
    library.group_start()
    for i, p in enumerate(prepared):
        p.issue(streams[i % 3])
    library.group_end()
    for queue in queues:
        assert queue.wait(queue.record(), 30)
    found = [text for p in prepared for text in p.problems()]
    premul.destroy()
    for queue in queues:
        queue.close()
    return found


@pytest.mark.parametrize(("engine", "n"), HOST_WORLDS)
def test_a_group_over_several_queues(engine, n):
    check(group_of_ring_and_queue, engine, n)


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
