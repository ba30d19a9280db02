"""The install: Python, this package's own files, torch, and the engine that a program would use."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import sys

from .probe import PACKAGE_FOLDER, Outcome, Probe
from .report import ERROR, OK, WARNING, Finding

__all__ = ["PROBE_S", "check_engine", "check_install", "check_torch", "read_version", "start_engine_probe"]

_OLDEST_PYTHON = (3, 10)
_DISTRIBUTION, _OF_OTHERS = "torch-collectives", "collectives"  # on PyPI the second is a stranger's
_EXTENSIONS = ("_nccl", "_kernels")
_LIBRARY = "_lib/libcollectives_host.so"
_SOURCES = ("host/*.cpp", "host/*.h", "kernels/host/*", "kernels/include/coll/*")
_CYTHON = ("*.pyx", "*.pxi", "*.pxd", "_nccl*.h")
_TOLERANCE = 2.0  # seconds; a checkout writes all files at about the same time
PROBE_S = 60.0  # limit; importing torch from a cold disk is slow
_PROGRAM = """
import ctypes, importlib, os, warnings
emit(stage="import torch")
import torch
import torch.distributed as dist
emit(torch={
    "version": torch.__version__, "cuda": torch.version.cuda,
    "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available")()]
    if dist.is_available() else [],
})
emit(stage="import collectives")
import collectives
from collectives import kernels
from collectives.comm.engine import get_engine
emit(stage="list the engines")
engines = [each._asdict() for each in collectives.engines()]
emit(engines=engines, isa=kernels.use_isa(), kernel_threads=kernels.get_num_threads())
emit(stage="choose the engine")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        emit(chosen=get_engine().name)
    except collectives.errors.CollectivesError as error:
        emit(refused=str(error))
emit(stage="ask the host engine for the free memory")
for each in engines:
    if each["name"] == "host" and each["available"]:
        free = ctypes.CDLL(each["path"]).collHostFreeMemory
        free.restype = ctypes.c_uint64
        emit(free_memory=free())
emit(stage="ask CUDA for its devices")
devices, peers = [], []
if torch.cuda.is_available():
    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(index).name for index in range(count)]
    peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
emit(devices=devices, peers=peers)
with open("/proc/self/maps", errors="replace") as file:
    emit(nccl_loaded=sorted({line.split()[-1] for line in file if "/libnccl.so" in line}))
emit(stage="")
"""


# ---- Files, by a process that imports neither torch nor an extension.


def read_version() -> str:
    """Return this package's version, as its ``__init__`` has it."""
    with open(os.path.join(PACKAGE_FOLDER, "__init__.py")) as file:
        found = re.search(r'^__version__ = "(.*)"', file.read(), re.MULTILINE)
    return found[1] if found else "unknown"


def _find_distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _reinstall() -> str:
    """Return the line that installs this package again from where it came: a file, or a URL.

    Where pip doesn't know, it is no name: no index has this package's, and a stranger could take it.
    """
    installed = _find_distribution(_DISTRIBUTION)
    source = "/path/to/the/wheel/or/checkout"
    origin = json.loads((installed and installed.read_text("direct_url.json")) or "{}")
    if origin:
        vcs = origin.get("vcs_info")
        source = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return f"pip install --force-reinstall --no-deps {shlex.quote(source)}"


def _find_other_copies() -> list[str]:
    """Return the folders of other packages of this name on ``sys.path``."""
    found = []
    for entry in sys.path:
        try:
            folder = os.path.realpath(os.path.join(entry or os.getcwd(), "collectives"))
        except FileNotFoundError:  # the current folder has been deleted
            continue
        if os.path.isfile(os.path.join(folder, "__init__.py")) and folder != os.path.realpath(PACKAGE_FOLDER):
            found.append(folder)
    return list(dict.fromkeys(found))


