"""Plug-in of pytest for `make gpu`: tests by number of ranks, a line of JSON for each test."""

from __future__ import annotations

import json

import pytest

RANKS = ("ranks", "n", "size", "world_size")  # names of parameters that hold a number of ranks
TEXT = 8000  # characters of a failure: its first and its last half of that


def pytest_addoption(parser):
    parser.addoption("--gpu-ranks", type=int, default=0, help="run tests of so many ranks only; 0: all")
    parser.addoption("--gpu-output", default=None, help="file that gets a line of JSON for each test")


def ranks_of(item) -> int:
    """Return with how many ranks a test runs: a parameter of it, or a marker `ranks(n)`; 1 where
    nothing says so.
    """
    marker = item.get_closest_marker("ranks")
    if marker is not None and marker.args:
        return marker.args[0]
    params = getattr(getattr(item, "callspec", None), "params", {})
    found = [params[name] for name in RANKS if isinstance(params.get(name), int)]
    return max(found, default=1)


def pytest_collection_modifyitems(config, items):
    wanted = config.getoption("--gpu-ranks")
    if wanted:
        chosen = [item for item in items if (ranks_of(item) > 1) == (wanted > 1)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def _write(config, row: dict) -> None:
    path = config.getoption("--gpu-output")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def shortened(text: str) -> str:
    half = TEXT // 2
    return text if len(text) <= TEXT else f"{text[:half]}\n... {len(text) - TEXT} characters ...\n{text[-half:]}"


class Writer:
    """Writes what each test came to, on the process that reports."""

    def __init__(self, config):
        self.config = config

    def pytest_collection_finish(self, session):
        if self.config.option.collectonly:
            _write(self.config, {"collected": len(session.items)})

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            if report.when != "call":
                row["in"] = report.when
            if report.skipped and isinstance(report.longrepr, tuple):
                row["why"] = str(report.longrepr[2])[:TEXT]
            elif report.failed:
                row["why"] = shortened(report.longreprtext)
            _write(self.config, row)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(n): runs n ranks, where no parameter says so")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(config), "gpu-writer")
