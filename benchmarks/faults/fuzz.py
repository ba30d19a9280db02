"""Fuzzing: everything that is read from outside gets bytes that were truncated, repeated, flipped,
spliced or random.

What must hold: each input ends in an error of `collectives.errors`, or is read as what it says, within
five seconds and 256 MiB; no crash, no other exception, and nothing that differs from what was sealed or
has a checksum.

A trial is one target and one seed, in a process of its own. Input number N of a seed is always the
same: `check_input` repeats it.
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
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from benchmarks.faults.mutations import mutate

__all__ = ["Outcome", "Target", "check_input", "make_input", "run_inputs", "run_trial"]

ROOT = Path(__file__).resolve().parent.parent.parent
SLOW = 5.0  # seconds of one input, on a busy machine
LARGE = 256 << 20  # bytes by which one input may make the process grow
LIMIT = 3600.0  # of a trial
_TRACED = 40  # of so many inputs one counts lines, and the first thousand do


class _Slow(BaseException):
    """An input took too long; no code under test may catch this."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    ``open``: enters what the inputs need and returns the corpus, valid inputs, and the reader. The
    reader takes bytes, and returns a text for what it has found wrong, or None; it raises
    `CollectivesError` for what is refused. ``code``: the functions or classes whose lines are
    counted; ``refusals``: further exceptions that are documented; ``valid``: the first inputs of the
    corpus that must not be refused.
    """

    name: str
    open: Callable[[], AbstractContextManager[tuple[Sequence[bytes], Callable[[bytes], str | None]]]]
    code: Sequence[object] = ()
    refusals: tuple[type[BaseException], ...] = ()
    mutate: Callable[[random.Random, Sequence[bytes]], bytes] = mutate
    valid: int = 1


@dataclass
class Outcome:
    """What came of some inputs. ``wrong``: by what it is, the first input's number, bytes and how many."""

    read: int = 0
    refused: int = 0
    slowest: float = 0.0
    wrong: dict[str, list] = field(default_factory=dict)


def make_input(target: Target, corpus: Sequence[bytes], seed: int, number: int) -> bytes:
    """Return an input of a seed; the first ones are the corpus itself."""
    if number < len(corpus):
        return corpus[number]
    return target.mutate(random.Random(f"{target.name}/{seed}/{number}"), corpus)


def check_input(target: Target, reader, data: bytes, outcome: Outcome, number: int = 0, valid: bool = False) -> None:
    """Have an input read, and note what came of it. ``valid``: it must not be refused."""
    from collectives.errors import CollectivesError

    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    problem = None
    try:
        with _time_limit():
            problem = reader(data)
        outcome.read += 1
    except (CollectivesError, *target.refusals) as error:
        outcome.refused += 1
        problem = f"a valid input is refused: {error}" if valid else None
    except _Slow as error:
        problem = f"took more than {SLOW:g} s {_place_of(error)}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = f"{type(error).__name__}: {str(error)[:120]} {_place_of(error)}"
    outcome.slowest = max(outcome.slowest, time.monotonic() - began)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > LARGE:
        problem = f"took {grown >> 20} MiB; {problem}"
    if problem:
        kind = problem if "(" not in problem else problem[problem.rindex("(") :] + problem.partition(":")[0]
        row = outcome.wrong.setdefault(kind, [number, problem, data[:4096].hex(), 0])
        row[3] += 1


def _place_of(error: BaseException) -> str:
    """Return the innermost line of this project that an exception went through."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "collectives" in each.filename]
    if not frames:
        return "(elsewhere)"
    return f"({Path(frames[-1].filename).name}:{frames[-1].lineno})"


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_):
        raise _Slow

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SLOW)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Lines:
    """Counts the lines of functions that were run."""

    def __init__(self, code: Sequence[object]):
        self.lines: dict[tuple[str, int], str] = {}
        self.seen: set[tuple[str, int]] = set()
        self._codes: set[CodeType] = set()
        for each in code:
            self._add(each)

    def _add(self, each) -> None:
        if isinstance(each, type):
            for value in vars(each).values():
                value = getattr(value, "__func__", getattr(value, "fget", value))
                if callable(value) or isinstance(value, CodeType):
                    self._add(value)
            return
        code = each if isinstance(each, CodeType) else getattr(each, "__code__", None)
        if code is None or code in self._codes or "collectives" not in code.co_filename:
            return
        self._codes.add(code)
        first = code.co_firstlineno
        self.lines.update({(code.co_filename, n): code.co_name for *_, n in code.co_lines() if n and n != first})
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add(constant)

    @contextmanager
    def counted(self) -> Iterator[None]:
        def local(frame, event, _):
            if event == "line":
                self.seen.add((frame.f_code.co_filename, frame.f_lineno))
            return local

        def trace(frame, *_):
            return local if frame.f_code in self._codes else None

        threading.settrace(trace)
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def missed(self) -> list[str]:
        return [f"{Path(file).name}:{line}" for file, line in sorted(self.lines.keys() - self.seen)]


def run_inputs(target: Target, seed: int, count: int, *, note: Callable[[int], None] = lambda _: None) -> dict:
    """Run the inputs of a seed in this process; return the trial's row."""
    outcome, lines, began = Outcome(), _Lines(target.code), time.monotonic()
    with target.open() as (corpus, reader):
        for number in range(count):
            note(number)
            data = make_input(target, corpus, seed, number)
            if number < 1000 or number % _TRACED == 0:
                with lines.counted():
                    check_input(target, reader, data, outcome, number, number < target.valid)
            else:
                check_input(target, reader, data, outcome, number)
    missed = lines.missed()
    return {
        "inputs": count, "read": outcome.read, "refused": outcome.refused, "slowest_s": round(outcome.slowest, 4),
        "lines": len(lines.lines), "reached": len(lines.lines) - len(missed), "missed": missed,
        "seconds": round(time.monotonic() - began, 1),
        "wrong": [f"input {n}, {times} times: {text}: {data[:600]}" for n, text, data, times in outcome.wrong.values()],
    }  # fmt: skip


# ---- A process for each trial.


def run_trial(seed: int, target: str, inputs: int) -> dict:
    """Run one target's inputs of a seed in a process of its own; return its row."""
    row = {"trial": "fuzz", "target": target, "seed": seed, "inputs": inputs}
    with tempfile.NamedTemporaryFile() as progress, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "benchmarks.faults.fuzz", target, str(seed), str(inputs), progress.name]
        began = time.monotonic()
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
        return {**row, "seconds": time.monotonic() - began, "wrong": [f"{how} at input {at}: {tail}"]}


def main(name: str, seed: str, inputs: str, progress: str) -> None:
    from benchmarks.faults.fuzz_targets import TARGETS

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
    fd = os.open(progress, os.O_WRONLY)
    row = run_inputs(TARGETS[name], int(seed), int(inputs), note=lambda number: os.pwrite(fd, b"%d" % number, 0))
    print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
