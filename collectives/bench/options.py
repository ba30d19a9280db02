"""Command line of the bench: nccl-tests' options, and ours."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from .. import __version__
from .cases import OPS, REDOPS, TYPES, Case

__all__ = ["PEERS", "Options", "UsageError", "parse"]

PEERS = ("gloo", "nccl", "collectives", "mpi4py-openmpi", "mpi4py-mpich", "mpi4py-intelmpi", "deepspeed")
_ALGORITHMS = ("native", "ring", "direct")
_ZERO_COPY = {"no": (False,), "yes": (True,), "both": (False, True)}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_MAX_SIZES = 10_000
_OP_NAMES = OPS | {"alltoall": OPS["all_to_all"], "allreduce": OPS["all_reduce"], "allgather": OPS["all_gather"]}

_EPILOG = """\
Sizes are bytes and may end in K, M, G (powers of 1024). Run it alone (it starts --ranks processes and ends them all
when one fails, and on Ctrl-C), under torchrun, or under mpirun.

time is the median over the timed batches (iterations of -m calls in a row) of the slowest rank's time per call.
With --fresh each call is timed alone, after a barrier.
algbw = size / time; busbw is algbw times nccl-tests' factor for the collective. #wrong counts the elements, over all
ranks, whose bits are not those of the exact result.

exit codes: 0 all is well; 1 a rank or a peer failed, something was wrong, or --timeout was reached; 2 the command line
can't be followed; 130 Ctrl-C.

examples:
  python -m collectives.bench --ranks 2 -b 1K -e 256M -f 4
  python -m collectives.bench --ranks 4 --collective all -d float,bfloat16 --json rows.jsonl
  python -m collectives.bench --ranks 2 --zero-copy both --peers gloo,mpi4py-openmpi --plot out.png
  torchrun --nproc-per-node 2 -m collectives.bench --peers all
"""


class UsageError(Exception):
    """The command line can't be followed; the text says why. Exit code 2."""


class Options(argparse.Namespace):
    """Checked options; ``--help`` has their meanings. Sizes in bytes, times in seconds."""

    def cases(self, ranks: int) -> list[Case]:
        """Return the cases in the order of measurement, without duplicates. Raises `UsageError`."""
        found = []
        for op in self.ops:
            roots = [-1] if not op.rooted else list(range(ranks)) if self.root == "all" else [self.root]
            if op.rooted and roots[-1] >= ranks:
                raise UsageError(f"-r {self.root}: the ranks are 0 to {ranks - 1}")
            for kind in self.kinds:
                for redop in self.redops if op.reduces else [None]:
                    for root in roots:
                        found += [Case.of(op, kind, redop, root, nbytes, ranks) for nbytes in self.sizes]
        return list(dict.fromkeys(found))


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(f"{message} (--help lists the options)")


