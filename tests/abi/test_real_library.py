"""NVIDIA's libnccl.so.2 from the wheel, driven by the same binding on a machine with no GPU in sight."""

from __future__ import annotations

import ctypes

import pytest

from tests.abi.alone import run_alone
from tests.abi.headers import public_functions, real_header, real_library, version_code
from tests.rank_process import load_binding

nccl = load_binding()
from collectives import errors  # noqa: E402  (found once the binding is loaded)


@pytest.fixture(scope="module")
def library():
    return nccl.Library(real_library())


def test_version(library):
    assert library.version == version_code(real_header().read_text())
    assert not library.is_host
    assert library.path == str(real_library())


def test_every_function_of_its_version_is_there(library):
    header = public_functions(real_header().read_text())
    for name, since in nccl.FUNCTIONS.items():
        assert library.has(name) == (since <= library.version) == (name in header), name
    assert not any(library.has(name) for name in nccl.HOST_FUNCTIONS)
    with pytest.raises(errors.InvalidArgument, match="ncclNoSuchThing"):
        library.has("ncclNoSuchThing")


def test_unique_ids_differ(library):
    ids = {library.get_unique_id() for _ in range(3)}
    assert len(ids) == 3 and all(len(each) == nccl.UNIQUE_ID_BYTES for each in ids)


INIT = (
    f"REAL = {str(real_library())!r}"
    + """
library = nccl.Library(REAL)
unique_id = library.get_unique_id()
try:
    {call}
except Exception as error:
    answer.update(kind=type(error).__name__, text=str(error), code=error.code, op=error.op, rank=error.rank,
                  detail=error.detail)
"""
)


@pytest.mark.parametrize(
    "call",
    [
        "library.comm_init_rank(2, unique_id, 1)",
        "library.comm_init_rank(2, unique_id, 1, config={})",
        "library.comm_init_rank(2, unique_id, 1, config={'blocking': 1, 'netName': 'Socket'})",
        "library.mem_alloc(4096)",
    ],
)
def test_no_gpu_is_a_clean_cuda_error(call):
    error = run_alone(INIT.format(call=call))
    assert error["kind"] == "CudaError" and error["code"] == 1
    assert "Cuda failure" in error["detail"] and error["detail"] in error["text"]
    if "_rank" in call:
        assert error["rank"] == 1 and error["op"].startswith("comm_init_rank")


def test_a_null_communicator_is_an_invalid_argument(library):
    count = ctypes.c_int()
    code = ctypes.CDLL(str(real_library())).ncclCommCount(None, ctypes.byref(count))
    with pytest.raises(errors.InvalidArgument) as caught:
        nccl.check(code, library)
    assert caught.value.code == 4 and "invalid argument" in str(caught.value)


def test_result_codes_become_exceptions(library):
    classes = {
        1: errors.CudaError,
        2: errors.TransportError,
        3: errors.InternalError,
        4: errors.InvalidArgument,
        5: errors.InvalidUsage,
        6: errors.RemoteError,
        8: errors.CollectiveTimeout,
    }
    for code, kind in classes.items():
        with pytest.raises(kind) as caught:
            nccl.check(code, library)
        assert type(caught.value) is kind and caught.value.code == code
    assert nccl.check(0, library) is None
    assert nccl.check(7, library) is None  # in progress: a non-blocking communicator, not an error


def test_host_only_functions_say_so(library):
    with pytest.raises(
        errors.EngineUnavailable, match=r"collHostQueueCreate is a function of the host engine; NCCL 2\."
    ):
        library.queue_create()
    with pytest.raises(errors.EngineUnavailable, match="collHostGetNamedUniqueId"):
        library.named_unique_id(b"name")


def test_a_group_is_cancelled(library):
    """Without a function for it: cancelling raises where NCCL would have launched what was in the group."""
    library.group_start()
    library.group_start()
    library.group_cancel()
    with pytest.raises(errors.InvalidUsage):
        library.group_end()
    library.group_cancel()  # none is open
    library.group_start()
    library.group_end()


CROSSTALK = (
    f"REAL = {str(real_library())!r}"
    + """
import ctypes
order = [REAL, HOST] if {real_first} else [HOST, REAL]
for path in order:
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)      # the worst case: the first one answers for both wherever it is asked
host, real = nccl.Library(HOST), nccl.Library(REAL)
comm = host.comm_init_rank(1, host.get_unique_id(), 0)
memory = host.mem_alloc(4096)
words = (ctypes.c_float * 4).from_address(memory)
words[:] = [1, 2, 3, 4]
out = (ctypes.c_float * 4)()
comm.all_reduce(memory, ctypes.addressof(out), 4, nccl.DTYPES["float32"], nccl.OPS["sum"])
answer.update(sum=list(out), is_host=[host.is_host, real.is_host])
try:
    comm.all_reduce(memory, memory, 4, 99, 0)
except Exception as error:
    answer["ours"] = [type(error).__name__, error.detail]
try:
    real.comm_init_rank(1, real.get_unique_id(), 0)
except Exception as error:
    answer["theirs"] = [type(error).__name__, error.detail]
comm.destroy()
"""
)


@pytest.mark.parametrize("real_first", [True, False])
def test_both_in_one_process_keep_to_themselves(real_first):
    answer = run_alone(CROSSTALK.format(real_first=real_first))
    assert answer["sum"] == [1, 2, 3, 4] and answer["is_host"] == [True, False]
    assert answer["ours"][0] == "InvalidArgument" and "99" in answer["ours"][1]
    assert answer["theirs"][0] == "CudaError" and "Cuda failure" in answer["theirs"][1]


def test_a_library_that_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(errors.EngineUnavailable, match="nowhere.so: cannot open shared object file"):
        nccl.Library(tmp_path / "nowhere.so")
    with pytest.raises(errors.EngineUnavailable, match="libm.so.6 is no NCCL library: it has no ncclGetVersion"):
        nccl.Library("libm.so.6")
