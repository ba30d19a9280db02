"""mpi4py on Open MPI, MPICH and Intel MPI: an MPI's collectives called from Python, as ours are.

The peers of `mpi` call an MPI from a loop in C, so a part of what they lead by at small sizes is
our Python call. Here mpi4py's upper-case methods are called from the same Python loop as our own
(``caller: "python"``), on NumPy arrays: those of torch tensors take 10 us more a call, in DLPack.

mpi4py's wheels have one extension for MPICH's ABI, which Intel MPI has, too, and one for Open
MPI's. ``MPI4PY_LIBMPI``, the path of a library, chooses both.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import tempfile
from pathlib import Path

from ..cases import Case
from ..implementation import PeerMissing
from .mpi import MpiPeer
from .mpi_protocol import PREPARE, encode_case, encode_command

__all__ = ["Mpi4pyPeer"]

_NEEDED = "libmpi.so.12"  # what mpi4py's extension for MPICH's ABI is linked with


class Mpi4pyPeer(MpiPeer):
    """Job of an MPI whose ranks are Python processes that call mpi4py. Raises `PeerMissing`."""

    caller = "python"
    prefix = "mpi4py-"

    def program(self, library: str, environment: dict[str, str]) -> list[str]:
        if importlib.util.find_spec("mpi4py") is None:
            raise PeerMissing("not installed (pip install mpi4py)")
        environment |= {"MPI4PY_LIBMPI": library, "OMP_NUM_THREADS": "1"}
        environment.pop("MPI4PY_MPIABI", None)  # it follows from the library
        if Path(library).name == "libmpich.so.12":  # Debian's name of the same library
            self._links = tempfile.TemporaryDirectory(prefix="collectives-bench-")
            Path(self._links.name, _NEEDED).symlink_to(library)
            environment["LD_LIBRARY_PATH"] = f"{self._links.name}:{environment.get('LD_LIBRARY_PATH', '')}"
        return [sys.executable, "-m", "collectives.bench.peers.mpi4py_rank"]

    def versions(self) -> dict[str, str]:
        return {"mpi4py": importlib.metadata.version("mpi4py")}

    def case_message(self, case: Case, in_place: bool, rank: int, arrays: int) -> bytes:
        return encode_command(PREPARE) + encode_case(case, in_place, arrays)
