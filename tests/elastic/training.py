"""An elastic training with faults, run by the tests as a program.

FAULTS: JSON, a list of {"rank": as launched, "life": 0 for the first process of that rank, "at": "step
N", "commit N", "sync N", "init", "group N" before torch's group is opened, or another point's name,
"how": "kill", "exit", "raise", "wait" or, at a commit, "update", "wait": seconds before}. WAY: "plain",
"ddp" or "own_ddp", torch's class or ours, whose gradients go in WIRE, or "hvd". LEAST: as many ranks
take part in each epoch's end. Each rank that finishes writes a line of JSON to OUT.
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

FAULTS = [each for each in json.loads(os.environ.get("FAULTS", "[]")) if str(each["rank"]) == os.environ.get("RANK")]
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
WAY, WIRE = os.environ.get("WAY", "plain"), os.environ.get("WIRE", "int8")
SAMPLES, BATCH, EPOCHS = 96, 2, int(os.environ.get("EPOCHS", "2"))
PAUSE = float(os.environ.get("PAUSE", "0"))  # seconds of a step
LEAST = int(os.environ.get("LEAST", "1"))  # ranks that an epoch's end waits for
reached: containers.Counter = containers.Counter()


def pass_point(point: str) -> str | None:
    """Come to a point at which a fault may be due; return "update" where `on_hosts_updated` is to be called."""
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
        elif fault["how"] == "update":
            return "update"
        if fault["how"] != "wait":
            raise ValueError("a fault of the program")
    return None


class State(elastic.TorchState):
    def sync(self) -> None:
        pass_point("sync")
        super().sync()


def make_job(way=WAY):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    data = torch.randn(SAMPLES, 4, dtype=torch.float64)
    if way.endswith("ddp"):
        model, data = model.float(), data.float()
    return model, torch.optim.Adam(model.parameters(), lr=0.02), data, data.sin().sum(1, keepdim=True)


def train_with(state, model, optimizer, data, target, reduce_counts, average):
    """Train from the state on; commit after every second step."""
    local: list[torch.Tensor] = []  # how often each sample occurred on this rank, for each step since the last commit

    def commit():
        if pass_point("commit") == "update":
            state.on_hosts_updated(time.time())
        if local:
            total = torch.stack(local)
            reduce_counts(total)
            local.clear()
            state.history = torch.cat([state.history, total])
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
            local.append(torch.bincount(indices, minlength=SAMPLES))
            state.sampler.record_batch(number, BATCH)
            if number % 2:
                commit()
        commit()
        while elastic.communicator().size < LEAST:  # until those that were started again join, at a commit
            time.sleep(0.05)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    return mse_loss(model(data), target).item()


def replay(way, history):
    """Return the loss of one process that makes the same steps, with as many of each sample as `history` has."""
    model, optimizer, data, target = make_job(way)
    for counts in torch.as_tensor(history, dtype=data.dtype):
        optimizer.zero_grad()
        ((model(data) - target).square().squeeze(1) @ (counts / counts.sum())).backward()
        optimizer.step()
    return mse_loss(model(data), target).item()


def make_state(kind, model, optimizer, data, **more):
    return kind(
        model=model, optimizer=optimizer, sampler=elastic.ElasticSampler(data), epoch=0,
        history=torch.zeros((0, SAMPLES), dtype=torch.int64), **more,
    )  # fmt: skip


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
    state = make_state(State, model, optimizer, data)
    return train(state), state


def run_ddp():
    model, optimizer, data, target = make_job()
    hook_state = collectives.HookState(wire=WIRE, error_feedback=WIRE != "fp32")

    @elastic.run(process_group="gloo")
    def train(state):
        ddp = (collectives if WAY == "own_ddp" else torch.nn.parallel).DistributedDataParallel(model)
        ddp.register_comm_hook(hook_state, collectives.fused_allreduce)
        return train_with(
            state, ddp, optimizer, data, target, lambda x: elastic.communicator().all_reduce(x), lambda: None
        )

    open_group = torch.distributed.init_process_group

    def open_with_faults(*args, **kwargs):
        pass_point("group")
        open_group(*args, **kwargs)

    torch.distributed.init_process_group = open_with_faults
    collectives.init()
    pass_point("init")
    state = make_state(State, model, optimizer, data)
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
    state = make_state(HvdState, model, optimizer, data)
    return train(state), state


if __name__ == "__main__":
    loss, state = {"plain": run_plain, "ddp": run_ddp, "own_ddp": run_ddp, "hvd": run_hvd}[WAY]()
    comm = elastic.communicator()
    row = {"rank": comm.rank, "size": comm.size, "loss": loss, "epoch": state.epoch, "history": state.history.tolist()}
    with open(f"{os.environ['OUT']}.{os.getpid()}", "w") as file:
        file.write(json.dumps(row))
    sys.stdout.flush()
