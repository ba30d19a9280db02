"""The ranks that share a module: from a communicator, a mesh, process groups, or torch.distributed's default group."""

import contextlib
import gc

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from collectives.errors import InvalidArgument, InvalidUsage
from collectives.rendezvous.process_groups import get_communicator
from collectives.sharded.fully_shard import fully_shard
from collectives.sharded.mesh import resolve_mesh
from collectives.torch_compat import open_process_groups
from tests.hosts import joined
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))


def check_training(mesh):
    """One step on shards of the mesh is the step of one process, and full_tensor and state dicts have its values."""
    gc.collect()  # on all ranks alike
    expected, model = make_model(), fully_shard(make_model(), mesh=mesh)
    for each in (expected, model):
        each(torch.ones(2, 6)).sum().backward()
        torch.optim.SGD(each.parameters(), 0.1).step()
    full = expected.state_dict()
    for name, shard in model.state_dict().items():
        assert torch.equal(shard.full_tensor(), full[name]), name
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        assert all(torch.equal(found[name], full[name]) for name in full)
    return model, full


def check_checkpoint(model, full, folder, group):
    dcp.save(get_model_state_dict(model), checkpoint_id=folder, process_group=group)
    other = fully_shard(make_model(), mesh=next(model.parameters()).device_mesh)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_model_state_dict(other, state)
    assert all(torch.equal(shard.full_tensor(), full[name]) for name, shard in other.state_dict().items())


