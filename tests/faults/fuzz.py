"""Fuzzing: what is read from others gets bytes that were truncated, repeated, flipped, spliced or random.

What must hold: each input ends in an error of `collectives.errors`, or is read as what it says, within five seconds and
256 MiB; no crash, no other exception, and nothing that differs from what was sealed or has a checksum.

A trial is one target and one seed, in a process of its own. Input number N of a seed is always the same.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.mutations import mutate
from tests.rank_process import ROOT

__all__ = ["Outcome", "Target", "check_input", "run_inputs", "run_trial"]

SLOW = 5.0  # seconds of one input, on a busy machine
LARGE = 256 << 20  # bytes by which one input may make the process grow
LIMIT = 3600.0  # of a trial


class _Slow(BaseException):
    """An input took too long; no code under test may catch this."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    ``open``: enters what the inputs need and returns the corpus, valid inputs, and the reader. The reader takes bytes,
    and returns a text for what it has found wrong, or None; it raises `CollectivesError`, or one of ``refusals``, for
    what is refused. The first ``valid`` inputs of the corpus must not be refused.
    """

    name: str
    open: Callable[[], AbstractContextManager[tuple[Sequence[bytes], Callable[[bytes], str | None]]]]
    refusals: tuple[type[BaseException], ...] = ()
    mutate: Callable[[random.Random, Sequence[bytes]], bytes] = mutate
    valid: int = 1


@dataclass
class Outcome:
    """What came of some inputs. ``wrong``: by what it is, the first input's number, a text, and its bytes."""

    read: int = 0
    refused: int = 0
    wrong: dict[str, tuple[int, str, str]] = field(default_factory=dict)


def _place_of(error: BaseException) -> str:
    """Return the innermost line of this project that an exception went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "collectives" in frame.filename]
    return f"({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else "(elsewhere)"


def _stop(*_):
    raise _Slow


def check_input(target: Target, reader, data: bytes, outcome: Outcome, number: int = 0, valid: bool = False) -> None:
    """Have an input read, and note what came of it. ``valid``: it must not be refused."""
    from collectives.errors import CollectivesError

    before, problem = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, None
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, SLOW)
    try:
        problem = reader(data)
        outcome.read += 1
    except (CollectivesError, *target.refusals) as error:
        outcome.refused += 1
        problem = f"a valid input is refused: {error}" if valid else None
    except _Slow as error:
        problem = f"took more than {SLOW:g} s {_place_of(error)}"
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:120]} {_place_of(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > LARGE:
        problem = f"took {grown >> 20} MiB; {problem}"
    if problem:
        kind = problem if "(" not in problem else problem[problem.rindex("(") :] + problem.partition(":")[0]
        outcome.wrong.setdefault(kind, (number, problem, data[:300].hex()))


def run_inputs(target: Target, seed: int, count: int, *, note: Callable[[int], None] = lambda _: None) -> dict:
    """Run the inputs of a seed in this process, the corpus first; return the trial's row."""
    outcome, began = Outcome(), time.monotonic()
    with target.open() as (corpus, reader):
        for number in range(count):
            note(number)
            if number < len(corpus):
                data = corpus[number]
            else:
                data = target.mutate(random.Random(f"{target.name}/{seed}/{number}"), corpus)
            check_input(target, reader, data, outcome, number, number < target.valid)
    return {
        "read": outcome.read, "refused": outcome.refused, "seconds": round(time.monotonic() - began, 1),
        "wrong": [f"input {number}: {text}: {data}" for number, text, data in outcome.wrong.values()],
    }  # fmt: skip


# ---- A process for each trial.


def run_trial(seed: int, target: str, inputs: int) -> dict:
    """Run one target's inputs of a seed in a process of its own; return its row."""
    row = {"trial": "fuzz", "target": target, "seed": seed, "inputs": inputs}
    with tempfile.NamedTemporaryFile() as progress, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "tests.faults.fuzz", target, str(seed), str(inputs), progress.name]
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, timeout=LIMIT, check=False,
                stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            text, how = done.stdout.decode().strip(), f"the process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            text, how = "", f"the process did not end within {LIMIT:g} s"
        if text.startswith("{"):
            return {**row, **json.loads(text)}
        log.seek(0)
        at, tail = progress.read().decode() or "the beginning", log.read()[-3000:].decode(errors="replace")
        return {**row, "wrong": [f"{how} at input {at}: {tail}"]}


def main(name: str, seed: str, inputs: str, progress: str) -> None:
    from tests.faults.fuzz_targets import TARGETS

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    fd = os.open(progress, os.O_WRONLY)
    print(json.dumps(run_inputs(TARGETS[name], int(seed), int(inputs), note=lambda n: os.pwrite(fd, b"%d" % n, 0))))


if __name__ == "__main__":
    main(*sys.argv[1:])
