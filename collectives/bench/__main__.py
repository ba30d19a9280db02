"""Command of the bench: reads options, starts ranks, runs the session, and writes its rows."""

from __future__ import annotations

import contextlib
import faulthandler
import sys

import torch

from ..comm.engine import get_engine
from ..errors import CollectivesError, EngineUnavailable
from ..launcher import Identity, detect_launcher
from ..rendezvous import world
from .control import Control
from .options import Options, UsageError, parse
from .plot import check_plot, draw_plot
from .processes import end_with_parent, run_ranks
from .report import Report, check_writable
from .runner import Session

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code; ``--help`` lists the exit codes.

    ``argv``: arguments; default: the command line's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_first = True
    try:
        identity = detect_launcher()
        is_first = identity.rank == 0
        options = parse(arguments)
        if identity.launcher == "alone":
            return _start_ranks(options, arguments)
        if options.ranks not in (None, identity.size):
            who = "RANK and WORLD_SIZE say" if identity.launcher == "env" else f"{identity.launcher} says"
            raise UsageError(f"--ranks {options.ranks}, but {who} that there are {identity.size}: leave --ranks out")
        return _run_rank(options, identity)
    except (UsageError, EngineUnavailable) as error:
        if is_first:
            print(f"collectives.bench: {error}", file=sys.stderr)
        return 2
    except CollectivesError as error:
        print(f"collectives.bench: {error}", file=sys.stderr)
        return 1


def _start_ranks(options: Options, arguments: list[str]) -> int:
    """Check what can be checked before the ranks start, run them, and return the exit code."""
    _check_files(options)
    engine = get_engine(options.engine)
    ranks = options.ranks or (torch.cuda.device_count() if engine.device_type == "cuda" else 2)
    options.cases(ranks)
    if ranks % options.hosts:
        raise UsageError(f"--hosts {options.hosts}: {ranks} ranks can't be on so many machines evenly")
    return run_ranks(arguments, ranks, options.hosts)


def _run_rank(options: Options, identity: Identity) -> int:
    """Run as one rank, which a launcher or this program has started; return the exit code."""
    if options.started_by is not None:
        end_with_parent(options.started_by)
    faulthandler.dump_traceback_later(options.timeout, exit=True)
    options.cases(identity.size)
    torch.set_num_threads(1)  # torch's threads spin for a while after each loop, on cores that are measured
    if identity.local_rank is not None and torch.cuda.is_available() and options.engine != "host":
        torch.cuda.set_device(identity.local_rank % torch.cuda.device_count())  # torch's own groups use this device
    with world.init(options.engine, timeout=min(120.0, options.timeout)) as comm:
        control = Control(comm, options.timeout)
        _check_files_together(options, control)
        report = Report(options, comm.size, comm.engine.name) if comm.rank == 0 else None
        session = Session(options, comm, control, report)
        with contextlib.closing(session):
            session.open()
            session.run()
        right = report.end() if report else True
        control.close()
    faulthandler.cancel_dump_traceback_later()
    if report is None:
        return 0
    if options.plot:
        draw_plot(report.rows, options.plot)
    if session.failed:
        print(f"collectives.bench: failed: {', '.join(session.failed)}", file=sys.stderr)
    return 0 if right and not session.failed else 1


def _check_files_together(options: Options, control: Control) -> None:
    """Check the files on rank 0, and raise its error on all ranks.

    Not every launcher ends the others when one fails.
    """
    problem = None
    if control.rank == 0:
        try:
            _check_files(options)
        except UsageError as error:
            problem = str(error)
    problem = control.broadcast_from_rank_0(problem)
    if problem:
        control.close()
        raise UsageError(problem)


def _check_files(options: Options) -> None:
    """Raise `UsageError` before the measurement for what would fail after it."""
    if options.json:
        check_writable(options.json, "--json")
    if options.plot:
        check_plot(options.plot)
        check_writable(options.plot, "--plot")


if __name__ == "__main__":
    sys.exit(main())
