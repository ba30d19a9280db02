"""Other people's clients of NCCL, unchanged, on the host engine: host addresses and stream 0, two processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.rank_process import HOST_LIBRARY

RANKS = 2
SECONDS = 60


def run_ranks(code: str, preload: bool, *arguments: str) -> list[dict]:
    """Run code as two ranks. Rank 0 prints the unique id first; each prints one JSON object last."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    if preload:
        environ["LD_PRELOAD"] = str(HOST_LIBRARY)
    processes = []
    unique_id = ""
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-c", code, str(rank), str(RANKS), unique_id, *arguments]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
            )
            processes.append(process)
            if rank == 0:
                unique_id = process.stdout.readline().strip()
        ended = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


# Written as a user of CuPy writes it: cupy.cuda.nccl.NcclCommunicator, pointers and counts.
CUPY = """
import json, sys
import numpy as np
from cupy.cuda import nccl

rank, size = int(sys.argv[1]), int(sys.argv[2])
unique_id = nccl.get_unique_id() if rank == 0 else bytes.fromhex(sys.argv[3])
if rank == 0:
    print(unique_id.hex(), flush=True)
comm = nccl.NcclCommunicator(size, unique_id, rank)
FLOAT, SUM, count = nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 1001
mine = np.arange(count, dtype=np.float32) + rank
out = np.empty_like(mine)
answer = dict(version=nccl.get_version(), rank=comm.rank_id(), size=comm.size())

comm.allReduce(mine.ctypes.data, out.ctypes.data, count, FLOAT, SUM, 0)
answer["all_reduce"] = out.tolist()
comm.reduce(mine.ctypes.data, out.ctypes.data, count, FLOAT, nccl.NCCL_MAX, 0, 0)
answer["reduce"] = out.tolist() if rank == 0 else None
out[:] = mine
comm.broadcast(mine.ctypes.data, out.ctypes.data, count, FLOAT, 1, 0)
answer["broadcast"] = out.tolist()
out[:] = mine
comm.bcast(out.ctypes.data, count, FLOAT, 0, 0)
answer["bcast"] = out.tolist()
both = np.empty(size * count, np.float32)
comm.allGather(mine.ctypes.data, both.ctypes.data, count, FLOAT, 0)
answer["all_gather"] = both.tolist()
comm.reduceScatter(both.ctypes.data, out.ctypes.data, count, FLOAT, SUM, 0)
answer["reduce_scatter"] = out.tolist()
nccl.groupStart()
comm.send(mine.ctypes.data, count, FLOAT, 1 - rank, 0)
comm.recv(out.ctypes.data, count, FLOAT, 1 - rank, 0)
nccl.groupEnd()
answer["exchange"] = out.tolist()
try:
    comm.allReduce(mine.ctypes.data, out.ctypes.data, count, 99, SUM, 0)
except nccl.NcclError as error:
    answer["error"] = [error.status, str(error)]
comm.check_async_error()
comm.destroy()
print(json.dumps(answer))
"""


def expected(rank: int) -> dict:
    count = 1001
    arrays = [[float(i + each) for i in range(count)] for each in range(RANKS)]
    total = [sum(values) for values in zip(*arrays, strict=True)]
    return {
        "all_reduce": total,
        "reduce": arrays[1] if rank == 0 else None,
        "broadcast": arrays[1],
        "bcast": arrays[0],
        "all_gather": arrays[0] + arrays[1],
        "reduce_scatter": [RANKS * value for value in arrays[rank]],
        "exchange": arrays[1 - rank],
    }


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_cupy():
    for rank, answer in enumerate(run_ranks(CUPY, preload=True)):
        for name, value in expected(rank).items():
            assert answer[name] == value, f"{name} on rank {rank}"
        assert (answer["rank"], answer["size"]) == (rank, RANKS)
        assert answer["error"][0] == 4 and "INVALID_ARGUMENT" in answer["error"][1]


