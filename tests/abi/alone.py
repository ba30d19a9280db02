"""Code in a Python process of its own, with the binding loaded (and torch not), that answers with one JSON object."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.rank_process import HOST_LIBRARY, ROOT

SETUP = f"""
import json, os, signal, sys, threading, time
sys.path.insert(0, {str(ROOT)!r})
from tests.rank_process import load_binding
nccl = load_binding()
errors = sys.modules["collectives.errors"]  # by import the package would load torch
HOST = {str(HOST_LIBRARY)!r}
FLOAT32, SUM = nccl.DTYPES["float32"], nccl.OPS["sum"]
answer = dict()

def pair(library):
    "A communicator of two ranks, both of them in this process."
    unique_id, comms = library.get_unique_id(), [None, None]
    def open_as(rank):
        comms[rank] = library.comm_init_rank(2, unique_id, rank)
    other = threading.Thread(target=open_as, args=(1,))
    other.start()
    open_as(0)
    other.join()
    return comms

def later(seconds, function, *arguments):
    threading.Timer(seconds, function, arguments).start()
"""


def run_alone(code: str, seconds: float = 60) -> dict:
    """Run code that fills the dictionary ``answer``. No GPU is in sight; it is killed after ``seconds``."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-X", "faulthandler", "-c", SETUP + code + "\nprint(json.dumps(answer))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environ)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}
