"""Reader of torch.distributed.checkpoint's files: checks that a checkpoint is complete, and reads it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from .state_reader import StateReader, list_names, load_error

__all__ = ["METADATA", "PARTIAL", "CheckpointReader", "sha256_of"]

METADATA = ".metadata"
PARTIAL = ".partial"


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


class CheckpointReader(StateReader, FileSystemReader):
    """A checkpoint's index, and what is read by it. Raises `InvalidArgument` for a folder that is
    no checkpoint. `checksums`: the name of the file of them, with which the others are compared, or
    None.
    """

    def __init__(self, folder: Path, checksums: str | None = None):
        FileSystemReader.__init__(self, folder)
        self.folder = folder
        self._checksums = checksums
        if not (folder / METADATA).is_file():
            partial = folder.with_name(folder.name + PARTIAL)
            what = "is no checkpoint, or a part of one: it has no .metadata"
            if not folder.is_dir():
                what = f"was never completed: there is only {partial.name}" if partial.is_dir() else "is not there"
            raise load_error(f"{folder} {what}")
        try:
            metadata = FileSystemReader.read_metadata(self)
        except Exception as error:  # any error that damaged bytes make pickle raise
            if isinstance(error, OSError):
                raise
            raise load_error(f"{folder / METADATA} is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise load_error(f"{folder / METADATA} is not of a checkpoint")
        StateReader.__init__(self, str(folder), metadata)

    def check_source(self, rank: int, ranks: int) -> None:
        """Check that all files are there and long enough, and that this rank's share of them has
        the right checksums.
        """
        checksums = self._checksums
        ends: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                raise load_error(f"{path} is missing: the checkpoint is incomplete")
            if path.stat().st_size < end:
                raise load_error(
                    f"{path} has {path.stat().st_size} bytes and must have {end}: the checkpoint is damaged"
                )
        if checksums is None or not (self.folder / checksums).is_file():
            return
        sums = {}
        for line in (self.folder / checksums).read_text(errors="replace").splitlines():
            digest, _, name = line.partition("  ")
            sums[name] = digest
        if {*ends, METADATA} - sums.keys():
            raise load_error(
                f"{self.folder / checksums} is damaged: it has none of {list_names({*ends, METADATA} - sums.keys())}"
            )
        for name in sorted({*ends, METADATA})[rank::ranks]:
            if sha256_of(self.folder / name) != sums[name]:
                raise load_error(f"{self.folder / name} is damaged: its checksum is not that in {checksums}")
