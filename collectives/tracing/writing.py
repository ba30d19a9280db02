"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write text to a file, which it replaces at the end in one piece."""
    # A name of this process in the same folder, so that the rename replaces the file atomically.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(parts)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