def check_async_save(model, folder):
    """Checkpoints that another thread saves while the model trains."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        state = get_model_state_dict(model)
        saved = {name: shard.full_tensor().clone() for name, shard in state.items()}
        done = dcp.async_save(state, checkpoint_id=f"{folder}{step}")
        for _ in range(30):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        done.result()
        loaded = get_model_state_dict(model)
        dcp.load(loaded, checkpoint_id=f"{folder}{step}")
        assert all(torch.equal(shard.full_tensor(), saved[name]) for name, shard in loaded.items())


@contextlib.contextmanager
def default_group(ctx, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=ctx.rank, world_size=ctx.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- A communicator.


def over_communicators(ctx, folder):
    comm, before = ctx.new_communicator(), len(open_process_groups())
    with default_group(ctx, folder) if folder.endswith("gloo") else contextlib.nullcontext():
        started = dist.is_initialized()
        found = resolve_mesh(make_model(), comm)
        assert found.comm is comm is found.world is get_communicator(found.mesh.get_group(), CPU)
        assert found.replicas is None and found.device == CPU and found.mesh.size() == ctx.size
        assert resolve_mesh(make_model(), comm).mesh == found.mesh
        if not started:
            assert get_communicator(dist.group.WORLD, CPU) is not comm  # it has an order of its own
        model, _ = check_training(found.mesh)
        check_async_save(model, f"{folder}/async")
        model, full = check_training(found.mesh)
        for name, group in (("default", None), ("own", found.mesh.get_group())):
            check_checkpoint(model, full, f"{folder}/{name}", group)


        reversed_ranks, lone = comm.split(0, -ctx.rank), comm.split(ctx.rank)
        turned = resolve_mesh(make_model(), reversed_ranks)
        assert get_communicator(turned.mesh.get_group(), CPU) is reversed_ranks
        assert turned.mesh.mesh.tolist() == [1, 0] and turned.mesh.get_local_rank() == 1 - ctx.rank
        check_training(turned.mesh)
        alone = resolve_mesh(make_model(), lone)
        assert alone.comm is lone and alone.mesh.size() == 1
        model, full = check_training(alone.mesh)
        if ctx.rank == 1:  # without the other rank
            check_checkpoint(model, full, f"{folder}/alone", alone.mesh.get_group())

        for shape, size in (("replicate", (2, 1)), ("hybrid", (1, 2))):
            rows = resolve_mesh(make_model(), comm, shape=shape)
            again = resolve_mesh(make_model(), comm, shape=shape)
            assert rows.mesh == again.mesh and rows.comm is again.comm and rows.world is comm
            assert tuple(rows.mesh.shape) == size == (rows.replicas.size, rows.comm.size)
            assert rows.mesh.mesh_dim_names == ("replicate", "shard")
            check_training(rows.mesh)

        count = len(open_process_groups())
        lone.close()
        assert len(open_process_groups()) == count - 1
        comm.close()  # with the communicators that were opened for the rows
        assert rows.comm.closed and rows.replicas.closed and dist.is_initialized() == started
        reversed_ranks.close()
        assert len(open_process_groups()) == before + started
    return True


@pytest.mark.parametrize("default", ["none", "gloo"])
def test_communicator_without_and_with_a_default_group(tmp_path, default):
    folder = tmp_path / default
    folder.mkdir()
    assert run_ranks(over_communicators, 2, str(folder)) == [True] * 2


def one_after_another(ctx):
    """Communicators of other sizes one after another, as in an elastic job; groups that the program destroys."""
    sizes = []
    for size in (2, 1, 2):
        comm = ctx.new_communicator() if size == 2 else ctx.new_communicator().split(ctx.rank)
        check_training(resolve_mesh(make_model(), comm).mesh)
        sizes.append(dist.get_world_size())
        dist.destroy_process_group()
        assert not comm.closed and not dist.is_initialized()
        check_training(resolve_mesh(make_model(), comm).mesh)
        comm.abort() if len(sizes) == 1 else comm.close()
        assert not dist.is_initialized() and not open_process_groups()
    return sizes


def test_communicators_one_after_another():
    assert run_ranks(one_after_another, 2) == [[2, 1, 2]] * 2


def errors_of(ctx, folder):
    comm, model = ctx.new_communicator(), make_model()
    found = []
    for kind, arguments in (
        (InvalidUsage, {}), (InvalidArgument, {"comm": "all"}), (InvalidArgument, {"comm": comm, "group": comm}),
        (InvalidArgument, {"mesh": "cpu"}), (InvalidArgument, {"comm": comm, "shape": "none"}),
    ):  # fmt: skip
        with pytest.raises(kind) as caught:
            resolve_mesh(model, **arguments)
        found.append(str(caught.value))
    half = comm.split(ctx.rank)
    resolve_mesh(model, half)  # each rank has a default group of its own now
    with pytest.raises(InvalidUsage) as caught:
        resolve_mesh(model, comm)
    found.append(str(caught.value))
    half.close()
    comm.close()
    return found


def test_errors(tmp_path):
    for found in run_ranks(errors_of, 2, str(tmp_path)):
        assert "torch.distributed.init_process_group()" in found[0] and "give fully_shard a comm or mesh" in found[0]
        assert "must be a collectives.Communicator" in found[1]
        assert "comm and process_group all say" in found[2]
        assert "mesh must be a DeviceMesh" in found[3]
        assert "isn't the same one on all ranks" in found[-1] and "collectives.init_process_group()" in found[-1]


# ---- Meshes and process groups, on four ranks.


def over_our_backend(ctx, folder):
    dist.init_process_group("collectives", init_method=f"file://{folder}/store", rank=ctx.rank, world_size=ctx.size)
    found, of_group = resolve_mesh(make_model()), get_communicator(dist.group.WORLD, CPU)
    assert found.comm is not of_group and found.comm.rank == of_group.rank == ctx.rank
    assert resolve_mesh(make_model()).comm is found.comm is resolve_mesh(make_model(), mesh=found.mesh).comm
    check_async_save(fully_shard(make_model()), f"{folder}/async")
    dist.destroy_process_group()
    return found.comm.closed and of_group.closed


def test_units_have_another_communicator_than_a_group_of_our_backend(tmp_path):
    assert run_ranks(over_our_backend, 2, str(tmp_path)) == [True] * 2


def over_groups(ctx, folder):
    with default_group(ctx, folder):
        model = make_model()
        found = resolve_mesh(model)
        assert found.mesh.size() == 4 == found.comm.size and found.comm is get_communicator(dist.group.WORLD, CPU)
        line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
        assert resolve_mesh(model, mesh=line).mesh is line
        part = resolve_mesh(model, mesh=grid["dp"])
        assert part.comm is part.world and part.comm.size == 2 and part.comm.rank == ctx.rank % 2
        whole = resolve_mesh(model, mesh=grid)
        assert (whole.comm.size, whole.replicas.size, whole.world.size) == (2, 2, 4)
        cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "replicate", "shard"))
        inner = resolve_mesh(model, mesh=cube["replicate", "shard"])
        assert (inner.comm.size, inner.replicas.size, inner.world.size) == (1, 2, 2)

        pairs = dist.new_subgroups(2)[0]
        even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
        hybrid = resolve_mesh(model, group=(pairs, odd if ctx.rank % 2 else even))
        assert hybrid.mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert hybrid.comm is get_communicator(pairs, CPU) and hybrid.world.size == 4
        single = resolve_mesh(model, group=pairs)
        assert single.mesh.mesh.tolist() == [2 * (ctx.rank // 2), 2 * (ctx.rank // 2) + 1]
        for shape, size in (("replicate", (4, 1)), ("hybrid", (1, 4))):
            rows = resolve_mesh(model, shape=shape)
            assert tuple(rows.mesh.shape) == size and rows.world is found.world
        for each in (found, part, whole, inner, hybrid, single, rows):
            check_training(each.mesh)
        outsiders = even if ctx.rank % 2 else odd
        with pytest.raises(InvalidArgument, match="must be a group of torch.distributed that this rank is a member of"):
            resolve_mesh(model, group=outsiders)
        with pytest.raises(InvalidArgument, match="one or two dimensions"):
            resolve_mesh(model, mesh=cube)
    return True


def test_meshes_and_process_groups(tmp_path):
    assert run_ranks(over_groups, 4, str(tmp_path)) == [True] * 4


def over_two_nodes(ctx):
    with joined(ctx, "aabb") as comm:
        found = resolve_mesh(make_model(), comm, shape="hybrid")
        assert found.mesh.mesh.tolist() == [[0, 1], [2, 3]] and found.world is comm
        assert (found.comm.rank, found.replicas.rank) == (ctx.rank % 2, ctx.rank // 2)
        check_training(found.mesh)
    with joined(ctx, "aaab") as comm, pytest.raises(InvalidArgument, match="on a node differs: 3, 1"):
        resolve_mesh(make_model(), comm, shape="hybrid")
    assert isinstance(found.mesh, DeviceMesh) and not dist.is_initialized()
    return True


def test_shards_in_a_node_and_replicas_over_nodes():
    assert run_ranks(over_two_nodes, 4) == [True] * 4
