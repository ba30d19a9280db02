"""The shape of the sources: imports only downward, no underscore names of others, public names that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "collectives"

# A package imports only packages of the lines above its own. Inside of a package modules import each other freely.
LAYERS = """
json_records weak_tensors
errors requirements environment secret torch_compat torch_patches cuda_state layout launcher parameter_names recorder
arrays _nccl _kernels
kernels optimizer_state
optim
comm
rendezvous
compression
gradients
ddp sharded
elastic
horovod backend
auto tracing run bench doctor flight
"""
LAYER = {name: number for number, line in enumerate(LAYERS.split("\n")) for name in line.split()}

SOURCES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxi")])


def package_of(path: Path) -> str:
    """The package or top-level module that a file is part of; "" is the whole's ``__init__``. A .pxi is its .pyx's."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if path.suffix == ".pxi":
        return next(p.stem for p in PACKAGE.glob("*.pyx") if parts[0].startswith(p.stem))
    return "" if parts == ("__init__",) else parts[0]


def imported_by_python(path: Path) -> set[tuple[str, ...]]:
    """What a Python file imports of ours, wherever in the file: ("comm", "engine", "get_engine")."""
    here = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {tuple(each.name.split(".")[1:]) for each in node.names if each.name.startswith("collectives.")}
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                source = [*here[: len(here) - node.level + 1], *module]
            elif module[0] == "collectives":
                source = module[1:]
            else:
                continue
            found |= {(*source, each.name) for each in node.names}
    return {parts for parts in found if parts}


def imported_by_cython(path: Path) -> set[tuple[str, ...]]:
    text = path.read_text()
    names = re.findall(r"^\s*(?:c?import|from)\s+collectives\.(\w+)", text, re.M)
    for listed in re.findall(r"^\s*from\s+(?:\.|collectives)\s+c?import\s+\(?([\w, ]+)", text, re.M):
        names += re.findall(r"\w+", listed)
    names += re.findall(r"^\s*from\s+\.(\w+)\s+c?import", text, re.M)
    return {(name,) for name in names}


def imported_by(path: Path) -> set[tuple[str, ...]]:
    found = imported_by_python(path) if path.suffix == ".py" else imported_by_cython(path)
    return {parts for parts in found if parts[0] in LAYER}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_only_downward(path):
    own = package_of(path)
    if own == "":
        return
    assert own in LAYER, f"{own} is in no layer of tests/project/test_imports.py"
    wrong = {parts for parts in imported_by(path) if parts[0] != own and LAYER[parts[0]] >= LAYER[own]}
    if LAYER[own] <= LAYER["_nccl"] or LAYER[own] == LAYER["auto"]:  # modules of their own, no packages
        wrong = {parts for parts in wrong if LAYER[parts[0]] > LAYER[own]}
    assert not wrong, f"{own} imports {sorted(wrong)}, which are not in a layer above it"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_underscore_name_of_another_package_is_imported(path):
    own = package_of(path)
    allowed = {("_nccl",), ("_kernels",)}
    wrong = {
        parts
        for parts in imported_by(path)
        if parts[0] != own and any(name.startswith("_") for name in parts) and parts[:1] not in allowed
    }
    assert not wrong


def test_the_walk_sees_imports():
    """The tests above are worth what imported_by finds."""
    assert ("comm", "communicator", "Communicator") in imported_by(PACKAGE / "gradients/buckets.py")
    assert ("comm", "engine", "Engine") in imported_by(PACKAGE / "comm/communicator.py")
    assert ("errors",) in imported_by(PACKAGE / "_nccl.pyx")


def test_the_binding_imports_no_torch():
    for path in SOURCES:
        if path.suffix in (".pyx", ".pxi") or path.name in ("errors.py", "schedule.py", "layout.py", "launcher.py"):
            assert not re.search(r"^\s*(from|c?import)\s+torch", path.read_text(), re.M), path


def literal_all(path: Path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    return None


@pytest.mark.parametrize("path", [p for p in SOURCES if p.suffix == ".py"], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_all_is_a_literal_of_names_that_are_there(path):
    names = literal_all(path)
    assert names is not None, "__all__ is missing, or is no literal"
    assert len(set(names)) == len(names)
    body = ast.parse(path.read_text()).body
    bound = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            bound.add(node.name)
        elif isinstance(node, ast.Assign):
            bound |= {n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.add(node.target.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(a.asname or a.name).split(".")[0] for a in node.names}
    assert set(names) <= bound, sorted(set(names) - bound)


def test_init_holds_names_only():
    """The package's ``__init__``: a docstring, imports, ``__all__`` and ``__version__``."""
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    for node in body[1:]:
        target = node.targets[0].id if isinstance(node, ast.Assign) else None
        assert isinstance(node, ast.ImportFrom) or target in ("__all__", "__version__"), ast.unparse(node)


def test_every_extension_has_a_stub():
    assert (PACKAGE / "py.typed").exists()
    for path in PACKAGE.rglob("*.pyx"):
        stub = path.with_suffix(".pyi")
        assert stub.exists(), stub
        ast.parse(stub.read_text())
