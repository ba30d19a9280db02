"""An elastic program that steps until a file named STOP is there, run by tests as a program.

Each rank writes a line of JSON to LOG.PID at its start and for each step: its process, rank, the
number of ranks and the step. WAY: "plain", or "hvd" for Horovod's functions. LIFE_ENDS: lives of a
rank ("RANK:LIFE ...", RANK as launched) that end with an exception in the third step.
"""

from __future__ import annotations

import json
import os
import time

import torch

import collectives
import collectives.horovod as hvd
from collectives import elastic

ENDS = os.environ.get("LIFE_ENDS", "").split()
ME = f"{os.environ['RANK']}:{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def write(**values):
    values |= {"pid": os.getpid(), "launched": ME, "node": os.environ.get("COLLECTIVES_HOST_ID", "")}
    with open(f"{os.environ['LOG']}.{os.getpid()}", "a") as file:
        file.write(json.dumps(values) + "\n")


def loop(state, sum_of):
    """Step until the file is there; commit after each step."""
    own = 0
    while True:
        stop = torch.tensor([float(os.path.exists(os.environ["STOP"])), 1.0])
        total = sum_of(stop)
        state.step += 1
        own += 1
        write(rank=elastic.communicator().rank, size=int(total[1]), step=state.step)
        if total[0]:
            return
        if ME in ENDS and own == 3:
            raise ValueError("a fault of the program")
        time.sleep(0.02)
        state.commit()


def run_plain():
    @elastic.run
    def train(state):
        def sum_of(values):
            elastic.communicator().all_reduce(values)
            return values

        loop(state, sum_of)

    collectives.init()
    train(elastic.ObjectState(step=0))


def run_hvd():
    @hvd.elastic.run
    def train(state):
        loop(state, lambda values: hvd.allreduce(values, op=hvd.Sum, name="stop"))

    hvd.init()
    train(hvd.elastic.ObjectState(step=0))


if __name__ == "__main__":
    write(rank=-1, size=0, step=0)
    {"plain": run_plain, "hvd": run_hvd}[os.environ.get("WAY", "plain")]()
