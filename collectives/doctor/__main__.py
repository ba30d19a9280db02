"""``python -m collectives.doctor``: examine this installation and this machine.

Where ``import collectives`` fails: ``python .../collectives/doctor/__main__.py``, which needs the
standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from pathlib import Path

if not __package__:  # run as a file: the package collectives may not be importable
    _here = Path(__file__).resolve().parent
    sys.path[:1] = []  # this folder
    sys.path.append(str(_here.parents[1]))  # last, so that an installed package is found first
    _spec = importlib.util.spec_from_file_location(
        "_doctor", _here / "__init__.py", submodule_search_locations=[str(_here)]
    )
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["_doctor"] = _module
    _spec.loader.exec_module(_module)
    __package__ = "_doctor"

__all__ = []

from .engines import examine_engines, examine_gpus  # noqa: E402
from .findings import Section, make_section  # noqa: E402
from .installed import examine_installation, import_collectives  # noqa: E402
from .limits import examine_cores, examine_memory  # noqa: E402
from .report import as_json, has_errors, print_report  # noqa: E402
from .self_test import examine_self_test, is_launched, test_launched_ranks  # noqa: E402
from .variables import examine_variables  # noqa: E402

_PARTS = {
    "installation": examine_installation, "engines": examine_engines, "gpus": examine_gpus, "cores": examine_cores,
    "memory": examine_memory, "variables": examine_variables,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m collectives.doctor", description="Examine this installation and this machine.",
        epilog="Exit status: 0, or 1 where an error was found. Variables whose names look like secrets are not shown. "
        "Under a launcher all its ranks make the self-test, and rank 0 prints.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-test", action="store_true", help="leave the self-test out")
    options = parser.parse_args()
    sections = [make_section(name, examine) for name, examine in _PARTS.items()]
    rank = 0
    if not options.no_test:
        section, rank = _self_test()
        sections.append(section)
    if rank == 0:
        if options.json:
            print(json.dumps(as_json(sections), indent=1))
        else:
            print_report(sections)
    return int(has_errors(sections))


def _self_test() -> tuple[Section, int]:
    """Return the self-test's section, and this process's rank in it."""
    if import_collectives()[0] is None:
        return Section("self-test", {"left out": "import collectives fails"}), 0
    ranks: list[int] = []
    if is_launched():
        section = make_section("self-test", lambda each: ranks.append(test_launched_ranks(each)))
    else:
        section = make_section("self-test", examine_self_test)
    return section, ranks[0] if ranks else 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
