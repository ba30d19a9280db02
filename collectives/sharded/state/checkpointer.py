"""Checkpointer: a directory of checkpoints, written while the training goes on, of which the newest
are kept.
"""

from __future__ import annotations

import atexit
import os
import shutil
import warnings
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ...errors import InvalidArgument, InvalidUsage
from .background_writer import BackgroundWriter, DeferredWriter
from .checkpoint import load, make_state
from .checkpoint_reader import PARTIAL
from .checkpoint_writer import RanksSavePlanner
from .dist_wrapper import DistWrapper, get_module_scheduler, no_dist
from .manifest import REMOVED, check_files, list_checkpoints, list_leftovers, name_of
from .snapshot import HostSnapshot

__all__ = ["Checkpointer", "LoadedCheckpoint"]

_EXIT_WAIT_S = 60.0  # for the other ranks' files, when rank 0 ends
_open: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


class LoadedCheckpoint(NamedTuple):
    """What `Checkpointer.load_latest` has loaded: of which step, from where, what was saved as
    `extra`, and why newer checkpoints were skipped, by their names.
    """

    step: int
    path: Path
    extra: Any
    skipped: dict[str, str]


class Checkpointer:
    """Saves a model and its optimizers to `directory` while the training goes on, and loads the
    newest whole checkpoint.

    `keep`: how many of the newest are kept. A checkpoint is a directory ``step_000001000`` that
    `load` and torch.distributed.checkpoint read, too. Its `manifest.json` has the size and SHA-256
    of each file; it is written last, and then the directory gets its name, so a writer that is
    killed leaves no checkpoint that looks whole. With COLLECTIVES_SECRET set the manifest carries
    an HMAC, and is loaded only with the same secret. All ranks must share the file system, and one
    job at a time writes to a directory.

    The model is one with sharded modules, or a plain one or DistributedDataParallel, which is equal
    on all ranks: rank 0 of torch.distributed then writes it, no call is a collective, and only rank
    0 raises what has failed.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3):
        if not isinstance(keep, int) or keep < 1:
            raise InvalidArgument(f"keep must be a number of checkpoints, at least 1, not {keep!r}")
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep
        self._snapshot = HostSnapshot()
        self._pending: BackgroundWriter | None = None
        self._pending_model: weakref.ref | None = None
        self._damaged: set[str] = set()  # names, as `load_latest` has found them
        _open.add(self)

    # ---- Saving.

    def save(self, step: int, model: nn.Module, optimizers=None, *, extra: Any = None, block: bool = False) -> None:
        """Save a model, and its optimizers, one or several, as the checkpoint of a step. A collective.

        Returns once the state is copied to host memory, which is page-locked for GPUs and is used
        again by the next call; threads write it. `block`: return once it is on the disk. `extra`: any
        further object, rank 0's, saved by pickle. Waits first until the checkpoint before is on the
        disk. A checkpoint of the same step is replaced.

        Raises what has failed in writing the one before, as `wait` does; ``OSError``,
        `InvalidArgument` and `InvalidUsage` as `save` of this package does.
        """
        if not isinstance(step, int) or step < 0:
            raise InvalidArgument(f"step must be an int of at least 0, not {step!r}", op="Checkpointer.save")
        scheduler = get_module_scheduler(model)
        if scheduler is None and not _is_first():
            return
        ranks = DistWrapper(scheduler, "Checkpointer.save", f"{self.directory}, step {step}")
        self._finish(ranks)
        target = self.directory / name_of(step)
        partial = target.with_name(target.name + PARTIAL)

        def begin() -> None:
            for path in list_leftovers(self.directory):
                shutil.rmtree(path)
            partial.mkdir(parents=True)

        ranks.run_on_rank0("begin the checkpoint", begin)
        made: list[DeferredWriter] = []

        def plan() -> None:
            state = make_state(model, optimizers, extra if ranks.rank == 0 else None)
            writer = DeferredWriter(partial, ranks)
            copied = self._snapshot.take(state)
            self._snapshot.forget_sources()
            with no_dist():
                dcp.save(copied, storage_writer=writer, planner=RanksSavePlanner(ranks), no_dist=True)
            made.append(writer)

        try:
            ranks.run_on_all("plan its part of the checkpoint", plan)
        except BaseException:
            if ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._pending_model = weakref.ref(model)
        self._pending = BackgroundWriter(
            target, step, ranks, made[0], self._snapshot.wait, self._remove_old
        )
        self._pending.start()
        if block:
            self._finish(ranks)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. A collective, which blocks.

        Raises ``OSError`` where writing it failed, and `RemoteError`, which names it, on the other
        ranks: nothing is left of it, and the ones before stay.
        """
        if self._pending is None:
            return
        model, comm = self._pending_model(), self._pending.ranks.comm
        if comm is not None and comm.closed:  # the ranks are others now
            pending, self._pending = self._pending, None
            _settle(pending, _EXIT_WAIT_S)
            return
        if model is None:
            raise InvalidUsage("the model that was saved is gone: keep it until wait() returns", op="Checkpointer.wait")
        self._finish(DistWrapper(get_module_scheduler(model), "Checkpointer.wait", str(self.directory)))

    def _finish(self, ranks: DistWrapper) -> None:
        """Wait for the checkpoint that is being written, if one is; raise on all ranks if it failed.

        In an elastic job other ranks may have begun it. Then those of them that are left complete it
        if all parts are there, and warn if not.
        """
        pending, self._pending = self._pending, None

        def look() -> str:
            if pending is None:
                return "none"
            if pending.ranks.comm is ranks.comm:
                return "own"
            pending.wait_until_written()
            return "older"

        found = ranks.run_on_all("look for a checkpoint that is being written", look)
        if "older" in found:
            if pending is not None:
                _settle(pending, 0.0)
            ranks.barrier()  # the next one begins by removing what is not complete
            return
        if pending is None:
            return

        def wait_until_written() -> None:
            pending.wait_until_written()
            if pending.error is not None:
                raise pending.error

        def wait_until_complete() -> None:
            pending.wait()
            if pending.error is not None:
                raise pending.error

        try:
            ranks.run_on_all(f"write its part of {pending.target}", wait_until_written)
        except BaseException:
            pending.give_up()
            pending.wait()
            if ranks.failed:
                ranks.barrier()  # wait until rank 0 has removed it
            raise
        ranks.run_on_rank0(f"complete {pending.target}", wait_until_complete)

    def _remove_old(self) -> None:
        """Remove checkpoints but the newest; called on rank 0's thread."""
        kept = 0
        for _, path in list_checkpoints(self.directory):
            if kept < self.keep:
                kept += path.name not in self._damaged
                continue
            removed = path.with_name(path.name + REMOVED)
            path.rename(removed)  # a removal that is killed leaves no checkpoint that looks whole
        for path in self.directory.glob(f"*{REMOVED}"):
            shutil.rmtree(path, ignore_errors=True)

    def _finish_at_exit(self) -> None:
        pending = self._pending
        if pending is None:
            return
        _settle(pending, _EXIT_WAIT_S)

    # ---- Loading.

    def latest(self) -> Path | None:
        """Return the directory of the newest whole checkpoint; None where there is none. Reads all of
        its files, and blocks. A local call.
        """
        for step, path in list_checkpoints(self.directory):
            if _problem_of(path, step, 0, 1) is None:
                return path
        return None

    def load_latest(self, model: nn.Module, optimizers=None, *, strict: bool = True) -> LoadedCheckpoint | None:
        """Load a model, and its optimizers, from the newest whole checkpoint; return None where there
        is none at all, as when a training begins. A collective, which blocks.

        The ranks may be others than those that saved, and more or fewer. Torn, truncated, changed or
        incomplete checkpoints are skipped, with a warning that says which and why. `strict`: as of
        `load`. Raises `InvalidArgument` where there are checkpoints and none is whole, or the newest
        whole one is of another model.
        """
        ranks = DistWrapper(get_module_scheduler(model), "Checkpointer.load_latest", str(self.directory))
        found = ranks.run_on_rank0("list the checkpoints", lambda: list_checkpoints(self.directory))
        skipped: dict[str, str] = {}
        for step, path in found:
            problems = ranks.run_on_all(
                "check the checkpoint", lambda path=path, step=step: _problem_of(path, step, ranks.rank, ranks.size)
            )
            problem = next((each for each in problems if each is not None), None)
            if problem is not None:
                skipped[path.name] = problem
                continue
            self._damaged |= skipped.keys()
            if skipped and ranks.rank == 0:
                warnings.warn(
                    f"resuming from {path}, since newer ones are not whole: {_describe(skipped)}", stacklevel=2
                )
            return LoadedCheckpoint(step, path, load(path, model, optimizers, strict=strict, verify=False), skipped)
        if skipped:
            text = f"no checkpoint in {self.directory} is whole: {_describe(skipped)}"
            raise InvalidArgument(text, op="Checkpointer.load_latest", rank=ranks.rank)
        return None


def _settle(pending: BackgroundWriter, seconds: float) -> None:
    """End the writing of a checkpoint without the other ranks; warn where it isn't whole.

    ``seconds``: for which rank 0 waits for parts that are not there yet.
    """
    pending.wait_until_written()
    pending.wait(seconds)
    pending.give_up()
    pending.wait()
    error = pending.error or ("other ranks have not written their parts" if pending.incomplete else None)
    if error is not None:
        warnings.warn(f"{pending.target} was not written: {error}", RuntimeWarning, stacklevel=1)


def _problem_of(path: Path, step: int, rank: int, ranks: int) -> str | None:
    """Return why a checkpoint isn't whole, as far as this rank's share of its files says; or None."""
    try:
        check_files(path, step, rank, ranks)
    except InvalidArgument as error:
        return error.message
    return None


def _describe(skipped: dict[str, str]) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in skipped.items())


def _is_first() -> bool:
    """Whether this process is rank 0 of torch.distributed, or alone."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized()) or (
        torch.distributed.get_rank() == 0
    )


@atexit.register
def _finish_all() -> None:
    for checkpointer in list(_open):
        checkpointer._finish_at_exit()
