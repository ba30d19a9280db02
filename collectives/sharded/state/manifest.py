"""Manifest of a checkpoint: its step, and the size and SHA-256 of each of its files; it is written
last, so a checkpoint without it is a part of one.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from ...errors import InvalidArgument, TransportError
from ...json_records import parse_json, parse_text
from ...secret import seal, unseal
from .checkpoint_reader import METADATA, PARTIAL, sha256_of

__all__ = [
    "MANIFEST", "REMOVED", "check_files", "flush_folder", "list_checkpoints", "list_leftovers", "name_of",
    "write_file", "write_manifest",
]  # fmt: skip

MANIFEST = "manifest.json"
REMOVED = ".removed"
_NAME = re.compile(r"step_(\d{9,})")
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")  # torch.distributed.checkpoint's own names


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step_{step:09}"


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return the (step, directory) of a folder's checkpoints, whole or damaged, the newest first."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in found), reverse=True)


def list_leftovers(folder: Path) -> list[Path]:
    """Return what writers and removals that were killed have left."""
    suffixes = (PARTIAL, REMOVED)
    return [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.suffix in suffixes and _NAME.fullmatch(path.stem)
    ]


def write_file(path: Path, data: bytes) -> None:
    """Write a file under another name, flush it to the disk, and rename it."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """Have a directory's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_manifest(folder: Path, step: int, files: dict[str, tuple[str, int]]) -> None:
    """Write the manifest of a step's checkpoint. `files`: (SHA-256, bytes) of each, by its name."""
    record = json.dumps({"step": step, "files": files}, indent=1).encode()
    write_file(folder / MANIFEST, seal(record, f"checkpoint of step {step}"))


def _read_manifest(folder: Path, step: int) -> dict[str, tuple[str, int]]:
    path = folder / MANIFEST
    if not path.is_file():
        raise InvalidArgument(f"it has no {MANIFEST}, so it was never completed", op="load")
    try:
        record = parse_json(unseal(path.read_bytes(), f"checkpoint of step {step}"))
        files = {name: (parse_text(digest), size) for name, (digest, size) in record["files"].items()}
        if record["step"] != step or METADATA not in files or not all(map(_FILE.fullmatch, files)):
            raise ValueError("it is another checkpoint's")
    except TransportError as error:
        raise InvalidArgument(f"its {MANIFEST}: {error.message}", op="load") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"its {MANIFEST} is damaged: {type(error).__name__}: {error}", op="load") from error
    return files


def check_files(folder: Path, step: int, rank: int = 0, ranks: int = 1) -> None:
    """Check that a checkpoint has all its files, with their sizes, and that those of this rank's
    share have their checksums. Nothing is unpickled.

    Raises `InvalidArgument` for a part of a checkpoint, or a damaged one.
    """
    files = _read_manifest(folder, step)
    for name, (_, size) in files.items():
        path = folder / name
        if not path.is_file():
            raise InvalidArgument(f"its {name} is missing", op="load")
        if path.stat().st_size != size:
            raise InvalidArgument(f"its {name} has {path.stat().st_size} bytes and must have {size}", op="load")
    for name in sorted(files)[rank::ranks]:
        try:
            digest = sha256_of(folder / name)
        except OSError as error:
            raise InvalidArgument(f"its {name} can't be read: {error}", op="load") from error
        if digest != files[name][0]:
            raise InvalidArgument(f"its {name} is damaged: its checksum is not that in {MANIFEST}", op="load")
