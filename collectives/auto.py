"""Speed up DDP without changing the program: ``import collectives.auto``, or ``python -m
collectives.auto program.py``.

`fused_allreduce` is registered on each DistributedDataParallel object that has no communication
hook, in the object's first forward that prepares a backward. A hook that the program registers
before that forward stays. All ranks of the object's process group register the hook, or none does:
they decide in torch's store, and a rank that can't register it, or that runs without
``collectives.auto``, is named. Rank 0 logs one line for each object, to the logger
"collectives.auto", or to stderr where the program has set up no logging.

Settings are environment variables, read at import: ``COLLECTIVES_WIRE``, ``COLLECTIVES_BLOCK`` and
``COLLECTIVES_STREAMS`` are `HookState`'s arguments of these names. ``COLLECTIVES_AUTO=0`` turns
everything off. `InvalidArgument` names the variable whose value can't be used.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import os
import runpy
import sys
import time
import traceback
import weakref
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .comm.agree import ComparedValue, describe_differences
from .comm.liveness import RankExits, publish_process
from .comm.waiting import RankWait, format_ranks
from .ddp.fitness import find_reason
from .ddp.hook import HookState, fused_allreduce
from .environment import check_variables, read_switch
from .errors import CollectivesError, InvalidArgument, InvalidUsage, TransportError
from .gradients.unused_states import forget
from .json_records import parse_json, parse_numbers, parse_text
from .rendezvous.process_groups import get_group_timeout
from .torch_compat import default_store, untraced
from .torch_patches import observe_comm_hooks, patch_attribute

__all__ = ["leave_alone"]

_UNANNOUNCED_S = 5.0  # limit for a rank that has built no object with collectives.auto
_SLOW_S = 300.0  # limit for any other rank to come to the object's first forward

_USAGE = """usage: python -m collectives.auto SCRIPT [ARGUMENT ...]
       python -m collectives.auto -m MODULE [ARGUMENT ...]

Run a program as python itself would, with DDP models sped up as by `import collectives.auto`.
Python processes that the program starts get it, too (those of this environment, unless started with -I, -E or -S).
Under a launcher: torchrun --nproc-per-node 2 -m collectives.auto SCRIPT [ARGUMENT ...]
Settings: COLLECTIVES_WIRE, COLLECTIVES_BLOCK and COLLECTIVES_STREAMS: HookState's wire, block and streams."""

_log = logging.getLogger("collectives.auto")
# Tables, because attributes of a DDP object would be copied and pickled with it.
_numbers: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()
_outcomes: weakref.WeakKeyDictionary[DistributedDataParallel, str] = weakref.WeakKeyDictionary()
_REGISTERED, _LEFT_ALONE, _TO_LEAVE_ALONE = "registered", "left alone", "to leave alone"


def leave_alone(ddp: DistributedDataParallel) -> None:
    """Keep torch's own all-reduce for one DDP object.

    One rank's call counts for all ranks of the object's process group. It doesn't block.

    Args:
        ddp: The object. Call it before the object's first forward.

    Raises:
        InvalidUsage: Once `fused_allreduce` is registered, because a hook can't be taken off.
    """
    if _outcomes.get(ddp) == _REGISTERED:
        raise InvalidUsage(
            "leave_alone(): collectives.auto has registered fused_allreduce on this DDP object already, and a hook "
            "can't be taken off: call it before the first forward, or build the object again"
        )
    _outcomes.setdefault(ddp, _TO_LEAVE_ALONE)


# ---- Settings and patches.


def read_settings(environ: Mapping[str, str]) -> dict | None:
    """Return `HookState`'s arguments for the variables that are set, None for ``COLLECTIVES_AUTO=0``."""
    if environ.get("COLLECTIVES_AUTO", "").strip() and not read_switch("COLLECTIVES_AUTO", environ):
        return None
    given = {name: environ.get(f"COLLECTIVES_{name.upper()}", "").strip() for name in ("wire", "block", "streams")}
    given = {name: value for name, value in given.items() if value}
    settings = {name: int(value) if value.isdecimal() else value for name, value in given.items()}
    try:
        forget(HookState(**settings))
    except InvalidArgument as error:
        variables = ", ".join(f"COLLECTIVES_{name.upper()}={value}" for name, value in given.items())
        raise InvalidArgument(f"{variables}: {error.message}") from error
    return settings


