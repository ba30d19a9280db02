"""Predict what collectives take past this machine: ``python -m collectives.bench --simulate``.

Prints, for numbers of ranks and sizes, the time, algbw and busbw that the model of `collectives.bench.model` gives for
each algorithm on NVLink + InfiniBand numbers from public sources, which is fastest, and where one overtakes another.
With ``--measured rows.json`` also the fit to rows that the bench has measured here, its error, and what it gives for
more ranks. Where NCCL and a GPU are there, beside it what NCCL's own ``ncclGroupSimulateEnd`` estimates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from .._nccl import DTYPES
from .._nccl import OPS as REDOPS
from ..comm.engine import engines
from ..errors import CollectivesError, InvalidArgument
from ..rendezvous.world import init
from .model import ALGORITHMS, OPS, Cost, Fit, Network, Point, busbw_factor, fit, predict

__all__ = ["NETWORKS", "best", "crossovers", "main", "nccl_estimates", "points_of", "predictions"]

# NVIDIA's own constants, by protocol: https://github.com/NVIDIA/nccl/blob/1fc949c50bbd7e31fb27343def456d8d48993a90/
# src/tuning/cost_model.cc (baseLatencies, hwLatencies of NVLINK and NET for Ring; Tree less Ring for a branch; llMaxBws
# of an Intel host) and src/graph/tuning.cc at b6475625 (LL128 carries 0.92 of a link; posting to the network takes 1 us
# a message on an Intel host, three times that with Simple; 0.4 us for each further peer over NVLink).
_SOURCES = (
    "https://github.com/NVIDIA/nccl/blob/1fc949c50bbd7e31fb27343def456d8d48993a90/src/tuning/cost_model.cc: latencies "
    "(us, LL / LL128 / Simple): start 6.6 / 14.0 / 8.4; NVLink 0.6 / 1.9 / 3.4; network 2.7 / 4.0 / 14.0, in trees 5.0 "
    "/ 8.5 / 14.0; LL at most 87.7 GB/s in a node, 20.4 between nodes",
    "https://github.com/NVIDIA/nccl/blob/b6475625fbcaa2c3c0e50eed2fa1255d7514d4a2/src/graph/tuning.cc: LL128 carries "
    "0.92 of a link; a message costs its sender 1 us to the network (Intel host; 3 with Simple), 0.4 us over NVLink",
    "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json: 8 GPUs a node, NVLink 4 at 900 GB/s in both directions together (450 each way), "
    "400 Gb/s InfiniBand",
)
_ACHIEVED = (
    "https://github.com/NVIDIA/nccl/issues/1264: 380 GB/s of the 450 reached between two H100s",
    "https://github.com/NVIDIA/nccl-tests/issues/290: 46 to 48 GB/s of a 400 Gb/s port's 50, says NVIDIA",
)
_HBM = 3.35e12  # bytes/s of an H100's memory, NVIDIA's data sheet; a reduction reads two bytes and writes one


def _dgx(name: str, nvlink: float, port: float, sources: tuple[str, ...]) -> tuple[Network, ...]:
    """Return one network for each of NCCL's protocols. `nvlink`, `port`: bytes/s each way of a GPU and of a NIC."""
    gamma = 3 / _HBM
    ll_ports = min(port * 8 / 2, 20.4e9) / 8  # half of what LL carries are flags
    rows = (
        ("ll", 6.6e-6, Cost(0.6e-6, 1 / min(nvlink / 2, 87.7e9), gamma, 0.4e-6), (2.7e-6, ll_ports, 1e-6, 2.3e-6)),
        ("ll128", 14e-6, Cost(1.9e-6, 1 / (0.92 * nvlink), gamma, 0.4e-6), (4e-6, 0.92 * port, 1e-6, 4.5e-6)),
        ("simple", 8.4e-6, Cost(3.4e-6, 1 / nvlink, gamma, 0.4e-6, 0.6e-6), (14e-6, port, 3e-6, 0.0)),
    )
    return tuple(
        Network(
            f"{name} ({protocol})", intra, Cost(alpha, 1 / rate, gamma, gap, branch),
            ranks_per_node=8, rails=8, start_s=start, max_chunks=256, sources=sources,
        )
        for protocol, start, intra, (alpha, rate, gap, branch) in rows
    )  # fmt: skip


NETWORKS = {
    "dgx-h100": _dgx("dgx-h100", 380e9, 47e9, _SOURCES + _ACHIEVED),
    "dgx-h100-peak": _dgx("dgx-h100-peak", 450e9, 50e9, _SOURCES),
}

# The binomial tree is there to be compared with in docs/scaling.md; it never wins but at the smallest sizes.
_SHOWN = ("ring", "direct", "tree", "hierarchical", "hierarchical_tree")
_DEFAULT_RANKS = "8,64,1024,16384"
_DEFAULT_SIZES = "1K,64K,1M,16M,256M,1G"


