"""Command line of the bench: nccl-tests' options, and ours."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path

from .. import __version__
from .cases import OPS, REDOPS, TYPES, Case, DataType

__all__ = ["ALGORITHMS", "PEERS", "Options", "UsageError", "parse"]

ALGORITHMS = ("auto", "native", "ring", "direct")
PEERS = (
    "gloo", "openmpi", "mpich", "intelmpi", "mpi4py-openmpi", "mpi4py-mpich", "mpi4py-intelmpi", "deepspeed", "nccl",
    "backend",
)  # fmt: skip
_ZERO_COPY = {"no": (False,), "yes": (True,), "both": (False, True)}
_WIRES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "e5m2": "float8_e5m2"}
_TYPE_NAMES = {kind.short: kind for kind in TYPES.values()} | TYPES | {"fp8": TYPES["float8_e4m3fn"]}
_OP_NAMES = OPS | {"alltoall": OPS["all_to_all"], "allreduce": OPS["all_reduce"], "allgather": OPS["all_gather"]}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_MAX_SIZES = 10_000

_EPILOG = """\
Sizes are bytes and may end in K, M, G (powers of 1024). Run it alone (it starts --ranks processes and ends them all
when one fails, on Ctrl-C, and at --timeout), under torchrun, or under mpirun.

time is the median over the timed batches (iterations of -m calls in a row) of the slowest rank's time per call.
With --fresh each call is timed alone, after a barrier.
algbw = size / time; busbw is algbw times nccl-tests' factor for the collective. #wrong counts the elements, over all
ranks, whose bits are not those of the exact result.

exit codes: 0 all is well; 1 a rank or a peer failed, or something was wrong; 2 the command line can't be followed;
3 --compare found a regression; 4 --timeout was reached; 130 Ctrl-C.

examples:
  python -m collectives.bench --ranks 2 -b 1K -e 256M -f 4
  python -m collectives.bench --ranks 4 --collective all -d float,bfloat16 --json out.json
  python -m collectives.bench --ranks 2 --zero-copy both --peers gloo,openmpi --plot out.png
  python -m collectives.bench --ranks 2 --collective all --peers mpi4py-openmpi,mpi4py-intelmpi --fresh
  torchrun --nproc-per-node 2 -m collectives.bench --compare out.json
