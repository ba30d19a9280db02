"""Trainings with models in shards, in which ranks die: others go on from the shards' copies, with the
bits of a job that loads a checkpoint of that commit.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives import elastic
from collectives.elastic.replicas import find_keepers
from collectives.errors import InvalidArgument, InvalidUsage
from collectives.rendezvous import world
from collectives.sharded import fully_shard, get_model_state_dict, get_optimizer_state_dict
from tests.elastic import sharded_training
from tests.elastic.test_training import fault, run_job, run_two_nodes
from tests.ranks import run_ranks

PROGRAM = Path(sharded_training.__file__)
STEPS = 2 * (sharded_training.SAMPLES // sharded_training.BATCH)


def run(folder, ranks, faults, *options, **env):
    return run_job(folder, ranks, faults, *options, program=PROGRAM, SAVES=str(folder / "saves"), **env)


def check(folder, done, rows, size, versions):
    """All ranks have ended with one state, which is that of a job that resumes from the disk.

    `versions`: from which commits it may have gone on last.
    """
    assert done.returncode == 0, done.stderr
    assert sorted(row["rank"] for row in rows) == list(range(size)), done.stderr
    assert len({row["digest"] for row in rows}) == 1
    counts = torch.tensor(rows[0]["history"]).sum(0).tolist()
    assert min(counts) >= sharded_training.EPOCHS, (counts, done.stderr)
    assert sum(counts) - STEPS * sharded_training.BATCH < 8 * 8, (counts, done.stderr)
    last, commits = rows[0]["starts"][-1]
    assert last == size and commits in versions, (rows[0]["starts"], done.stderr)
    if commits:
        (folder / "resumed").mkdir()
        for row in run_ranks(sharded_training.resume, size, folder / "saves" / f"commit_{commits}"):
            assert row["loss"] == rows[0]["loss"] and row["digest"] == rows[0]["digest"]
            assert row["history"] == rows[0]["history"]


def test_a_rank_dies_in_a_step(tmp_path):
    done, rows = run(tmp_path, 3, [fault(1, "step 6")], "--max-restarts", "0", WHOLE="1")
    check(tmp_path, done, rows, 2, {2})


@pytest.mark.thorough
@pytest.mark.parametrize(
    "ranks, faults, left, versions",
    [
        (3, [fault(0, "refresh 3")], 2, {2}),  # the version that was being sent is not whole: the one before it is
        (2, [fault(0, "refresh 1")], 1, {0}),
        (4, [fault(3, "commit 4"), fault(1, "attach 2")], 2, {2}),
    ],
    ids=["while shards are sent", "while the first shards are sent", "one after the other, in a recovery"],
)
def test_ranks_die(tmp_path, ranks, faults, left, versions):
    done, rows = run(tmp_path, ranks, faults, "--max-restarts", "0", EVERY="2" if ranks == 4 else "1")
    check(tmp_path, done, rows, left, versions)


@pytest.mark.thorough
def test_another_rank_joins(tmp_path):
    """The restarted rank joins at a commit between two versions, and gets its shards from the others."""
    late = {**fault(0, "start", "wait", 1), "wait": 2.0}  # not in the recovery
    done, rows = run(tmp_path, 2, [fault(0, "step 9"), late], EVERY="3", JOIN="2")
    check(tmp_path, done, rows, 2, {4, 1})  # 1: not even the first version was whole
    first, alone, both = max((row["starts"] for row in rows), key=len)
    assert first == [2, 0] and alone == [1, both[1] - 1]


def test_shards_whose_ranks_have_all_died(tmp_path):
    faults = [{**fault(rank, "step 9"), "wait": 0.5} for rank in (1, 2)]
    done, rows = run(tmp_path, 3, faults, "--max-restarts", "0", KEPT=f"{tmp_path}/saves/kept", KEEP="2")
    assert done.returncode != 0 and not rows
    assert "MissingShards" in done.stderr and "the shards of rank 1 are on no rank that is left" in done.stderr
    assert f"the newest whole checkpoint is {tmp_path}/saves/kept/step_000000004" in done.stderr


@pytest.mark.thorough
def test_the_others_die_before_a_rank_that_joins_has_its_shards(tmp_path):
    late = {**fault(1, "start", "wait", 1), "wait": 2.0}  # not in the recovery
    done, rows = run(tmp_path, 2, [fault(1, "step 5"), late, fault(0, "attach 3")], "--max-restarts", "1", JOIN="2")
    assert done.returncode != 0 and not rows
    assert "MissingShards" in done.stderr and "the shards of rank 0 are on no rank that is left" in done.stderr


@pytest.mark.thorough
def test_a_node_dies(tmp_path):
    """All ranks of the second of two nodes: the first one's ranks have kept their shards."""
    (tmp_path / "job").mkdir()
    faults = [{**fault(rank, "step 6"), "wait": 0.5} for rank in (2, 3)]
    done, rows = run_two_nodes(tmp_path / "job", faults, "--max-restarts", "0", program=PROGRAM,
                               SAVES=str(tmp_path / "job" / "saves"))  # fmt: skip
    done[0].stderr += done[1].stderr
    check(tmp_path / "job", done[0], rows, 2, {2, 3})


