"""What needs hardware, which sampled tests run, and stack dumps when the test process itself crashes."""

from __future__ import annotations

import collections
import faulthandler
import functools
import os
import signal
import subprocess
import zlib
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# Folders with files that take a minute: where files run side by side, none of these is left alone at the end.
LONG = ("sanitize", "examples", "bench", "launch", "elastic", "streams")

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


def pytest_addoption(parser):
    parser.addoption(
        "--sample-of",
        metavar="COMMIT",
        default=head(),
        help="the commit whose hash chooses which of the tests marked sampled aren't thorough (default: HEAD)",
    )


def head() -> str:
    """The hash of the tree's commit; "none" outside of git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "none"
    return done.stdout.strip() or "none"


def pytest_report_header(config):
    return f"sampled tests: those that commit {config.getoption('sample_of')} chooses; the others are thorough"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark the sampled tests that weren't chosen as thorough, before pytest deselects. The longest files go first."""
    commit = config.getoption("sample_of")
    places = collections.Counter()  # function -> how many of its tests came before
    for item in items:
        function = item.nodeid.partition("[")[0]
        sampled = item.get_closest_marker("sampled")
        if sampled:
            first = zlib.crc32(f"{commit} {function}".encode())
            if (first + places[function]) % sampled.kwargs["one_in"]:  # every so many-th of a function's tests
                item.add_marker(pytest.mark.thorough)
            places[function] += 1
    items.sort(key=lambda item: item.path.relative_to(HERE).parts[0] not in LONG)


def pytest_runtest_setup(item):
    need = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if need and gpu_count() < need:
        text = f"needs {need} GPU(s), this machine has {gpu_count()}"
        if os.environ.get("COLLECTIVES_REQUIRE_GPU") == "1":
            pytest.fail(f"COLLECTIVES_REQUIRE_GPU=1 and the test {text}")
        pytest.skip(text)
