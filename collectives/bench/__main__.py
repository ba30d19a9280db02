"""Command of the bench: reads options, starts ranks, runs the session, and writes its rows."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return the exit code; ``--help`` lists the exit codes.

    ``argv``: arguments; default: the command line's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    from ..errors import CollectivesError, EngineUnavailable

    if "--simulate" in arguments:
        program = "python -m benchmarks.scaling, with the same options, in the source tree"
        print(f"collectives.bench: --simulate has a program of its own: {program}", file=sys.stderr)
        return 2
    from ..launcher import detect_launcher
    from .options import UsageError, parse

    first = True
    try:
        parent = _started_by(arguments)
        identity = detect_launcher()
        first = identity.rank == 0
        options = parse(arguments)
        if identity.launcher == "alone":
            return _alone(options, arguments)
        if options.ranks not in (None, identity.size):
            who = "RANK and WORLD_SIZE say" if identity.launcher == "env" else f"{identity.launcher} says"
            raise UsageError(f"--ranks {options.ranks}, but {who} that there are {identity.size}: leave --ranks out")
        return _rank(options, identity, parent)
    except (UsageError, EngineUnavailable) as error:
        if first:
            print(f"collectives.bench: {error}", file=sys.stderr)
        return 2
    except CollectivesError as error:
        print(f"collectives.bench: {error}", file=sys.stderr)
        return 1


def _started_by(arguments: list[str]) -> int | None:
    """Remove the pid of the process that started this rank from the command line, to which `_alone`
    added it.
    """
    if len(arguments) < 2 or arguments[-2] != "--started-by":
        return None
    parent = int(arguments.pop())
    arguments.pop()
    return parent


def _alone(options, arguments: list[str]) -> int:
    from ..comm.engine import get_engine
    from . import report
    from .options import UsageError
    from .processes import run_ranks

    old = _prepare_files(options)
    if options.rows_from:
        rows = report.read_rows(options.rows_from, "--from")
        return _finish(options, rows, old, True)
    engine = get_engine(options.engine)
    ranks = options.ranks
    if ranks is None:
        import torch

        ranks = torch.cuda.device_count() if engine.device_type == "cuda" else 2
    options.cases(ranks)
    if ranks % options.hosts:
        raise UsageError(f"--hosts {options.hosts}: {ranks} ranks can't be on so many machines evenly")
    return run_ranks(arguments, ranks, options.timeout, options.hosts)


def _rank(options, identity, parent: int | None) -> int:
    """Run as one rank, which a launcher or this program has started; return the exit code."""
    import torch

    from ..rendezvous import world
    from .control import Control
    from .options import UsageError
    from .processes import become_rank
    from .report import Report
    from .runner import Session

    if options.rows_from:
        raise UsageError("--from measures nothing: run it alone")
    options.cases(identity.size)
    if parent is None:
        faulthandler.dump_traceback_later(options.timeout, exit=True)
    else:
        become_rank(parent)
    torch.set_num_threads(1)  # torch's threads spin for a while after each loop, on cores that are measured
    if identity.local_rank is not None and torch.cuda.is_available() and options.engine != "host":
        torch.cuda.set_device(identity.local_rank % torch.cuda.device_count())  # torch's own groups use this device
    with world.init(options.engine, timeout=min(120.0, options.timeout)) as comm:
        control = Control(comm, options.timeout)
        old = _prepare_together(options, control)
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
    code = _finish(options, report.rows, old, right)
    if session.failed:
        print(f"collectives.bench: failed: {', '.join(session.failed)}", file=sys.stderr)
    return code or bool(session.failed)


def _prepare_together(options, control) -> list[dict] | None:
    """`_prepare_files` on rank 0.

    Its error ends all ranks, because not every launcher ends the others when one fails.
    """
    from .options import UsageError

    old, problem = None, None
    try:
        old = _prepare_files(options) if control.rank == 0 else None
    except UsageError as error:
        problem = str(error)
    problem = control.broadcast_from_rank_0(problem)
    if problem:
        control.close()
        raise UsageError(problem)
    return old


def _prepare_files(options) -> list[dict] | None:
    """Check before the measurement what would fail after it; return the rows to compare with."""
    from . import report
    from .options import UsageError

    for option in ("json", "csv", "plot"):
        path = getattr(options, option)
        if path is not None:
            report.check_writable(path, f"--{option}")
    if options.plot:
        from . import plot

        plot.check(options.plot)
    if options.compare is None:
        return None
    if options.json and options.json.exists() and os.path.samefile(options.compare, options.json):
        raise UsageError("--compare and --json are the same file: the old rows would be lost")
    return report.read_rows(options.compare, "--compare")


def _finish(options, rows: list[dict], old: list[dict] | None, right: bool) -> int:
    """Write the files, print the summaries, and return the exit code."""
    from . import report
    from .compare import compare
    from .ranking import print_ranking

    report.print_ratios(rows)
    print_ranking(rows)
    if options.json:
        report.write_json(options.json, rows)
    if options.csv:
        report.write_csv(options.csv, rows)
    if options.plot:
        from . import plot

        plot.draw(rows, options.plot)
    code = 0 if right else 1
    if old is not None:
        both, slower = compare(old, rows, options.tolerance)
        if not both:
            print(f"collectives.bench: --compare {options.compare}: it has none of this run's rows", file=sys.stderr)
            return code or 2
        code = code or (3 if slower else 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
