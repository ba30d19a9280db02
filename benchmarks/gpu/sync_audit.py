"""Audit of host synchronisation: one step of every front end under set_sync_debug_mode.

Some steps are made before, in which DDP makes its buckets anew and memory is taken. Then a step in
the mode "warn", which lists every wait with the Python stack that led to it (those of the
autograd's threads have none), and one in the mode "error", which decides. A way that waits fails,
but for torch's own, which is there to compare. On the simulated GPU, which has no such mode, the
row holds what its checker reports of one more step; tests/streams judges that.
"""

from __future__ import annotations

import sys
import traceback
import warnings

import torch

from .program import ROOT, Program, is_gpu, open_device, synchronize

BEFORE = 4
FRAMES = 6


class Waits:
    """Collects the warnings of a step, each with the frames of this project that it came through."""

    def __init__(self):
        self.found: list[dict] = []

    def take(self, message, category, filename, lineno, file=None, line=None):
        frames = [
            f"{frame.filename.removeprefix(str(ROOT)).lstrip('/')}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack()
            if str(ROOT) in frame.filename and "benchmarks/gpu" not in frame.filename
        ]
        wait = {"says": str(message)[:200], "stack": frames[-FRAMES:]}
        for each in self.found:
            if (each["says"], each["stack"]) == (wait["says"], wait["stack"]):
                each["times"] += 1
                return
        self.found.append({**wait, "times": 1})


def step_in_mode(way, mode: str, device) -> list[dict]:
    """Make a step in a mode; return the waits that were warned of."""
    real = is_gpu(device)
    waits = Waits()
    synchronize(device)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = waits.take
        if real:
            torch.cuda.set_sync_debug_mode(mode)
        try:
            way.step()
        finally:
            if real:
                torch.cuda.set_sync_debug_mode("default")
    synchronize(device)
    return [each for each in waits.found if "synchroniz" in each["says"]]


def reports_of(way) -> list[str]:
    """Return what the simulated GPU's checker reports of a step."""
    from tests.streams.checker import checker, step

    checker.take()
    with step():
        way.step()
    return [str(each)[:400] for each in checker.take()]


def audit(program, name: str, device) -> None:
    from .front_ends import SMALL, Way

    way = Way(name, SMALL, device, 0, bucket_cap_mb=0.004)
    for _ in range(BEFORE):
        way.step()
    waits = step_in_mode(way, "warn", device)
    if program.arguments.device == "simulated":
        program.row(case=name, result="simulated", reported=reports_of(way))
        return
    is_torchs = name == "alone" or name.startswith(("ddp", "fsdp2"))
    try:
        step_in_mode(way, "error", device)
    except RuntimeError as error:
        program.failures += not is_torchs
        program.row(case=name, result="waits", error=f"{error}"[:400], waits=waits)
    else:
        program.row(case=name, result="clean", waits=waits)


def main() -> int:
    program = Program(__doc__, "sync_audit")
    program.parser.add_argument("--ways", nargs="+", default=None)
    arguments = program.parse()
    device = open_device(arguments.device)
    from .front_ends import WAYS, process_group

    with process_group(device):
        for name in arguments.ways or WAYS:
            program.attempt(name, audit, program, name, device)
        import collectives.horovod as hvd

        if hvd.is_initialized():
            hvd.shutdown()
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
