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
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.elastic import sharded_training, training
from tests.elastic.test_training import run_job

__all__ = ["make_plan", "run_trial"]

WAYS = ("plain", "ddp", "hvd")
LIMIT = 300.0  # seconds of a training
SPARE = 8 * 8  # samples that may occur once more, where the rest of an epoch can't be dealt out evenly


def make_plan(seed: int) -> SimpleNamespace:
    """Return the plan of a seed: each fourth one, from 3 on, is of a model in shards.

    faults, options: as the programs in tests/elastic take them.
    """
    draw = random.Random(seed)
    return plan_of_shards(seed, draw) if seed % 4 == 3 else plan_of_replicas(seed, draw)


def plan_of_replicas(seed: int, draw: random.Random) -> SimpleNamespace:
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
    options = {"way": way, "LEAST": str(least), "WIRE": "fp32", "PAUSE": str(pause)}
    return SimpleNamespace(seed=seed, way=way, ranks=ranks, faults=faults, options=options, keeps=False)


def plan_of_shards(seed: int, draw: random.Random) -> SimpleNamespace:
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
    options = {"JOIN": least, "DTYPE": "float64", "EVERY": every, "REPLICAS": replicas, "KEEP": keep, "PAUSE": pause}
    options = {name: str(value) for name, value in options.items() if name != "KEEP" or keep}
    return SimpleNamespace(seed=seed, way="shards", ranks=ranks, faults=faults, options=options, keeps=keep > 0)


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and the seconds."""
    plan, begun = make_plan(seed), time.monotonic()
    row = {**vars(plan), "wrong": []}
    program, more, options = training, (), dict(plan.options)
    with tempfile.TemporaryDirectory() as folder:
        if plan.way == "shards":
            program, more = sharded_training, ("--max-restarts", "16")  # of all ranks, too, where shards are missing
            options |= {"KEPT": f"{folder}/kept"} if plan.keeps else {}
        options |= {"program": Path(program.__file__), "seconds": LIMIT}
        try:
            done, rows = run_job(Path(folder, "job"), plan.ranks, plan.faults, *more, **options)
        except subprocess.TimeoutExpired as late:
            row["wrong"].append(f"did not end in {late.timeout} s")
            return row
    row["spent_s"] = round(time.monotonic() - begun, 1)
    row["wrong"] += [f"{text}: {done.stderr[-3000:]}" for text in find_wrong(plan.way, program, done.returncode, rows)]
    return row


def find_wrong(way: str, program, code: int, rows: list[dict]) -> list[str]:
    """Return what doesn't hold of a training that has ended."""
    if code or not rows:
        return [f"exit code {code}, {len(rows)} ranks have finished"]
    losses, history, wrong = [row["loss"] for row in rows], torch.tensor(rows[0]["history"]), []
    counts = history.sum(0)
    if len(set(losses)) > 1:
        wrong.append(f"the ranks have other losses: {losses}")
    if int(counts.min()) < program.EPOCHS:
        wrong.append(f"samples were lost: {counts.tolist()}")
    if int(counts.sum()) - program.EPOCHS * program.SAMPLES >= SPARE:
        wrong.append(f"samples were repeated: {counts.tolist()}")
    alone = program.replay(way, history)
    if not math.isclose(alone, losses[0], rel_tol=1e-3 if way.endswith("ddp") else 1e-8):
        wrong.append(f"a loss of {losses[0]}, and {alone} undisturbed")
    return wrong
