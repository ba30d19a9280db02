"""The shape of the sources: imports only downward, short files, stubs beside extensions, the README's call path."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "collectives"

# A module imports only modules that stand before it in this list.
ORDER = """
errors
cuda_state
variables
schedule
layout
launch failure_record
machines
presence waiting
_nccl
arrays
_kernels
kernels
engine
work
memory
group agree
exchange rendezvous
mesh
across
hosts
two_levels
lifetime
watchdog
ring
tune
communicator
control
world
torch_groups
compiled
devices
torch_changes
names
timeline
wire
quantized
hierarchical
powersgd
wires
optim
alike
hyperparameters
lanes
saved_buckets
reduction
overlap
local_sgd
state
gradients
round_flags
buckets
ddp
sharded
horovod
auto
run
bench
""".split()

SOURCES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxi")])
ALL_TEXT = [
    path
    for folder in ("collectives", "host", "kernels", "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyx", ".pxd", ".pyi", ".pxi", ".h", ".cpp", ".cu", ".cuh", ".sh")
]
MAX_LINES = 800


def module_of(path: Path) -> str:
    """The part of the package that a file belongs to; "" is its own ``__init__``. A .pxi is part of its .pyx."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if path.suffix == ".pxi":
        owners = [p.stem for p in PACKAGE.glob("*.pyx") if parts[0].startswith(p.stem)]
        return owners[0]
    return "" if parts == ("__init__",) else parts[0]


def imported_by_python(path: Path) -> set[str]:
    """Modules of the package that a Python file imports, wherever in the file the import stands."""
    depth = len(path.relative_to(PACKAGE).parts)  # 1: a module of the package itself
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("collectives.")}
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] == "collectives":
                parts = node.module.split(".")[1:]
            elif node.level == depth:
                parts = node.module.split(".") if node.module else []
            else:
                continue  # outside of the package, or inside of a subpackage
            found |= {parts[0]} if parts else {name.name for name in node.names}
    return found


def imported_by_cython(path: Path) -> set[str]:
    text = path.read_text()
    names = re.findall(r"^\s*(?:c?import|from)\s+collectives\.(\w+)", text, re.M)
    for listed in re.findall(r"^\s*from\s+(?:\.|collectives)\s+c?import\s+\(?([\w, ]+)", text, re.M):
        names += re.findall(r"\w+", listed)
    names += re.findall(r"^\s*from\s+\.(\w+)\s+c?import", text, re.M)
    return set(names)


def imported_by(path: Path) -> set[str]:
    modules = imported_by_python(path) if path.suffix == ".py" else imported_by_cython(path)
    return {name for name in modules if name in ORDER or (PACKAGE / f"{name}.py").exists()}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_only_downward(path):
    own = module_of(path)
    if own == "":
        return
    assert own in ORDER, f"{path.name} has no place in the order of tests/unit/test_imports.py"
    above = ORDER[: ORDER.index(own)]
    wrong = imported_by(path) - set(above) - {own}
    assert not wrong, f"{own} imports {sorted(wrong)}, which stand below it"


def test_the_walk_sees_imports():
    """The test above is worth what imported_by finds."""
    assert {"communicator", "torch_groups", "errors"} <= imported_by(PACKAGE / "ddp.py")
    assert "errors" in imported_by(PACKAGE / "_nccl.pyx")
    assert {"errors", "engine"} <= imported_by(PACKAGE / "communicator.py")


def test_the_binding_imports_no_torch():
    for path in SOURCES:
        if path.suffix in (".pyx", ".pxi") or path.name in ("errors.py", "schedule.py", "layout.py", "launch.py"):
            assert not re.search(r"^\s*(from|c?import)\s+torch", path.read_text(), re.M), path


@pytest.mark.parametrize("path", ALL_TEXT, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short(path):
    if path.suffix == ".cpp" and path.with_suffix(".pyx").exists():
        pytest.skip("made by Cython")
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines"


def test_no_file_is_a_junk_drawer():
    wrong = [p for p in ALL_TEXT if re.fullmatch(r"_?(utils?|commons?|helpers?|misc)", p.stem)]
    assert not wrong


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


def calls_in(path: Path) -> set[str]:
    """Names of everything that is called as a method or looked up as an attribute in a file."""
    return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}


def test_the_path_of_one_call():
    """What the README prints, hop by hop: ``ddp.fused_allreduce -> ... -> libnccl | host engine``."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "ddp.fused_allreduce -> Communicator.all_reduce -> _nccl -> ncclAllReduce -> libnccl | host engine" in readme
    hook = (PACKAGE / "ddp.py").read_text()
    assert "def fused_allreduce(" in hook
    # The hook's own hops: the bucket, its lane, its wire.
    assert {"reduction", "start"} <= calls_in(PACKAGE / "ddp.py")
    assert {"wire", "reduce"} <= calls_in(PACKAGE / "reduction.py")
    assert "all_reduce" in calls_in(PACKAGE / "wire.py")
    communicator = ast.parse((PACKAGE / "communicator.py").read_text())
    (cls,) = (n for n in communicator.body if isinstance(n, ast.ClassDef) and n.name == "Communicator")
    (method,) = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "all_reduce")
    assert any(isinstance(n, ast.Attribute) and n.attr == "all_reduce" for n in ast.walk(method))  # the binding's
    binding = "".join(p.read_text() for p in SOURCES if p.suffix in (".pyx", ".pxi"))
    assert re.search(r"def all_reduce\((?s:.){0,2000}?api\.ncclAllReduce\(", binding)
    engine = "".join(p.read_text() for p in sorted((ROOT / "host").glob("*.cpp")))
    assert re.search(r"ncclResult_t ncclAllReduce\(", engine)
