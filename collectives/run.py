"""``python -m collectives.run -n 4 script.py ...``: start a program's ranks, without MPI or Slurm.

It wraps torch's own launcher. It takes all of ``torchrun``'s options, with the same meaning, and
mpirun's and horovodrun's spellings of them. The system chooses the port, so concurrent jobs don't
collide. The ranks divide the cores. The exit code is that of the rank that failed first, which a
message names.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence

from torch.distributed import DistNetworkError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from .elastic.workers import ElasticJob, launch
from .errors import TransportError

__all__ = ["main"]

_NAME = "collectives.run"
_USAGE = """python -m collectives.run -n RANKS [option ...] SCRIPT [argument ...]
       python -m collectives.run -n RANKS [option ...] -m MODULE [argument ...]"""
_DEFAULT_PORT = 29500  # of torch's rendezvous by default
# Seconds between two checks of the ranks by torch's agent. In its own 0.1 s other ranks fail, too,
# after the first one, and then the first one is unknown.
_MONITOR_INTERVAL = 0.02
_ELASTIC_RESTARTS = 3  # of --elastic, where --max-restarts says nothing
# No rank dies of these because another one died: of ranks that were found dead together, such a
# rank was first.
_PRIMARY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# Errors of a rank whose cause is the end of another rank; the last one is Gloo's.
_SECONDARY_ERROR = re.compile(r"^(RemoteError|HorovodInternalError): |Connection (closed|reset) by peer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait until all have ended.

    Args:
        arguments: The command line. None: that of ``sys.argv``.

    Returns:
        0; or the code of the rank that failed first (128 + its number for a signal, as a shell
        does); 130 after Ctrl-C.

    Raises:
        SystemExit: With 2 for an invalid command line, as argparse does.
    """
    parser = _make_parser()
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.max_restarts is None:
        options.max_restarts = 0 if options.elastic is None else _ELASTIC_RESTARTS
    try:
        _set_variables(options)
        _complete_options(options)
    except ValueError as error:
        parser.error(str(error))
    if options.elastic is not None:
        return _run_elastic(parser, options)
    return _run(options)


# ---- The command line.


