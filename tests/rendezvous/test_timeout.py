"""`timeout` has one meaning: the limit of the opening, of each operation, and of split and shrink."""

import datetime

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives.errors import CollectiveTimeout, InvalidArgument
from tests.hosts import apart, joined
from tests.ranks import run_ranks
from tests.variables import variables


def times_out(call, seconds):
    """Return the error of a call that fails with the limit of so many seconds, by the error's own words."""
    with pytest.raises(CollectiveTimeout, match=f"(timeout of|within|took longer than) {seconds:.1f} s") as error:
        call()
    return error.value


def operations(ctx, what):
    """Rank 1 leaves out a call; nothing else has a limit as short."""
    with joined(ctx, "aa", timeout=1.5) as comm:
        assert comm.timeout == 1.5
        part = comm.split(0)
        assert part.timeout == 1.5
        library = comm.engine.library
        library.set_init_timeout(100.0)  # as the opening of another communicator does
        call = {
            "all_reduce": lambda: part.all_reduce(torch.ones(1)),
            "split": lambda: part.split(0),
        }[what]
        if ctx.rank == 0:
            assert times_out(call, 1.5).peers == (1,)
        ctx.barrier()
        library.set_init_timeout(60.0)
        part.abort()


@pytest.mark.parametrize("what", ["all_reduce", "split"])
def test_operations_of_init(what):
    run_ranks(operations, 2, what)


def shrinking(ctx):
    with apart(ctx, "aaa"):
        import collectives.rendezvous.world as world

        world._generation, world._world = 0, None
        comm = collectives.init(timeout=1.5)
        comm.engine.library.set_init_timeout(100.0)
        if ctx.rank == 0:
            assert times_out(lambda: comm.shrink([2]), 1.5).peers == (1,)
        ctx.barrier()
        comm.engine.library.set_init_timeout(60.0)
        comm.abort()


def test_shrink():
    run_ranks(shrinking, 3)


def defaults(ctx):
    with joined(ctx, "aa") as comm:
        assert comm.timeout == 1800.0
        assert collectives.init() is comm
        assert collectives.init(timeout=7) is comm and comm.timeout == 7
        assert collectives.init() is comm and comm.timeout == 7
        comm.timeout = 8  # the way to another limit after the opening
        assert comm.split(0).timeout == 8
    with joined(ctx, "ab", timeout=20) as comm:  # between nodes
        assert comm.timeout == 20
        assert comm.split(0).timeout == comm.split(ctx.rank).timeout == 20
    for wrong in (0, -1, "5", float("inf"), True):
        with pytest.raises(InvalidArgument, match="timeout"):
            collectives.init(timeout=wrong)


def test_defaults_and_errors():
    run_ranks(defaults, 2)


def horovod(ctx, seconds):
    import collectives.horovod as hvd
    import collectives.rendezvous.world as world

    with apart(ctx, "aa"), variables(HOROVOD_GLOO_TIMEOUT_SECONDS=seconds):
        world._generation, world._world = 0, None
        hvd.init()
        try:
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
            return world.current_world().timeout
        finally:
            hvd.shutdown()


@pytest.mark.parametrize(("seconds", "limit"), [("23", 23.0), ("", 1800.0)])
def test_horovod(seconds, limit):
    assert run_ranks(horovod, 2, seconds) == [limit] * 2


def torchs_groups(ctx, path):
    import collectives.horovod as hvd

    limit = datetime.timedelta(seconds=17)
    dist.init_process_group(
        "collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size, timeout=limit
    )
    try:
        group = dist.new_group(timeout=datetime.timedelta(seconds=19))
        get, cpu = collectives.rendezvous.get_communicator, torch.device("cpu")
        found = [get(pg, cpu).timeout for pg in (dist.group.WORLD, group)]
        hvd.init()
        found.append(collectives.rendezvous.world.current_world().timeout)
        hvd.shutdown()
        return found
    finally:
        dist.destroy_process_group()


def test_process_groups(tmp_path):
    assert run_ranks(torchs_groups, 2, str(tmp_path / "store")) == [[17.0, 19.0, 17.0]] * 2
