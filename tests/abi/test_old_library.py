"""A library that has next to nothing: it loads, and each function that is missing says so when it is called."""

from __future__ import annotations

import inspect
import re
import subprocess

import pytest

from tests.rank_process import ROOT, load_binding

nccl = load_binding()
from collectives import errors  # noqa: E402

# NCCL 2.7.8 cut down to what opens a communicator, and what tells its rank.
OLD = """
#include "coll/nccl_abi.h"
ncclResult_t ncclGetVersion(int* version) { *version = 2708; return ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  static int anything;
  (void)nranks; (void)id; (void)rank;
  *comm = (ncclComm_t)&anything;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return comm ? ncclSuccess : ncclInvalidArgument; }
"""
PRESENT = {"ncclGetVersion", "ncclCommInitRank", "ncclCommAbort"}
UNIQUE_ID = bytes(128)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    (folder / "old.c").write_text(OLD)
    path = folder / "libnccl-old.so"
    command = ["gcc", "-shared", "-fPIC", f"-I{ROOT / 'kernels/include'}", str(folder / "old.c"), "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return nccl.Library(path)


@pytest.fixture
def comm(library):
    opened = library.comm_init_rank(1, UNIQUE_ID, 0)
    yield opened
    opened.abort()


def arguments(method) -> list:
    """Something acceptable for each parameter that has no default."""
    named = {"unique_id": UNIQUE_ID, "name": b"job", "enable": True, "seconds": 1.0, "exclude": [], "value": 1.0}
    required = [each for each in inspect.signature(method).parameters.values() if each.default is each.empty]
    return [named.get(each.name, 0) for each in required if each.name != "self"]


def needed_by(method) -> list[str]:
    """The C functions that a method calls, from its docstring."""
    return re.findall(r"``((?:nccl|collHost)[A-Z]\w*(?<!_t))``", method.__doc__ or "")


# handle, library, rank, size and the like are no calls or known to the object; group_cancel does with NCCL's functions
# what the host engine has one of its own for.
METHODS = [
    (cls, name)
    for cls in (nccl.Library, nccl.Comm)
    for name, member in vars(cls).items()
    if not name.startswith("_") and callable(member) and needed_by(member) and name not in ("abort", "group_cancel")
]


# Called inside of other calls: for the version and for the text of an error, and by abort() on the host engine.
INTERNAL = {"ncclGetVersion", "ncclGetErrorString", "ncclGetLastError", "ncclCommAbort", "ncclCommRevoke"}


def test_methods_name_their_c_functions():
    """Each method of the two classes says which C function it calls; together they call all of them."""
    named = {name for cls, method in METHODS for name in needed_by(getattr(cls, method))} | INTERNAL
    named |= {name for each in ("rank", "size") for name in needed_by(getattr(nccl.Comm, each))}
    assert set(nccl.FUNCTIONS) <= named
    assert not {name for name in named if name not in nccl.FUNCTIONS and name not in nccl.HOST_FUNCTIONS}


@pytest.mark.parametrize(("cls", "method"), METHODS, ids=[f"{cls.__name__}.{name}" for cls, name in METHODS])
def test_a_missing_function_is_named(cls, method, library, comm):
    bound = getattr(library if cls is nccl.Library else comm, method)
    absent = [name for name in needed_by(bound) if name not in PRESENT]
    if absent:  # comm_init_rank is there, without its Config form
        keywords = {"config": {}} if method == "comm_init_rank" else {}
        with pytest.raises(errors.EngineUnavailable) as caught:
            bound(*arguments(bound), **keywords)
        name = absent[0]
        text = str(caught.value)
        assert name in text and library.path in text and "2.7.8" in text
        if name in nccl.FUNCTIONS:
            assert f"came with NCCL {nccl.format_version(nccl.FUNCTIONS[name])}" in text
        else:
            assert "host engine" in text
        assert not library.has(name)
        assert comm.handle, "the communicator must stay as it was"


def test_errors_without_error_functions(library):
    """Neither ncclGetErrorString nor ncclGetLastError is there: the code still becomes its exception."""
    with pytest.raises(errors.InternalError, match="result code 3") as caught:
        nccl.check(3, library)
    assert caught.value.code == 3


def test_version_texts():
    texts = {2708: "2.7.8", 2700: "2.7", 21403: "2.14.3", 22100: "2.21", 23203: "2.32.3"}
    assert {code: nccl.format_version(code) for code in texts} == texts
