"""The pages: every public name has a reference entry, links lead somewhere, figures are the committed results', what
pages name exists.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import collectives.horovod
import collectives.kernels
import collectives.optim
import collectives.sharded.param
import collectives.sharded.param_group
from benchmarks import performance_doc
from tests.project.test_imports import PACKAGE, ROOT, literal_all

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
PUBLIC = {
    "collectives": PACKAGE / "__init__.py",
    "collectives.auto": PACKAGE / "auto" / "__init__.py",
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


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)


def entries() -> tuple[set[str], set[str]]:
    """Return the names that mkdocstrings renders, and those that the reference describes in a table."""
    text = {path.stem: path.read_text() for path in (DOCS / "reference").glob("*.md")}
    rendered = [name for page in text.values() for name in re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)]
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
    assert rendered | tables <= public | set(PUBLIC) and not rendered & tables


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", without_code(path.read_text()), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_links_lead_somewhere(path):
    text = re.sub(r"`[^`\n]*`", "", without_code(path.read_text()))
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        inside = path.name == "README.md" or target.is_relative_to(DOCS)  # the site has nothing else
        if not target.is_file() or not inside or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_every_page_is_in_the_sites_menu():
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("path", [*PAGES, ROOT / "benchmarks" / "LOG.md"], ids=[*NAMES, "benchmarks/LOG.md"])
def test_prose_wraps_at_100(path):
    text = re.sub(
        r"`[^`\n]*`|\[[^\]\n]*\]\([^)\n]*\)", lambda span: span[0].replace(" ", "_"), without_code(path.read_text())
    )
    lines = [line for line in text.splitlines() if len(line) > 100 and not line.startswith(("|", "!["))]
    assert [line for line in lines if " " in line.strip()] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("path", performance_doc.PAGES, ids=lambda path: path.name)
def test_figures_are_those_of_the_committed_results(path):
    text = path.read_text()
    assert performance_doc.written(text) == text, "run python benchmarks/performance_doc.py"
    assert performance_doc.MARK.search(text)


def test_the_picture_of_the_layers_has_every_package():
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    picture, page = (DOCS / "layers.svg").read_text(), (DOCS / "architecture.md").read_text()
    assert len(packages) >= 10
    assert {name for name in packages if f">{name}</text>" not in picture} == set()
    assert {name for name in packages if f"`{name}/`" not in page} == set()


OWNERS = {
    "buckets": collectives.GradientBuckets, "collectives": collectives, "comm": collectives.Communicator,
    "group": collectives.sharded.param_group.ParamGroup, "hvd": collectives.horovod, "kernels": collectives.kernels,
    "optim": collectives.optim, "param": collectives.sharded.param.ShardedParam, "state": collectives.HookState,
    "unit": collectives.sharded.Unit,
}  # fmt: skip


def code_of(path: Path) -> list[str]:
    """Return a page's Python blocks of our own, and what stands in backquotes."""
    text = path.read_text()
    blocks = re.findall(r"^ *```(?:python(?! theirs)[^\n]*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"`([^`\n]+)`", without_code(text))


def has(owner, name: str) -> bool:
    """Whether a module or class has a name, or its methods set it."""
    if hasattr(owner, name) or (inspect.ismodule(owner) and importlib.util.find_spec(f"{owner.__name__}.{name}")):
        return True
    bases = [base for base in getattr(owner, "__mro__", ()) if base.__module__.startswith("collectives")]
    return any(re.search(rf"self\.{name}\b", inspect.getsource(base)) for base in bases)


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_attributes_that_pages_name_exist(path):
    owners = {name: owner for name, owner in OWNERS.items() if (path.name, name) != ("elastic.md", "state")}
    attribute = re.compile(rf"(?<![\w./\"])({'|'.join(owners)})\.(?!py\b|cpp\b)([A-Za-z_]\w*)")
    found = {pair for code in code_of(path) for pair in attribute.findall(code)}
    assert {f"{owner}.{name}" for owner, name in found if not has(owners[owner], name)} == set()


def called(function: ast.expr):
    """What of ours a page calls: ``collectives.init``, ``comm.send``, ``fully_shard``; None: something else."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return getattr(OWNERS.get(function.value.id), function.attr, None)
    name = getattr(function, "id", "")
    modules = (collectives, collectives.sharded, collectives.optim)
    return next((getattr(module, name) for module in modules if name in module.__all__), None)


@pytest.mark.parametrize("path", PAGES, ids=NAMES)
def test_arguments_that_pages_name_exist(path):
    wrong = []
    for code in code_of(path):
        with contextlib.suppress(SyntaxError):
            for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
                function = called(call.func)
                if callable(function):
                    taken = inspect.signature(function).parameters
                    others = any(each.kind is each.VAR_KEYWORD for each in taken.values())
                    wrong += [f"{ast.unparse(call.func)}({each.arg}=)" for each in call.keywords
                              if each.arg and each.arg not in taken and not others]  # fmt: skip
    assert wrong == []
