"""Imported by Python at the start of each process that a program under ``python -m collectives.auto``
starts: it imports ``collectives.auto`` once torch is loaded.

Its folder is first in PYTHONPATH, so it first imports the ``sitecustomize`` that it hides, if any.
"""

import importlib.machinery
import importlib.util
import os
import sys

__all__ = []


def _import_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry) != here]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if found is None or found.loader is None:
        return
    module = importlib.util.module_from_spec(found)
    sys.modules["sitecustomize"] = module
    found.loader.exec_module(module)


class _TorchLoader:
    """torch's own loader, which imports ``collectives.auto`` after torch."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        import collectives.auto  # noqa: F401


class _TorchFinder:
    """Finds torch as the finders after it do, and gives it `_TorchLoader`."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader)
        return spec


if os.environ.get("COLLECTIVES_AUTO_CHILDREN") == sys.prefix:
    sys.meta_path.insert(0, _TorchFinder())
_import_hidden()
