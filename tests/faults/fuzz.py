"""Fuzzing: what is read from others gets bytes that were truncated, repeated, flipped, spliced or random.

What must hold: each input ends in an error of `collectives.errors`, or is read as what it says, within five seconds and
256 MiB; no crash, no other exception, and nothing that differs from what was sealed or has a checksum.

A trial is one target and one seed, in a process of its own. Input number N of a seed is always the same.
"""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.mutations import mutate
from tests.ranks import RankFailure, run_ranks

__all__ = ["Target", "check_input", "run_inputs", "run_trial"]

SLOW = 5.0  # seconds of one input, on a busy machine
LARGE = 256 << 20  # bytes by which one input may make the process grow
LIMIT = 3600.0  # seconds of a trial


class _Slow(BaseException):
    """An input took too long; no code under test may catch this."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    ``open``: enters what the inputs need in an `ExitStack`, and returns the corpus, valid inputs, and the reader. The
    reader takes bytes, and returns a text for what it has found wrong, or None; it raises `CollectivesError`, or one of
    ``refusals``, for what is refused. The first ``valid`` inputs of the corpus must not be refused.
    """

    name: str
    open: Callable[[contextlib.ExitStack], tuple[Sequence[bytes], Callable[[bytes], str | None]]]
    refusals: tuple[type[BaseException], ...] = ()
    mutate: Callable[[random.Random, Sequence[bytes]], bytes] = mutate
    valid: int = 1


def _place_of(error: BaseException) -> str:
    """Return the innermost line of this project that an exception went through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "collectives" in frame.filename]
    return f"in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "elsewhere"


def _stop(*_):
    raise _Slow


def check_input(target: Target, reader, data: bytes, valid: bool = False) -> tuple[bool, str | None]:
    """Have an input read; return whether it was, and what is wrong with that. ``valid``: it must not be refused."""
    from collectives.errors import CollectivesError

    before, was_read, problem = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, False, None
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, SLOW)
    try:
        problem = reader(data)
        was_read = True
    except (CollectivesError, *target.refusals) as error:
        problem = f"a valid input is refused: {error}" if valid else None
    except _Slow as error:
        problem = f"took more than {SLOW:g} s {_place_of(error)}"
    except Exception as error:
        problem = f"{type(error).__name__} {_place_of(error)}: {str(error)[:120]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return was_read, f"took much memory: {grown >> 20} MiB; {problem}" if grown > LARGE else problem


def run_inputs(target: Target, seed: int, count: int, note: Callable[[int], None] = lambda _: None) -> dict:
    """Run the inputs of a seed in this process, the corpus first; return the trial's row."""
    read, wrong, began = 0, {}, time.monotonic()  # of what is wrong, the first input
    with contextlib.ExitStack() as stack:
        corpus, reader = target.open(stack)
        for number in range(count):
            note(number)
            draw = random.Random(f"{target.name}/{seed}/{number}")
            data = corpus[number] if number < len(corpus) else target.mutate(draw, corpus)
            was_read, problem = check_input(target, reader, data, number < target.valid)
            read += was_read
            if problem:
                wrong.setdefault(problem.partition(":")[0], f"input {number}: {problem}: {data[:300].hex()}")
    seconds = round(time.monotonic() - began, 1)
    return {"read": read, "refused": count - read, "seconds": seconds, "wrong": list(wrong.values())}


def run_trial(seed: int, target: str, inputs: int) -> dict:
    """Run one target's inputs of a seed in a process of its own; return its row."""
    row = {"target": target, "seed": seed, "inputs": inputs}
    try:
        return row | run_ranks(run_in_process, 1, target, seed, inputs, timeout=LIMIT, fresh=True)[0]
    except RankFailure as failure:
        return row | {"wrong": [str(failure)[-5000:]]}


def run_in_process(ctx, target: str, seed: int, inputs: int) -> dict:
    """A process's part of a trial: with 4 GiB more than it has, and on stdout the number of the input under way."""
    from tests.faults.fuzz_targets import TARGETS

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    return run_inputs(TARGETS[target], seed, inputs, note=lambda number: print("input", number, flush=True))
