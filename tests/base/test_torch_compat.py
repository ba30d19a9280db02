"""The private names of torch: in one module, all there in the torch that is installed, and which versions are taken."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from collectives import torch_compat
from collectives.errors import EngineUnavailable

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "collectives"
# Private names of torch's modules; attributes of objects are ATTRIBUTES' affair, torch._foreach_... are documented.
PRIVATE = re.compile(
    r"torch\.(?:\w+\.)*_(?!foreach_)\w+|from torch[\w.]*\._\w+[\w.]* import|from torch[\w.]* import \(?\s*_\w+"
    r"|\b(?:dist|distributed_c10d|c10d)\._\w+"
)
TEXT = re.compile(r'#.*|""".*?"""|"[^"\n]*"', re.DOTALL)  # comments and strings may name them
VERSIONS = re.compile(r"torch\.__version__")


def test_private_names_stand_in_one_module():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name != "torch_compat.py":
            text = VERSIONS.sub("", TEXT.sub("", path.read_text()))
            wrong += [f"{path.relative_to(ROOT)}: {found[0]}" for found in PRIVATE.finditer(text)]
    assert not wrong, "import these from collectives/torch_compat.py"


def test_the_search_finds_such_names():
    for line in (
        "x = torch._C.TensorBase", "from torch.utils._pytree import tree_map", "from torch.a import _B",
        "dist.distributed_c10d._world", "torch.utils._pytree.tree_map(f, x)",
    ):  # fmt: skip
        assert PRIVATE.search(line), line
    assert not PRIVATE.search("torch._foreach_mul_(a, b)")


def test_every_name_is_there():
    assert torch_compat.current_graph_task_id() == -1
    assert torch_compat.premul_sum(2.0) is not None
    assert torch_compat.open_process_groups() == {}
    for name in torch_compat.__all__:
        assert getattr(torch_compat, name) is not None


@pytest.mark.parametrize("owner", torch_compat.ATTRIBUTES)
def test_attributes_of_torchs_objects_are_there(owner):
    module, _, name = owner.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    source = getattr(importlib.import_module(cls.__module__), "__file__", "")  # a part of an extension may have none
    text = Path(source).read_text() if source.endswith(".py") else ""
    for attribute in torch_compat.ATTRIBUTES[owner]:
        assert hasattr(cls, attribute) or f"self.{attribute}" in text, f"{owner} has no {attribute}"


def test_an_older_torch_is_refused_by_its_version():
    for version in ("2.6.0+cu124", "2.7.1", "1.13.0"):
        with pytest.raises(EngineUnavailable, match=rf"torch 2\.8 or newer, and this is torch {re.escape(version)}"):
            torch_compat._check_version(version)
    for version in ("2.8.0", "2.13.0+cpu", "2.15.0", "2.20.0a0+git1234", "3.0"):
        torch_compat._check_version(version)


def test_the_metadata_and_the_readme_name_the_oldest():
    assert f'"torch>={torch_compat.OLDEST},<' in (ROOT / "pyproject.toml").read_text()
    assert f"torch {torch_compat.OLDEST}" in (ROOT / "README.md").read_text()


class Untraced:
    @torch.no_grad()
    def wrapped(self, x):
        return plus_one(x)

    def plain(self, x):
        return plus_one(x)


def plus_one(x):
    return x + 1


@torch.no_grad()
def of_a_program(x):
    return plus_one(x)


def behind_a_break(x):
    with contextlib.suppress(ValueError):  # Dynamo then leaves this frame alone, and looks at those below
        torch._dynamo.graph_break()
        y = of_a_program(x)
    return y


def count_graphs(function):
    counter = CompileCounter()
    assert torch.compile(function, backend=counter)(torch.ones(2)).tolist() == [2, 2]
    torch._dynamo.reset()
    return counter.frame_count


def test_untraced_keeps_the_compiler_out_of_what_it_is_told_to_alone(monkeypatch):
    monkeypatch.setattr(torch_compat, "_FOLDER", str(Path(__file__).parent))
    monkeypatch.setattr(torch_compat, "__package__", "tests.base")
    torch_compat.untraced(Untraced)
    assert count_graphs(Untraced().plain) == count_graphs(Untraced().wrapped) == 0
    assert count_graphs(behind_a_break) == 1  # of a function whose wrapper has the code of `wrapped`'s
    calls_other = torch_compat.untraced(recursive=False)(lambda x: plus_one(x))
    assert count_graphs(calls_other) == 1
