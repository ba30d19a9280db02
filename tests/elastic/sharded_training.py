"""An elastic training of a model in shards with faults, run by the tests as a program.

FAULTS, PAUSE and OUT: as in training.py, with the points "refresh N", on the thread that sends the
shards, and "attach N". EVERY: commits of a version. SAVES: a directory for a checkpoint of each
commit. JOIN: with fewer ranks a commit waits for one that joins. Each rank that finishes writes a line
of JSON to OUT; its "history" has how many ranks went on from which commit.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

import collectives
from collectives import elastic
from collectives.elastic import sharded_state
from collectives.elastic.replicas import Refresh
from collectives.rendezvous import world
from collectives.sharded import Checkpointer, fully_shard, get_model_state_dict, load, save
from collectives.sharded import get_optimizer_state_dict as optimizer_state
from tests.elastic.training import PAUSE, pass_point

SAMPLES, BATCH, EPOCHS = 48, 2, int(os.environ.get("EPOCHS", "2"))
EVERY, SAVES = int(os.environ.get("EVERY", "1")), os.environ.get("SAVES")
JOIN = int(os.environ.get("JOIN", "0"))


class FaultyRefresh(Refresh):
    def run(self) -> None:
        pass_point("refresh")
        super().run()


class State(elastic.ShardedState):
    def sync(self) -> None:
        pass_point("sync")
        super().sync()


def make_job():
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 5), torch.nn.Linear(5, 1)
    )
    data = torch.randn(SAMPLES, 4)
    model[2].eval().requires_grad_(False)
    fully_shard(model[0], comm=elastic.communicator())
    fully_shard(model, comm=elastic.communicator())
    return model, torch.optim.AdamW(model.parameters(), lr=0.02), data, data.sin().sum(1, keepdim=True)


def make_state(**how):
    return State(
        sampler=elastic.ElasticSampler(range(SAMPLES)), epoch=0, commits=0,
        counts=torch.zeros(SAMPLES, dtype=torch.int64), every=EVERY, **how,
    )  # fmt: skip


def train_from(state, model, optimizer, scheduler, data, target) -> dict:
    """Train from the state on, to the end; commit after each second step. Return a row."""
    comm = elastic.communicator()
    local = torch.zeros(SAMPLES, dtype=torch.int64)

    def commit() -> None:
        total = local.clone()
        comm.all_reduce(total)
        local.zero_()
        state.counts = state.counts + total
        state.commits += 1
        if SAVES is not None:
            state.save()  # the samplers exchange what was processed
            extra = {"epoch": state.epoch, "commits": state.commits, "counts": state.counts,
                     "sampler": state.sampler.state_dict(), "scheduler": scheduler.state_dict()}  # fmt: skip
            save(Path(SAVES) / f"commit_{state.commits}", model, optimizer, extra=extra, overwrite=True)
            if state.commits == 2:
                Checkpointer(f"{SAVES}/kept").save(2, model, optimizer, block=True)
        pass_point("commit")
        while comm.size < JOIN and not world.has_joiners():
            time.sleep(0.02)
        state.commit()

    while state.epoch < EPOCHS:
        for number, indices in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=state.sampler)):
            pass_point("step")
            optimizer.zero_grad()
            mse_loss(model(data[indices]), target[indices]).backward()
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                model[2].running_mean += 0.01
            time.sleep(PAUSE)
            local[indices] += 1
            state.sampler.record_batch(number, BATCH)
            if number % 2:
                commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        commit()
    loss = mse_loss(model(data), target).item()
    full = get_model_state_dict(model, full_state_dict=True), optimizer_state(model, optimizer, full_state_dict=True)
    return {
        "rank": comm.rank, "size": comm.size, "loss": loss, "counts": state.counts.tolist(), "epoch": state.epoch,
        "digest": digest_of(full),
    }  # fmt: skip


def digest_of(states) -> str:
    """Return a digest of all values of state dicts."""
    digest = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            file = io.BytesIO(value.contiguous().numpy().tobytes())
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + file.getvalue())
        else:
            digest.update(repr(value).encode())

    add(states)
    return digest.hexdigest()


def make_scheduler(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def resume(ctx, path) -> dict:
    """Train from a checkpoint of a commit on these ranks; return a row."""
    world.replace_world(ctx.communicator())
    model, optimizer, *data = make_job()
    scheduler, state = make_scheduler(optimizer), make_state()
    extra = load(path, model, optimizer)
    scheduler.load_state_dict(extra["scheduler"])
    state.epoch, state.commits, state.counts = extra["epoch"], extra["commits"], extra["counts"]
    state.sampler.load_state_dict(extra["sampler"])
    state.sync()
    state.attach(model, optimizer, scheduler=scheduler)
    return train_from(state, model, optimizer, scheduler, *data)


def main() -> None:
    history = []

    @elastic.run
    def train(state):
        model, optimizer, *data = make_job()
        scheduler = make_scheduler(optimizer)
        pass_point("attach")
        state.attach(model, optimizer, scheduler=scheduler)
        history.append((elastic.communicator().size, state.commits))
        return train_from(state, model, optimizer, scheduler, *data)

    sharded_state.Refresh = FaultyRefresh
    collectives.init()
    pass_point("init")
    row = train(make_state(checkpointer=None if SAVES is None else Checkpointer(f"{SAVES}/kept")))
    with open(f"{os.environ['OUT']}.{os.getpid()}", "w") as file:
        file.write(json.dumps({**row, "history": history}))


if __name__ == "__main__":
    main()
