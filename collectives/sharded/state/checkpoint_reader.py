"""Reader of torch.distributed.checkpoint's files: checks that a checkpoint is complete, and reads it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from .state_reader import StateReader, load_error

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
    no checkpoint.

    `checksums`: the name of its file of SHA-256 sums, where there may be one and it is to be
    compared. The index is a pickle, and is compared before it is read.
    """

    def __init__(self, folder: Path, checksums: str | None = None):
        FileSystemReader.__init__(self, folder)
        self.folder = folder
        self._checksums = checksums or ""
        if not (folder / METADATA).is_file():
            partial = folder.with_name(folder.name + PARTIAL)
            what = "is no checkpoint, or a part of one: it has no .metadata"
            if not folder.is_dir():
                what = f"was never completed: there is only {partial.name}" if partial.is_dir() else "is not there"
            raise load_error(f"{folder} {what}")
        self._sums = self._read_sums()
        self._compare_sum(METADATA)
        try:
            metadata = FileSystemReader.read_metadata(self)
        except Exception as error:  # any error that damaged bytes make pickle raise
            if isinstance(error, OSError):
                raise
            raise load_error(f"{folder / METADATA} is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise load_error(f"{folder / METADATA} is not of a checkpoint")
        StateReader.__init__(self, str(folder), metadata)

    def _read_sums(self) -> dict[str, str] | None:
        if not self._checksums or not (self.folder / self._checksums).is_file():
            return None
        lines = (self.folder / self._checksums).read_text(errors="replace").splitlines()
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}

    def _compare_sum(self, name: str) -> None:
        if self._sums is None:
            return
        if name not in self._sums:
            raise load_error(f"{self.folder / self._checksums} is damaged: it has no {name}")
        if sha256_of(self.folder / name) != self._sums[name]:
            raise load_error(f"{self.folder / name} is damaged: its checksum is not that in {self._checksums}")

    def check_source(self, rank: int, ranks: int) -> None:
        """Check that all files are there and long enough, and that this rank's share of them has
        the right checksums.
        """
        ends: dict[str, int] = {}
        try:
            for info in self.metadata.storage_data.values():
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        except (AttributeError, TypeError) as error:  # without checksums a pickle may have come to be any object
            raise load_error(f"{self.folder / METADATA} is damaged: {type(error).__name__}: {error}") from error
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                raise load_error(f"{path} is missing: the checkpoint is incomplete")
            if path.stat().st_size < end:
                raise load_error(
                    f"{path} has {path.stat().st_size} bytes and must have {end}: the checkpoint is damaged"
                )
        for name in sorted(ends)[rank::ranks]:
            self._compare_sum(name)