def _make_parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with our options added.

    It takes every option of the installed torch.
    """
    parser = torchrun.get_args_parser()
    if parser.get_default("max_restarts") == 0:  # neither the variable is set nor, so far, the option given
        parser.set_defaults(max_restarts=None)
    parser.prog, parser.usage = f"python -m {_NAME}", _USAGE
    parser.description = "Start the ranks of a program on this machine. All of torchrun's options are taken, too."
    ours = parser.add_argument_group("options beside torchrun's")
    add = ours.add_argument
    add("-n", "-np", "--np", "--nproc", "--num-proc", dest="ranks", metavar="RANKS",
        help="ranks on this machine: a number, auto, gpu or cpu")  # fmt: skip
    add("-x", dest="variables", action="append", default=[], metavar="VAR[=VALUE]",
        help="give the ranks a variable (they have this shell's in any case); may be repeated")  # fmt: skip
    add("-H", "--host", "--hosts", "--hostfile", "--machinefile", action=_RefuseHosts, help=argparse.SUPPRESS)
    add("--oversubscribe", nargs=0, action=_RefuseHosts, help=argparse.SUPPRESS)
    add("--elastic", metavar="MIN:MAX",
        help="an elastic job of so many ranks: those that die are started again and join")  # fmt: skip
    add("--start-timeout", type=int, metavar="SECONDS", help="how long the machines may take to find each other")
    add("--timeline-filename", metavar="FILE", help="sets COLLECTIVES_TIMELINE: each rank's trace")
    add("--fusion-threshold-mb", type=float, metavar="MB", help="sets HOROVOD_FUSION_THRESHOLD, in bytes")
    add("--cycle-time-ms", type=float, metavar="MS", help="sets HOROVOD_CYCLE_TIME")
    return parser


class _RefuseHosts(argparse.Action):
    """mpirun's and horovodrun's options for several nodes, on which nothing is started from here."""

    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(
            f"{option_string}: the ranks of this machine are started, -n says how many; for several machines run this "
            "command on each, with the same --nnodes, --master-addr and --master-port and its own --node-rank"
        )


def _set_variables(options: argparse.Namespace) -> None:
    """Set the variables of horovodrun's options and of -x in this process's environment.

    The ranks inherit them.
    """
    if options.timeline_filename is not None:
        os.environ["COLLECTIVES_TIMELINE"] = options.timeline_filename
    for name, value in (("fusion_threshold_mb", options.fusion_threshold_mb), ("cycle_time_ms", options.cycle_time_ms)):
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: not a number from 0 up")
    if options.fusion_threshold_mb is not None:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(int(options.fusion_threshold_mb * 2**20))
    if options.cycle_time_ms is not None:
        os.environ["HOROVOD_CYCLE_TIME"] = f"{options.cycle_time_ms:g}"
    for assignment in options.variables:
        name, sign, value = assignment.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z_0-9]*", name):
            raise ValueError(f"-x {assignment}: {name!r} is no name of a variable")
        if sign:
            os.environ[name] = value
        elif name not in os.environ:
            _log(f"-x {name}: there is no such variable here, so the ranks don't get one")


def _complete_options(options: argparse.Namespace) -> None:
    """Set the options that torch's launcher needs.

    Raises ``ValueError`` for a job that can't be started.
    """
    if options.ranks is not None:
        options.nproc_per_node = options.ranks
    try:
        count = torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise ValueError(f"-n {options.nproc_per_node}: {error}") from error
    if count < 1:
        raise ValueError(f"-n {options.nproc_per_node}: a job has at least one rank")
    options.nproc_per_node = str(count)
    if options.start_timeout is not None:
        if options.start_timeout < 1:
            raise ValueError(f"--start-timeout {options.start_timeout}: not a number of seconds from 1 up")
        limits = f"timeout={options.start_timeout},join_timeout={options.start_timeout}"
        options.rdzv_conf = ",".join(filter(None, (options.rdzv_conf, limits)))
    _check_program(options)
    alone = options.nnodes in ("1", "1:1") and options.rdzv_backend != "collectives"
    if alone and not options.rdzv_endpoint and options.master_port is None:
        # Any free port; and this node's own name needn't be resolvable.
        options.standalone = True
        options.local_addr = options.local_addr or "localhost"
    if options.monitor_interval == torchrun.get_args_parser().get_default("monitor_interval"):
        options.monitor_interval = _MONITOR_INTERVAL
    _set_omp_threads(count)
    try:
        torchrun.config_from_args(options)
    except (AssertionError, RuntimeError) as error:  # numbers that don't fit together
        raise ValueError(str(error)) from error


def _check_program(options: argparse.Namespace) -> None:
    program = options.training_script
    if options.module:
        try:
            sys.path.insert(0, os.getcwd())  # python -m searches it first
            found = importlib.util.find_spec(program.partition(".")[0])
        except (ImportError, ValueError):
            found = None
        finally:
            del sys.path[0]
        if found is None:
            raise ValueError(f"-m {program}: there is no such module")
    elif not options.no_python and not os.path.exists(program):
        raise ValueError(f"can't open file {program!r}: no such file in {os.getcwd()}")


def _set_omp_threads(ranks: int) -> None:
    """Set OMP_NUM_THREADS to each rank's part of the cores where it isn't set.

    torch's launcher would set 1, and without the variable each rank uses all cores.
    """
    if "OMP_NUM_THREADS" in os.environ or ranks == 1:
        return
    cores = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    threads = os.environ["OMP_NUM_THREADS"]
    _log(f"OMP_NUM_THREADS={threads} for each of {ranks} ranks on {cores} cores; set it to change that")


# ---- Running.


def _run_elastic(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run this node's part of an elastic job, with torchrun's options that fit one."""
    least, _, most = options.elastic.partition(":")
    ranks, nodes = int(options.nproc_per_node), options.nnodes.partition(":")[0]
    if not least.isdigit() or not (most or least).isdigit() or not nodes.isdigit():
        parser.error(f"--elastic {options.elastic} --nnodes {nodes}: they must be MIN:MAX ranks, and a number of nodes")
    host, _, port = (options.rdzv_endpoint or "").partition(":")
    port = port or str(options.master_port or (0 if nodes == "1" else _DEFAULT_PORT))
    job = ElasticJob(
        _worker_command(options), ranks, int(nodes), options.node_rank, int(least), int(most or least),
        options.max_restarts, host or (options.master_addr if nodes != "1" else "localhost"),
        int(port),
    )  # fmt: skip
    if not 0 < job.least <= job.start <= job.most:
        parser.error(f"--elastic {options.elastic}: {job.start} ranks start, so it takes MIN <= {job.start} <= MAX")
    try:
        return launch(job, _log)
    except TransportError as error:
        _log(str(error))
        return 1


