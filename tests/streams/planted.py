"""Planted errors: one synchronisation of the package taken back while a program runs on the simulated GPU.

A `Site` is a call in the package's sources; `taken_back` compiles its function again without the call. `Change` is any
other change of a function's text. What runs, runs in the same processes as other tests: code objects are exchanged, and
put back.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("wait_stream", "wait_event", "wait_for_stream", "record_stream", "record_event")
# What has no streams of CUDA, and what is no part of training.
OUT = ("bench/", "comm/multinode/", "rendezvous/")


class Change(NamedTuple):
    """A change of a function's text: ``old`` becomes ``new``. ``function``: its qualified name in ``file``."""

    file: str
    function: str
    old: str
    new: str

    def applied(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        node = find(ast.parse(text), self.function)
        body = "".join(lines[node.lineno - 1 : node.end_lineno])
        if self.old not in body:
            raise ValueError(f"{self.file}, {self.function}: no {self.old!r}")
        return "".join(lines[: node.lineno - 1]) + body.replace(self.old, self.new) + "".join(lines[node.end_lineno :])


class Site(NamedTuple):
    """A call that orders streams. ``number``: which one of this text in its function."""

    file: str
    function: str
    call: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}, {self.function}: {self.call}" + (f" ({self.number + 1})" if self.number else "")

    def applied(self, text: str) -> str:
        node = [each for each, its in calls_of(ast.parse(text), text) if its == self.key()][self.number]
        kind = name_of(node)
        lines = text.encode().splitlines(keepends=True)
        first = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        last = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        stand_in = f"__import__('tests.streams.planted', fromlist=['hit']).hit({kind!r})"
        whole = text.encode()
        return (whole[:first] + stand_in.encode() + whole[last:]).decode()

    def key(self) -> tuple[str, str]:
        return self.function, self.call


def outer_functions(tree, prefix=""):
    """The functions of a module and the methods of its classes, each with its qualified name."""
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from outer_functions(node, f"{prefix}{node.name}.")


def find(tree, name: str):
    return next(node for its, node in outer_functions(tree) if its == name)


def name_of(call: ast.Call) -> str:
    """The name of the function or method that is called; "" where it has none."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def calls_of(tree, text: str):
    """The calls that order streams, with (function, text)."""
    for name, function in outer_functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = name_of(node)
                if called in CALLS or (called == "record" and "event" in ast.get_source_segment(text, node.func)):
                    yield node, (name, ast.get_source_segment(text, node))


def sites() -> list[Site]:
    """All such calls of the package."""
    found = []
    for path in sorted((ROOT / "collectives").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if any(part in file for part in OUT):
            continue
        text = path.read_text()
        seen: dict[tuple, int] = {}
        for _, key in calls_of(ast.parse(text), text):
            number = seen[key] = seen.get(key, -1) + 1
            found.append(Site(file, *key, number))
    return found


hits: list[str] = []


def hit(kind: str):
    """Stand for a call that was taken back."""
    hits.append(kind)
    if kind == "record_event":
        import torch

        return torch.cuda.Event()  # one that was never recorded: a wait for it waits for nothing
    return None


def _code_of(module_code, qualified: str):
    code = module_code
    for name in qualified.split("."):
        code = next(each for each in code.co_consts if inspect.iscode(each) and each.co_name == name)
    return code


def _function_of(module, qualified: str):
    owner = module
    *path, last = qualified.split(".")
    for name in path:
        owner = getattr(owner, name)
    found = inspect.getattr_static(owner, last)
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__func__", found)  # of a static or class method
    return inspect.unwrap(found)


@contextlib.contextmanager
def taken_back(*changes):
    """Run with changes of the package's functions."""
    before = []
    try:
        for change in changes:
            path = ROOT / change.file
            name = change.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            module = importlib.import_module(name)
            code = compile(change.applied(path.read_text()), str(path), "exec", dont_inherit=True)
            function = _function_of(module, change.function)
            before.append((function, function.__code__))
            function.__code__ = _code_of(code, change.function)
        yield
    finally:
        for function, code in reversed(before):
            function.__code__ = code


def reports_without(ctx, changes, program, *args):
    """Run a program with changes; give the reports as (kind, text), and how often a site was passed."""
    from tests.streams import running

    hits.clear()
    with taken_back(*changes):
        program(ctx, *args)
    return [(each.kind, each.text) for each in running.take()], len(hits)


def sweep(ctx, planted, program, path):
    """Run a program with each site taken back, one after the other; give for each (times it was passed, report kinds).

    ``path``: None, or a folder for the files over which process groups are initialised.
    """
    results = []
    for number, site in enumerate(planted):
        args = () if path is None else (f"{path}/{number}",)
        found, passed = reports_without(ctx, [site], program, *args)
        results.append((passed, sorted({kind for kind, _ in found})))
    return results
