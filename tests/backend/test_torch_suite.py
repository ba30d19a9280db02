"""Torch's own suite for backends: what passes on Gloo passes on "collectives"."""

import json
import subprocess
import sys

import pytest
import torch


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the figures are those of a machine without GPUs")
def test_torchs_suite_for_backends(tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.backend.torch_suite", "--json", str(report)],
        capture_output=True, text=True, timeout=1750,
    )  # fmt: skip
    results = json.loads(report.read_text())
    failed = {name: text for name, text in results.items() if text.startswith("failed")}
    assert not failed and done.returncode == 0, done.stdout[-20_000:]
    assert sum(text == "passed" for text in results.values()) >= 80