# The way of clients that open a library by path and call it through ctypes: argument types for each function, the
# unique id as a struct by value, a table of functions, the result checked against ncclGetErrorString.
CTYPES = """
import ctypes, json, sys
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]

class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]

comm_t, buffer_t, stream_t, dtype_t, op_t = c_void_p, c_void_p, c_void_p, c_int, c_int
FUNCTIONS = {
    "ncclGetErrorString": (c_char_p, [c_int]),
    "ncclGetVersion": (c_int, [POINTER(c_int)]),
    "ncclGetUniqueId": (c_int, [POINTER(UniqueId)]),
    "ncclCommInitRank": (c_int, [POINTER(comm_t), c_int, UniqueId, c_int]),
    "ncclAllReduce": (c_int, [buffer_t, buffer_t, c_size_t, dtype_t, op_t, comm_t, stream_t]),
    "ncclSend": (c_int, [buffer_t, c_size_t, dtype_t, c_int, comm_t, stream_t]),
    "ncclRecv": (c_int, [buffer_t, c_size_t, dtype_t, c_int, comm_t, stream_t]),
    "ncclGroupStart": (c_int, []),
    "ncclGroupEnd": (c_int, []),
    "ncclCommWindowRegister": (c_int, [comm_t, buffer_t, c_size_t, POINTER(c_void_p), c_int]),
    "ncclCommWindowDeregister": (c_int, [comm_t, c_void_p]),
    "ncclCommInitAll": (c_int, [POINTER(comm_t), c_int, POINTER(c_int)]),
    "ncclCommCuDevice": (c_int, [comm_t, POINTER(c_int)]),
    "ncclCommFinalize": (c_int, [comm_t]),
    "ncclCommDestroy": (c_int, [comm_t]),
}
library = ctypes.CDLL(path)
for name, (result, arguments) in FUNCTIONS.items():
    function = getattr(library, name)       # a missing one ends the client here
    function.restype, function.argtypes = result, arguments

def check(code):
    if code:
        raise RuntimeError("NCCL error: " + library.ncclGetErrorString(code).decode())

version = c_int()
check(library.ncclGetVersion(byref(version)))
unique_id = UniqueId()
if rank == 0:
    check(library.ncclGetUniqueId(byref(unique_id)))
    print(bytes(unique_id).hex(), flush=True)
else:
    ctypes.memmove(byref(unique_id), bytes.fromhex(sys.argv[3]), 128)
comm = comm_t()
check(library.ncclCommInitRank(byref(comm), size, unique_id, rank))
FLOAT, SUM, count = 7, 0, 1001
array = ctypes.c_float * count
mine, out = array(*[i + rank for i in range(count)]), array()
answer = dict(version=version.value)
check(library.ncclAllReduce(mine, out, count, FLOAT, SUM, comm, None))
answer["all_reduce"] = list(out)
check(library.ncclGroupStart())
check(library.ncclSend(mine, count, FLOAT, 1 - rank, comm, None))
check(library.ncclRecv(out, count, FLOAT, 1 - rank, comm, None))
check(library.ncclGroupEnd())
answer["exchange"] = list(out)
try:
    check(library.ncclAllReduce(mine, out, count, 99, SUM, comm, None))
except RuntimeError as error:
    answer["error"] = str(error)
check(library.ncclCommFinalize(comm))
check(library.ncclCommDestroy(comm))

both, device, sums = (comm_t * 2)(), c_int(), [array(), array()]     # all ranks of a communicator in this process
check(library.ncclCommInitAll(both, 2, (c_int * 2)(3, 5)))
check(library.ncclGroupStart())
for each, total in zip(both, sums):
    check(library.ncclAllReduce(mine, total, count, FLOAT, SUM, each, None))
check(library.ncclGroupEnd())
answer["in one process"] = [list(total) == [2 * value for value in mine] for total in sums]
answer["devices"] = []
for each in both:
    check(library.ncclCommCuDevice(each, byref(device)))
    answer["devices"].append(device.value)
    check(library.ncclCommDestroy(each))
print(json.dumps(answer))
"""


def test_a_ctypes_client():
    for rank, answer in enumerate(run_ranks(CTYPES, False, str(HOST_LIBRARY))):
        assert all(answer[name] == expected(rank)[name] for name in ("all_reduce", "exchange")), rank
        assert answer["version"] >= 23200
        assert "invalid argument" in answer["error"]
        assert answer["in one process"] == [True, True] and answer["devices"] == [3, 5]
