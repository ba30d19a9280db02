"""The exit code of an elastic job."""

from __future__ import annotations

import os
import sys
import textwrap

from collectives.elastic.workers import ElasticJob, launch
from tests.project.test_imports import ROOT

PROGRAM = """
import os, sys, time
import collectives
from collectives import elastic

collectives.init()

@elastic.run
def train(state):
    pass

train(elastic.ObjectState(step=0))
if os.environ["RANK"] == "1":
    time.sleep(2.0)
    sys.exit(5)
"""


def test_a_rank_that_fails_after_the_training(tmp_path, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    lines: list[str] = []
    job = ElasticJob((sys.executable, str(program)), ranks=2, least=1, most=2)
    assert launch(job, lines.append) == 5, lines
    assert "rank 1" in lines[-1] and "after another rank's program has ended with 0" in lines[-1]
