"""What one call from Python to a function of NCCL costs: through the binding's table, and through ctypes beside it.

The library behind both is a stub, compiled on the spot, whose ``ncclAllReduce`` returns at once: what is timed is the
way there and back. One row goes to benchmarks/results/call_cost.jsonl. ``--limit`` fails the run where the binding's
median call takes longer than so many nanoseconds.
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

from provenance import where_and_when

from collectives import __version__, _nccl

ROOT = Path(__file__).resolve().parent.parent
STUB = """
#include "coll/nccl_abi.h"
static unsigned long calls = 0;
unsigned long stub_calls(void) { return calls; }
ncclResult_t ncclGetVersion(int* version) { *version = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n, ncclUniqueId id, int rank) {
  (void)n; (void)id; (void)rank; *comm = (ncclComm_t)&calls; return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { (void)comm; return ncclSuccess; }
ncclResult_t ncclAllReduce(const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t s) {
  (void)a; (void)b; (void)n; (void)t; (void)op; (void)c; (void)s; calls++; return ncclSuccess;
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


def empty_call(rounds: int) -> float:
    """A Python function that takes the same arguments and does nothing: the floor, loop included."""

    def call(send, recv, count, dtype, op, stream):
        return None

    address = 1 << 20
    start = time.perf_counter_ns()
    for _ in range(rounds):
        call(address, address, 1024, 7, 0, 0)
    return (time.perf_counter_ns() - start) / rounds


def measure(path: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Nanoseconds a call, ``repeats`` times each, in turn so that a busy moment hits all."""
    library = _nccl.Library(path)
    comm = library.comm_init_rank(1, bytes(128), 0)
    stub = ctypes.CDLL(path)
    stub.stub_calls.restype = ctypes.c_ulong
    pointer = ctypes.c_void_p
    stub.ncclAllReduce.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, pointer, pointer]
    rows: dict[str, list[float]] = {"binding": [], "ctypes": [], "python function": []}
    for _ in range(repeats):
        rows["binding"].append(through_binding(comm, rounds))
        rows["ctypes"].append(through_ctypes(stub.ncclAllReduce, comm.handle, rounds))
        rows["python function"].append(empty_call(rounds))
    if stub.stub_calls() != 2 * rounds * repeats:
        raise SystemExit("not every call reached the library: the figures mean nothing")
    comm.abort()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000, help="calls in one timing")
    parser.add_argument("--repeats", type=int, default=9, help="timings; the median and the least are shown")
    parser.add_argument("--limit", type=float, help="fail where the binding's median is above so many ns")
    default = ROOT / "benchmarks" / "results" / "call_cost.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="where the row goes; an empty name: nowhere")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(compile_stub(folder), options.rounds, options.repeats)
    print(f"{'way':<16} {'median ns':>10} {'least ns':>10}")
    for name, values in rows.items():
        print(f"{name:<16} {statistics.median(values):>10.0f} {min(values):>10.0f}")
    median = {name: round(statistics.median(values), 1) for name, values in rows.items()}
    row = {
        "benchmark": "call_cost",
        "binding_ns": median["binding"],
        "ctypes_ns": median["ctypes"],
        "python_function_ns": median["python function"],
        "ctypes_over_binding": round(median["ctypes"] / median["binding"], 2),
        "rounds": options.rounds,
        "repeats": options.repeats,
        "collectives": __version__,
        **where_and_when(),
    }
    print(json.dumps(row))
    if options.results.name:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a") as rows_file:
            rows_file.write(json.dumps(row) + "\n")
    if options.limit is not None and median["binding"] > options.limit:
        print(f"a call costs {median['binding']} ns, more than {options.limit} ns", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
