"""Planner and storage writer with which each rank calls torch.distributed.checkpoint.save.

DCP coordinates ranks over a process group of torch's. A sharded module needs none, so each rank
saves with ``no_dist=True``, and the two hooks that DCP has for what concerns all ranks, the
planner's `create_global_plan` and the writer's `finish`, coordinate them over the module's
communicator.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ...errors import InvalidUsage
from .checkpoint_reader import METADATA, sha256_of
from .dist_wrapper import DistWrapper

__all__ = ["CHECKSUMS", "ChecksumWriter", "RanksSavePlanner"]

CHECKSUMS = "checksums.sha256"


class RanksSavePlanner(DefaultSavePlanner):
    """DCP's planner, whose global plan is made on rank 0 from all ranks' plans; each rank gets its
    own.
    """

    def __init__(self, ranks: DistWrapper):
        super().__init__(flatten_sharded_tensors=False)
        self._ranks = ranks

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        (own,) = all_plans
        plans = self._ranks.run_on_all("plan its part of the checkpoint", lambda: own)
        make = super().create_global_plan
        metadata = Metadata({})  # rank 0's is written

        def create() -> list[SavePlan]:
            nonlocal metadata
            made, metadata = make(plans)
            return made

        made = self._ranks.run_on_rank0("plan the checkpoint", create)
        return [made[self._ranks.rank]], metadata


class ChecksumWriter(FileSystemWriter):
    """DCP's writer of one file for each rank; rank 0 writes the index, and the files' SHA-256 sums
    beside it.
    """

    def __init__(self, folder: Path, ranks: DistWrapper):
        super().__init__(folder)
        self._folder, self._ranks = folder, ranks

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        before = self._ranks.rank  # files are named by a plan's place in the list
        return super().prepare_global_plan([SavePlan([])] * before + plans)[before:]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        (own,) = results

        def sums():
            names = sorted({result.storage_data.relative_path for result in own})
            paths = {name: self._folder / name for name in names}
            return own, {name: (sha256_of(path), path.stat().st_size) for name, path in paths.items()}

        written = self._ranks.run_on_all("write its part of the checkpoint", sums)
        write_index = super().finish

        def finish() -> None:
            digests = self._collect_sums([files for _, files in written])
            write_index(metadata, [results for results, _ in written])
            digests[METADATA] = sha256_of(self._folder / METADATA)
            with open(self._folder / CHECKSUMS, "w") as file:
                file.writelines(f"{digest}  {name}\n" for name, digest in digests.items())
                file.flush()
                os.fsync(file.fileno())

        self._ranks.run_on_rank0("write the checkpoint's index", finish)

    def _collect_sums(self, tables: list[dict[str, tuple[str, int]]]) -> dict[str, str]:
        """Return all ranks' checksums by names, after a check that rank 0 sees their files."""
        digests = {}
        for rank, files in enumerate(tables):
            for name, (digest, size) in files.items():
                path = self._folder / name
                if not path.exists() or path.stat().st_size != size:
                    raise InvalidUsage(
                        f"rank {rank} wrote {size} bytes to {path}, which rank 0 doesn't see: give a path on "
                        "a file system that all ranks share",
                        op="save",
                    )
                digests[name] = digest
        return digests
