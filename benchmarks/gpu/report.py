"""Report of `make gpu`: one JSON file, complete after every stage, and a short log a part."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path

__all__ = ["Report"]

LOG_BYTES = 400_000  # of one stage: its first and its last half of that
FILE_BYTES = 16 << 20
TAIL_LINES = 5  # lines of a stage's log that stand in the report


class Report:
    """Collects what the stages found; parts that are run one after the other, go into one report."""

    def __init__(self, folder: Path, device: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "report.json"
        self.device = device
        self.body = self._before()
        self.body["device"] = device
        self.body["machine"] = {"host": platform.node(), "cpus": os.cpu_count(), "kernel": platform.release()}
        self.body["commit"] = _commit()

    def _before(self) -> dict:
        """Return the report of parts that ran before on this device, or an empty one."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            found = {}
        same = found.get("device") == self.device and isinstance(found.get("parts"), dict)
        return found if same else {"parts": {}}

    def begin(self, part: int) -> None:
        """Start a part anew."""
        self.body["parts"][str(part)] = {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "stages": []}
        self.log(part).write_bytes(b"")

    def log(self, part: int) -> Path:
        """Return the path of a part's log."""
        return self.folder / f"part{part}.log"

    def add(self, part: int, stage: dict, output: Path) -> None:
        """Add a stage, and its output to the part's log; the report is written at once."""
        text = _shortened(output.read_bytes() if output.exists() else b"")
        with self.log(part).open("ab") as file:
            file.write(f"==== {stage['stage']}: {stage['result']}, {stage['seconds']:.1f} s\n".encode() + text + b"\n")
        if stage["result"] != "passed":
            lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
            stage["end_of_output"] = lines[-TAIL_LINES:]
        self.body["parts"][str(part)]["stages"].append(stage)
        self.write()

    def write(self) -> None:
        """Write the report beside the one before, and put it in its place."""
        text = json.dumps(self.body, indent=1, default=str)
        if len(text) > FILE_BYTES:
            raise ValueError(f"the report has {len(text)} bytes, more than {FILE_BYTES}")
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text + "\n")
        fresh.replace(self.path)


def _shortened(text: bytes) -> bytes:
    if len(text) <= LOG_BYTES:
        return text
    half = LOG_BYTES // 2
    return text[:half] + f"\n... {len(text) - LOG_BYTES} bytes left out ...\n".encode() + text[-half:]


def _commit() -> str:
    """Return git's name of what is checked out; "unknown" in a copy without its history."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True,
            timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
