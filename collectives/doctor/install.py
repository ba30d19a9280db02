"""The install: Python, this package and how it was built, and the packages beside it, without importing them."""

from __future__ import annotations

import glob
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import sys

from .cgroups import read_text
from .finding import ERROR, OK, WARNING, Finding
from .probe import PACKAGE_FOLDER

__all__ = ["check_install", "check_packages", "package_version"]

_OLDEST_PYTHON = (3, 10)
_EXTENSIONS = ("_nccl", "_kernels")
_PACKAGES = ("torch", "numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "accelerate",
             "lightning", "transformers", "horovod")  # fmt: skip
_LIBRARY = "_lib/libcollectives_host.so"
_SOURCES = ("host/*.cpp", "host/*.h", "kernels/host/*", "kernels/include/coll/*")
_CYTHON = ("*.pyx", "*.pxi", "*.pxd", "_nccl*.h")
_TOLERANCE = 2.0  # seconds; a checkout writes all files at about the same time


def package_version() -> str:
    """Return this package's version, as its ``__init__`` has it."""
    found = re.search(r'^__version__ = "(.*)"', read_text(os.path.join(PACKAGE_FOLDER, "__init__.py")) or "", re.M)
    return found[1] if found else "unknown"


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _other_copies() -> list[str]:
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


def _extension(folder: str, name: str) -> str | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if os.path.exists(os.path.join(folder, name + suffix)):
            return os.path.join(folder, name + suffix)
    return None


def _newest(folder: str, patterns: tuple[str, ...]) -> float:
    times = [os.path.getmtime(path) for pattern in patterns for path in glob.glob(os.path.join(folder, pattern))]
    return max(times, default=0.0)


def check_install() -> list[Finding]:
    """Check Python and this package's own files."""
    values: dict = {"version": platform.python_version(), "executable": sys.executable}
    text = f"{values['version']} ({platform.python_implementation()}), {sys.executable}"
    python = Finding("python", OK, text, values=values)
    if sys.version_info < _OLDEST_PYTHON:
        python.status, python.remedy = WARNING, "python3.12 -m venv .venv"
        python.text += f"; the package needs {'.'.join(map(str, _OLDEST_PYTHON))} or newer"
    root = os.path.dirname(PACKAGE_FOLDER)
    checkout = os.path.isfile(os.path.join(root, "setup.py")) and os.path.isdir(os.path.join(root, "host"))
    extensions = {name: _extension(PACKAGE_FOLDER, name) for name in _EXTENSIONS}
    override = os.environ.get("COLLECTIVES_HOST_LIBRARY", "").strip()
    library = os.path.abspath(override) if override else os.path.join(PACKAGE_FOLDER, _LIBRARY)
    others = _other_copies()
    values = {
        "version": package_version(), "folder": PACKAGE_FOLDER, "checkout": checkout,
        "installed_version": _distribution_version("collectives"), "extensions": extensions, "host_library": library,
        "host_library_exists": os.path.isfile(library), "other_copies": others,
    }  # fmt: skip
    kind = "a checkout" if checkout else "installed"
    found = [
        python,
        *_check_current_folder(),
        Finding("package", OK, f"collectives {values['version']}, {kind}: {PACKAGE_FOLDER}", values=values),
    ]
    build = f"cd {shlex.quote(root)} && python setup.py build_ext --inplace" if checkout else (
        "pip install --force-reinstall --no-deps collectives"
    )  # fmt: skip
    missing = [name for name, path in extensions.items() if path is None]
    if missing:
        install = "pip install -e " + shlex.quote(root) if checkout else build
        found.append(_describe_missing(missing, others, root, install))
    if not values["host_library_exists"]:
        text = f"the host engine's library {library} is not there"
        remedy = "unset COLLECTIVES_HOST_LIBRARY" if override else build
        if override:
            text += ": COLLECTIVES_HOST_LIBRARY names it, and no other is tried"
        found.append(Finding("package.library", ERROR, text, remedy))
    if checkout and not missing and values["host_library_exists"]:
        old = [os.path.basename(path) for path in extensions.values()
               if os.path.getmtime(path) + _TOLERANCE < _newest(PACKAGE_FOLDER, _CYTHON)]  # fmt: skip
        if not override and os.path.getmtime(library) + _TOLERANCE < _newest(root, _SOURCES):
            old.append(os.path.basename(library))
        if old:
            text = f"{', '.join(old)} {'is' if len(old) == 1 else 'are'} older than the sources in this checkout"
            found.append(Finding("package.stale", WARNING, text, build))
    if others and not missing:
        text = f"other copies are on sys.path, and this one is imported before them: {', '.join(others)}"
        remedy = "pip uninstall collectives" if checkout else "unset PYTHONPATH"
        found.append(Finding("package.copies", WARNING, text, remedy))
    return found


def _check_current_folder() -> list[Finding]:
    try:
        os.getcwd()
    except FileNotFoundError:
        text = "the current folder has been deleted: torch's libraries can't be loaded in it"
        return [Finding("python.folder", ERROR, text, "cd /")]
    return []


def _describe_missing(missing: list[str], others: list[str], root: str, install: str) -> Finding:
    names = " and ".join(f"collectives.{name}" for name in missing)
    foreign = [os.path.basename(path) for name in missing for path in glob.glob(f"{PACKAGE_FOLDER}/{name}.*.so")]
    text = f"{names} {'is' if len(missing) == 1 else 'are'} not built for this Python in {PACKAGE_FOLDER}"
    if foreign:
        text += f" ({', '.join(foreign)} is another Python's)"
    built = [folder for folder in others if all(_extension(folder, name) for name in _EXTENSIONS)]
    if built:
        text += f". This folder hides a copy that is built: {built[0]}"
        here = os.path.realpath(os.curdir) == os.path.realpath(root)
        leave = "cd / && python -m collectives.doctor" if here else "unset PYTHONPATH"
        return Finding("package.shadow", ERROR, text, leave)
    return Finding("package.extensions", ERROR, text, install)


def check_packages() -> list[Finding]:
    """Check which packages are installed, by their metadata, and whether two bring the same library."""
    values = {name: version for name in _PACKAGES if (version := _distribution_version(name)) is not None}
    text = ", ".join(f"{name} {version}" for name, version in values.items()) or "none of those that are used"
    found = [Finding("packages", OK, text, values=values)]
    if importlib.util.find_spec("torch") is None:
        found.append(Finding("packages.torch", ERROR, "torch is not installed for this Python", "pip install torch"))
    if importlib.util.find_spec("numpy") is None:
        found.append(Finding("packages.numpy", ERROR, "numpy is not installed for this Python", "pip install numpy"))
    if {"nvidia-nccl-cu12", "nvidia-nccl-cu13"} <= set(values):
        text = (
            "nvidia-nccl-cu12 and nvidia-nccl-cu13 are both installed and write one file, nvidia/nccl/lib/libnccl.so.2"
        )
        keep = "cu12" if "cupy-cuda12x" in values else "cu13"
        lose = "cu13" if keep == "cu12" else "cu12"
        remedy = f"pip uninstall -y nvidia-nccl-{lose} && pip install --force-reinstall --no-deps nvidia-nccl-{keep}"
        found.append(Finding("packages.nccl", WARNING, text, remedy))
    return found
