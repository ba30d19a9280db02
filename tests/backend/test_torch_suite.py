"""Torch's own suite for backends: what passes on Gloo passes on "collectives", and what is skipped, Gloo skips, too."""

import json
import os
import subprocess
import sys

import pytest
import torch


def run_suite(backend, report):
    """Run the suite on a backend; return the text of each test's result by its name, and what was printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.torch_suite", "--json", str(report)],
        capture_output=True, text=True, timeout=1700, env={**os.environ, "TORCH_SUITE_BACKEND": backend},
    )  # fmt: skip
    return json.loads(report.read_text()), done.stdout[-20_000:]


def named(results, word):
    return {name for name, text in results.items() if text.startswith(word)}


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs the suite runs other tests on Gloo")
def test_torchs_suite_for_backends(tmp_path):
    theirs, _ = run_suite("gloo", tmp_path / "gloo.json")
    ours, printed = run_suite("collectives", tmp_path / "collectives.json")
    assert len(named(theirs, "passed")) >= 80, "the suite doesn't run on Gloo itself"
    assert set(ours) == set(theirs)
    assert not named(ours, "failed"), printed
    assert named(theirs, "passed") - named(ours, "passed") == set()
    assert named(ours, "skipped") - named(theirs, "skipped") == set()
