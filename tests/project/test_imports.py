"""The shape of the sources: imports only downward, no underscore names of others, public names that are there."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "collectives"

# A package imports only packages of the lines above its own. Inside of a package modules import each other freely.
LAYERS = """
json_records weak_tensors argument_types
errors requirements environment secret torch_compat torch_patches cuda_state layout launcher parameter_names recorder
arrays _nccl _kernels
kernels optimizer_state
optim
comm
rendezvous
compression
gradients
ddp
backend
sharded
elastic
horovod
auto auto_children tracing run bench doctor flight
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


@functools.cache
def imported_by(path: Path) -> set[tuple[str, ...]]:
    found = imported_by_python(path) if path.suffix == ".py" else imported_by_cython(path)
    return {parts for parts in found if parts[0] in LAYER}


def test_imports_go_only_downward():
    assert ("comm", "engine", "Engine") in imported_by(PACKAGE / "comm/communicator.py")  # the walk sees imports
    assert ("errors",) in imported_by(PACKAGE / "_nccl.pyx")
    wrong = []
    for path in SOURCES:
        own = package_of(path)
        if own == "":
            continue
        assert own in LAYER, f"{own} is in no layer of tests/project/test_imports.py"
        lowest = LAYER[own] - 1
        if LAYER[own] <= LAYER["_nccl"] or LAYER[own] == LAYER["auto"]:  # modules of their own, no packages
            lowest = LAYER[own]
        wrong += [(path, ".".join(of)) for of in imported_by(path) if of[0] != own and LAYER[of[0]] > lowest]
    assert not wrong, "imports of what is not in a layer above"


def test_no_underscore_name_of_another_package_is_imported():
    wrong = [
        (path, ".".join(parts))
        for path in SOURCES
        for parts in imported_by(path)
        if parts[0] not in (package_of(path), "_nccl", "_kernels") and any(name.startswith("_") for name in parts)
    ]
    assert not wrong


def test_the_binding_imports_no_torch():
    for path in SOURCES:
        if path.suffix in (".pyx", ".pxi") or path.name in ("errors.py", "schedule.py", "layout.py", "launcher.py"):
            assert not re.search(r"^\s*(from|c?import)\s+torch", path.read_text(), re.M), path


def literal_all(path: Path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", None) == "__all__" for t in node.targets):
            return ast.literal_eval(node.value)
    return None


def test_every_extension_has_a_stub():
    assert (PACKAGE / "py.typed").exists()
    for path in PACKAGE.rglob("*.pyx"):
        stub = path.with_suffix(".pyi")
        assert stub.exists(), stub
        ast.parse(stub.read_text())


# Functions of torch that take a device and otherwise follow torch.set_default_device.
ALLOCATING = set(
    "arange as_tensor asarray empty empty_permuted empty_quantized empty_strided eye full linspace logspace normal "
    "ones rand randint randn randperm range scalar_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor "
    "sparse_csr_tensor tensor tril_indices triu_indices vander zeros".split()
)


def test_memory_is_made_on_a_device_that_is_named():
    """Else it would lie where torch.set_default_device says, and an engine would write through its address."""
    unnamed = []
    for path in SOURCES:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in ALLOCATING:
                    if not {"device", None} & {each.arg for each in node.keywords}:
                        unnamed.append(f"{path.relative_to(ROOT)}:{node.lineno}: torch.{name}")
    assert not unnamed, "\n".join(unnamed)