def test_keepers_are_on_other_nodes():
    assert find_keepers(1, [(0,)], 1) == []
    assert find_keepers(3, [(0, 1, 2)], 1) == [[1, 2, 0]]
    assert find_keepers(3, [(0, 1, 2)], 5) == [[1, 2, 0], [2, 0, 1]]
    for nodes in ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0,), (1, 2), (3, 4, 5)], [(0, 1), (2, 3), (4, 5)]):
        size = sum(map(len, nodes))
        node_of = {rank: node for node in nodes for rank in node}
        (keepers,) = find_keepers(size, nodes, 1)
        assert sorted(keepers) == list(range(size))
        assert all(node_of[rank] != node_of[keeper] for rank, keeper in enumerate(keepers))


class Net(torch.nn.Module):
    """Parameters in float32 and bfloat16, one that isn't sharded, one of no dimensions, one of few rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 7), torch.nn.Linear(7, 3, dtype=torch.bfloat16)
        self.plain, self.factor = torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.second((self.first(x) * self.factor).bfloat16()).float().sum() + self.plain.sum()


def make_net(comm):
    torch.manual_seed(5)
    net = Net()
    fully_shard(net.first, comm=comm)
    fully_shard(net, comm=comm, ignored_params={net.plain})
    matrices = [param for param in net.parameters() if param.dim() == 2]
    others = [param for param in net.parameters() if param.dim() != 2]
    return net, [torch.optim.Adafactor(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.1, amsgrad=True)]


def step_net(net, optimizers):
    torch.manual_seed(9)
    for optimizer in optimizers:
        optimizer.zero_grad()
    net(torch.randn(4, 6)).backward()
    for optimizer in optimizers:
        optimizer.step()


def take_row(state, net, optimizers):
    full = get_model_state_dict(net, full_state_dict=True)
    digest = sharded_training.digest_of((full, get_optimizer_state_dict(net, optimizers, full_state_dict=True)))
    return state.step, full["seen"].item(), digest


def live_twice(ctx, sizes):
    """Train on the first ranks of one size, and then on as many as the other one; return a row before and after."""
    state, rows, gone = elastic.ShardedState(step=0, replicas=2), [], []
    for life, size in enumerate(sizes):
        comm = ctx.communicator().split(0 if ctx.rank < size else None)
        if comm is None:
            continue
        world.replace_world(comm)
        if gone:
            state.restore()
            state.on_reset()
            assert not dist.is_initialized()
        state.sync()
        net, optimizers = make_net(comm)
        gc.collect()
        assert not [left for reference in gone if (left := reference()) is not None], "of the life before"
        if life:
            with pytest.raises(InvalidArgument, match=r"commit 2 is of another model: bias is absent there, and \[2\]"):
                state.attach(fully_shard(torch.nn.Linear(2, 2), comm=comm))
            state.restore()
            state.sync()
        state.attach(net, optimizers)
        rows.append(take_row(state, net, optimizers))
        for _ in range(2):
            step_net(net, optimizers)
            state.step += 1
            state.commit()
        rows.append(take_row(state, net, optimizers))
        state.wait()
        unit = net._sharded_unit
        gone = [weakref.ref(each) for each in (net, unit, unit.scheduler, unit.scheduler.arena, *optimizers)]
        comm.abort()
        del net, optimizers, unit, comm
    return rows


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (3, 1)], ids=str)
def test_a_second_life_has_the_state_of_the_first(sizes):
    """Of any dtypes, of what isn't sharded, and of several optimizers; nothing is left of the first life's objects."""
    (first, before, after, end), *others = run_ranks(live_twice, 3, sizes)
    assert after == before and before[:2] == (2, 2) and end[:2] == (4, 4)
    assert len({first[2], before[2], end[2]}) == 3
    for rows in others[: sizes[1] - 1]:
        assert rows[-2:] == [after, end]


def attach_wrongly(ctx):
    comm = ctx.communicator().split(0)
    world.replace_world(comm)
    state = elastic.ShardedState()
    state.sync()
    with pytest.raises(InvalidUsage, match="nothing in this model is sharded"):
        state.attach(torch.nn.Linear(2, 2))
    with pytest.raises(InvalidUsage, match="call attach"):
        state.commit()
    alone = comm.split(ctx.rank)
    with pytest.raises(InvalidUsage, match="sharded over 1 ranks, and the job has 2"):
        state.attach(fully_shard(torch.nn.Linear(2, 2), comm=alone))
    alone.close()
    comm.abort()


def test_what_cant_be_attached():
    run_ranks(attach_wrongly, 2)
    with pytest.raises(InvalidArgument, match="model is made in the function"):
        elastic.ShardedState(model=torch.nn.Linear(2, 2))
    with pytest.raises(InvalidArgument, match="every must be an int from 1 up"):
        elastic.ShardedState(every=0)
