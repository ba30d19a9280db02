"""The build of the host engine, on a tree with a tiny engine: what is rebuilt when, and what is said when it fails."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

import pytest

from tests.rank_process import ROOT


@pytest.fixture
def tree(tmp_path):
    """A source tree whose engine is two files that share a header, and one kernel file."""
    for name in ("setup.py", "pyproject.toml", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text("A tree for a test.\n")
    (tmp_path / "collectives").mkdir()
    (tmp_path / "collectives/__init__.py").write_text('__version__ = "0"\n')
    (tmp_path / "host").mkdir()
    shutil.copy(ROOT / "host/exports.map", tmp_path / "host/exports.map")
    (tmp_path / "host/value.h").write_text("constexpr int kValue = 41;\n")
    export = 'extern "C" __attribute__((visibility("default"))) int'
    (tmp_path / "host/a.cpp").write_text(
        f'#include "value.h"\nint hidden();\n{export} collHostA() {{ return kValue + hidden(); }}\n'
    )
    (tmp_path / "host/b.cpp").write_text("int hidden() { return 1; }\n")
    (tmp_path / "kernels/host").mkdir(parents=True)
    (tmp_path / "kernels/host/k.cpp").write_text(
        "#define JOIN(a, b) a##b\n#define NAME(a, b) JOIN(a, b)\n"
        f"{export} NAME(collHostK_, COLL_ISA)() {{ return 7; }}\n"
    )
    return tmp_path


def build(tree, **environ) -> subprocess.CompletedProcess:
    plain = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "LDFLAGS")}
    command = [sys.executable, "setup.py", "-q", "build_host"]
    return subprocess.run(command, cwd=tree, env=plain | environ, capture_output=True, text=True, timeout=120)


def times(tree) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (tree / "build/host").glob("*.o")}


def test_builds_what_changed_and_no_more(tree):
    done = build(tree)
    assert done.returncode == 0, done.stderr
    library = tree / "collectives/_lib/libcollectives_host.so"
    assert ctypes.CDLL(str(library)).collHostA() == 42
    assert ctypes.CDLL(str(library)).collHostK_baseline() == 7
    before, linked = times(tree), library.stat().st_mtime_ns

    assert build(tree).returncode == 0
    assert times(tree) == before and library.stat().st_mtime_ns == linked

    (tree / "host/value.h").write_text("constexpr int kValue = 99;\n")
    assert build(tree).returncode == 0
    after = times(tree)
    assert {name for name in after if after[name] != before[name]} == {"a.host.o"}
    assert library.stat().st_mtime_ns != linked

    assert build(tree, CXXFLAGS="-DOTHER").returncode == 0
    assert all(times(tree)[name] != after[name] for name in after), "other flags must rebuild everything"
    leftovers = [path.name for path in library.parent.iterdir() if path != library]
    assert leftovers == []


def test_a_header_edited_while_the_compiler_runs_makes_the_object_old(tree):
    compiler = tree / "slow-compiler"
    compiler.write_text('#!/bin/sh\ng++ "$@" && touch host/value.h\n')
    compiler.chmod(0o755)
    assert build(tree, CXX=str(compiler)).returncode == 0
    before = times(tree)
    assert build(tree, CXX=str(compiler)).returncode == 0
    after = times(tree)
    assert {name for name in after if after[name] != before[name]} == {"a.host.o"}


@pytest.mark.parametrize(
    ("change", "environ", "words"),
    [
        (None, {"CXX": "no-such-compiler"}, ("needs a C++17 compiler", "no-such-compiler", "apt-get")),
        ("int hidden() { return nonsense; }\n", {}, ("nonsense",)),
        ("int missing();\nint hidden() { return missing(); }\n", {}, ("missing",)),
        ("nothing", {}, ("the source tree is incomplete",)),
    ],
    ids=["no compiler", "a compile error", "an undefined symbol", "no source"],
)
def test_what_ends_a_build(tree, change, environ, words):
    if change == "nothing":
        for path in (tree / "host").glob("*.cpp"):
            path.unlink()
    elif change:
        (tree / "host/b.cpp").write_text(change)
    done = build(tree, **environ)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and all(word in said for word in words), said
    assert not (tree / "collectives/_lib/libcollectives_host.so").exists()
