"""An elastic training of a model in shards with faults, run by the tests as a program.

FAULTS, PAUSE and OUT: as in training.py, with the points "refresh N", on the thread that sends the
shards, and "attach N". EVERY: commits of a version. REPLICAS: copies of each shard. SAVES: a directory
for a checkpoint of each commit. KEPT: a directory of a Checkpointer, which saves each KEEP-th commit, and
from whose newest checkpoint a job begins. JOIN: with fewer ranks a commit waits for one that joins.
WHOLE: if set, a step begins when all ranks have their copies of the last version. DTYPE: of the model.
Each rank that finishes writes a line of JSON to OUT, whose "starts" has how many ranks went on from which
commit.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_flatten

import collectives
from collectives import elastic
from collectives.elastic import sharded_state
from collectives.elastic.replicas import refresh
from collectives.rendezvous import world
from collectives.sharded import Checkpointer, fully_shard, get_model_state_dict, load, save
from collectives.sharded import get_optimizer_state_dict as optimizer_state
from tests.elastic.training import PAUSE, pass_point

SAMPLES, BATCH, EPOCHS = 48, 2, int(os.environ.get("EPOCHS", "2"))
EVERY, REPLICAS = int(os.environ.get("EVERY", "1")), int(os.environ.get("REPLICAS", "1"))
SAVES, KEPT, KEEP = os.environ.get("SAVES"), os.environ.get("KEPT"), int(os.environ.get("KEEP", "1"))
JOIN, WHOLE = int(os.environ.get("JOIN", "0")), "WHOLE" in os.environ
DTYPE = getattr(torch, os.environ.get("DTYPE", "float32"))


def faulty_refresh(*args) -> None:
    pass_point("refresh")
    refresh(*args)


class State(elastic.ShardedState):
    def sync(self) -> None:
        pass_point("sync")
        super().sync()


def make_model(dtype=DTYPE):
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 5), torch.nn.Linear(5, 1)
    )
    model, data = model.to(dtype), torch.randn(SAMPLES, 4).to(dtype)
    model[2].eval().requires_grad_(False)
    return model, data, data.sin().sum(1, keepdim=True)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def make_job():
    model, data, target = make_model()
    fully_shard(model[0], comm=elastic.communicator())
    fully_shard(model, comm=elastic.communicator())
    return model, make_optimizer(model), data, target


def step(model, optimizer, scheduler):
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        model[2].running_mean += 0.01


def replay(way, history):
    """As `training.replay`, in float64."""
    model, data, target = make_model(torch.float64)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    for counts in torch.as_tensor(history, dtype=data.dtype):
        optimizer.zero_grad()
        ((model(data) - target).square().squeeze(1) @ (counts / counts.sum())).backward()
        step(model, optimizer, scheduler)
    return mse_loss(model(data), target).item()


def make_state(**how):
    return State(
        sampler=elastic.ElasticSampler(range(SAMPLES)), epoch=0, commits=0,
        history=torch.zeros((0, SAMPLES), dtype=torch.int64), every=EVERY, replicas=REPLICAS, **how,
    )  # fmt: skip


def make_extra(state, scheduler) -> dict:
    state.save()  # the samplers exchange what was processed
    return {"epoch": state.epoch, "commits": state.commits, "history": state.history,
            "sampler": state.sampler.state_dict(), "scheduler": scheduler.state_dict()}  # fmt: skip


def take_extra(extra, state, scheduler) -> None:
    scheduler.load_state_dict(extra["scheduler"])
    state.epoch, state.commits, state.history = extra["epoch"], extra["commits"], extra["history"]
    state.sampler.load_state_dict(extra["sampler"])


def train_from(state, model, optimizer, scheduler, data, target, checkpointer=None) -> dict:
    """Train from the state on, to the end; commit after each second step. Return a row."""
    comm = elastic.communicator()
    local: list[torch.Tensor] = []  # as in training.py

    def commit() -> None:
        if local:
            total = torch.stack(local)
            comm.all_reduce(total)
            local.clear()
            state.history = torch.cat([state.history, total])
        state.commits += 1
        if SAVES is not None:
            extra = make_extra(state, scheduler)
            save(Path(SAVES) / f"commit_{state.commits}", model, optimizer, extra=extra, overwrite=True)
        if checkpointer is not None and state.commits % KEEP == 0:
            checkpointer.save(state.commits, model, optimizer, extra=make_extra(state, scheduler), block=True)
        pass_point("commit")
        while comm.size < JOIN and not world.has_joiners():
            time.sleep(0.02)
        state.commit()

    while state.epoch < EPOCHS:
        for number, indices in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=state.sampler)):
            if WHOLE:
                state.wait()
                comm.barrier()
            pass_point("step")
            optimizer.zero_grad()
            mse_loss(model(data[indices]), target[indices]).backward()
            step(model, optimizer, scheduler)
            time.sleep(PAUSE)
            local.append(torch.bincount(indices, minlength=SAMPLES))
            state.sampler.record_batch(number, BATCH)
            if number % 2:
                commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        commit()
    loss = mse_loss(model(data), target).item()
    full = get_model_state_dict(model, full_state_dict=True), optimizer_state(model, optimizer, full_state_dict=True)
    return {
        "rank": comm.rank, "size": comm.size, "loss": loss, "epoch": state.epoch,
        "history": state.history.tolist(), "digest": digest_of(full),
    }  # fmt: skip


def digest_of(states) -> str:
    """Return a digest of all values of state dicts, with their names."""
    leaves, names = tree_flatten(states)
    values = [_bytes_of(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves]
    return hashlib.sha256(repr((values, str(names))).encode()).hexdigest()


def _bytes_of(tensor):
    return str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def resume(ctx, path) -> dict:
    """Train from a checkpoint of a commit on these ranks; return a row."""
    comm = ctx.communicator().split(0)
    world.replace_world(comm)
    model, optimizer, *data = make_job()
    scheduler, state = make_scheduler(optimizer), make_state()
    extra = load(path, model, optimizer)
    take_extra(extra, state, scheduler)
    state.sync()
    state.attach(model, optimizer, scheduler=scheduler)
    row = train_from(state, model, optimizer, scheduler, *data)
    comm.abort()  # torch.distributed's default group ends with it
    return row


def main() -> None:
    starts = []
    checkpointer = None if KEPT is None else Checkpointer(KEPT)

    @elastic.run
    def train(state):
        model, optimizer, *data = make_job()
        scheduler = make_scheduler(optimizer)
        pass_point("attach")
        state.attach(model, optimizer, scheduler=scheduler)
        comm = elastic.communicator()
        if state.commits == 0 and checkpointer is not None:
            loaded = checkpointer.load_latest(model, optimizer)
            if loaded is not None:
                take_extra(loaded.extra, state, scheduler)
        starts.append((comm.size, state.commits))
        return train_from(state, model, optimizer, scheduler, *data, checkpointer=checkpointer)

    sharded_state.refresh = faulty_refresh
    pass_point("start")
    collectives.init()
    pass_point("init")
    row = train(make_state(checkpointer=checkpointer))
    with open(f"{os.environ['OUT']}.{os.getpid()}", "w") as file:
        file.write(json.dumps({**row, "starts": starts}))


if __name__ == "__main__":
    main()