def _install(settings: dict) -> None:
    """Patch DDP's constructor, which announces the object, and its forward, which decides once."""
    construct, plain_forward = DistributedDataParallel.__init__, DistributedDataParallel.forward

    @functools.wraps(construct)
    def __init__(self, *args, **kwargs):
        _announce()  # before the constructor, in which the ranks wait for each other
        construct(self, *args, **kwargs)
        self.default_hook = False  # our own class would register it by itself
        if self.process_group.size() > 1:
            _numbers[self] = _count_object(self.process_group)

    @untraced(recursive=False)
    @functools.wraps(plain_forward)
    def forward(self, *inputs, **kwargs):
        if _outcomes.get(self) not in (_REGISTERED, _LEFT_ALONE):
            _decide(self, settings)
        return plain_forward(self, *inputs, **kwargs)

    patch_attribute(DistributedDataParallel, "__init__", __init__, "collectives.auto announces each DDP object")
    patch_attribute(
        DistributedDataParallel, "forward", forward, "collectives.auto registers its hook in the first forward"
    )
    observe_comm_hooks(_refuse_second_hook)


def _refuse_second_hook(ddp, state, hook) -> None:
    if _outcomes.get(ddp) == _REGISTERED:
        raise InvalidUsage(
            "collectives.auto has registered fused_allreduce on this DDP object in its first forward, and DDP takes "
            "one hook: register yours before the first forward, or call collectives.auto.leave_alone(ddp) there"
        )


# ---- The first forward of a DDP object.


@untraced
def _decide(ddp, settings: dict) -> None:
    """Register the hook on all ranks or on none, if this forward prepares a backward with a reduction."""
    group = ddp.process_group
    if group.size() == 1:
        _outcomes[ddp] = _LEFT_ALONE
        return
    if not (torch.is_grad_enabled() and ddp.require_backward_grad_sync):
        return
    own_reason = "leave_alone() was called" if _outcomes.get(ddp) == _TO_LEAVE_ALONE else find_reason(ddp)
    reason, ranks = _Decision(ddp).make(own_reason, settings)
    _outcomes[ddp] = _LEFT_ALONE
    if not reason:
        state = HookState(process_group=group, **settings)
        forget(state)
        ddp.register_comm_hook(state, fused_allreduce)
        ddp._comm_hooks.pop()  # torch's list for compiled autograd alone, which would be pickled with the object
        _outcomes[ddp] = _REGISTERED
    # Where the others step back for rank 0 alone, it may be without collectives.auto and without a log.
    if group.rank() == 0 or (dist.get_process_group_ranks(group)[0] in ranks and not own_reason):
        options = "".join(f" {name}={value}" for name, value in settings.items())
        text = f"left alone: {own_reason or reason}" if reason else f"fused_allreduce on {group.size()} ranks{options}"
        level = logging.WARNING if reason and not own_reason else logging.INFO
        _write_log(level, f"DistributedDataParallel({type(ddp.module).__name__}): {text}")


def _announce() -> None:
    """Record in torch's store that this rank runs with ``collectives.auto``."""
    if dist.is_initialized():
        publish_process()
        default_store().set(f"collectives/auto/announced/{dist.get_rank()}", "")


def _count_object(group) -> int:
    """Return how many DDP objects this rank has built over a group.

    The number is the same on all ranks, which build objects in one order. The store counts, because
    it may outlive a group and its name.
    """
    return default_store().add(f"{_prefix(group)}/built/{dist.get_rank()}", 1)


def _prefix(group) -> str:
    return f"collectives/auto/{group.group_name}/{group.size()}"