"""


class UsageError(Exception):
    """The command line, or a file that it names, can't be followed; the text says why.

    Exit code 2.
    """


@dataclasses.dataclass
class Options:
    """Checked options; ``--help`` has their meanings. Sizes in bytes, times in seconds."""

    sizes: list[int]
    ops: list
    kinds: list[DataType]
    redops: list[str]
    root: str | int
    iters: int
    warmup: int
    calls: int | None
    turns: int
    check: int
    blocking: bool
    percentiles: bool
    engine: str | None
    algorithms: list[str]
    zero_copy: tuple[bool, ...]
    wires: list[DataType | None]
    fresh: int | None
    peers: list[str]
    ranks: int | None
    hosts: int
    bind: str | None
    timeout: float
    json: Path | None
    csv: Path | None
    plot: Path | None
    compare: Path | None
    tolerance: float
    rows_from: Path | None

    def binds(self, ranks: int, cores: int) -> bool:
        """Return whether each rank is bound to a core of its own.

        Without ``--bind`` it is, where there are enough cores.
        """
        return self.bind == "core" or self.bind is None and ranks <= cores

    def cases(self, ranks: int) -> list[Case]:
        """Return the cases in the order of measurement, without duplicates."""
        wires = [wire for wire in self.wires if wire is not None]
        found = []
        for op in self.ops:
            roots = [-1] if not op.rooted else list(range(ranks)) if self.root == "all" else [self.root]
            for kind in self.kinds:
                for redop in self.redops if op.reduces else [None]:
                    for root in roots:
                        if op.rooted and root >= ranks:
                            raise UsageError(f"-r {root}: the ranks are 0 to {ranks - 1}")
                        for nbytes in self.sizes:
                            found.append(Case.of(op, kind, redop, root, nbytes, ranks, wires))
        return list(dict.fromkeys(found))


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (--help lists the options)")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m collectives.bench",
        description="Measure the collectives, check what they give, and measure other libraries beside them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_nccl_tests_options(parser.add_argument_group("as in nccl-tests").add_argument)
    _add_measured_options(parser.add_argument_group("what is measured").add_argument)
    _add_output_options(parser.add_argument_group("what is done with it").add_argument)
    parser.add_argument("--version", action="version", version=f"collectives {__version__}")
    return parser


def _add_nccl_tests_options(add) -> None:
    add("-b", "--minbytes", default="1K", metavar="SIZE", help="smallest size (default: 1K)")
    add("-e", "--maxbytes", default="64M", metavar="SIZE", help="largest size (default: 64M)")
    add("-f", "--stepfactor", metavar="N", help="factor between sizes (default: 4, where -i is not given)")
    add("-i", "--stepbytes", metavar="SIZE", help="increment between sizes, in place of -f")
    add(
        "-d",
        "--datatype",
        default="float",
        metavar="TYPE",
        help=f"all, or some of {', '.join(k.short for k in TYPES.values())} (torch's names, too)",
    )
    add("-o", "--redop", default="sum", metavar="OP", help=f"reduction: all, or some of {', '.join(REDOPS)}")
    add("-r", "--root", default="0", metavar="RANK", help="root: a rank, or all (default: 0)")
    add("-n", "--iters", default=20, type=int, metavar="N", help="timed iterations a turn (default: 20)")
    add(
        "-m",
        "--agg_iters",
        type=int,
        metavar="N",
        help="calls in a row that one iteration times together (default: 16 up to 16K, 4 up to 256K, else 1)",
    )
    add(
        "-w",
        "--warmup_iters",
        default=5,
        type=int,
        metavar="N",
        help="calls before each turn that are not timed (default: 5)",
    )
    add(
        "-c", "--check", default=1, type=int, metavar="N", help="check every element of N results (default: 1; 0: none)"
    )
    add(
        "-z",
        "--blocking",
        default=0,
        type=int,
        choices=(0, 1),
        help="on GPUs: wait for each call; the host's always do",
    )
    add(
        "-T",
        "--timeout",
        default=3600.0,
        type=float,
        metavar="S",
        help="hard limit of the whole run, seconds (default: 3600)",
    )


def _add_measured_options(add) -> None:
    add("--collective", "--op", default="all_reduce", metavar="NAME", help=f"all, or some of {', '.join(OPS)}")
    add("--ranks", type=int, metavar="N", help="rank processes to start, alone (default: 2, or the number of GPUs)")
    add(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="let the started ranks act as on N machines, as many on each, with the loopback between",
    )
    add(
        "--bind",
        choices=("core", "none"),
        help="bind each rank, of the peers too, to a core of its own or to none (default: core where there are enough)",
    )
    add("--sizes", metavar="SIZE,...", help="these sizes, in place of -b -e -f -i")
    add("--engine", choices=("host", "nccl"), help="default: nccl with a GPU, else host")
    add(
        "--algorithm",
        default="auto",
        metavar="NAME",
        help=f"all, or some of {', '.join(ALGORITHMS)} (default: auto, the library's own choice)",
    )
    add(
        "--zero-copy",
        nargs="?",
        const="yes",
        default="no",
        choices=tuple(_ZERO_COPY),
        help="arrays from comm.empty(), which need no staging copy; both: with and without",
    )
    add(
        "--wire",
        default="none",
        metavar="NAME",
        help=f"cast to this before the collective and back after it, timed with it: some of none, {', '.join(_WIRES)}",
    )
    add(
        "--peers",
        default="",
        metavar="NAME",
        help=f"measure these in turn with ours: all, or some of {', '.join(PEERS)}",
    )
    add(
        "--fresh",
        nargs="?",
        const="512M",
        metavar="SIZE",
        help="new data in every call: each has the next of several arrays, which the rank writes before it, not timed; "
        "as many as there are calls, or as pass the last-level cache, or as take SIZE (default: 512M) of a rank",
    )
    add(
        "--turns",
        type=int,
        metavar="N",
        help="turns that each one gets at each size (default: 1, with others beside it 5)",
    )
    add(
        "--simulate",
        action="store_true",
        help="ended: in the source tree python -m benchmarks.scaling predicts the times of many ranks",
    )


def _add_output_options(add) -> None:
    add("--percentiles", action="store_true", help="print p95 and p99 beside the time (the files always have them)")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all rows; a name that ends in .jsonl is appended to, a row a line",
    )
    add("--csv", type=Path, metavar="FILE", help="write all rows")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw time and bandwidth against size (png, svg, pdf); needs matplotlib",
    )
    add(
        "--compare",
        type=Path,
        metavar="FILE",
        help="compare with an earlier --json file; a regression of ours is exit code 3",
    )
    add(
        "--tolerance",
        default=0.2,
        type=float,
        metavar="X",
        help="slower by more than this part is a regression (default: 0.2)",
    )
    add(
        "--from", dest="rows_from", type=Path, metavar="FILE", help="measure nothing: take the rows of this --json file"
    )


def parse(argv: list[str]) -> Options:
    """Read and check the command line. Raises `UsageError`."""
    arguments = _make_parser().parse_args(argv)
    algorithms = _chosen(arguments.algorithm, {name: name for name in ALGORITHMS}, "--algorithm", "algorithm")
    wires = _chosen(arguments.wire, {"none": None} | {k: TYPES[v] for k, v in _WIRES.items()}, "--wire", "wire format")
    zero_copy = _ZERO_COPY[arguments.zero_copy]
    peers = _chosen(arguments.peers, {name: name for name in PEERS}, "--peers", "peer") if arguments.peers else []
    alone = not peers and len(algorithms) * len(wires) * len(zero_copy) == 1
    least = {"iters": 1, "warmup_iters": 0, "check": 0, "turns": 1, "agg_iters": 1, "ranks": 1, "hosts": 1}
    for name, low in least.items():
        value = getattr(arguments, name)
        if value is not None and value < low:
            raise UsageError(f"--{name} {value}: it has to be at least {low}")
    for name in ("timeout", "tolerance"):
        if not (0 < getattr(arguments, name) < math.inf or name == "tolerance" and arguments.tolerance == 0):
            raise UsageError(f"--{name} {getattr(arguments, name):g}: it has to be above 0")
    fresh = None if arguments.fresh is None else _bytes(arguments.fresh, "--fresh")
    if fresh == 0:
        raise UsageError("--fresh 0: it has to be at least 1 byte")
    kinds = _chosen(arguments.datatype, _TYPE_NAMES, "-d", "data type", every=TYPES)
    if any(wires) and [k for k in kinds if k.name not in ("float32", "float64", "float16", "bfloat16")]:
        raise UsageError("--wire casts floating-point data: give -d float, double, half or bfloat16")
    checked = {
        "sizes": _sizes(arguments), "ops": _ops(arguments.collective), "kinds": kinds,
        "redops": _chosen(arguments.redop, {name: name for name in REDOPS}, "-o", "reduction"),
        "root": _root(arguments.root), "warmup": arguments.warmup_iters, "calls": arguments.agg_iters,
        "turns": arguments.turns or (1 if alone else 5), "blocking": bool(arguments.blocking),
        "algorithms": algorithms, "zero_copy": zero_copy, "wires": wires, "peers": peers,
        "fresh": fresh,
    }  # fmt: skip
    values = vars(arguments) | checked
    return Options(**{field.name: values[field.name] for field in dataclasses.fields(Options)})


def _chosen(text: str, names: dict, option: str, what: str, every=None) -> list:
    """Look up comma-separated names, or "all", in their order and each once."""
    found = []
    for name in text.split(","):
        if name.strip() == "all":
            found += (every or names).values()
        elif name.strip() in names:
            found.append(names[name.strip()])
        else:
            raise UsageError(
                f"{option} {text}: no {what} {name.strip()!r}; there are {', '.join(every or names)} and all"
            )
    return list(dict.fromkeys(found))


def _ops(text: str) -> list:
    wrong = [name for name in text.split(",") if name in REDOPS]
    if wrong:
        raise UsageError(
            f"--op {text}: the reduction {wrong[0]!r} is named by -o; --op (--collective) names collectives"
        )
    return _chosen(text, _OP_NAMES, "--collective", "collective", every=OPS)


def _root(text: str) -> str | int:
    if text in ("all", "-1"):
        return "all"
    if not text.isdecimal():
        raise UsageError(f"-r {text}: a root is a rank's number, or all")
    return int(text)


def _bytes(text: str, option: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise UsageError(f"{option} {text}: a size is a number of bytes such as 512, 1K, 25M or 1G")
    number = float(match[1]) * 2 ** _UNITS[match[2].upper()]
    if number != int(number):
        raise UsageError(f"{option} {text}: that is no whole number of bytes")
    return int(number)


def _sizes(arguments) -> list[int]:
    if arguments.sizes is not None:
        return [_bytes(text, "--sizes") for text in arguments.sizes.split(",")]
    low, high = _bytes(arguments.minbytes, "-b"), _bytes(arguments.maxbytes, "-e")
    if low > high:
        raise UsageError(f"-b {arguments.minbytes} is larger than -e {arguments.maxbytes}")
    if arguments.stepbytes is not None and arguments.stepfactor is not None:
        raise UsageError("-i and -f can't be given together")
    step = _bytes(arguments.stepbytes, "-i") if arguments.stepbytes is not None else 0
    if arguments.stepbytes is not None and step < 1:
        raise UsageError(f"-i {arguments.stepbytes}: the increment has to be at least 1 byte")
    try:
        factor = float(arguments.stepfactor or 4)
    except ValueError:
        raise UsageError(f"-f {arguments.stepfactor}: the factor has to be a number") from None
    if not 1 < factor < math.inf:
        raise UsageError(f"-f {arguments.stepfactor}: the factor has to be above 1")
    sizes = [low]
    while len(sizes) <= _MAX_SIZES:
        after = sizes[-1] + step if step else max(int(sizes[-1] * factor), sizes[-1] + 1)
        if after > high:
            return sizes
        sizes.append(after)
    raise UsageError(f"-b {arguments.minbytes} -e {arguments.maxbytes} with that step are more than {_MAX_SIZES} sizes")
