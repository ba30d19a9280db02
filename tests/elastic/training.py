"""An elastic training with faults, run by the tests and by benchmarks/faults as a program.

FAULTS: JSON, a list of {"rank": as launched, "life": 0 for the first process of that rank, "at": "step
N", "commit N", "sync N", "init", or another point's name, "how": "kill", "exit" or "raise", "wait":
seconds before}. WAY: "plain", "ddp" or "hvd".
Each rank that finishes writes a line of JSON to OUT.
"""

from __future__ import annotations

import collections as containers
import json
import os
import signal
import sys
import time

import torch
from torch.nn.functional import mse_loss

import collectives
from collectives import elastic

FAULTS = [each for each in json.loads(os.environ.get("FAULTS", "[]")) if each["rank"] == int(os.environ["RANK"])]
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
WAY = os.environ.get("WAY", "plain")
SAMPLES, BATCH, EPOCHS = 96, 2, int(os.environ.get("EPOCHS", "2"))
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds of a step
reached: containers.Counter = containers.Counter()


def pass_point(point: str) -> None:
    """Come to a point at which a fault may be due."""
    reached[point] += 1
    for fault in FAULTS:
        name, _, number = fault["at"].partition(" ")
        if name != point or reached[point] != int(number or 1) or fault["life"] != LIFE:
            continue
        time.sleep(fault.get("wait", 0.0))
        if fault["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault["how"] == "exit":
            os._exit(3)
        elif fault["how"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise ValueError("a fault of the program")


class State(elastic.TorchState):
    def sync(self) -> None:
        pass_point("sync")
        super().sync()


def make_job():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    data = torch.randn(SAMPLES, 4, dtype=torch.float64)
    return model, torch.optim.Adam(model.parameters(), lr=0.02), data, data.sin().sum(1, keepdim=True)


def train_with(state, model, optimizer, data, target, reduce_counts, average):
    """Train from the state on; commit after every second step."""
    local = torch.zeros(SAMPLES, dtype=torch.int64)

    def commit():
        pass_point("commit")
        total = local.clone()
        reduce_counts(total)
        local.zero_()
        state.counts = state.counts + total
        state.commit()

    while state.epoch < EPOCHS:
        for number, indices in enumerate(torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=state.sampler)):
            optimizer.zero_grad()
            loss = mse_loss(model(data[indices]), target[indices])
            loss.backward()
            pass_point("step")
            average()
            optimizer.step()
            time.sleep(PAUSE)
            local[indices] += 1
            state.sampler.record_batch(number, BATCH)
            if number % 2:
                commit()
        commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return mse_loss(model(data), target).item()


def run_plain():
    model, optimizer, data, target = make_job()

    @elastic.run
    def train(state):
        def average():
            for param in model.parameters():
                elastic.communicator().all_reduce(param.grad, "avg")

        def add(counts):
            elastic.communicator().all_reduce(counts)

        return train_with(state, model, optimizer, data, target, add, average)

    collectives.init()
    pass_point("init")
    state = State(
        model=model, optimizer=optimizer, sampler=elastic.ElasticSampler(data), epoch=0,
        counts=torch.zeros(SAMPLES, dtype=torch.int64),
    )  # fmt: skip
    return train(state), state


def run_ddp():
    model, optimizer, data, target = make_job()
    hook_state = collectives.HookState(wire="int8", error_feedback=True)

    @elastic.run(process_group="gloo")
    def train(state):
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(hook_state, collectives.fused_allreduce)
        return train_with(
            state, ddp, optimizer, data, target, lambda x: elastic.communicator().all_reduce(x), lambda: None
        )

    collectives.init()
    pass_point("init")
    model.float()
    data, target = data.float(), target.float()
    state = State(
        model=model, optimizer=optimizer, sampler=elastic.ElasticSampler(data), epoch=0,
        counts=torch.zeros(SAMPLES, dtype=torch.int64),
    )  # fmt: skip
    return train(state), state


def run_hvd():
    import collectives.horovod as hvd

    model, optimizer, data, target = make_job()

    class HvdState(hvd.elastic.TorchState):
        def sync(self) -> None:
            pass_point("sync")
            super().sync()

    @hvd.elastic.run
    def train(state):
        def reduce_counts(total):
            total.copy_(hvd.allreduce(total, op=hvd.Sum, name="counts"))

        return train_with(state, model, optimizer, data, target, reduce_counts, lambda: None)

    hvd.init()
    pass_point("init")
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    state = HvdState(
        model=model, optimizer=optimizer, sampler=hvd.elastic.ElasticSampler(data), epoch=0,
        counts=torch.zeros(SAMPLES, dtype=torch.int64),
    )  # fmt: skip
    return train(state), state


if __name__ == "__main__":
    loss, state = {"plain": run_plain, "ddp": run_ddp, "hvd": run_hvd}[WAY]()
    comm = elastic.communicator()
    row = {"rank": comm.rank, "size": comm.size, "loss": loss, "counts": state.counts.tolist(), "epoch": state.epoch}
    with open(f"{os.environ['OUT']}.{os.getpid()}", "w") as file:
        file.write(json.dumps(row))
    sys.stdout.flush()
