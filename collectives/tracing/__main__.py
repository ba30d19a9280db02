"""Print the table of a timeline, and draw its picture, from its trace or from those of its ranks.

    python -m collectives.tracing trace.json -o trace.png
    python -m collectives.tracing trace.rank0.json trace.rank1.json -o trace.png
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..errors import CollectivesError, InvalidArgument
from .load import load_traces
from .picture import save_picture
from .summary import describe_missing_ranks, format_report
from .trace import write_trace

__all__ = ["main"]


def main(arguments=None) -> int:
    """Print the report and write the output; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.tracing", description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE.json", help="all of one run, each rank once")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE",
        help="NAME.png (or .svg, .pdf): the picture, which needs matplotlib; NAME.json: one trace of all ranks",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="draw the last N steps (default 2)")
    options = parser.parse_args(arguments)
    output = options.output
    try:
        if output is not None and output.resolve() in [path.resolve() for path in options.traces]:
            raise InvalidArgument(f"{output} is a trace that is read: give the output another name")
        records = load_traces(options.traces)
        lines = [format_report(records)]
        if missing := describe_missing_ranks(records):
            lines.append(missing)
        if output is not None:
            if output.suffix == ".json":
                write_trace(output, records)
            else:
                save_picture(output, records, options.steps)
            lines.append(f"written: {output}")
    except (CollectivesError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
