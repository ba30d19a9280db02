"""Torch's own tests of its backends, ``distributed_test``, run on the backend "collectives" with 2 ranks.

    TORCH_SUITE_BACKEND=collectives|gloo python -m tests.backend.torch_suite [-k PATTERN] [--json FILE]

The suite decides by the backend's name what to run: much of it is for "gloo" only, or for a set of names. The name that
it gets here equals "gloo" as well, so that it runs what it runs on Gloo; the process groups are those of "collectives".
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
import unittest

from torch.testing._internal.common_distributed import DistTestCases

MODULE = "torch.testing._internal.distributed.distributed_test"


class LikeGloo(str):
    """The name of a backend, which passes for "gloo" in comparisons and sets."""

    def __eq__(self, other):
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash("gloo")


def load_suite(backend: str):
    """Load the suite's module with a backend's name in place of the variable BACKEND of its environment."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=os.environ.get("WORLD_SIZE", "2"))
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp(prefix="torch-suite-"))
    folder = os.environ["TEMP_DIR"]
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    os.environ.setdefault("INIT_METHOD", f"file://{folder}/init_dir/shared_init_file")
    spec = importlib.util.find_spec(MODULE)
    with open(spec.origin) as file:
        source = file.read()
    line = 'BACKEND = os.environ["BACKEND"]\n'
    assert source.count(line) == 1, "the suite has changed: it reads its backend in another way"
    if backend != "gloo":
        import collectives  # noqa: F401  (registers the backend)

        source = source.replace(line, "from tests.backend.torch_suite import LikeGloo\n" + line.replace(
            'os.environ["BACKEND"]', 'LikeGloo(os.environ["BACKEND"])'))  # fmt: skip
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    if backend != "gloo":  # a name that the suite doesn't know is a plugin's
        DistTestCases.backend_feature["plugin"] = {backend}
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


_suite = load_suite(os.environ.get("TORCH_SUITE_BACKEND", "collectives"))


class TorchSuite(_suite.TestDistBackend, _suite.DistributedTest._DistTestBase):
    """The suite's tests, each on processes of its own."""

    def setUp(self):
        super().setUp()
        # The suite spawns them, which imports torch for each.
        self._start_processes(multiprocessing.get_context("fork").Process)


class Results(unittest.TextTestResult):
    """Result of each test by its name: "passed", "skipped: why" or "failed: error"."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.by_name = {}

    def startTest(self, test):
        super().startTest(test)
        self.started = time.monotonic()

    def _record(self, test, text):
        self.by_name[test._testMethodName] = text
        print(f"{time.monotonic() - self.started:6.1f} s  {test._testMethodName}: {text[:300]}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self._record(test, "passed")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._record(test, f"skipped: {reason}")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self._record(test, f"failed: {error[1]}")

    addError = addFailure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", dest="pattern", action="append", default=None)
    parser.add_argument("--skip", action="append", default=[], help="leave out names with this part")
    parser.add_argument("--json", help="write the results by name to this file")
    options = parser.parse_args()
    loader = unittest.TestLoader()
    from tests.backend.torch_suite import TorchSuite as cls  # by its importable name, which the suite prints

    names = loader.getTestCaseNames(cls)
    if options.pattern:
        names = [name for name in names if any(pattern in name for pattern in options.pattern)]
    names = [name for name in names if not any(part in name for part in options.skip)]
    suite = unittest.TestSuite(cls(name) for name in names)
    result = unittest.TextTestRunner(stream=open(os.devnull, "w"), resultclass=Results).run(suite)
    counts = {}
    for text in result.by_name.values():
        counts[text.split(":")[0]] = counts.get(text.split(":")[0], 0) + 1
    print(counts)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result.by_name, file, indent=1)
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