def _worker_command(options: argparse.Namespace) -> list[str]:
    python = [] if options.no_python else [sys.executable, "-u"]
    return [*python, *(["-m"] if options.module else []), options.training_script, *options.training_script_args]


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGINT, _terminate_ranks)
    if hasattr(options, "signals_to_handle"):  # else this torch passes SIGINT on itself
        options.signals_to_handle = ",".join(s for s in options.signals_to_handle.split(",") if s != "SIGINT")
    if not options.max_restarts and "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):  # _report_failures reports the ends, once
                logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        return _report_failures(error.failures)
    except DistNetworkError as error:
        if options.standalone or "EADDRINUSE" not in str(error):
            raise
        where = options.rdzv_endpoint or f"--master-port {options.master_port or _DEFAULT_PORT}"
        _log(f"{where}: the port is in use by another program on this machine; give all machines a free one")
        return 1
    except (SignalException, KeyboardInterrupt) as error:
        number = signal.SIGINT if _interrupted or isinstance(error, KeyboardInterrupt) else error.sigval
        _log(f"ended by {signal.Signals(number).name}, and all ranks with it")
        return 128 + number
    return 0


_interrupted = False


def _terminate_ranks(_number: int, _frame: object) -> None:
    """Terminate the ranks at Ctrl-C by SIGTERM, as mpirun does.

    At SIGINT each of them would print its stack.
    """
    global _interrupted
    if not _interrupted:  # another one would interrupt torch's agent while it ends the ranks
        _interrupted = True
        raise SignalException("Ctrl-C", sigval=signal.SIGTERM)


def _report_failures(failures: dict[int, ProcessFailure]) -> int:
    """Report which rank failed first, and how; return its exit code."""
    ranks = list(failures)  # in the order of detection; those that the agent has ended come last
    limit = min(failure.timestamp for failure in failures.values()) + 1  # whole seconds
    own = [r for r in ranks if -failures[r].exitcode in _PRIMARY_SIGNALS and failures[r].timestamp <= limit]
    causes = [r for r in ranks if _is_cause(failures[r])]
    first = (own or causes or ranks)[0]
    failure, text = failures[first], _error_message(failures[first])
    code = failure.exitcode
    if text and code == -signal.SIGTERM:  # the agent ended it while it was ending
        code = 1
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (by the system, for lack of memory? `dmesg` tells)"
    else:
        how = f"ended with exit code {code}" + (f" ({text})" if text else "")
    others = [f"{r} ({failures[r].exitcode})" for r in ranks if r != first and failures[r].exitcode != -signal.SIGTERM]
    _log(
        f"rank {first} (process {failure.pid}) {how}; it was the first to fail, and the others were ended"
        + (f". Failed after it: rank {', '.join(others)}" if others else "")
    )
    return code if code > 0 else 128 - code


def _error_message(failure: ProcessFailure) -> str:
    """Return the first line of the exception that ended a rank.

    `failure_record` or torch's ``@record`` has stored it.
    """
    message = failure.error_file_data.get("message")
    text = message.get("message", "") if isinstance(message, dict) else ""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 300 else f"{line[:300]}..."


def _is_cause(failure: ProcessFailure) -> bool:
    """Return whether a rank failed by itself.

    False where it failed because of another rank's failure or the agent's signal.
    """
    text = _error_message(failure)
    return not _SECONDARY_ERROR.search(text) if text else failure.exitcode != -signal.SIGTERM


def _log(text: str) -> None:
    sys.stderr.write(f"{_NAME}: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
