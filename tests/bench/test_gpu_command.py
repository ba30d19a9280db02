"""`make gpu` without a GPU: its dry run, its refusal, its time limits, and what its stages must add
up to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import limited, selection, stages

ROOT = Path(__file__).resolve().parent.parent.parent


def gpu_command(*options, timeout=580, **variables):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
        env={**os.environ, **variables},
    )  # fmt: skip


def dry_run(folder, part, *options):
    """Run the stages of a part, or those of the options; return their names."""
    done = gpu_command("--dry", "--part", str(part), "--folder", str(folder), "--part-seconds", "540", *options)
    found = json.loads((folder / "report.json").read_text())["parts"][str(part)]["stages"]
    assert done.returncode == 0, done.stdout + json.dumps([s for s in found if s["result"] != "passed"], indent=1)
    for each in found:
        assert each["rows"] or each["stage"].startswith("build"), each
        assert not [row for row in each["rows"] if "error" in row or "torn" in row], each
    return [each["stage"] for each in found]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", stages.STAGES, ids=lambda stage: stage.name)
def test_a_stage_of_the_dry_run(tmp_path, stage):
    """Every stage's own program is executed: none runs for the first time on a GPU."""
    assert dry_run(tmp_path, stage.part, "--only", stage.name) == [stage.name]


@pytest.mark.thorough
@pytest.mark.parametrize("part", stages.PARTS)
def test_the_dry_run_of_a_part(tmp_path, part):
    assert dry_run(tmp_path, part) == [stage.name for stage in stages.STAGES if stage.part == part]
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(files) <= 8 and all(path.stat().st_size < 16 << 20 for path in files)


def test_every_kernel_is_launched_under_the_sanitizers():
    words = [sys.executable, "-m", "benchmarks.gpu.every_kernel", "--device", "cpu"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "not_launched=[]" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line():
    done = gpu_command()
    assert done.returncode == 3 and len(done.stdout.splitlines()) == 1
    assert "no GPU" in done.stdout and "Traceback" not in done.stderr


def test_each_part_fits_its_time():
    for part in stages.PARTS:
        assert sum(stage.seconds for stage in stages.STAGES if stage.part == part) <= stages.PART_SECONDS
    names = [stage.name for stage in stages.STAGES]
    assert len(set(names)) == len(names)
    folders = {word for stage in stages.STAGES for word in stage.words if word.startswith("tests/")}
    assert [word for word in folders if not (ROOT / word).exists()] == []


SPAWNER = """
import os, subprocess, sys, time
# A child in a session of its own, whose parent ends: out of reach of a kill of the group.
subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
                "'import time; time.sleep(600)  # MARK'], start_new_session=True)"])
print("started", flush=True)
time.sleep(600 if sys.argv[1] == "hangs" else 0)
"""
LIMITED = """
import sys
from pathlib import Path
from benchmarks.gpu.limited import adopt_orphans, run_limited
assert adopt_orphans()
code, how, seconds, log = sys.argv[1:]
ended = run_limited([sys.executable, "-c", code, how], float(seconds), Path(log), {}, Path.cwd())
print(ended.status, ended.timed_out, ended.left)
"""


def living(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if mark.encode() in text and b"time.sleep(600)  # " in text and b"subprocess" not in text:
            found.append(path.parent.name)
    return found


@pytest.mark.parametrize(("how", "seconds", "says"), [("hangs", 4, "-9 True ()"), ("ends", 60, "0 False ()")])
def test_a_stage_ends_with_all_that_it_started(tmp_path, how, seconds, says):
    mark = f"stage {os.getpid()} {how}"
    command = [sys.executable, "-c", LIMITED, SPAWNER.replace("MARK", mark), how, str(seconds), str(tmp_path / "log")]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == says, done.stderr
    assert "started" in (tmp_path / "log").read_text()
    assert not living(mark)
    assert time.monotonic() - start < 90
    assert limited.KILL_SECONDS > 0


class Item:
    def __init__(self, params, marker=None):
        self.callspec = type("Callspec", (), {"params": params})
        self.marker = marker

    def get_closest_marker(self, name):
        return self.marker


def test_ranks_of_a_test():
    assert selection.ranks_of(Item({"ranks": 2})) == 2
    assert selection.ranks_of(Item({"engine": "nccl", "n": 2})) == 2
    assert selection.ranks_of(Item({"dtype": "float32"})) == 1
    assert selection.ranks_of(Item({}, type("Marker", (), {"args": (2,)}))) == 2
