"""What messages and docstrings name exists: ``collectives.…`` can be imported, what stands in backquotes is a name."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "collectives"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOTTED = re.compile(r"(?<![\w./-])collectives(?:\.[A-Za-z_]\w*)+")
QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")


def literals(path: Path):
    """All text between quotes, f-strings' constant parts and docstrings included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, or what one has."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not dotted.startswith(error.name or "-"):
                raise
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def test_what_is_named_with_the_package_exists():
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        for line, text in literals(path)
        for name in DOTTED.findall(text)
        if not resolves(name)
    ]
    assert not wrong


def identifiers() -> set[str]:
    """Every name that the package's code has, strings that are one included, and what Python itself has."""
    found = {*dir(builtins), "collectives", "hvd", "dmesg"}
    for path in SOURCES:
        found |= {path.stem, path.parent.name}
        found |= {text for _, text in literals(path) if text.isidentifier()}
        for node in ast.walk(ast.parse(path.read_text())):
            for field in ("id", "attr", "arg", "name"):
                value = getattr(node, field, None)
                if isinstance(value, str):
                    found |= set(value.split("."))
    for path in PACKAGE.glob("*.p[yx][ix]*"):
        found |= set(re.findall(r"\w+", path.read_text()))
    return found


def test_what_is_quoted_is_a_name():
    known = identifiers()
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        for line, text in literals(path)
        for name in QUOTED.findall(text)
        if not known.issuperset(name.split("."))
    ]
    assert not wrong
