"""Elastic trainings in which ranks die and are started again at random moments.

What must hold: each training ends, all its ranks with one loss; every sample was part of each epoch;
and the loss is, within rounding, that of one process that makes the same steps undisturbed.
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

from tests.elastic import training
from tests.elastic.test_training import run_job

__all__ = ["Plan", "make_plan", "run_trial"]

WAYS = ("plain", "ddp", "hvd")
SPARE = 8 * 8  # samples that may occur once more, where the rest of an epoch can't be dealt out evenly


@dataclass(frozen=True)
class Plan:
    """One trial: all that its seed determines."""

    seed: int
    way: str
    ranks: int
    faults: tuple[dict, ...]  # as tests/elastic/training.py takes them
    pause: float  # seconds of a step
    least: int  # ranks of each epoch's end


def make_plan(seed: int) -> Plan:
    """Return the plan of a seed."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 2, 3, 3, 4])
    faults = []
    for number in range(draw.randint(1, 3)):
        place = draw.choice(["step", "step", "commit", "sync", "init"])
        latest = {"init": 1, "sync": 1 if number == 0 else 3, "commit": 10, "step": 20}[place]
        rank, life = draw.randrange(ranks), 0 if number == 0 else draw.choice([0, 1])
        how, number = draw.choice(["kill", "kill", "exit"]), draw.randint(1, latest)
        faults.append({"rank": rank, "life": life, "at": f"{place} {number}", "how": how})
    least = ranks if draw.random() < 0.5 else 1
    return Plan(seed, draw.choice(WAYS), ranks, tuple(faults), draw.choice([0.0, 0.01, 0.05]), least)


def run_trial(seed: int) -> dict:
    """Run the trial of a seed; return its row: the plan, what was wrong, and the seconds."""
    plan = make_plan(seed)
    row = {"trial": "trainings", **asdict(plan), "wrong": []}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        env = {"PAUSE": str(plan.pause), "LEAST": str(plan.least), "WIRE": "fp32"}
        try:
            done, rows = run_job(Path(folder) / "job", plan.ranks, list(plan.faults), way=plan.way, **env)
        except subprocess.TimeoutExpired as late:
            row["wrong"].append(f"did not end in {late.timeout} s: {(late.stderr or b'')[-3000:]!r}")
            return row
    row["spent"] = time.monotonic() - begun
    lines = done.stderr.splitlines()
    row["deaths"] = sum(" was killed by " in line or " ended with exit code " in line for line in lines)
    row["wrong"] += [f"{text}: {done.stderr[-3000:]}" for text in find_wrong(plan, done.returncode, rows)]
    return row


def find_wrong(plan: Plan, code: int, rows: list[dict]) -> list[str]:
    """Return what doesn't hold of a training that has ended."""
    if code or not rows:
        return [f"exit code {code}, {len(rows)} ranks have finished"]
    wrong = []
    if len({row["loss"] for row in rows}) > 1:
        wrong.append(f"the ranks have other losses: {[row['loss'] for row in rows]}")
    history = torch.tensor(rows[0]["history"])
    counts = history.sum(0)
    if int(counts.min()) < training.EPOCHS:
        wrong.append(f"samples were lost: {counts.tolist()}")
    if int(counts.sum()) - training.EPOCHS * training.SAMPLES >= SPARE:
        wrong.append(f"samples were repeated: {counts.tolist()}")
    alone = training.replay(plan.way, history)
    if not math.isclose(alone, rows[0]["loss"], rel_tol=1e-3 if plan.way == "ddp" else 1e-8):
        wrong.append(f"a loss of {rows[0]['loss']}, and {alone} undisturbed")
    return wrong
