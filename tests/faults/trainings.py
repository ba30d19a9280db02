"""Elastic trainings in which ranks die and are started again at random moments.

What must hold: each training ends, all its ranks with one loss; every sample was part of each epoch; and the loss is,
within rounding, that of one process that makes the same steps undisturbed.
"""

from __future__ import annotations

import math
import random
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.elastic import sharded_training, training
from tests.elastic.test_training import run_job

__all__ = ["Plan", "make_plan", "run_trial"]

WAYS = ("plain", "ddp", "hvd")
LIMIT = 300.0  # seconds of a training
SPARE = 8 * 8  # samples that may occur once more, where the rest of an epoch can't be dealt out evenly


@dataclass(frozen=True)
class Plan:
    """One trial: all that its seed determines."""

    seed: int
    way: str
    ranks: int
    faults: tuple[dict, ...]  # as tests/elastic/training.py takes them
    pause: float  # seconds of a step
    least: int  # ranks of each epoch's end; of a model in shards, of each commit
    every: int = 1  # as ShardedState takes it
    replicas: int = 1
    keep: int = 0  # commits between checkpoints; 0: none


def make_plan(seed: int) -> Plan:
    """Return the plan of a seed: each fourth one, from 3 on, is of a model in shards."""
    draw = random.Random(seed)
    return make_sharded_plan(seed, draw) if seed % 4 == 3 else make_replicated_plan(seed, draw)


def make_replicated_plan(seed: int, draw: random.Random) -> Plan:
    """Return a plan of a model that is equal on all ranks.

    With DDP, for each fourth seed, the ranks that others lose at their start die where torch's group is opened, and
    for another one the class is ours.
    """
    ranks = draw.choice([2, 2, 3, 3, 4])
    faults = []
    for number in range(draw.randint(1, 3)):
        place = draw.choice(["step", "step", "commit", "sync", "init"])
        latest = {"init": 1, "sync": 1 if number == 0 else 3, "commit": 10, "step": 20}[place]
        rank, life = draw.randrange(ranks), 0 if number == 0 else draw.choice([0, 1])
        how, number = draw.choice(["kill", "kill", "exit"]), draw.randint(1, latest)
        faults.append({"rank": rank, "life": life, "at": f"{place} {number}", "how": how})
    least, way, pause = ranks if draw.random() < 0.5 else 1, draw.choice(WAYS), draw.choice([0.0, 0.01, 0.05])
    if way == "ddp" and seed % 4 == 2:
        faults = [each | {"at": each["at"].replace("init", "group")} for each in faults]
    if way == "ddp" and seed % 4 == 1:
        way = "own_ddp"
    return Plan(seed, way, ranks, tuple(faults), pause, least)


def make_sharded_plan(seed: int, draw: random.Random) -> Plan:
    """Return a plan of a model in shards; several ranks may die at once."""
    ranks, every = draw.choice([2, 2, 3, 3, 4]), draw.choice([1, 1, 2, 3])
    replicas, keep = draw.choice([1, 1, 2]), draw.choice([0, 2, 3])
    faults = []
    for number in range(draw.randint(1, 3)):
        place = draw.choice(["step", "step", "commit", "refresh", "refresh", "sync", "attach", "init"])
        first = number == 0
        latest = {"init": 1, "sync": 1 if first else 3, "attach": 1 if first else 3, "step": 16}.get(place, 8)
        life = 0 if first else draw.choice([0, 1])
        together = min(ranks - 1, draw.choice([2, replicas + 1])) if draw.random() < 0.5 else 1
        at, how = f"{place} {draw.randint(1, latest)}", draw.choice(["kill", "kill", "exit"])
        faults += [
            {"rank": rank, "life": life, "at": at, "how": how, "wait": 0.3 if together > 1 else 0.0}
            for rank in draw.sample(range(ranks), together)
        ]
    least, pause = ranks if draw.random() < 0.5 else 1, draw.choice([0.0, 0.01, 0.05])
    return Plan(seed, "shards", ranks, tuple(faults), pause, least, every, replicas, keep)


def run_plan(plan: Plan, folder: Path) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run the training of a plan; return its launcher's process, and what the ranks have written."""
    options, more = {"PAUSE": str(plan.pause), "seconds": LIMIT}, ()
    if plan.way == "shards":
        options |= {
            "program": Path(sharded_training.__file__), "JOIN": str(plan.least), "DTYPE": "float64",
            "EVERY": str(plan.every), "REPLICAS": str(plan.replicas),
        }  # fmt: skip
        options |= {"KEPT": str(folder / "kept"), "KEEP": str(plan.keep)} if plan.keep else {}
        more = ("--max-restarts", "16")  # of all ranks, too, where shards are missing
    else:
        options |= {"way": plan.way, "LEAST": str(plan.least), "WIRE": "fp32"}
    return run_job(folder / "job", plan.ranks, list(plan.faults), *more, **options)


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and the seconds."""
    plan = make_plan(seed)
    row = {"trial": "trainings", **asdict(plan), "wrong": []}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done, rows = run_plan(plan, Path(folder))
        except subprocess.TimeoutExpired as late:
            row["wrong"].append(f"did not end in {late.timeout} s: {(late.stderr or b'')[-3000:]!r}")
            return row
    row["spent_s"] = round(time.monotonic() - begun, 1)
    row["wrong"] += [f"{text}: {done.stderr[-3000:]}" for text in find_wrong(plan, done.returncode, rows)]
    return row


def find_wrong(plan: Plan, code: int, rows: list[dict]) -> list[str]:
    """Return what doesn't hold of a training that has ended."""
    if code or not rows:
        return [f"exit code {code}, {len(rows)} ranks have finished"]
    wrong, program = [], sharded_training if plan.way == "shards" else training
    if len({row["loss"] for row in rows}) > 1:
        wrong.append(f"the ranks have other losses: {[row['loss'] for row in rows]}")
    history = torch.tensor(rows[0]["history"])
    counts = history.sum(0)
    if int(counts.min()) < program.EPOCHS:
        wrong.append(f"samples were lost: {counts.tolist()}")
    if int(counts.sum()) - program.EPOCHS * program.SAMPLES >= SPARE:
        wrong.append(f"samples were repeated: {counts.tolist()}")
    alone = program.replay(plan.way, history)
    if not math.isclose(alone, rows[0]["loss"], rel_tol=1e-3 if plan.way.endswith("ddp") else 1e-8):
        wrong.append(f"a loss of {rows[0]['loss']}, and {alone} undisturbed")
    return wrong
