"""Horovod's module names for this package: ``import horovod.torch as hvd`` in a program gives `collectives.horovod`."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ..errors import InvalidUsage

__all__ = ["install"]

_VERSION = "0.28.1"  # whose API this is
# Processes that this one spawns get its sys.path and none of its modules: there, a package of this folder installs.
_FOLDER = str(Path(__file__).with_name("spawned"))
# Where Horovod's names are, beside horovod.torch itself, which has all but elastic's.
_SAME = ("mpi_ops", "functions", "optimizer", "sync_batch_norm")
_OWN = {
    "horovod.torch.compression": "compression",
    "horovod.torch.elastic": "elastic",
    "horovod.torch.elastic.sampler": "elastic.sampler",
    "horovod.torch.elastic.state": "elastic.state",
    "horovod.common.elastic": "elastic.state",
    "horovod.common.exceptions": "exceptions",
    "horovod.common.process_sets": "process_sets",
}


def install() -> None:
    """Make ``import horovod.torch`` and its submodules give `collectives.horovod`, from now on, in this process.

    Also in processes that it spawns (a DataLoader's workers). It comes before a package horovod that is installed;
    where that was imported already, `InvalidUsage` is raised. Again: does nothing.
    """
    there = sys.modules.get("horovod")
    if getattr(there, "_collectives", False):
        return
    strange = sorted(name for name in sys.modules if name == "horovod" or name.startswith("horovod."))
    if strange and not _is_ours(there):
        where = getattr(there, "__file__", None) or "a module made at run time"
        raise InvalidUsage(
            f"the package horovod was imported before ({where}): call collectives.horovod.install() before anything "
            "imports it, or start the program with python -m collectives.horovod",
            op="install",
        )
    ours = importlib.import_module(__package__)
    root, common = _package("horovod"), _package("horovod.common")
    root._collectives = True
    root.__version__ = _VERSION
    names = {"horovod": root, "horovod.common": common, "horovod.torch": ours}
    names |= {f"horovod.torch.{name}": ours for name in _SAME}
    names |= {name: importlib.import_module(f"{__package__}.{own}") for name, own in _OWN.items()}
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
    """Tell whether it is the package of `_FOLDER`, which is being imported."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).parent.parent == Path(_FOLDER)


def _package(name: str) -> ModuleType:
    module = ModuleType(name, "Horovod's names for collectives.horovod.")
    module.__path__ = []
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__package__ = name
    return module