def best(op: str, algorithm: str, ranks: int, nbytes: int, networks: Sequence[Network]) -> tuple[float, Network]:
    """Return the least time in seconds over `networks` (NCCL's protocols, say), and the network that has it."""
    return min(
        ((predict(op, algorithm, ranks, nbytes, network), network) for network in networks), key=lambda pair: pair[0]
    )


def predictions(op: str, ranks: int, nbytes: int, networks: Sequence[Network], algorithms=_SHOWN) -> list[dict]:
    """Return one row an algorithm, with the fields of the bench's rows; the fastest has ``"wins": True``."""
    found = {algorithm: best(op, algorithm, ranks, nbytes, networks) for algorithm in algorithms}
    least = min(seconds for seconds, _ in found.values())
    rows = []
    for algorithm, (seconds, network) in found.items():
        rate = nbytes / seconds / 1e9 if seconds else math.inf
        rows.append(
            {
                "op": op, "algorithm": algorithm, "ranks": ranks, "bytes": nbytes, "network": network.name,
                "time_us": seconds * 1e6, "algbw_gbs": rate, "busbw_gbs": rate * busbw_factor(op, ranks),
                "wins": seconds == least,
            }
        )  # fmt: skip
    return rows


def crossovers(
    op: str, ranks: int, networks: Sequence[Network], algorithms=_SHOWN, smallest: int = 8, largest: int = 1 << 34
) -> list[tuple[int, str]]:
    """Return (bytes, algorithm): which algorithm is fastest from that size on, in steps of 2 ** (1 / 8).

    One follows another only where it is faster by more than 2%, which no model tells.
    """
    found: list[tuple[int, str]] = []
    steps = int(8 * math.log2(largest / smallest)) + 1
    for step in range(steps):
        nbytes = round(smallest * 2 ** (step / 8))
        times = {name: best(op, name, ranks, nbytes, networks)[0] for name in algorithms}
        name = min(times, key=times.get)
        if not found or times[name] < 0.98 * times[found[-1][1]]:
            found.append((nbytes, name))
    return found


# ---- Measured rows of this machine.


def points_of(rows: Iterable[dict]) -> dict[tuple[str, str], list[Point]]:
    """Return the points of the bench's rows by engine and algorithm; rows that the model doesn't have are left out.

    Raises `InvalidArgument` for a row without the bench's fields, or one whose results were wrong.
    """
    found: dict[tuple[str, str], list[Point]] = {}
    for row in rows:
        try:
            op, engine, ranks, nbytes = row["op"], row["engine"], int(row["ranks"]), int(row["bytes"])
            algorithm, seconds, wrong = row.get("algorithm") or "native", float(row["time_us"]) * 1e-6, row["wrong"]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"not a row of the bench ({error!r} is missing or no number): {row!r}") from error
        if wrong:
            raise InvalidArgument(f"this row's results were wrong, so its time means nothing: {row!r}")
        if op in OPS and algorithm in ALGORITHMS and ranks > 1 and nbytes > 0 and seconds > 0:
            name = f"{engine} zero-copy" if row.get("zero_copy") else engine
            found.setdefault((name, algorithm), []).append(Point(op, algorithm, ranks, nbytes, seconds))
    return found


def read_rows(path: Path) -> tuple[list[dict], dict]:
    """Read the bench's JSON (``{"machine": ..., "rows": [...]}``) or JSON lines; return its rows and what is beside."""
    text = path.read_text()
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()], {}
    if isinstance(whole, list):
        return whole, {}
    return (whole["rows"], whole) if "rows" in whole else ([whole], {})


def cores_of(rows: Iterable[dict], beside: dict) -> int:
    """Return how many cores the rows were measured on: their own field, the file's, or this process's."""
    machine = beside.get("machine")
    places = [*rows, beside, machine if isinstance(machine, dict) else {}]
    known = {int(place["cores"]) for place in places if place.get("cores")}
    if len(known) > 1:
        raise InvalidArgument(f"the rows come from machines with {sorted(known)} cores: fit each machine's alone")
    return known.pop() if known else len(os.sched_getaffinity(0))


def cache_bytes() -> int:
    """Return the size in bytes of this machine's last-level cache, 0 where Linux doesn't tell."""
    found = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = max(found, parse_size(path.read_text().strip()))
    return found


def fits_of(rows: Iterable[dict], cores: int, cache: int = 0) -> dict[tuple[str, str, str], Fit]:
    """Fit each engine and algorithm to its rows: all of them, those in the cache of `cache` bytes, those past it.

    A call counts as in the cache where the arrays of all ranks fill at most half of it: staged ones are there twice.
    """
    found = {}
    for (engine, algorithm), points in points_of(rows).items():
        parts = {"all sizes": points}
        if cache:
            parts["in cache"] = [p for p in points if 2 * p.ranks * p.nbytes <= cache]
            parts["past cache"] = [p for p in points if 2 * p.ranks * p.nbytes > cache]
        for part, chosen in parts.items():
            if chosen:
                found[engine, algorithm, part] = fit(chosen, cores=cores, name=f"{engine} {algorithm}, {part}")
    return found


