"""What needs hardware, the order of the files, and stack dumps when the test process itself crashes."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# Folders with files that take a minute: where files run side by side, none of these is left alone at the end.
LONG = ("examples", "bench", "launch", "elastic", "gpu", "kernels")

# torch's store looks up the names of all who connect: without a name server that takes 5 to 10 s now and then.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

faulthandler.enable()
faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


@functools.cache
def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def pytest_configure(config):
    try:
        from hypothesis import settings
    except ImportError:  # the tests that need it say so themselves
        return
    settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The longest files go first."""
    items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] not in LONG)


def pytest_runtest_setup(item):
    need = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if need and gpu_count() < need:
        text = f"needs {need} GPU(s), this machine has {gpu_count()}"
        if os.environ.get("COLLECTIVES_REQUIRE_GPU") == "1":
            pytest.fail(f"COLLECTIVES_REQUIRE_GPU=1 and the test {text}")
        pytest.skip(text)
