"""Make the page of a timeline from its trace, or from those that each rank wrote for itself.

    python -m collectives.tracing trace.json
    python -m collectives.tracing trace.rank0.json trace.rank1.json -o trace.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import InvalidArgument
from .load import load_traces
from .page import page_path, write_page
from .report import format_report

__all__ = ["main"]


def main(arguments=None) -> int:
    """Write the page, print where it is and the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.tracing", description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.json", help="all of one run, each rank once")
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE.html", help="default: beside the first trace")
    options = parser.parse_args(arguments)
    output = options.output or page_path(options.traces[0])
    try:
        if output.resolve() in [path.resolve() for path in options.traces]:
            raise InvalidArgument(f"{output} is a trace: give another name for the page")
        records, remarks = load_traces(options.traces)
        write_page(output, records, remarks)
    except (InvalidArgument, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print("\n".join([format_report(records), *remarks, f"page: {output}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
