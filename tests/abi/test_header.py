"""Every constant, enum value, struct layout and signature of ours against the real nccl.h, at compile time only."""

from __future__ import annotations

import subprocess

import pytest

from tests.abi.headers import (
    check_source,
    compiles,
    our_declarations,
    our_text,
    public_functions,
    real_header,
    version_code,
)
from tests.rank_process import ROOT, load_binding


def source(text: str) -> str:
    return check_source(our_declarations(text), real_header().read_text(), load_binding().FUNCTIONS)


def test_the_declarations_agree_with_the_real_header(tmp_path):
    text = source(our_text())
    assert text.count("static_assert") > 180, "the check itself has lost most of what it checks"
    agrees, words = compiles(text, real_header(), tmp_path)
    assert agrees, words


WRONG = {
    "constant": ("#define NCCL_SPLIT_NOCOLOR -1", "#define NCCL_SPLIT_NOCOLOR -2"),
    "enum value": ("ncclMax = 2, ncclMin = 3", "ncclMax = 3, ncclMin = 2"),
    "order of fields": ("  int maxCTAs;\n  const char* netName;", "  const char* netName;\n  int maxCTAs;"),
    "type of a field": ("  const char* netName;", "  char* netName;"),
    "field left out": ("  int splitShare;\n", ""),
    "type of an argument": ("ncclCommSplit(ncclComm_t comm, int color", "ncclCommSplit(ncclComm_t comm, long color"),
    "const left out": ("ncclBroadcast(const void* sendbuff", "ncclBroadcast(void* sendbuff"),
    "pointer for a value": (
        "int nranks, ncclUniqueId commId, int rank);",
        "int nranks, ncclUniqueId* commId, int rank);",
    ),
    "result": ("const char* ncclGetLastError", "char* ncclGetLastError"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_planted_mistake_does_not_compile(what, tmp_path):
    right, wrong = WRONG[what]
    text = our_text()
    assert right in text, f"plant the mistake elsewhere: the header no longer says {right!r}"
    agrees, words = compiles(source(text.replace(right, wrong, 1)), real_header(), tmp_path)
    assert not agrees, f"wrong {what} compiled: the check is blind to it"
    assert "static assertion failed" in words, words


def test_what_is_bound_is_public_and_declared():
    header = real_header().read_text()
    bound = load_binding().FUNCTIONS
    assert {name for name, since in bound.items() if since <= version_code(header)} <= public_functions(header)
    assert set(bound) <= set(our_declarations(our_text()).functions)


@pytest.mark.parametrize("compiler", [("gcc", "-std=c11", "-xc"), ("g++", "-std=c++17", "-xc++")])
@pytest.mark.parametrize("name", ["nccl_abi.h", "host_abi.h"])
def test_our_headers_stand_alone(compiler, name):
    command = [*compiler, "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'kernels/include'}", "-"]
    done = subprocess.run(command, input=f'#include "coll/{name}"\n', capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
