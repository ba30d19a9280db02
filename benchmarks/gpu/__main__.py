"""Run what only a GPU can show, and write a report: ``python -m benchmarks.gpu [--part 1|2|3|all] [--dry]``.

It needs no network and no virtual environment: torch for CUDA, CuPy, Cython, setuptools, pytest, hypothesis, g++. Each
stage is one command with a hard limit of its time; past it, it is killed with all that it has started, and the next one
runs. The report is complete after every stage. The exit status is 0 where every stage passed, 1 where one did not, 3
where there is no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
NO_GPU = 3
PART_SECONDS = 540  # of all stages of a part together
TAIL = 20_000  # characters of a stage's output in the report
PR_SET_CHILD_SUBREAPER = 36


class Stage(NamedTuple):
    """One command. ``words``: what follows Python. ``dry``: those of a run without a GPU; None: nothing is run."""

    name: str
    part: int
    seconds: float
    words: str
    dry: str | None = None


def _jobs(most: int) -> str:
    """Return pytest's options for so many processes side by side, where pytest-xdist is installed."""
    if importlib.util.find_spec("xdist") is None:
        return ""
    return f"-n {min(most, os.cpu_count() or 1)} --dist worksteal"


BUILD = "setup.py -q build_ext --inplace"
PYTEST = "-m pytest -q -rfEs --tb=short -p no:cacheprovider --timeout 150 --continue-on-collection-errors"
KERNELS = f"{PYTEST} -m 'gpu and not multigpu' tests/kernels tests/optim"
TESTS = "tests/gpu tests/comm tests/conformance tests/sharded/test_memory.py tests/bench/test_command.py"
TWO = "2ranks or 2-on-one-gpu"  # in the names of tests by two ranks that share the GPU
ONE_RANK = f"{PYTEST} -m 'gpu and not multigpu' -k 'not 2ranks and not 2-on-one-gpu' {TESTS}"
TWO_RANKS = f"{PYTEST} -m 'gpu and not multigpu' -k '{TWO}' {TESTS}"
SMALL = {  # every kernel on small arrays: what the sanitizers run, and a dry run on the CPU
    "pack": "--lists two_linears --rounds 1", "reduce": "--nbytes 40000 --rounds 1",
    "quantize": "--count 40960 --rounds 1", "adamw": "--lists two_linears --rounds 1",
}  # fmt: skip
# compute-sanitizer looks at our kernels, not at torch's, and not at what libraries ask the driver for in vain.
SANITIZER = "compute-sanitizer --kernel-regex kns=coll_ --report-api-errors no --error-exitcode 99 --tool"


def _kernel(name: str, device: str, options: str) -> str:
    return f"benchmarks/kernels/{name}.py --device {device} --no-output {options}"


def _example(seconds: float, ranks: int, words: str) -> Stage:
    return Stage(f"{words.split()[0]}, {ranks}", 1, seconds, f"-m benchmarks.gpu.ranks {ranks} examples/{words}")


def _steps(ranks: int, seconds: float) -> Stage:
    program = f"-m benchmarks.gpu.ranks {ranks} -m benchmarks.gpu.steps"
    return Stage(f"steps, {ranks}", 3, seconds, program, f"{program} --device cpu --small")


STAGES = (
    Stage("build 1", 1, 90, BUILD, "setup.py --name"),
    Stage("versions", 1, 30, "-m torch.utils.collect_env", "-m torch.utils.collect_env"),
    Stage("doctor", 1, 40, "-m collectives.doctor", "-m collectives.doctor"),
    Stage("tests of kernels", 1, 160, f"{KERNELS} {_jobs(12)}", f"{KERNELS} --collect-only"),
    _example(40, 2, "train_digits.py --epochs 2"),
    _example(40, 2, "horovod_digits.py --epochs 2"),
    _example(40, 2, "sharded_digits.py --epochs 2"),
    _example(50, 1, "char_gpt.py --steps 60 --compare bf16,int8"),
    _example(50, 2, "char_gpt.py --steps 60 --sharded"),
    Stage("build 2", 2, 90, BUILD, "setup.py --name"),
    Stage("tests, 1 rank", 2, 230, f"{ONE_RANK} {_jobs(12)}", f"{ONE_RANK} --collect-only"),
    Stage("tests, 2 ranks", 2, 220, f"{TWO_RANKS} {_jobs(4)}", f"{TWO_RANKS} --collect-only"),
    Stage("build 3", 3, 90, BUILD, "setup.py --name"),
    *(Stage(f"rates of {name}", 3, 40, _kernel(name, "cuda", ""), _kernel(name, "cpu", SMALL[name])) for name in SMALL),
    _steps(1, 60),
    _steps(2, 60),
    *(
        Stage(f"{tool} of {name}", 3, seconds, f"{SANITIZER} {tool} {sys.executable} {_kernel(name, 'cuda', small)}")
        for tool, seconds in (("memcheck", 20), ("racecheck", 20))
        for name, small in SMALL.items()
    ),
)


