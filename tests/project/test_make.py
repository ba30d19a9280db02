"""`make mpi` says what it has done, and why not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("sh", "timeout", "mkdir", "id", "make")


def make_mpi(folder: Path, tools: dict[str, str]) -> str:
    """Run it in a folder with a Makefile alone, with these programs beside those that a shell needs."""
    path = folder / "path"
    path.mkdir()
    for name in NEEDED:
        (path / name).symlink_to(shutil.which(name))
    for name, text in tools.items():
        (path / name).unlink(missing_ok=True)
        (path / name).write_text(f"#!/bin/sh\n{text}\n")
        (path / name).chmod(0o755)
    shutil.copy(ROOT / "Makefile", folder)
    env = {"PATH": str(path)}
    done = subprocess.run(["make", "mpi"], cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("tools", "said", "log"),
    [
        ({"mpirun.openmpi": "", "mpiexec.hydra": ""}, "", None),
        ({}, "no apt-get here", None),
        ({"apt-get": "exit 9", "id": "echo 1000"}, "not root", None),
        ({"apt-get": "echo tried $*", "id": "echo 0"}, "installing openmpi-bin and mpich\n", "tried install"),
        ({"apt-get": "echo no $*; exit 1", "id": "echo 0"}, "could not install them (see out/mpi.log)", "no install"),
    ],
    ids=["there", "no apt-get", "not root", "installed", "refused"],
)
def test_make_mpi_in_a_fresh_checkout(tmp_path, tools, said, log):
    out = make_mpi(tmp_path, tools)
    assert out == "" if said == "" else said in out
    assert ("could not" in out) == ("could not" in said)
    written = tmp_path / "out" / "mpi.log"
    assert log in written.read_text() if log else not written.exists()