def _find_extension(folder: str, name: str) -> str | None:
    paths = (os.path.join(folder, name + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return next(filter(os.path.exists, paths), None)


def _newest(folder: str, patterns: tuple[str, ...]) -> float:
    times = [os.path.getmtime(path) for pattern in patterns for path in glob.glob(os.path.join(folder, pattern))]
    return max(times, default=0.0)


def check_install() -> list[Finding]:
    """Check Python, this package's own files, and the packages that it needs."""
    text = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    python = Finding("python", OK, text, values={"version": platform.python_version(), "executable": sys.executable})
    if sys.version_info < _OLDEST_PYTHON:
        python.status, python.remedy = WARNING, "python3.12 -m venv .venv"
        python.text += f"; the package needs {'.'.join(map(str, _OLDEST_PYTHON))} or newer"
    findings = [python, *_check_package()]
    for name in ("torch", "numpy"):
        if importlib.util.find_spec(name) is None:
            text = f"{name} is not installed for this Python"
            findings.append(Finding(f"package.{name}", ERROR, text, f"pip install {name}"))
    if _find_distribution("nvidia-nccl-cu12") and _find_distribution("nvidia-nccl-cu13"):
        text = "nvidia-nccl-cu12 and nvidia-nccl-cu13 both write nvidia/nccl/lib/libnccl.so.2"
        keep, other = ("cu12", "cu13") if _find_distribution("cupy-cuda12x") else ("cu13", "cu12")
        remedy = f"pip uninstall -y nvidia-nccl-{other} && pip install --force-reinstall --no-deps nvidia-nccl-{keep}"
        findings.append(Finding("package.nccl", WARNING, text, remedy))
    return findings


def _check_package() -> list[Finding]:
    root = os.path.dirname(PACKAGE_FOLDER)
    checkout = os.path.isfile(os.path.join(root, "setup.py")) and os.path.isdir(os.path.join(root, "host"))
    extensions = {name: _find_extension(PACKAGE_FOLDER, name) for name in _EXTENSIONS}
    override = os.environ.get("COLLECTIVES_HOST_LIBRARY", "").strip()
    library = os.path.abspath(override) if override else os.path.join(PACKAGE_FOLDER, _LIBRARY)
    others = _find_other_copies()
    values = {
        "version": read_version(), "folder": PACKAGE_FOLDER, "checkout": checkout, "extensions": extensions,
        "host_library": library, "other_copies": others,
    }  # fmt: skip
    text = f"collectives {values['version']}, {'a checkout' if checkout else 'installed'}: {PACKAGE_FOLDER}"
    findings = [Finding("package", OK, text, values=values)]
    reinstall = _reinstall()
    other = _find_distribution(_OF_OTHERS)
    if other is not None and "collectives/__init__.py," in (other.read_text("RECORD") or ""):
        text = (
            f"the distribution {_OF_OTHERS!r} {other.version} is installed, too, and writes into the same folder: "
            f"this package's is {_DISTRIBUTION!r}"
        )
        status = ERROR if values["version"] == "unknown" else WARNING
        findings.append(Finding("package.name", status, text, f"pip uninstall -y {_OF_OTHERS} && {reinstall}"))
    build = f"cd {shlex.quote(root)} && python setup.py build_ext --inplace" if checkout else reinstall
    missing = [name for name, path in extensions.items() if path is None]
    if missing:
        install = f"pip install -e {shlex.quote(root)}" if checkout else reinstall
        findings.append(_describe_missing(missing, others, root, install))
    if not os.path.isfile(library):
        text = f"the host engine's library {library} is not there"
        if override:
            text += ": COLLECTIVES_HOST_LIBRARY names it, and no other is tried"
        findings.append(
            Finding("package.library", ERROR, text, "unset COLLECTIVES_HOST_LIBRARY" if override else build)
        )
    elif checkout and not missing:
        built = [(path, PACKAGE_FOLDER, _CYTHON) for path in extensions.values()]
        built += [] if override else [(library, root, _SOURCES)]
        old = [os.path.basename(path) for path, folder, sources in built
               if os.path.getmtime(path) + _TOLERANCE < _newest(folder, sources)]  # fmt: skip
        if old:
            text = f"older than the sources in this checkout: {', '.join(old)}"
            findings.append(Finding("package.stale", WARNING, text, build))
    return findings


def _describe_missing(missing: list[str], others: list[str], root: str, install: str) -> Finding:
    text = f"not built for this Python in {PACKAGE_FOLDER}: {', '.join(missing)}"
    foreign = [os.path.basename(path) for name in missing for path in glob.glob(f"{PACKAGE_FOLDER}/{name}.*.so")]
    if foreign:
        text += f" (of another Python: {', '.join(foreign)})"
    built = [folder for folder in others if all(_find_extension(folder, name) for name in _EXTENSIONS)]
    if not built:
        return Finding("package.extensions", ERROR, text, install)
    here = os.path.realpath(os.curdir) == os.path.realpath(root)
    leave = "cd / && python -m collectives.doctor" if here else "unset PYTHONPATH"
    return Finding("package.shadow", ERROR, f"{text}. This folder hides a copy that is built: {built[0]}", leave)


# ---- torch and the engines, by a process that imports them.


def start_engine_probe() -> Probe:
    """Start the process that imports torch and this package, and lists engines and GPUs."""
    return Probe(_PROGRAM, PROBE_S)


def check_torch(outcome: Outcome) -> list[Finding]:
    """Return the findings about torch. `outcome`: of the engine probe."""
    torch = outcome.values.get("torch")
    if torch is None:
        text = f"torch can't be imported: {outcome.error}"
        remedy = "pip install torch" if "No module named" in outcome.error else "pip install --force-reinstall torch"
        return [Finding("torch", ERROR, text, remedy, {"error": outcome.error, "output": outcome.output})]
    built = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
    text = f"{torch['version']}, {built}, backends {', '.join(torch['backends']) or 'none'}"
    if not torch["backends"]:
        text += ": torch.distributed has none"
        return [Finding("torch", ERROR, text, "pip install --force-reinstall torch", torch)]
    return [Finding("torch", OK, text, values=torch)]


def check_engine(outcome: Outcome, install: str) -> list[Finding]:
    """Return the findings about the engines: the one that a program would use, and why not the other.

    `outcome`: of the engine probe. `install`: what fixes the package's own files, "" where nothing
    is wrong with them.
    """
    values = outcome.values
    if "torch" not in values:
        return []
    if "engines" not in values:
        text = f"collectives can't be imported: {outcome.error}"
        remedy = install or "python -c 'import collectives'   # its whole traceback"
        if "needs torch" in outcome.error:
            remedy = "pip install --upgrade torch"
        return [Finding("engine", ERROR, text, remedy, {"error": outcome.error, "output": outcome.output})]
    engines = {each["name"]: each for each in values["engines"]}
    names = ("chosen", "engines", "isa", "kernel_threads", "nccl_loaded")
    facts = {name: values.get(name) for name in names}
    parts = [
        f"{name} version {each['version']}, {each['path']}" if each["available"]
        else each["reason"] if each["reason"].startswith("engine ") else f"{name} can't be used: {each['reason']}"
        for name, each in engines.items()
    ]  # fmt: skip
    chosen, host = values.get("chosen"), engines["host"]
    engine = Finding("engine", OK, "; ".join([chosen or "none", *parts]), values=facts)
    if chosen is None:
        named = os.environ.get("COLLECTIVES_ENGINE", "").strip()
        # Without it "host" is used where there is no GPU; asked for by name, its library is at fault.
        engine.status, engine.text = ERROR, values.get("refused") or host["reason"] or outcome.error
        engine.remedy = (
            "unset COLLECTIVES_ENGINE" if named not in ("", "host") else _find_library_remedy(engine.text, install)
        )
    findings = [engine]
    if not host["available"] and chosen is not None:
        findings.append(Finding("engine.host", ERROR, host["reason"], _find_library_remedy(host["reason"], install)))
    if values.get("devices") and not engines["nccl"]["available"]:
        cuda = (values["torch"]["cuda"] or "12").split(".")[0]
        text = f"there are GPUs, but NCCL can't be used: {engines['nccl']['reason']}"
        findings.append(Finding("engine.nccl", ERROR, text, f"pip install nvidia-nccl-cu{cuda}"))
    loaded = values.get("nccl_loaded") or []
    if len(loaded) > 1:
        text = f"several NCCL libraries are loaded, torch's and ours differ: {', '.join(loaded)}"
        findings.append(Finding("engine.nccl_copies", WARNING, text, f"export COLLECTIVES_NCCL_LIBRARY={loaded[0]}"))
    if values.get("stage"):  # it did not come to its end
        text = f"the probe stopped at: {values['stage']}: {outcome.error}"
        remedy = "nvidia-smi" if "CUDA" in values["stage"] else "python -X faulthandler -c 'import collectives'"
        findings.append(Finding("engine.probe", ERROR, text, remedy, {"output": outcome.output}))
    return findings


def _find_library_remedy(text: str, install: str) -> str:
    for name in ("COLLECTIVES_HOST_LIBRARY", "COLLECTIVES_NCCL_LIBRARY"):
        if os.environ.get(name, "").strip() and name in text:
            return f"unset {name}"
    return install or _reinstall()
