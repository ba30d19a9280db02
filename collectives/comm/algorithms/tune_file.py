"""The tune file: JSON of `collectives.tune`'s results by host, engine, device and ranks."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from platform import node

import torch

from ...errors import CollectivesError, InvalidArgument
from .schedule import ALGORITHMS, OPS

__all__ = ["Choices", "device_name", "file_engine", "read_tune_file", "tables_of", "tune_file", "write_entry"]

_FORMAT = 1

Choices = tuple[list[int], list[str]]  # upper limits in bytes, and the algorithms, one more than limits


def tune_file() -> Path:
    """Return the tune file's path: COLLECTIVES_TUNE_FILE, or one in the user's cache folder."""
    named = os.environ.get("COLLECTIVES_TUNE_FILE", "").strip()
    if named:
        return Path(os.path.expanduser(named))  # pathlib's raises where a user has no home, as in some containers
    cache = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(os.path.expanduser(cache)) / "collectives" / "tune.json"


def read_tune_file(path: Path) -> list[dict]:
    """Return a file's entries, of all hosts; none where there is no file.

    Raises `InvalidArgument` if it is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except PermissionError as error:
        if not os.environ.get("COLLECTIVES_TUNE_FILE", "").strip():
            return []  # another user's home, as under sudo: nobody has asked for the file there
        raise _invalid_file(path, f"can't be read ({error})") from error
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid_file(path, f"can't be read ({error})") from error
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise _invalid_file(path, f"has format {content['format']!r:.20}, and this version reads {_FORMAT}")
        for entry in content["entries"]:
            for limits, names in entry["choices"].values():
                numbers = all(type(limit) is int for limit in limits) and limits == sorted(limits)
                if not (numbers and set(names) <= set(ALGORITHMS) and len(names) == len(limits) + 1):
                    raise ValueError(f"choices {limits} {names}")
            if not set(entry["choices"]) <= set(OPS) or type(entry["ranks"]) is not int:
                raise ValueError(f"operations {sorted(entry['choices'])}")
            _ = entry["machine"], entry["engine"], entry["device"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CollectivesError):
            raise
        raise _invalid_file(path, f"is no result of collectives.tune() ({type(error).__name__}: {error})") from error
    return content["entries"]


def _invalid_file(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{path} {what}: delete it and run collectives.tune() again, or let COLLECTIVES_TUNE_FILE name another file"
    )


def device_name(device: torch.device) -> str:
    """Return a device's name in the file: "cpu", or the GPU's model."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def file_engine(native, engine: str) -> str:
    """Return an engine's name in the file, which has the number of nodes: times depend on it."""
    nodes = getattr(native, "num_nodes", 1)
    return engine if nodes == 1 else f"{engine} on {nodes} machines"


def tables_of(entries: list[dict], engine: str, device: torch.device) -> dict[int, dict[str, Choices]]:
    """Return this host's, engine's and device's choices, by number of ranks and operation."""
    here = node(), engine, device_name(device)
    return {
        entry["ranks"]: {op: (limits, names) for op, (limits, names) in entry["choices"].items()}
        for entry in entries
        if (entry["machine"], entry["engine"], entry["device"]) == here
    }


def write_entry(path: Path, entry: dict) -> None:
    """Replace the previous entry in the file, by a rename, so that readers get either file."""
    key = ("machine", "engine", "device", "ranks")
    entries = [each for each in read_tune_file(path) if any(each[name] != entry[name] for name in key)]
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by tempfile, whose files nobody else may read: a file may serve all users of a host.
    new = path.with_name(f"{path.name}.{node()}.{os.getpid()}")
    try:
        new.write_text(json.dumps({"format": _FORMAT, "entries": [*entries, entry]}, indent=1), encoding="utf-8")
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