# ---- NCCL's own estimate.


def nccl_estimates(comm, op: str, sizes: Sequence[int]) -> dict[int, float | None]:
    """Return NCCL's own estimate in seconds for each size in bytes of one float32 `op` on `comm`.

    None where it has none. Nothing is sent. C: ncclGroupSimulateEnd, since NCCL 2.22. Raises `EngineUnavailable` from
    an older one and `InvalidUsage` from an engine that makes no estimates.
    """
    library, native, found = comm.engine.library, comm._native, {}
    for nbytes in sizes:
        count = max(1, nbytes // 4 // comm.size) * comm.size
        array = torch.zeros(count, device=comm.device)
        part = array[: count // comm.size]
        stream = 0 if comm.device.type == "cpu" else torch.cuda.current_stream(comm.device).cuda_stream
        dtype, add = DTYPES["float32"], REDOPS["sum"]
        library.group_start()
        try:
            if op == "all_reduce":
                native.all_reduce(array.data_ptr(), array.data_ptr(), count, dtype, add, stream)
            elif op == "reduce_scatter":
                native.reduce_scatter(array.data_ptr(), part.data_ptr(), part.numel(), dtype, add, stream)
            else:
                native.all_gather(part.data_ptr(), array.data_ptr(), part.numel(), dtype, stream)
        finally:  # a refused call leaves its group open
            found[nbytes] = library.group_simulate_end()
    return found


def _own_nccl(op: str, sizes: Sequence[int]) -> tuple[int, dict[int, float | None]] | str:
    """Return (ranks, estimates) of a communicator over this process's GPU, or why there are none."""
    info = next(info for info in engines() if info.name == "nccl")
    if not info.available:
        return info.reason
    try:
        with init(engine="nccl") as comm:
            return comm.size, nccl_estimates(comm, op, sizes)
    except CollectivesError as error:
        return str(error)


# ---- Printing.


def parse_size(text: str) -> int:
    """Parse a number of bytes: "512", "64K", "16M", "1G"."""
    scale = {"K": 10, "M": 20, "G": 30}.get(text[-1:].upper(), 0)
    digits = text[:-1] if scale else text
    if not digits.isdigit():
        raise InvalidArgument(f"{text!r} is no size: write bytes, or a number with K, M or G")
    return int(digits) << scale


def show_size(nbytes: int) -> str:
    """Write a number of bytes with the unit that leaves at least one digit before the point."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes / (1 << bits):.3g} {unit}"
    return f"{nbytes} B"


def show_time(seconds: float) -> str:
    """Write a time in the unit that it is read best in."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


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
    """Add the options of the simulation to `parser`."""
    parser.add_argument("--op", choices=OPS, default="all_reduce", help="operation (default: %(default)s)")
    parser.add_argument("--ranks", default=_DEFAULT_RANKS, help="numbers of ranks (default: %(default)s)")
    parser.add_argument("--sizes", default=_DEFAULT_SIZES, help="sizes in bytes (default: %(default)s)")
    parser.add_argument("--network", choices=NETWORKS, default="dgx-h100", help="links (default: %(default)s)")
    parser.add_argument("--measured", type=Path, help="rows of the bench on this machine, to fit the model to")
    parser.add_argument(
        "--cache", type=parse_size, default=cache_bytes(), help="last-level cache of that machine (default: this one's)"
    )
    parser.add_argument("--json", type=Path, help="write everything to this file, too")


def main(args: Sequence[str] | argparse.Namespace | None = None) -> int:
    """Run the simulation; `args`: words, or what a parser with `add_options` has parsed. Returns the exit status."""
    if not isinstance(args, argparse.Namespace):
        words = [word for word in (sys.argv[1:] if args is None else args) if word != "--simulate"]
        parser = argparse.ArgumentParser(prog="python -m collectives.bench --simulate", description=__doc__)
        add_options(parser)
        args = parser.parse_args(words)
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
        measured, beside = read_rows(args.measured)
        fits = fits_of(measured, cores_of(measured, beside), args.cache)
        if not fits:
            raise InvalidArgument(f"{args.measured} has no rows of {', '.join(OPS)} by an algorithm of the model")
        _print_fits(fits, args.op, (2, 4, 8, 16, 64), sizes)
        for (engine, algorithm, part), one in fits.items():
            result["fits"].append({"engine": engine, "algorithm": algorithm, "part": part, **dataclasses.asdict(one)})
    own = _own_nccl(args.op, sizes)
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
