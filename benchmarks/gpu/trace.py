"""A Chrome trace by torch's profiler of a few steps of each front end."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from .program import Program, is_gpu, open_device, synchronize

MAX_BYTES = 8 << 20  # of the file; another way is left out where it would pass that
STEPS = 2
TRACED = ("ddp", "hook", "ours", "sharded", "fsdp2", "horovod")


def traced(name: str, device, dry: bool) -> list[dict]:
    """Return the events of some steps of one way."""
    from .front_ends import SMALL, Model, Way

    way = Way(name, SMALL if dry else Model(4, 1024, 4096, 512), device, 0, 8.0)
    for _ in range(3):
        way.step()
    synchronize(device)
    real = is_gpu(device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if real else [])
    with profile(activities=activities) as found:
        for number in range(STEPS):
            with record_function(f"{name}: step {number}"):
                way.step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        found.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def main() -> int:
    program = Program(__doc__, "trace")
    program.parser.add_argument("--trace", type=Path, required=True, help="the file to write, gzip-compressed")
    arguments = program.parse()
    device = open_device(arguments.device)
    from .front_ends import process_group

    events: list[dict] = []
    with process_group(device):
        for name in TRACED:
            some = program.attempt(name, traced, name, device, arguments.dry)
            if some is None:
                continue
            text = json.dumps({"traceEvents": events + some}).encode()
            packed = gzip.compress(text, 6)
            fits = len(packed) <= MAX_BYTES
            program.row(case=name, events=len(some), kept=fits, nbytes=len(packed))
            if fits:
                events += some
                arguments.trace.write_bytes(packed)
        import collectives.horovod as hvd

        if hvd.is_initialized():
            hvd.shutdown()
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
