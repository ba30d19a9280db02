"""Cost of one call from Python to a function of NCCL, by each way to make it.

- binding: addresses and codes through the binding's table; ctypes: the same through ctypes.
- communicator: ``Communicator.all_reduce(tensor)``; python reader: the same where torch has no
  DLPack exchange table (before 2.10), so that the tensor is read by its Python attributes; numpy:
  the same of a NumPy array.
- all_gather: ``Communicator.all_gather(out, inp)``, two tensors to read and to compare.
- async: ``Communicator.all_reduce(tensor, async_op=True).wait()``, the stub's queue being done at
  once.
- torch.distributed: ``dist.all_reduce(tensor)`` with the backend "collectives"; its async: with
  ``async_op=True``, and ``wait()``.
- python function: a function of Python that does nothing, the floor.

The library behind all is a stub, compiled on the spot, whose functions return at once: what is
timed is the way there and back. One row goes to benchmarks/results/call_cost.jsonl. ``--limit``
fails the run where the binding's median call takes longer than so many nanoseconds,
``--limit-communicator`` where the communicator's does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from rows import RESULTS, append_rows, provenance

from collectives import _nccl, arrays
from collectives.comm.communicator import Communicator
from collectives.comm.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
STUB = """
#include "coll/host_abi.h"
#include "coll/nccl_abi.h"
static unsigned long calls = 0;
unsigned long stub_calls(void) { return calls; }
ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n, ncclUniqueId id, int rank) {
  (void)n; (void)id; (void)rank; *comm = (ncclComm_t)&calls; return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { (void)comm; return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { (void)comm; return ncclSuccess; }
ncclResult_t ncclAllReduce(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t s) {
  (void)a; (void)b; (void)n; (void)t; (void)op; (void)c; (void)s; calls++; return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* a, void* b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
  (void)a; (void)b; (void)n; (void)t; (void)c; (void)s; calls++; return ncclSuccess;
}
ncclResult_t collHostCommSetTimeout(ncclComm_t comm, int64_t ms) { (void)comm; (void)ms; return ncclSuccess; }
ncclResult_t collHostCommSetStep(ncclComm_t comm, uint64_t step) { (void)comm; (void)step; return ncclSuccess; }
ncclResult_t collHostQueueCreate(collHostQueue_t* q) { *q = (collHostQueue_t)&calls; return ncclSuccess; }
ncclResult_t collHostQueueDestroy(collHostQueue_t q) { (void)q; return ncclSuccess; }
ncclResult_t collHostQueueRecord(collHostQueue_t q, uint64_t* ticket) { (void)q; *ticket = calls; return ncclSuccess; }
ncclResult_t collHostQueueWait(collHostQueue_t q, uint64_t ticket, int64_t ns) {
  (void)q; (void)ticket; (void)ns; return ncclSuccess;
}
"""


def compile_stub(folder: str) -> str:
    source, library = Path(folder, "stub.c"), Path(folder, "libstub.so")
    source.write_text(STUB)
    compiler = os.environ.get("CC", "cc").split()
    include = f"-I{ROOT / 'kernels' / 'include'}"
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", include, str(source), "-o", str(library)], check=True)
    return str(library)


def through_binding(comm, rounds: int) -> float:
    call, address = comm.all_reduce, 1 << 20
    start = time.perf_counter_ns()
    for _ in range(rounds):
        call(address, address, 1024, 7, 0, 0)
    return (time.perf_counter_ns() - start) / rounds


def through_ctypes(function, handle: int, rounds: int) -> float:
    call, address = function, 1 << 20
    start = time.perf_counter_ns()
    for _ in range(rounds):
        call(address, address, 1024, 7, 0, handle, 0)
    return (time.perf_counter_ns() - start) / rounds


def through_communicator(comm, array, rounds: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(rounds):
        comm.all_reduce(array)
    return (time.perf_counter_ns() - start) / rounds


def gathering(comm, out, inp, rounds: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(rounds):
        comm.all_gather(out, inp)
    return (time.perf_counter_ns() - start) / rounds


def asynchronous(comm, array, rounds: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(rounds):
        comm.all_reduce(array, async_op=True).wait()
    return (time.perf_counter_ns() - start) / rounds


def through_torch(tensor, rounds: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(rounds):
        dist.all_reduce(tensor)
    return (time.perf_counter_ns() - start) / rounds


def through_torch_asynchronously(tensor, rounds: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(rounds):
        dist.all_reduce(tensor, async_op=True).wait()
    return (time.perf_counter_ns() - start) / rounds


def empty_call(rounds: int) -> float:
    """A Python function that takes the same arguments and does nothing: the floor, loop included."""

    def call(send, recv, count, dtype, op, stream):
        return None

    address = 1 << 20
    start = time.perf_counter_ns()
    for _ in range(rounds):
        call(address, address, 1024, 7, 0, 0)
    return (time.perf_counter_ns() - start) / rounds


def open_communicator(path: str, exchange: bool) -> Communicator:
    """A world of one on the stub; without ``exchange`` it reads tensors as a torch without an
    exchange table does.
    """
    table = arrays._EXCHANGE
    try:
        if not exchange:
            arrays._EXCHANGE = None
        engine = Engine("host", "cpu", "0", path, _nccl.Library(path))
        return Communicator(engine, bytes(128), 0, 1, device="cpu")
    finally:
        arrays._EXCHANGE = table


def measure(path: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Nanoseconds a call, ``repeats`` times each, in turn so that a busy moment hits all."""
    native = _nccl.Library(path).comm_init_rank(1, bytes(128), 0)
    stub = ctypes.CDLL(path)
    stub.stub_calls.restype = ctypes.c_ulong
    pointer = ctypes.c_void_p
    stub.ncclAllReduce.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer]
    tensor, out, array = torch.ones(256), torch.zeros(256), numpy.ones(256, numpy.float32)
    comm, slow = open_communicator(path, True), open_communicator(path, False)
    dist.init_process_group("collectives", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD._get_backend(tensor.device)
    group.communicator(tensor.device).close()
    group._comms[tensor.device] = comm
    ways = {
        "binding": lambda: through_binding(native, rounds),
        "ctypes": lambda: through_ctypes(stub.ncclAllReduce, native.handle, rounds),
        "communicator": lambda: through_communicator(comm, tensor, rounds),
        "python reader": lambda: through_communicator(slow, tensor, rounds),
        "numpy": lambda: through_communicator(comm, array, rounds),
        "all_gather": lambda: gathering(comm, out, tensor, rounds),
        "async": lambda: asynchronous(comm, tensor, rounds),
        "torch.distributed": lambda: through_torch(tensor, rounds),
        "its async": lambda: through_torch_asynchronously(tensor, rounds),
        "python function": lambda: empty_call(rounds),
    }
    rows: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            rows[name].append(way())
    if stub.stub_calls() != (len(ways) - 1) * rounds * repeats:
        raise SystemExit("not every call reached the library: the figures mean nothing")
    dist.destroy_process_group()
    comm.close()
    slow.close()
    native.abort()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000, help="calls in one timing")
    parser.add_argument("--repeats", type=int, default=9, help="timings; the median and the least are shown")
    parser.add_argument("--limit", type=float, help="fail where the binding's median is above so many ns")
    parser.add_argument("--limit-communicator", type=float, help="the same for Communicator.all_reduce(tensor)")
    default = RESULTS / "call_cost.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="where the row goes; an empty name: nowhere")
    options = parser.parse_args()
    where = provenance()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(compile_stub(folder), options.rounds, options.repeats)
    print(f"{'way':<18} {'median ns':>10} {'least ns':>10}")
    for name, values in rows.items():
        print(f"{name:<18} {statistics.median(values):>10.0f} {min(values):>10.0f}")
    median = {name: round(statistics.median(values), 1) for name, values in rows.items()}
    row = {
        "benchmark": "call_cost",
        **{f"{name.replace(' ', '_').replace('.', '_')}_ns": value for name, value in median.items()},
        "ctypes_over_binding": round(median["ctypes"] / median["binding"], 2),
        "python_reader_over_communicator": round(median["python reader"] / median["communicator"], 2),
        "rounds": options.rounds,
        "repeats": options.repeats,
        **where,
    }
    print(json.dumps(row))
    if options.results.name:
        append_rows([row], options.results)
    late = 0
    for name, limit in (("binding", options.limit), ("communicator", options.limit_communicator)):
        if limit is not None and median[name] > limit:
            print(f"a call ({name}) costs {median[name]} ns, more than {limit} ns", file=sys.stderr)
            late = 1
    return late


if __name__ == "__main__":
    sys.exit(main())
