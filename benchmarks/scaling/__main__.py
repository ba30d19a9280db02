"""``python -m benchmarks.scaling``: predict the times of collectives over many nodes.

Prints, for numbers of ranks and sizes, the time, algbw and busbw that the cost model of model.py
predicts for each algorithm on NVLink and InfiniBand figures from public sources, the fastest
algorithm, and the sizes at which another one becomes the fastest. ``--measured rows.json`` adds the
fit to rows that the bench has measured here, its error, and its predictions for more ranks. With
NCCL and a GPU it prints the estimates of NCCL's ``ncclGroupSimulateEnd`` with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from collectives.bench.rotation import last_level_cache
from collectives.errors import CollectivesError, InvalidArgument

from .measurements import cores_of, fits_of, read_rows
from .model import OPS, Fit, Network
from .nccl_estimates import own_estimates
from .predictions import NETWORKS, best, crossovers, predictions
from .units import parse_size, show_size, show_time

__all__ = ["main"]

_DEFAULT_RANKS = "8,64,1024,16384"
_DEFAULT_SIZES = "1K,64K,1M,16M,256M,1G"


def _print_predictions(rows: list[dict], networks: Sequence[Network], op: str) -> None:
    print(f"# {'ranks':>6} {'size':>9} {'algorithm':>18} {'time':>9} {'algbw':>9} {'busbw':>9}  protocol")
    print(f"# {'':>6} {'':>9} {'':>18} {'':>9} {'(GB/s)':>9} {'(GB/s)':>9}  (* fastest)")
    for row in rows:
        protocol = row["network"].partition(" (")[2].rstrip(")")
        print(
            f"  {row['ranks']:>6} {show_size(row['bytes']):>9} {row['algorithm']:>18} "
            f"{show_time(row['time_us'] / 1e6):>9} {row['algbw_gbs']:>9.4g} {row['busbw_gbs']:>9.4g}  "
            f"{protocol}{' *' if row['wins'] else ''}"
        )
    print(f"\n# Fastest {op} by size:")
    for ranks in sorted({row["ranks"] for row in rows}):
        shown = ", ".join(f"{name} from {show_size(size)}" for size, name in crossovers(op, ranks, networks))
        print(f"#   {ranks:>6} ranks: {shown}")


def _print_fits(fits: dict[tuple[str, str, str], Fit], op: str, ranks: Sequence[int], sizes: Sequence[int]) -> None:
    for (engine, algorithm, part), one in fits.items():
        cost = one.network.intra
        print(f"\n# Fit of {engine}, {algorithm}, {part}: {one.points} points, {one.network.cores} cores")
        print(
            f"#   start {one.network.start_s * 1e6:.3g} us, alpha {cost.alpha_s * 1e6:.3g} us, beta "
            f"{cost.beta_s_per_byte * 1e9:.3g} ns/byte, gamma {cost.gamma_s_per_byte * 1e9:.3g} ns/byte"
        )
        print(f"#   error: rms {one.rms:.0%}, largest {one.largest:.0%}")
        for count in ranks if part == "all sizes" else ():
            shown = ", ".join(f"{show_size(n)} {show_time(one.predict(op, algorithm, count, n))}" for n in sizes)
            print(f"#   {op}, {count} ranks of one machine: {shown}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the predictions to `parser`."""
    parser.add_argument("--op", choices=OPS, default="all_reduce", help="operation (default: %(default)s)")
    parser.add_argument("--ranks", default=_DEFAULT_RANKS, help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--sizes", default=_DEFAULT_SIZES, help="sizes in bytes (default: %(default)s)")
    parser.add_argument("--network", choices=NETWORKS, default="dgx-h100", help="links (default: %(default)s)")
    parser.add_argument("--measured", type=Path, help="rows of the bench on this machine, to fit the model to")
    parser.add_argument(
        "--cache",
        type=parse_size,
        default=last_level_cache(),
        help="last-level cache of that machine (default: this one's)",
    )
    parser.add_argument("--json", type=Path, help="write everything to this file, too")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the predictions for command-line arguments (default: the process's own).

    Return the exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    add_options(parser)
    try:
        return _predict(parser.parse_args(arguments))
    except (CollectivesError, OSError, ValueError) as error:  # an option, a file, or a file's content
        print(f"benchmarks.scaling: {error}", file=sys.stderr)
        return 2


def _predict(args: argparse.Namespace) -> int:
    try:
        ranks = [int(word) for word in args.ranks.split(",")]
    except ValueError:
        raise InvalidArgument(f"--ranks {args.ranks}: write numbers with commas between them") from None
    sizes = [parse_size(word) for word in args.sizes.split(",")]
    networks = NETWORKS[args.network]
    rows = [row for n in ranks for size in sizes for row in predictions(args.op, n, size, networks)]
    print(f"# Predicted {args.op} on {args.network}: no measurement. Sources:")
    for source in networks[0].sources:
        print(f"#   {source}")
    _print_predictions(rows, networks, args.op)
    result = {"predictions": rows, "sources": list(networks[0].sources), "fits": [], "nccl": None}
    if args.measured is not None:
        measured, container = read_rows(args.measured)
        fits = fits_of(measured, cores_of(measured, container), args.cache)
        if not fits:
            raise InvalidArgument(f"{args.measured} has no rows of {', '.join(OPS)} by an algorithm of the model")
        _print_fits(fits, args.op, (2, 4, 8, 16, 64), sizes)
        for (engine, algorithm, part), one in fits.items():
            result["fits"].append({"engine": engine, "algorithm": algorithm, "part": part, **dataclasses.asdict(one)})
    own = own_estimates(args.op, sizes)
    if isinstance(own, str):
        print(f"\n# NCCL's own estimate (ncclGroupSimulateEnd): none here, {own}")
    else:
        count, estimates = own
        print(f"\n# NCCL's own estimate (ncclGroupSimulateEnd) for {args.op} over this job's {count} rank(s):")
        for size, seconds in estimates.items():
            ours = best(args.op, "ring", count, size, networks)[0]
            shown = "no estimate" if seconds is None else show_time(seconds)
            print(f"#   {show_size(size):>9}: {shown}; the model's ring {show_time(ours)}")
        result["nccl"] = {"ranks": count, "seconds": estimates}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
