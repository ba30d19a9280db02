"""Engines: NCCL on GPUs ("nccl"), this project's shared-memory engine on CPUs ("host").

An engine is a library that exports NCCL's C API, loaded by its absolute path into a table of its
own, and the type of device whose memory it takes. COLLECTIVES_ENGINE names the engine to use where
the caller names none. COLLECTIVES_NCCL_LIBRARY and COLLECTIVES_HOST_LIBRARY are a library's path;
where one is set, no other library is tried.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .. import _nccl
from ..errors import EngineUnavailable, InvalidArgument
from ..kernels.execution import library_path
from ..secret import read_secret

__all__ = ["Engine", "EngineInfo", "engines", "get_engine", "parse_device", "resolve_device"]

_DEVICE_TYPES = {"nccl": "cuda", "host": "cpu"}
_OVERRIDES = {"nccl": "COLLECTIVES_NCCL_LIBRARY", "host": "COLLECTIVES_HOST_LIBRARY"}
_SONAME = "libnccl.so.2"
_SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
    "/usr/local/nccl/lib",
)


class EngineInfo(NamedTuple):
    """Availability of an engine.

    Attributes:
        name: "nccl" or "host".
        available: Whether the engine can be used here.
        version: The library's version, such as "2.32.3"; None where no library could be loaded.
        path: The library's absolute path; None where no library could be loaded.
        reason: Why the engine isn't available; empty where it is.
    """

    name: str
    available: bool
    version: str | None
    path: str | None
    reason: str


@dataclass(frozen=True)
class Engine:
    """A loaded library and the type of device that it works on.

    ``name``: "nccl" or "host"; ``device_type``: "cuda" or "cpu"; ``version``: NCCL's version that
    the library follows, such as "2.32.3" (``library.version`` is the same as NCCL's number, 23203);
    ``path``: the library's absolute path.
    """

    name: str
    device_type: str
    version: str
    path: str
    library: _nccl.Library = field(repr=False, compare=False)


_loaded: dict[tuple[str, str | None], _nccl.Library] = {}
_lock = threading.Lock()


def engines() -> list[EngineInfo]:
    """List the engines, loading each one's library where it can be found.

    Doesn't raise where one can't be used.
    """
    found = []
    for name in _DEVICE_TYPES:
        try:
            library = _load(name)
        except EngineUnavailable as error:
            found.append(EngineInfo(name, False, None, None, error.message))
            continue
        reason = _missing_device_reason(name)
        found.append(EngineInfo(name, not reason, _version_text(library.version), library.path, reason))
    return found


def get_engine(name: str | None = None, device_type: str | None = None) -> Engine:
    """Load an engine, or return the one that is loaded already.

    ``name``: "nccl", "host", or None: the one of COLLECTIVES_ENGINE, else the one for
    ``device_type`` ("cuda" or "cpu"), else "nccl" where CUDA has a device and NCCL's library loads,
    else "host". Raises ``EngineUnavailable`` with the paths that were tried or the device that is
    missing, ``InvalidArgument`` for an unknown name or an engine that doesn't work on this type of
    device.
    """
    if device_type is not None and device_type not in _DEVICE_TYPES.values():
        raise InvalidArgument(f"no engine works on device type {device_type!r}; there are 'cuda' and 'cpu'")
    chosen, source = name, f"engine {name!r}"
    if chosen is None:
        chosen = os.environ.get("COLLECTIVES_ENGINE", "").strip() or None
        source = f"COLLECTIVES_ENGINE={chosen}"
    if chosen is None:
        chosen = _default_name() if device_type is None else {"cuda": "nccl", "cpu": "host"}[device_type]
    if chosen not in _DEVICE_TYPES:
        raise InvalidArgument(f"{source}: no such engine; there are {', '.join(map(repr, _DEVICE_TYPES))}")
    if device_type not in (None, _DEVICE_TYPES[chosen]):
        raise InvalidArgument(f"{source} works on device type {_DEVICE_TYPES[chosen]!r}, not on {device_type!r}")
    library = _load(chosen)
    reason = _missing_device_reason(chosen)
    if reason:
        raise EngineUnavailable(f"engine {chosen!r} can't be used: {reason} ({library.path} was loaded)")
    if library.is_host:
        _set_secret(library)
    return Engine(chosen, _DEVICE_TYPES[chosen], _version_text(library.version), library.path, library)


def _set_secret(library: _nccl.Library) -> None:
    secret = read_secret()
    if secret is not None or library.has("collHostSetSecret"):
        library.set_secret(secret)


def _default_name() -> str:
    if not torch.cuda.is_available():
        return "host"
    if os.environ.get(_OVERRIDES["nccl"], "").strip():
        return "nccl"  # the user asks for that library: if it can't be loaded, get_engine raises
    try:
        _load("nccl")
    except EngineUnavailable as error:
        warnings.warn(
            f"CUDA has a device, but NCCL can't be loaded, so the host engine is used: {error}",
            RuntimeWarning,
            stacklevel=3,
        )
        return "host"
    return "nccl"


def _missing_device_reason(name: str) -> str:
    if name == "nccl" and not torch.cuda.is_available():
        build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        return f"no CUDA device is there for torch ({build if torch.version.cuda else 'its build has no CUDA'})"
    return ""


def _version_text(code: int) -> str:
    """Return NCCL's version number as text: 23203 is 2.32.3, and before 2.9 2708 was 2.7.8."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def parse_device(device) -> torch.device:
    """Return a torch device, or raise `InvalidArgument`."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"device {device!r} is none that torch knows: {str(error).splitlines()[0]}") from error


def resolve_device(engine: Engine, device) -> torch.device:
    """Return a device with its index.

    Raises `InvalidArgument` where the engine doesn't work on it.
    """
    device = parse_device(device)
    if device.type != engine.device_type:
        raise InvalidArgument(f"engine {engine.name!r} works on {engine.device_type}, not on {device}")
    if device.type == "cpu":
        return torch.device("cpu")
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


# ---- Finding and loading the libraries.


def _load(name: str) -> _nccl.Library:
    override = os.environ.get(_OVERRIDES[name], "").strip() or None
    with _lock:
        library = _loaded.get((name, override))
        if library is None:
            library = _loaded[name, override] = _open(name, override)
    return library


def _open(name: str, override: str | None) -> _nccl.Library:
    """Open the first of the candidate libraries that exists and loads."""
    if override is not None:
        candidates = [os.path.abspath(override)]
    else:
        candidates = _nccl_candidates() if name == "nccl" else [library_path()]
    failures = []
    for path in candidates:
        if not os.path.exists(path):
            failures.append(f"{path}: no such file")
            continue
        try:
            library = _nccl.Library(path)
        except EngineUnavailable as error:
            failures.append(f"{path}: {error.message}")
            continue
        if library.is_host != (name == "host"):
            what = (
                "is the host engine, not NCCL" if library.is_host else "is not the host engine: no collHostQueueCreate"
            )
            failures.append(f"{path}: {what}")
            continue
        if library.is_host:
            library.set_interrupt_check(True)  # so that Ctrl-C ends a wait inside the library
        return library
    if override is None and (reason := _missing_device_reason(name)):
        raise EngineUnavailable(f"engine {name!r} can't be used: {reason}")  # nor would it be with a library
    if override is not None:
        cure = f"that is what {_OVERRIDES[name]} names; correct or unset it"
    elif name == "nccl":
        cure = "install nvidia-nccl-cu12 or nvidia-nccl-cu13, or set COLLECTIVES_NCCL_LIBRARY to libnccl.so.2's path"
    else:
        cure = "install this package again (python -m collectives.doctor has the line), or set COLLECTIVES_HOST_LIBRARY"
    tried = "; ".join(failures)
    raise EngineUnavailable(f"engine {name!r}: no library could be loaded; tried {tried}. Cure: {cure}")


def _nccl_candidates() -> list[str]:
    """Return paths where NCCL may be: its wheel, torch's, loaded ones, the system's folders."""
    folders = []
    wheel = importlib.util.find_spec("nvidia") if "nvidia" not in sys.modules else sys.modules["nvidia"].__spec__
    for root in (wheel.submodule_search_locations or ()) if wheel is not None else ():
        folders.append(os.path.join(root, "nccl", "lib"))
    folders.append(os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "lib"))
    paths = [os.path.join(folder, _SONAME) for folder in folders]
    paths += _mapped_nccl()
    for variable in ("LD_LIBRARY_PATH", "CONDA_PREFIX"):
        for folder in filter(None, os.environ.get(variable, "").split(":")):
            paths.append(os.path.join(os.path.abspath(folder), "lib" if variable == "CONDA_PREFIX" else "", _SONAME))
    paths += [os.path.join(folder, _SONAME) for folder in _SYSTEM_FOLDERS]
    return list(dict.fromkeys(paths))


def _mapped_nccl() -> list[str]:
    """Return the NCCL libraries that this process has loaded already, most likely through torch."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        names = [line.split(maxsplit=5)[5].strip() for line in file if "/libnccl.so" in line]
    return [name for name in dict.fromkeys(names) if os.path.exists(name)]