class _Decision:
    """What the ranks of a DDP object decide in torch's store: to register the hook, or a reason against it.

    The first verdict in the store counts for all ranks, so that a late rank does as the others
    have done. Keys of an object: each rank's settings and model, and the verdict. Ranks are
    numbered as in the default group.
    """

    def __init__(self, ddp):
        group = ddp.process_group
        if ddp not in _numbers:  # built before collectives.auto was imported
            _announce()
            _numbers[ddp] = _count_object(group)
        self._group = group
        parameters = [p for p in ddp.parameters() if p.requires_grad]
        self._model = {
            "module": type(ddp.module).__name__,
            "parameters": len(parameters),
            "elements": sum(p.numel() for p in parameters),
        }
        self._store = default_store()
        self._ranks = dist.get_process_group_ranks(group)
        self._key = f"{_prefix(group)}/{_numbers[ddp]}"
        self._verdict_key = f"{self._key}/verdict"

    def make(self, own_reason: str, settings: dict) -> tuple[str, list[int]]:
        """Return the reason not to register the hook, "" for none, and the ranks that it is about.

        Blocks until all ranks have come, unless one of them has a reason.
        """
        rank = dist.get_rank()
        if own_reason:
            return self._settle(f"rank {rank}: {own_reason}", [rank])
        self._store.set(f"{self._key}/rank/{rank}", json.dumps({**settings, **self._model}))
        seconds = min(_SLOW_S, get_group_timeout(self._group, torch.device("cpu")) / 2)
        exits = RankExits(self._store, range(dist.get_world_size()))
        purpose = "to the first forward of this model under collectives.auto"
        wait = RankWait(purpose, rank, dist.get_world_size(), seconds, exit_reason=exits.reason)
        announced_by, pause = time.monotonic() + _UNANNOUNCED_S, 0.001
        while not self._store.check([self._verdict_key]):
            if self._store.check([f"{self._key}/rank/{other}" for other in self._ranks]):
                return self._settle(self._compare(), [])
            try:
                wait.check(self._find_missing)
            except CollectivesError as error:
                return self._settle(error.message, [*error.peers])
            if time.monotonic() > announced_by:
                without = [
                    other
                    for other in self._find_missing()
                    if not self._store.check([f"collectives/auto/announced/{other}"])
                ]
                if without:
                    return self._settle(
                        f"{format_ranks(without)} built this model without collectives.auto, or with "
                        "COLLECTIVES_AUTO=0: import it in every rank's program, or start every rank with "
                        "python -m collectives.auto",
                        without,
                    )
                announced_by = math.inf
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        return self._read(self._store.get(self._verdict_key))

    def _settle(self, reason: str, ranks: list[int]) -> tuple[str, list[int]]:
        """Write a verdict, and return the one that counts."""
        return self._read(self._store.compare_set(self._verdict_key, "", json.dumps([reason, ranks])))

    def _read(self, verdict: bytes) -> tuple[str, list[int]]:
        try:
            reason, ranks = parse_json(verdict)
            return parse_text(reason), parse_numbers(ranks)
        except (TypeError, ValueError) as error:
            raise TransportError(f"the ranks' decision in torch's store can't be read: {verdict[:80]!r}") from error

    def _compare(self) -> str:
        values = [self._store.get(f"{self._key}/rank/{rank}") for rank in self._ranks]
        try:
            tables = [dict(parse_json(value)) for value in values]
        except (TypeError, ValueError) as error:
            raise TransportError(f"the ranks' settings in torch's store can't be read: {str(values)[:200]}") from error
        differences = describe_differences([ComparedValue(table.items()).entries for table in tables], self._ranks)
        return f"the ranks' settings or models differ ({differences})" if differences else ""

    def _find_missing(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"{self._key}/rank/{rank}"])]


def _write_log(level: int, text: str) -> None:
    """Log a line with the program's handlers; write it to stderr where the program has none."""
    if _log.hasHandlers():
        _log.log(level, text)
    elif level >= (_log.level or logging.INFO):
        print(f"collectives.auto: {text}", file=sys.stderr, flush=True)


# ---- python -m collectives.auto


def run_program(words: list[str]) -> None:
    """Run a program by the words of its command line, as python would."""
    if words[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        sys.exit(0)
    as_module = words[:1] == ["-m"]
    words = words[1:] if as_module else words
    if not words or words[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        sys.exit(2)
    if _settings is not None:
        _reach_children()
    sys.argv[:] = words
    if as_module:
        sys.excepthook = _make_excepthook(_find_file(words[0]))
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    if not os.path.exists(words[0]):
        print(f"python -m collectives.auto: can't open file {words[0]!r}", file=sys.stderr)
        sys.exit(2)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # there python -m has put the working folder
    sys.excepthook = _make_excepthook(words[0])
    runpy.run_path(words[0], run_name="__main__")


def _reach_children() -> None:
    """Have the Python processes that the program starts import ``collectives.auto``, too.

    A program that starts the other ranks itself does so by ``sys.argv``, which has no
    ``-m collectives.auto``, or by multiprocessing.
    """
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "auto_children")
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *others])
    os.environ["COLLECTIVES_AUTO_CHILDREN"] = sys.prefix


def _find_file(module: str) -> str | None:
    """Return the file that ``-m`` runs; None where the module doesn't exist, which runpy reports."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ImportError:
        return None
    return None if spec is None else spec.origin


def _make_excepthook(path: str | None):
    """Return an excepthook that leaves out the frames above the program's own."""

    def print_program_trace(kind, error, trace):
        first = trace
        while first is not None and first.tb_frame.f_code.co_filename != path:
            first = first.tb_next
        traceback.print_exception(kind, error, first or trace)

    return print_program_trace


if __name__ == "__main__":
    # This copy of the module is named __main__; the one that programs import does the work.
    from collectives import auto

    auto.run_program(sys.argv[1:])
else:
    check_variables()
    _settings = read_settings(os.environ)
    if _settings is not None and dist.is_available():
        _install(_settings)
