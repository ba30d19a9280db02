"""What is installed: Python, torch, NumPy, CuPy, NCCL's wheels, and collectives with its libraries."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from .findings import Section

__all__ = ["examine_installation", "import_collectives"]

_PACKAGE = Path(__file__).resolve().parents[1]
_WHEELS = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def import_collectives():
    """Return (the package, None), or (None, the error with which its import failed)."""
    try:
        return importlib.import_module("collectives"), None
    except Exception as error:  # a broken library raises anything
        return None, error


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine_installation(section: Section) -> None:
    """Fill in versions and paths; find what is missing, mixed up, or out of date."""
    values = section.values
    values["python"] = f"{platform.python_version()} ({sys.executable})"
    values["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform != "linux":
        section.fail(f"the host engine needs Linux, and this is {platform.system()}", "use a Linux machine, or WSL 2")
    _examine_torch(section)
    values["numpy"] = _version_of("numpy") or "not installed"
    if _version_of("numpy") is None:
        section.fail("NumPy is not installed", "pip install numpy")
    cupy = [f"{name} {_version_of(name)}" for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if _version_of(name)]
    values["cupy"] = ", ".join(cupy) or "not installed (needed on GPUs only)"
    if len(cupy) > 1:
        section.fail(f"several CuPy packages overwrite each other: {', '.join(cupy)}", "pip uninstall all but one")
    wheels = [f"{name} {_version_of(name)}" for name in _WHEELS if _version_of(name)]
    values["nccl wheel"] = ", ".join(wheels) or "none"
    if len(wheels) > 1:
        section.warn(
            "both NCCL wheels install nvidia/nccl/lib/libnccl.so.2, so the last one has overwritten the other",
            "pip uninstall nvidia-nccl-cu12 nvidia-nccl-cu13, then pip install the one of torch.version.cuda",
        )
    _examine_package(section)


def _examine_torch(section: Section) -> None:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        section.values["torch"] = f"can't be imported: {error}"
        section.fail(f"torch can't be imported: {error}", "pip install torch")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    section.values["torch"] = f"{torch.__version__} ({build})"
    dist = torch.distributed
    backends = ["gloo", "nccl", "mpi", "ucc"] if dist.is_available() else []
    section.values["torch.distributed"] = (
        ", ".join(name for name in backends if dist.is_backend_available(name)) or "not available"
    )
    if not dist.is_available():
        section.warn("this torch has no torch.distributed: DDP and FSDP can't run", "pip install another torch build")


def _examine_package(section: Section) -> None:
    values = section.values
    built = sorted(path.name for path in _PACKAGE.glob("_*.so"))
    checkout = _PACKAGE.parent if (_PACKAGE.parent / "host" / "api.cpp").exists() else None
    values["collectives at"] = f"{_PACKAGE}" + (" (a checkout)" if checkout else "")
    values["extensions"] = ", ".join(built) or "none"
    remedy = f"pip install -e {checkout}" if checkout else "pip install --force-reinstall collectives"
    if checkout and not built:
        remedy += ", or start Python in another folder where the package is installed"
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    missing = [
        name for name in ("_nccl", "_kernels") if not any((_PACKAGE / f"{name}{end}").exists() for end in suffixes)
    ]
    if missing:
        section.fail(f"the extensions {' and '.join(missing)} are not built for this Python ({suffixes[0]})", remedy)
    library = _PACKAGE / "_lib" / "libcollectives_host.so"
    if not library.exists() and not os.environ.get("COLLECTIVES_HOST_LIBRARY"):
        section.fail(f"the host engine's library is missing: {library}", remedy)
    elif checkout and library.exists():
        sources = [*(checkout / "host").glob("*.cpp"), *(checkout / "host").glob("*.h")]
        newer = [path.name for path in sources if path.stat().st_mtime > library.stat().st_mtime + 1]
        if newer:
            section.warn(f"the engine is older than its sources ({', '.join(sorted(newer)[:4])})", remedy)
    package, error = import_collectives()
    if package is None:
        values["collectives"] = "can't be imported"
        section.fail(f"import collectives fails: {type(error).__name__}: {str(error).splitlines()[0]}", remedy)
        return
    values["collectives"] = package.__version__
    imported = Path(package.__file__).resolve().parent
    if imported != _PACKAGE:
        section.warn(f"import collectives finds {imported}, and not this package", "start Python in another folder")
    files = [Path(entry or ".", "collectives", "__init__.py") for entry in sys.path]
    copies = {str(path.parent.resolve()) for path in files if path.exists()} - {str(imported)}
    if copies:
        section.warn(
            f"other copies of collectives are on the path: {', '.join(sorted(copies))}",
            "pip uninstall collectives in the environment whose copy isn't wanted",
        )
