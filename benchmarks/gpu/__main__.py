"""Run what needs a GPU, write the report. ``python -m benchmarks.gpu [--part 1|2|3|all] [--dry]``

The exit status is 0 where every stage passed, 1 where one failed, 3 where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from . import VARIABLE
from .limited import adopt_orphans, run_limited
from .report import Report
from .stages import PART_SECONDS, PARTS, STAGES, Stage

ROOT = Path(__file__).resolve().parent.parent.parent
NO_GPU = 3
NEEDED = ("torch", "numpy", "cupy", "Cython", "setuptools", "pytest", "pytest_timeout", "hypothesis")
SIMULATED = "4"  # devices of a dry run
MIN_SECONDS = 5.0  # a stage with less time left is not started


def missing_gpu() -> str:
    """Return why there is no GPU to run on; "" where there is one."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU"
    return ""


def dry_device() -> tuple[str, str]:
    """Return the device of a dry run, and why it is the CPU: the simulated GPU where this torch can
    carry it.
    """
    if importlib.util.find_spec("tests.streams") is None:
        return "cpu", "tests/streams isn't there"
    from tests.streams.build import build_all
    from tests.streams.start import why_not

    if reason := why_not():
        return "cpu", reason
    build_all()  # in no stage's time
    return "simulated", ""


def words_of(stage: Stage, device: str, dry: bool, output: Path, folder: Path) -> list[str]:
    """Return a stage's command."""
    filled = []
    for word in stage.dry if dry and stage.dry is not None else stage.words:
        if word == "{dry}":
            filled += ["--dry"] if dry else []
        elif not word.startswith("tests/") or (ROOT / word).exists():
            filled.append(word.format(device=device, output=output, folder=folder))
    if "-n" in filled and importlib.util.find_spec("xdist") is None:
        at = filled.index("-n")
        del filled[at : at + 4]  # with --dist
    return [sys.executable, *filled]


def rows_of(output: Path) -> list[dict]:
    """Return the rows that a stage wrote; the last line of one that was killed may be a torn one."""
    rows = []
    for line in output.read_text(errors="replace").splitlines() if output.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            rows.append({"torn": line[:200]})
    return rows


def run_stage(stage: Stage, report: Report, device: str, dry: bool, limit: float) -> bool:
    """Run one stage; return whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "rows.jsonl"), Path(folder, "log")
        words = words_of(stage, device, dry, output, report.folder)
        environment = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": python_path(), **dict(stage.environment)}
        if device == "simulated":
            environment[VARIABLE] = SIMULATED
        if dry:
            environment.pop("COLLECTIVES_REQUIRE_GPU", None)
        ended = run_limited(words, limit, log, environment, ROOT)
        result = "out of time" if ended.timed_out else "passed" if ended.status == 0 else "failed"
        found = {"stage": stage.name, "result": result, "status": ended.status, "seconds": round(ended.seconds, 1)}
        found["limit"] = round(limit, 1)
        found["command"] = " ".join(words[1:])
        if dry and stage.dry_lacks:
            found["dry_run_lacks"] = stage.dry_lacks
        if absent := [word for word in stage.words if word.startswith("tests/") and not (ROOT / word).exists()]:
            found["not_there"] = absent
        if ended.left:
            found["not_ended"] = list(ended.left)
        found["rows"] = rows_of(output)
        report.add(stage.part, found, log)
    print(f"{result:11s} {ended.seconds:6.1f} s  {stage.name}", flush=True)
    return result == "passed"


def python_path() -> str:
    before = os.environ.get("PYTHONPATH")
    return str(ROOT) + (os.pathsep + before if before else "")


def run_part(part: int, report: Report, device: str, dry: bool, only: list[str], seconds: float) -> bool:
    """Run a part's stages within its budget; a stage may take what those before it have left over."""
    stages = [stage for stage in STAGES if stage.part == part and (not only or stage.name in only)]
    report.begin(part)
    scale = seconds / PART_SECONDS
    end = time.monotonic() + seconds
    passed = True
    for number, stage in enumerate(stages):
        later = sum(each.seconds for each in stages[number + 1 :]) * scale
        limit = end - time.monotonic() - later
        if limit < MIN_SECONDS:
            found = {"stage": stage.name, "result": "left out: no time", "seconds": 0.0, "rows": []}
            report.add(part, found, Path(os.devnull))
            print(f"left out              {stage.name}", flush=True)
            passed = False
            continue
        passed &= run_stage(stage, report, device, dry, limit)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["all", *map(str, PARTS)], default="all")
    parser.add_argument("--dry", action="store_true", help="every stage without a GPU, as far as it goes")
    parser.add_argument("--only", nargs="+", default=[], choices=[s.name for s in STAGES], metavar="STAGE")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "gpu", help="(default: %(default)s)")
    parser.add_argument("--part-seconds", type=float, default=PART_SECONDS, help="a part's budget (%(default)s)")
    arguments = parser.parse_args()
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not arguments.dry and (reason := missing_gpu()):
        print(f"make gpu: no GPU: {reason} (make gpu DRY=1 runs every stage without one)")
        return NO_GPU
    device, why_cpu = dry_device() if arguments.dry else ("cuda", "")
    adopted = adopt_orphans()
    report = Report(arguments.folder, device)
    report.body |= {"dry": arguments.dry, "python": sys.version.split()[0], "not_installed": lacking}
    report.body["ends_orphans"] = adopted
    if why_cpu:
        report.body["no_simulated_gpu"] = why_cpu
        print(f"dry run on the CPU: {why_cpu}", flush=True)
    if lacking:
        print(f"not installed, so that some stages will fail: {', '.join(lacking)}", flush=True)
    passed = True
    for part in PARTS if arguments.part == "all" else [int(arguments.part)]:
        passed &= run_part(part, report, device, arguments.dry, arguments.only, arguments.part_seconds)
    print(f"{'passed' if passed else 'FAILED'}: {report.path}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