def parse(argv: list[str]) -> Options:
    """Read and check the command line. Raises `UsageError`."""
    options = _make_parser().parse_args(argv, Options())
    options.sizes = options.sizes or _list_sizes(options)
    options.zero_copy = _ZERO_COPY[options.zero_copy]
    if options.turns is None:
        options.turns = 1 if not options.peers and len(options.algorithm) * len(options.zero_copy) == 1 else 5
    return options


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m collectives.bench",
        description="Measure the collectives, check what they give, and measure other libraries beside them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    types = {kind.short: kind for kind in TYPES.values()}
    add = parser.add_argument_group("as in nccl-tests").add_argument
    add("-b", "--minbytes", default="1K", type=_size, metavar="SIZE", help="smallest size (default: 1K)")
    add("-e", "--maxbytes", default="64M", type=_size, metavar="SIZE", help="largest size (default: 64M)")
    add("-f", "--stepfactor", type=float, metavar="N", help="factor between sizes (default: 4, where -i is not given)")
    add("-i", "--stepbytes", type=_size, metavar="SIZE", help="increment between sizes, in place of -f")
    add("-d", "--datatype", dest="kinds", default="float", type=_names("data type", types, types | TYPES),
        metavar="TYPE", help=f"all, or some of {', '.join(types)} (torch's names, too)")  # fmt: skip
    add("-o", "--redop", dest="redops", default="sum", type=_names("reduction", REDOPS), metavar="OP",
        help=f"reduction: all, or some of {', '.join(REDOPS)}")  # fmt: skip
    add("-r", "--root", default="0", type=_root, metavar="RANK", help="root: a rank, or all (default: 0)")
    add("-n", "--iters", default=20, type=_at_least(1), metavar="N", help="timed iterations a turn (default: 20)")
    add("-m", "--agg_iters", dest="calls", type=_at_least(1), metavar="N",
        help="calls in a row that one iteration times together (default: 16 up to 16K, 4 up to 256K, else 1)",
        )  # fmt: skip
    add("-w", "--warmup_iters", dest="warmup", default=5, type=_at_least(0), metavar="N",
        help="calls before each turn that are not timed (default: 5)")  # fmt: skip
    add("-c", "--check", default=1, type=_at_least(0), metavar="N",
        help="check every element of N results (default: 1; 0: none)")  # fmt: skip
    add("-z", "--blocking", default=0, type=int, choices=(0, 1), help="on GPUs: wait for each call")
    add("-T", "--timeout", default=3600.0, type=_seconds, metavar="S",
        help="hard limit of the whole run, seconds (default: 3600)")  # fmt: skip

    add = parser.add_argument_group("what is measured").add_argument
    add("--collective", "--op", dest="ops", default="all_reduce", type=_names("collective", OPS, _OP_NAMES),
        metavar="NAME", help=f"all, or some of {', '.join(OPS)}")  # fmt: skip
    add("--ranks", type=_at_least(1), metavar="N",
        help="rank processes to start, alone (default: 2, or the number of GPUs)")  # fmt: skip
    add("--hosts", type=_at_least(1), default=1, metavar="N",
        help="let the started ranks act as on N machines, as many on each, with the loopback between")  # fmt: skip
    add("--bind", choices=("core", "none"),
        help="bind each rank to a core of its own or to none (default: core where there are enough)")  # fmt: skip
    add("--sizes", type=_sizes, metavar="SIZE,...", help="these sizes, in place of -b -e -f -i")
    add("--engine", choices=("host", "nccl"), help="default: nccl with a GPU, else host")
    add("--algorithm", default="native", type=_names("algorithm", _ALGORITHMS), metavar="NAME",
        help=f"all, or some of {', '.join(_ALGORITHMS)} (default: native, the library's)")  # fmt: skip
    add("--zero-copy", nargs="?", const="yes", default="no", choices=tuple(_ZERO_COPY),
        help="arrays from comm.empty(), which need no staging copy; both: with and without")  # fmt: skip
    add("--peers", default=(), type=_peers, metavar="NAME",
        help=f"measure these in turn with ours: all, or some of {', '.join(PEERS)}, or another backend of "
        "torch.distributed")  # fmt: skip
    add("--fresh", action="store_true",
        help="new data in every call: the rank writes the next array's input before it, not timed")  # fmt: skip
    add("--turns", type=_at_least(1), metavar="N",
        help="turns that each one gets at each size (default: 1, with others beside it 5)")  # fmt: skip

    add = parser.add_argument_group("what is done with it").add_argument
    add("--json", type=Path, metavar="FILE", help="append all rows, one JSON object a line")
    add("--plot", type=Path, metavar="FILE",
        help="draw time and bandwidth against size (png, svg, pdf); needs matplotlib")  # fmt: skip
    parser.add_argument("--version", action="version", version=f"collectives {__version__}")
    parser.add_argument("--started-by", type=int, help=argparse.SUPPRESS)  # of a rank: this program's process id
    return parser


def _names(what: str, every, known=None) -> Callable[[str], list]:
    """Return a reader of comma-separated names, or "all"; what they stand for, in their order and each once.

    ``every``: what "all" means; ``known``: with other names; dicts, or names that stand for themselves.
    """
    every = every if isinstance(every, dict) else {name: name for name in every}

    def read(text: str) -> list:
        found = []
        for name in map(str.strip, text.split(",")):
            if name != "all" and name not in (known or every):
                also = f"; the reduction {name!r} is named by -o" if what == "collective" and name in REDOPS else ""
                raise argparse.ArgumentTypeError(f"no {what} {name!r}; there are {', '.join(every)} and all{also}")
            found += every.values() if name == "all" else [(known or every)[name]]
        return list(dict.fromkeys(found))

    return read


def _peers(text: str) -> list[str]:
    backends = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    return _names("peer", PEERS, {name: name for name in (*PEERS, *backends)})(text)


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: it has to be a whole number and at least {least}")
        return int(text)

    return read


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: it has to be above 0")
    return seconds


def _root(text: str) -> str | int:
    if text in ("all", "-1"):
        return "all"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: a root is a rank's number, or all")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: a size is a number of bytes such as 512, 1K, 25M or 1G")
    number = float(match[1]) * 2 ** _UNITS[match[2].upper()]
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text}: that is no whole number of bytes")
    return int(number)


def _sizes(text: str) -> list[int]:
    return [_size(part) for part in text.split(",")]


def _list_sizes(options: Options) -> list[int]:
    """Return the sizes that -b, -e, -f and -i name."""
    low, high, step, factor = options.minbytes, options.maxbytes, options.stepbytes, options.stepfactor
    if low > high:
        raise UsageError(f"-b {low} is larger than -e {high}")
    if step is not None and factor is not None:
        raise UsageError("-i and -f can't be given together")
    if step is not None and step < 1:
        raise UsageError(f"-i {step}: the increment has to be at least 1 byte")
    factor = factor or 4
    if not 1 < factor < math.inf:
        raise UsageError(f"-f {factor}: the factor has to be above 1")
    sizes = [low]
    while len(sizes) <= _MAX_SIZES:
        following = sizes[-1] + step if step else max(int(sizes[-1] * factor), sizes[-1] + 1)
        if following > high:
            return sizes
        sizes.append(following)
    raise UsageError(f"from {low} to {high} with that step are more than {_MAX_SIZES} sizes")
