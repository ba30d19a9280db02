"""``python -m collectives.flight DIR``: say what a job's flight recorder files show."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from ..errors import CollectivesError
from .analysis import analyse
from .picture import draw
from .reading import read_folder
from .report import describe_rings, format_findings

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Read a folder and report; return 0, 1 where something went wrong, 2 where nothing can be read."""
    parser = argparse.ArgumentParser(
        prog="python -m collectives.flight",
        description="Merge the flight recorder files of a job's ranks, and say what went wrong.",
        epilog="The exit code is 0 where nothing went wrong, 1 where something did, 2 where nothing can be read.",
    )
    parser.add_argument("folder", help="that COLLECTIVES_FLIGHT_DIR named; those of several nodes side by side in it")
    parser.add_argument("--json", action="store_true", help="print findings and ranks as JSON")
    parser.add_argument("--picture", metavar="FILE", help="write a picture (SVG) of each rank's last operations")
    parser.add_argument("--last", type=int, default=200, metavar="N", help="operations in the picture (default 200)")
    options = parser.parse_args(arguments)
    try:
        rings, problems = read_folder(options.folder)
        findings = analyse(rings)
        if options.picture:
            Path(options.picture).write_text(draw(rings, max(1, options.last)))
    except (CollectivesError, OSError) as error:
        print(f"collectives.flight: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"collectives.flight: {problem}", file=sys.stderr)
    if options.json:
        print(json.dumps({"findings": [asdict(each) for each in findings], "ranks": describe_rings(rings)}, indent=1))
    else:
        print(format_findings(findings, rings))
    if not rings:
        return 2
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
