"""Options of groups and operations of the backend "collectives": pg_options, timeouts, callbacks, mixed groups."""

import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives.backend.options import parse_options
from collectives.errors import CollectiveTimeout, InvalidArgument, RemoteError
from collectives.torch_compat import c10d_backend
from tests.backend.groups import over
from tests.ranks import run_ranks

SECOND = timedelta(seconds=1)


def all_in(ctx, name):
    """Wait until all ranks are here, over the store alone."""
    store = dist.group.WORLD.get_group_store()
    store.add(name, 1)
    while store.add(name, 0) < ctx.size:
        time.sleep(0.01)


def options(ctx):
    world, config = dist.group.WORLD, collectives.CommConfig(max_ctas=4, comm_name="pair")
    for given in (config, {"max_ctas": 4, "comm_name": "pair"}):
        group = dist.new_group(pg_options=given)
        assert group.communicator(torch.device("cpu")).config == config
        part = group.split_group([0, 1])
        assert part.communicator(torch.device("cpu")).config == config, "a part has its parent's"
    assert world.communicator(torch.device("cpu")).config == collectives.CommConfig()
    for wrong in ({"colour": 1}, object(), 5):
        with pytest.raises(InvalidArgument, match="config|pg_options"):
            dist.new_group(pg_options=wrong)
    all_in(ctx, "asked")
    with pytest.raises(ValueError, match="timedelta"):
        dist.monitored_barrier(timeout="5")
    # torch's own function, which torchtitan and others call after their first step
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7))
    assert world.options._timeout == timedelta(seconds=7)
    assert world.communicator(torch.device("cpu")).timeout == 7.0


def test_options_of_torchs_nccl_groups():
    class Options(c10d_backend().Options):
        is_high_priority_stream = True
        config = SimpleNamespace(max_ctas=8, min_ctas=-(2**31), comm_name=None, cga_cluster_size=2, blocking=-(2**31))

    with pytest.warns(UserWarning, match="is_high_priority_stream"):
        made = parse_options(Options("nccl", SECOND))
    assert made == collectives.CommConfig(max_ctas=8, cga_cluster_size=2)
    plain = c10d_backend().Options("collectives", SECOND)
    assert parse_options(plain, made) == made and parse_options(None) == collectives.CommConfig()


def own_timeouts(world):
    """Every short form of an operation that has a timeout, and one with options."""
    tensor, size = torch.ones(2), world.size()
    outs, ins = [torch.empty(2) for _ in range(size)], [torch.ones(2) for _ in range(size)]
    limited = dist.AllreduceOptions()
    limited.timeout = SECOND
    here = world.rank() == 0
    return {
        "options": lambda: world.allreduce([tensor], limited),
        "allreduce": lambda: world.allreduce(tensor, dist.ReduceOp.MAX, SECOND),
        "broadcast": lambda: world.broadcast(tensor, 1, SECOND),
        "reduce": lambda: world.reduce(tensor, 0, dist.ReduceOp.SUM, SECOND),
        "allgather": lambda: world.allgather(outs, tensor, SECOND),
        "gather": lambda: world.gather(outs if here else [], tensor, 0, SECOND),
        "scatter": lambda: world.scatter(tensor, ins if world.rank() == 1 else [], 1, SECOND),
        "reduce_scatter": lambda: world.reduce_scatter(tensor, ins, dist.ReduceOp.SUM, SECOND),
        "all_to_all": lambda: world.alltoall_base(torch.empty(size), torch.ones(size), [], [], timeout=SECOND),
        "barrier": lambda: world.barrier(SECOND),
    }


def timed(ctx):
    """An operation's own timeout."""
    world = dist.group.WORLD
    calls, works = own_timeouts(world), {}
    if ctx.rank == 0:
        for name, call in calls.items():  # all at once: each limit counts from its own call
            began = time.monotonic()
            works[name] = call()
            assert time.monotonic() - began < 10, f"{name} has blocked"
        for name, work in works.items():
            with pytest.raises(CollectiveTimeout) as caught:
                work.wait()
            assert caught.value.peers == (1,), name
        blocking = dist.AllreduceOptions()
        blocking.timeout, blocking.asyncOp = SECOND, False
        with pytest.raises(CollectiveTimeout):
            world.allreduce([torch.ones(2)], blocking)
    all_in(ctx, "timed out")
    if ctx.rank == 1:
        for call in calls.values():
            call().wait(timedelta(seconds=30))
        dist.all_reduce(torch.ones(2))
    for work in works.values():
        work.wait(timedelta(seconds=30))  # it stayed in flight
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0


@over("collectives")
def options_and_timeouts(ctx):
    timed(ctx)
    options(ctx)


def test_pg_options_and_timeouts(tmp_path):
    run_ranks(options_and_timeouts, 2, tmp_path / "store")


def mixed(ctx, path, backend, ours):
    dist.init_process_group(backend, init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    try:
        world, found = dist.group.WORLD, []
        for group in (world, dist.new_group([0, 1])):
            tensor, rows = torch.ones(2), torch.empty(2 * ctx.size)
            dist.all_reduce(tensor, group=group)
            work = dist.all_gather_into_tensor(rows, tensor, group=group, async_op=True)
            work.wait()
            objects = [None] * ctx.size
            dist.all_gather_object(objects, ctx.rank, group=group)
            dist.barrier(group=group)
            if ctx.rank == 0:
                dist.send(tensor, 1, group=group)
            else:
                dist.recv(tensor, 0, group=group)
            assert tensor.tolist() == [2.0, 2.0] and objects == [0, 1] and rows.tolist() == [2.0] * 4
            found.append(type(work).__name__ == "BackendWork")
        assert found == [ours, ours] and dist.get_backend_config() == backend
        assert sorted(each.type for each in world._device_types) == ["cpu", "cuda"][: backend.count(":")]
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=9))
        assert world._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=9)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "backend, ours",
    [("cpu:collectives", True), ("cpu:gloo,cuda:collectives", False), ("cpu:collectives,cuda:gloo", True)],
)
def test_groups_with_a_backend_for_each_device(tmp_path, backend, ours):
    run_ranks(mixed, 2, tmp_path / "store", backend, ours)


def dead(ctx, path, kind):
    dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    dist.barrier()
    if ctx.rank == 1:
        os._exit(7)
    tensor = torch.ones(2)
    call = {
        "broadcast": lambda: dist.broadcast(tensor, 1),
        "objects": lambda: dist.all_gather_object([None] * 2, 5),
        "object from it": lambda: dist.broadcast_object_list([None], 1),
        "monitored barrier": lambda: dist.monitored_barrier(),
        "batch": lambda: [each.wait() for each in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, 1)])],
    }[kind]
    with pytest.raises(RemoteError, match="rank 1") as caught:
        call()
    dist.destroy_process_group()
    return caught.value.peers


@pytest.mark.parametrize(
    "kind",
    [
        "object from it", "monitored barrier",
        *(pytest.param(each, marks=pytest.mark.thorough) for each in ("broadcast", "objects", "batch")),
    ],
)  # fmt: skip
def test_a_dead_rank_is_named_by_every_kind_of_operation(tmp_path, kind):
    assert run_ranks(dead, 2, tmp_path / "store", kind, deaths=[1])[0] == (1,)
