"""The committed stub of the binding against the compiled module: same names, same parameters, same defaults."""

from __future__ import annotations

import ast
import inspect

import pytest

from tests.rank_process import ROOT, load_binding

nccl = load_binding()
STUB = ast.parse((ROOT / "collectives" / "_nccl.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
COMPILED = [nccl.Library, nccl.Comm, nccl.Queue, nccl.ArrayReader, nccl.ArrayCalls]


def is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) in ("property", f"{node.name}.setter") for each in node.decorator_list)


def parameters(function) -> list[tuple[str, str, object]]:
    """(name, kind, default) of each parameter of a stub's function or of a compiled one."""
    if isinstance(function, ast.FunctionDef):
        args = function.args
        plain = [(each.arg, "plain") for each in args.posonlyargs + args.args]
        defaults = [inspect.Parameter.empty] * (len(plain) - len(args.defaults))
        defaults += [ast.literal_eval(each) for each in args.defaults]
        rows = [(name, kind, default) for (name, kind), default in zip(plain, defaults, strict=True)]
        for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            rows.append(
                (each.arg, "keyword", inspect.Parameter.empty if default is None else ast.literal_eval(default))
            )
        return rows
    found = inspect.signature(function).parameters.values()
    return [(each.name, "keyword" if each.kind is each.KEYWORD_ONLY else "plain", each.default) for each in found]


def test_module_names():
    named = {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign)}
    named |= {node.name for node in STUB.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert named == set(nccl.__all__)
    assert all(hasattr(nccl, name) for name in nccl.__all__)


@pytest.mark.parametrize("name", [node.name for node in STUB.body if isinstance(node, ast.FunctionDef)])
def test_functions(name):
    stub = next(node for node in STUB.body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert parameters(stub) == parameters(getattr(nccl, name))


@pytest.mark.parametrize("cls", COMPILED, ids=lambda cls: cls.__name__)
def test_methods_and_properties(cls):
    in_stub = {node.name: node for node in CLASSES[cls.__name__].body if node.name != "__init__"}
    compiled = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
    assert set(in_stub) == set(compiled)
    for name, member in compiled.items():
        assert is_property(in_stub[name]) == (not callable(member)), name
        if callable(member):
            assert parameters(in_stub[name]) == parameters(member), name


def test_error_info():
    fields = [node.target.id for node in CLASSES["ErrorInfo"].body]
    assert fields == list(nccl.ErrorInfo._fields)


def test_every_public_method_has_a_docstring():
    for cls in COMPILED:
        for name, member in vars(cls).items():
            if not name.startswith("_") and callable(member):
                summary = (member.__doc__ or "").split("\n\n")[0]
                assert summary.rstrip().endswith("."), f"{cls.__name__}.{name}"
