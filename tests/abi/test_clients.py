"""Other people's clients of NCCL, unchanged, on the host engine: host addresses and stream 0, two processes."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.rank_process import HOST_LIBRARY

RANKS = 2
SECONDS = 60


def run_ranks(code: str) -> list[dict]:
    """Run code as two ranks. Rank 0 prints the unique id first; each prints one JSON object last."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "LD_PRELOAD": str(HOST_LIBRARY)}
    processes = []
    unique_id = ""
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-c", code, str(rank), str(RANKS), unique_id]
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
    for rank, answer in enumerate(run_ranks(CUPY)):
        for name, value in expected(rank).items():
            assert answer[name] == value, f"{name} on rank {rank}"
        assert (answer["rank"], answer["size"]) == (rank, RANKS)
        assert answer["error"][0] == 4 and "INVALID_ARGUMENT" in answer["error"][1]


def test_a_ctypes_client():
    """By path, argument types and return codes, with all ranks of a communicator in this process."""
    library, count = ctypes.CDLL(str(HOST_LIBRARY)), 1001
    library.ncclGetErrorString.restype = ctypes.c_char_p
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ncclAllReduce.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    for name in ("ncclCommCuDevice", "ncclCommFinalize", "ncclCommDestroy"):
        getattr(library, name).argtypes = [pointer, *([pointer] if name == "ncclCommCuDevice" else [])]

    def check(code):
        assert not code, library.ncclGetErrorString(code)

    comms, number, array = (pointer * RANKS)(), ctypes.c_int(), ctypes.c_float * count
    check(library.ncclGetVersion(ctypes.byref(number)))
    assert number.value >= 23200
    check(library.ncclCommInitAll(comms, RANKS, (ctypes.c_int * RANKS)(3, 5)))
    mine, sums = array(*range(count)), [array() for _ in comms]
    check(library.ncclGroupStart())
    for comm, total in zip(comms, sums, strict=True):
        check(library.ncclAllReduce(mine, total, count, 7, 0, comm, None))
    check(library.ncclGroupEnd())
    assert all(list(total) == [RANKS * value for value in mine] for total in sums)
    code = library.ncclAllReduce(mine, sums[0], count, 99, 0, comms[0], None)
    assert b"invalid argument" in library.ncclGetErrorString(code)
    for comm, device in zip(comms, (3, 5), strict=True):
        check(library.ncclCommCuDevice(comm, ctypes.byref(number)))
        assert number.value == device
        check(library.ncclCommFinalize(comm))
        check(library.ncclCommDestroy(comm))
