"""The reference: every public name has an entry. mkdocs checks links and the menu (`make docs`)."""

from __future__ import annotations

import re

import pytest

from tests.project.test_imports import PACKAGE, ROOT, literal_all

DOCS = ROOT / "docs"
PUBLIC = {
    "collectives": PACKAGE / "__init__.py",
    "collectives.auto": PACKAGE / "auto.py",
    "collectives.elastic": PACKAGE / "elastic" / "__init__.py",
    "collectives.elastic.sharded_state": PACKAGE / "elastic" / "sharded_state.py",  # imported at its first use
    "collectives.errors": PACKAGE / "errors.py",
    "collectives.flight": PACKAGE / "flight" / "__init__.py",
    "collectives.horovod": PACKAGE / "horovod" / "__init__.py",
    "collectives.horovod.elastic": PACKAGE / "horovod" / "elastic" / "__init__.py",
    "collectives.kernels": PACKAGE / "kernels" / "__init__.py",
    "collectives.optim": PACKAGE / "optim.py",
    "collectives.run": PACKAGE / "run.py",
    "collectives.sharded": PACKAGE / "sharded" / "__init__.py",
    "collectives.sharded.fsdp2": PACKAGE / "sharded" / "fsdp2.py",
}


def entries() -> tuple[set[str], set[str]]:
    """Return the names that mkdocstrings renders, and those that the reference describes in a table."""
    text = {path.stem: path.read_text() for path in (DOCS / "reference").glob("*.md")}
    rendered = [name for page in text.values() for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
    # A function is named twice where its module has its name, which would be rendered in its place.
    rendered = [re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in rendered]
    assert len(set(rendered)) == len(rendered)
    tables = {
        f"collectives.{module}.{name}"
        for module in ("horovod", "sharded")
        for name in re.findall(r"^\| `(\w+)` \|", text[f"{module}-api"], re.MULTILINE)
    }
    return set(rendered), tables


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_reference_entry(module):
    rendered, tables = entries()
    # A module that is exported has entries of its own.
    modules = {f"{module}.{name}" for name in ("elastic", "errors") if f"{module}.{name}" in PUBLIC}
    public = {f"{module}.{name}" for name in literal_all(PUBLIC[module])}
    assert public and public - rendered - tables - modules == set()


def test_every_reference_entry_is_public():
    rendered, tables = entries()
    public = {f"{module}.{name}" for module, path in PUBLIC.items() for name in literal_all(path)}
    public.add("collectives.gradients.options.HookOptions")  # the arguments of HookState
    assert rendered | tables <= public | set(PUBLIC) and not rendered & tables
