"""Horovod's module names for this package, so that ``import horovod.torch`` imports it."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ..errors import InvalidUsage

__all__ = ["install"]

_VERSION = "0.28.1"  # whose API this is
# Processes that this one spawns get its sys.path and none of its modules. There the package in this
# folder installs.
_FOLDER = str(Path(__file__).with_name("spawned"))
# Submodules of horovod.torch that are `collectives.horovod` itself, and those that are other
# modules of it.
_ALIASES = ("mpi_ops", "functions", "optimizer", "sync_batch_norm")
_MODULES = {
    "horovod.torch.compression": "compression",
    "horovod.torch.elastic": "elastic",
    "horovod.torch.elastic.sampler": "elastic.sampler",
    "horovod.torch.elastic.state": "elastic.state",
    "horovod.common.elastic": "elastic.state",
    "horovod.common.exceptions": "exceptions",
    "horovod.common.process_sets": "process_sets",
}


def install() -> None:
    """Make imports of horovod.torch and its submodules import `collectives.horovod`.

    It is for this process and those that it spawns (a DataLoader's workers). It takes precedence
    over an installed package horovod; where that was imported before, `InvalidUsage` is raised.
    Another call does nothing.
    """
    imported = sys.modules.get("horovod")
    if getattr(imported, "_collectives", False):
        return
    foreign = sorted(name for name in sys.modules if name == "horovod" or name.startswith("horovod."))
    if foreign and not _is_ours(imported):
        where = getattr(imported, "__file__", None) or "a module made at run time"
        raise InvalidUsage(
            f"the package horovod was imported before ({where}): call collectives.horovod.install() before anything "
            "imports it, or start the program with python -m collectives.horovod",
            op="install",
        )
    ours = importlib.import_module(__package__)
    root, common = _make_package("horovod"), _make_package("horovod.common")
    root._collectives = True
    root.__version__ = _VERSION
    names = {"horovod": root, "horovod.common": common, "horovod.torch": ours}
    names |= {f"horovod.torch.{name}": ours for name in _ALIASES}
    names |= {name: importlib.import_module(f"{__package__}.{own}") for name, own in _MODULES.items()}
    root.torch, root.common = ours, common
    for name, module in names.items():
        parent, _, leaf = name.rpartition(".")
        if parent == "horovod.common":
            setattr(common, leaf, module)
    ours.mpi_ops = ours
    sys.modules.update(names)
    if _FOLDER not in sys.path:
        sys.path.insert(0, _FOLDER)


def _is_ours(module) -> bool:
    """Return whether a module is the package in `_FOLDER`, which is being imported."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent.parent == Path(_FOLDER)


def _make_package(name: str) -> ModuleType:
    module = ModuleType(name, "Horovod's names for collectives.horovod.")
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__package__ = name
    return module
