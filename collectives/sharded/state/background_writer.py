"""BackgroundWriter: writes one checkpoint on a thread, while the training goes on.

Each rank's thread writes its file, and then a record that it is there. Rank 0's thread waits for
the records, writes the index and the manifest, and renames the directory. The threads make no
collective: the training's are not disturbed, and nothing waits for a rank that has ended.
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ...secret import seal, unseal
from .checkpoint_reader import METADATA, PARTIAL, sha256_of
from .checkpoint_writer import CHECKSUMS
from .dist_wrapper import DistWrapper
from .manifest import flush_folder, write_file, write_manifest

__all__ = ["BackgroundWriter", "DeferredWriter"]

_WRITTEN, _FAILED = "written", "failed"
_LONGEST_POLL_S = 0.2


class DeferredWriter(FileSystemWriter):
    """DCP's writer of one file for each rank, which writes once `write` is called, in any thread."""

    def __init__(self, folder: Path, ranks: DistWrapper):
        super().__init__(folder)
        self._rank = ranks.rank
        self._deferred: tuple[SavePlan, SavePlanner] | None = None
        self.metadata = Metadata({})  # rank 0's is written

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        before = self._rank  # files are named by a plan's place in the list
        return super().prepare_global_plan([SavePlan([])] * before + plans)[before:]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future:
        self._deferred = plan, planner
        made: Future = Future()
        made.set_result([])
        return made

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata = metadata

    def write(self) -> list[WriteResult]:
        """Write this rank's file and flush it to the disk."""
        plan, planner = self._deferred
        return super().write_data(plan, planner).wait()

    def write_index(self, results: list[list[WriteResult]]) -> None:
        """Write DCP's index of all ranks' files."""
        super().finish(self.metadata, results)


class BackgroundWriter:
    """Writes the checkpoint of one step; `start` begins it.

    `before`: a function that is called first, on the thread; `after`: one that rank 0 calls once the
    checkpoint is there. `ranks`: that write it. `error`: what has failed here, or None;
    `incomplete`: rank 0 has given up waiting for other ranks.
    """

    def __init__(
        self, target: Path, step: int, ranks: DistWrapper, writer: DeferredWriter, before: Callable[[], None],
        after: Callable[[], None],
    ):  # fmt: skip
        self.target, self.step, self.ranks = target, step, ranks
        self._partial = target.with_name(target.name + PARTIAL)
        self._rank = ranks.rank
        self._writer = writer
        self._before, self._after = before, after
        self._written, self._given_up = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.incomplete = False
        self._thread = threading.Thread(target=self._run, name=f"collectives checkpoint {step}", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def wait_until_written(self) -> None:
        """Wait until this rank's file is written, or has failed; see `error`."""
        self._written.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended, on rank 0 with the whole checkpoint; return whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Have rank 0 wait no longer for other ranks' files, and remove what is there."""
        self._given_up.set()

    def _run(self) -> None:
        try:
            try:
                self._before()
                self._write()
            except BaseException as error:  # raised by the next call on the training's thread
                self.error = error
                self._clear()
            finally:
                self._written.set()
            if self._rank == 0:
                self._complete()
        finally:
            self._before = self._after = self._writer = None  # the snapshot, and the Checkpointer

    # ---- Each rank's part.

    def _record_of(self, rank: int, kind: str) -> Path:
        return self._partial / f"rank_{rank}.{kind}"

    def _write(self) -> None:
        results = self._writer.write()
        files = {}
        for name in sorted({result.storage_data.relative_path for result in results}):
            path = self._partial / name
            files[name] = sha256_of(path), path.stat().st_size
        record = pickle.dumps((results, files))
        write_file(self._record_of(self._rank, _WRITTEN), seal(record, self._purpose(self._rank)))

    def _purpose(self, rank: int) -> str:
        return f"part of rank {rank} of the checkpoint of step {self.step}"

    def _clear(self) -> None:
        """Free what this rank has written of a checkpoint that has failed, and have rank 0 notice."""
        for path in self._partial.glob(f"__{self._rank}_*"):
            path.unlink(missing_ok=True)
        try:
            self._record_of(self._rank, _FAILED).touch()
        except OSError:
            pass  # rank 0 gives up when the ranks exchange their errors, in the next call

    # ---- Rank 0's part.

    def _complete(self) -> None:
        try:
            if self._wait_for_ranks():
                self._commit()
                self._after()
                return
            self.incomplete = True
        except BaseException as error:
            self.error = error
        shutil.rmtree(self._partial, ignore_errors=True)

    def _wait_for_ranks(self) -> bool:
        """Wait until no rank writes any more; return whether all ranks have written their files."""
        missing, failed, pause = list(range(self.ranks.size)), self.error is not None, 1e-3
        while True:
            given_up = self._given_up.is_set()  # before the look: what is there by then counts
            missing = [rank for rank in missing if not self._record_of(rank, _WRITTEN).exists()]
            found = [rank for rank in missing if self._record_of(rank, _FAILED).exists()]
            failed = failed or bool(found)
            missing = [rank for rank in missing if rank not in found and not (rank == self._rank and failed)]
            if not missing or given_up:
                return not missing and not failed
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)

    def _commit(self) -> None:
        results, files = [], {}
        for rank in range(self.ranks.size):
            path = self._record_of(rank, _WRITTEN)
            made, its_files = pickle.loads(unseal(path.read_bytes(), self._purpose(rank)))
            results.append(made)
            files.update(its_files)
            path.unlink()
        self._writer.write_index(results)
        index = self._partial / METADATA
        files[METADATA] = sha256_of(index), index.stat().st_size
        sums = "".join(f"{digest}  {name}\n" for name, (digest, _) in files.items()).encode()
        write_file(self._partial / CHECKSUMS, sums)
        write_manifest(self._partial, self.step, files)
        flush_folder(self._partial)
        if self.target.exists():  # damaged, as `Checkpointer.save` has found
            os.rename(self.target, self.target.with_name(self.target.name + ".removed"))
        self._partial.rename(self.target)
        flush_folder(self.target.parent)
