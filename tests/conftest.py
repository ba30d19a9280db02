"""What needs hardware, and stack dumps when the test process itself crashes."""

from __future__ import annotations

import faulthandler
import functools
import os
import signal

import pytest

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


def pytest_runtest_setup(item):
    need = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if need and gpu_count() < need:
        text = f"needs {need} GPU(s), this machine has {gpu_count()}"
        if os.environ.get("COLLECTIVES_REQUIRE_GPU") == "1":
            pytest.fail(f"COLLECTIVES_REQUIRE_GPU=1 and the test {text}")
        pytest.skip(text)
