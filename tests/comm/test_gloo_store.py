"""The store by which Gloo connects: a rank that refuses is named."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from collectives.comm.multinode.error_store import ErrorStore
from collectives.comm.multinode.gloo_store import GlooStore
from tests.project.test_imports import ROOT

DIES = """
import os, threading
from datetime import timedelta
import torch.distributed as dist

class Store(dist.Store):
    def set(self, key, value):
        print(key, value.hex(), flush=True)
        os._exit(0)

options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
dist.ProcessGroupGloo(Store(), 0, 2, options)
"""


def test_a_rank_that_refuses_is_named():
    done = subprocess.run([sys.executable, "-c", DIES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    key, value = done.stdout.split()
    errors = ErrorStore(dist.HashStore(), "", 1)
    errors.set(f"gloo/{key}", bytes.fromhex(value))
    for _ in range(50):  # which side connects depends on the ports
        store = GlooStore(errors, time.monotonic() + 30)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=1)
        with pytest.raises(RuntimeError) as raised:
            dist.ProcessGroupGloo(store, 1, 2, options)
        if "refused" in str(raised.value):
            break
    assert store.find_rank(str(raised.value)) == 0, raised.value
    assert store.find_rank("remote=[127.0.0.1]:1") is None and store.find_rank("another error") is None
