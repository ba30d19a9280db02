"""`make gpu` without a GPU: its dry run, its refusal, and its time limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import PART_SECONDS, STAGES
from tests.rank_process import ROOT

STAGES_TRIED = ("build 1", "char_gpt.py, 2", "rates of reduce", "steps, 2", "memcheck of pack")


def run(*options):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *options], cwd=ROOT, capture_output=True, text=True, timeout=500
    )


def dry_run(folder, *options):
    """Return the report's stages; none has failed."""
    done = run("--dry", "--folder", str(folder), *options)
    found = json.loads((folder / "report.json").read_text())["stages"]
    assert done.returncode == 0, done.stdout + json.dumps([row for row in found if row["result"] == "failed"], indent=1)
    return found


def test_some_stages_of_the_dry_run(tmp_path):
    rows = {row["stage"]: row for row in dry_run(tmp_path, "--only", *STAGES_TRIED)}
    assert set(rows) == set(STAGES_TRIED)
    assert rows["char_gpt.py, 2"]["result"] == rows["memcheck of pack"]["result"] == "not run"
    assert "compute-sanitizer" in rows["memcheck of pack"]["tail"]
    assert "fraction_of_copy" in rows["rates of reduce"]["tail"] and "of_ddp" in rows["steps, 2"]["tail"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part1.log", "part3.log", "report.json"]


@pytest.mark.thorough
def test_the_dry_run(tmp_path):
    assert [row["stage"] for row in dry_run(tmp_path)] == [stage.name for stage in STAGES]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_in_one_line():
    done = run()
    assert done.returncode == 3 and len(done.stdout.splitlines()) == 1
    assert "no GPU" in done.stdout and "Traceback" not in done.stderr


def test_each_part_fits_its_time():
    for part in (1, 2, 3):
        assert sum(stage.seconds for stage in STAGES if stage.part == part) <= PART_SECONDS
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    words = {word for stage in STAGES for word in stage.words.split()}
    named = [word for word in words if word.startswith(("tests/", "examples/", "benchmarks/"))]
    assert [word for word in named if not (ROOT / word).exists()] == []


SPAWNER = """
import subprocess, sys, time
# A child in a session of its own, whose parent ends: out of reach of a kill of the group.
subprocess.run([sys.executable, "-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', "
                "'import time; time.sleep(600)  # MARK'], start_new_session=True)"])
print("started", flush=True)
time.sleep(600 if sys.argv[1] == "hangs" else 0)
"""
LIMITED = """
import sys
from pathlib import Path
from benchmarks.gpu.__main__ import run_limited
print(*run_limited(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])))
"""


@pytest.mark.parametrize(("how", "seconds", "says"), [("hangs", 4, "None []"), ("ends", 60, "0 []")])
def test_a_stage_ends_with_all_that_it_started(tmp_path, how, seconds, says):
    mark = f"stage {os.getpid()} {how}"
    (tmp_path / "spawner.py").write_text(SPAWNER.replace("MARK", mark))
    command = f"{sys.executable} {tmp_path}/spawner.py {how}"
    words = [sys.executable, "-c", LIMITED, command, str(seconds), str(tmp_path / "log")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == says, done.stderr
    assert "started" in (tmp_path / "log").read_text()
    living = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if mark.encode() in text and b"spawner" not in text:
            living.append(text)
    assert living == []