# ---- A command under a time limit.
def descendants(pid: int) -> list[int]:
    """Return a process's descendants, those that have ended but weren't waited for included."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for path in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            try:
                children = [int(word) for word in path.read_text().split()]
            except OSError:  # the process has ended meanwhile
                continue
            found += children
            waiting += children
    return found


def reap_children() -> None:
    """Wait for all children that have ended, adopted ones included."""
    try:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass
    except ChildProcessError:  # none is left
        pass


def end_descendants(seconds: float = 10.0) -> list[int]:
    """Kill all that this process has started, directly or not; return what is still there after so many seconds."""
    limit = time.monotonic() + seconds
    while living := descendants(os.getpid()):
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap_children()
        if time.monotonic() > limit:  # in an uninterruptible call of the driver
            return living
        time.sleep(0.05)
    return []


def run_limited(command: str, seconds: float, log: Path) -> tuple[int | None, list[int]]:
    """Run a command of the shell, its output in a file; past the limit it is killed with all that it has started.

    Returns its exit status, None where it was out of time, and processes that could not be ended. This process becomes
    the parent of orphans, and must have no other children.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    environment = {
        **os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            left = end_descendants()
    process.returncode = process.returncode if process.returncode is not None else -signal.SIGKILL  # it was reaped
    return status, left


# ---- The report.
def why_no_gpu() -> str:
    """Return why there is no GPU to run on; "" where there is one."""
    if importlib.util.find_spec("torch") is None:
        return f"{sys.executable} has no torch"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def commit() -> str:
    """Return git's name of what is checked out; "unknown" in a copy without its history."""
    if shutil.which("git") is None:
        return "unknown"
    git = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def run_stage(stage: Stage, dry: bool, limit: float, log: Path) -> dict:
    """Run a stage; return its row of the report."""
    words, began = stage.dry if dry else stage.words, time.monotonic()
    is_tool = stage.words.startswith("compute-sanitizer")
    row = {"stage": stage.name, "part": stage.part, "limit": round(limit, 1)}
    if words is None or (is_tool and shutil.which("compute-sanitizer") is None):
        log.write_text(f"not run here: {stage.words}\n")
        status, left, result = 0, [], "not run"
    else:
        command = words if is_tool else f"{sys.executable} {words}"
        status, left = run_limited(command, limit, log)
        result = "out of time" if status is None else "passed" if status == 0 else "failed"
        row["command"] = command
    text = log.read_text(errors="replace")
    row |= {"result": result, "status": status, "seconds": round(time.monotonic() - began, 1), "tail": text[-TAIL:]}
    return row | ({"not_ended": left} if left else {})


def write_report(path: Path, facts: dict, rows: list[dict]) -> None:
    """Put the report in its place, whole."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({**facts, "stages": rows}, indent=1) + "\n")
    fresh.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["all", "1", "2", "3"], default="all")
    parser.add_argument("--dry", action="store_true", help="every stage without a GPU, as far as it goes")
    parser.add_argument("--only", nargs="+", default=[], choices=[stage.name for stage in STAGES], metavar="STAGE")
    parser.add_argument("--folder", type=Path, default=ROOT / "out" / "gpu", help="(default: %(default)s)")
    arguments = parser.parse_args()
    if not arguments.dry and (reason := why_no_gpu()):
        print(f"make gpu: no GPU: {reason} (make gpu DRY=1 runs every stage without one)")
        return NO_GPU
    if not arguments.dry:
        os.environ["COLLECTIVES_REQUIRE_GPU"] = "1"  # a test that finds no GPU fails
    arguments.folder.mkdir(parents=True, exist_ok=True)
    report = arguments.folder / "report.json"
    facts = {"dry": arguments.dry, "commit": commit(), "python": sys.version.split()[0], "cpus": os.cpu_count(),
             "machine": platform.node(), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
    parts = {1, 2, 3} if arguments.part == "all" else {int(arguments.part)}
    stages = [stage for stage in STAGES if stage.part in parts and (not arguments.only or stage.name in arguments.only)]
    rows: list[dict] = []
    if report.exists():  # of other parts, which ran before
        rows = [row for row in json.loads(report.read_text())["stages"] if row["part"] not in parts]
    for part in sorted(parts):
        end = time.monotonic() + PART_SECONDS
        own = [stage for stage in stages if stage.part == part]
        for number, stage in enumerate(own):
            later = sum(each.seconds for each in own[number + 1 :])
            limit = max(1.0, end - time.monotonic() - later)  # what the stages before have left over comes on top
            log = arguments.folder / "stage.log"
            row = run_stage(stage, arguments.dry, limit, log)
            with (arguments.folder / f"part{part}.log").open("ab" if number else "wb") as whole:
                whole.write(f"==== {stage.name}: {row['result']}\n".encode() + log.read_bytes()[-1_000_000:])
            log.unlink()
            rows.append(row)
            write_report(report, facts, rows)
            print(f"{row['result']:11s} {row['seconds']:6.1f} s  {stage.name}", flush=True)
    passed = all(row["result"] in ("passed", "not run") for row in rows)
    print(f"{'passed' if passed else 'FAILED'}: {report}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
