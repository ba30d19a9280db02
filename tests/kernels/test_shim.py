"""The shim's own test: what a GPU would not forgive is a Fault, and what is right runs, in every order of threads."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from collectives.kernels import cuda

from . import shim

HEAD = """
struct Args { long n; float* floats; unsigned long long* counts; };
#define COLL_KERNEL extern "C" __global__ void __launch_bounds__(256)
"""


class Args(ctypes.Structure):
    _fields_ = [("n", ctypes.c_long), ("floats", ctypes.c_void_p), ("counts", ctypes.c_void_p)]


class Probe:
    def __init__(self):
        self.floats = np.zeros(1024, dtype=np.float32)
        self.counts = np.zeros(4, dtype=np.uint64)
        self.args = Args(5, self.floats.ctypes.data, self.counts.ctypes.data)
        assert self.floats.ctypes.data % 16 == 0

    def run(self, monkeypatch, body, *, block=64, order="forward", limit_s=10.0):
        monkeypatch.setattr(cuda, "source_text", lambda name: f"{HEAD}\nCOLL_KERNEL k(const Args a) {{\n{body}\n}}")
        shim.Text("probe.cu").run("k", bytes(self.args), 2, block, order, limit_s)


@pytest.fixture
def probe():
    return Probe()


FAULTS = {
    "a barrier .* that thread 3 never reaches": "if (threadIdx.x < 3) __syncthreads();",
    "a barrier .* while thread 0 is in another": "if (threadIdx.x < 3) __syncthreads(); else {\n__syncthreads(); }",
    "a shuffle .* that thread 3 never reaches": "if (threadIdx.x == 3) return; __shfl_xor_sync(0xffffffffu, 1u, 1);",
    "a shuffle .* while thread": "if (threadIdx.x == 3) __syncthreads(); else __shfl_xor_sync(0xffffffffu, 1u, 1);",
    "a mask that is not all lanes": "__shfl_xor_sync(0xffffu, 1u, 1);",
    "did not end in time": 'for (;;) asm volatile("");',
    "kernel did not end in time": "for (;;) __syncthreads();",
    "illegal access": "a.floats[1l << 40] = 1;",
    "NULL pointer": "float* nowhere = a.n == 5 ? nullptr : a.floats; *nowhere = 1;",
    "not aligned to 16 bytes": "struct alignas(16) Pack { float x[4]; }; *(Pack*)(a.floats + 1) = *(Pack*)a.floats;",
    "out of its array's bounds": "__shared__ float s[64]; s[threadIdx.x + 1] = 1; a.floats[0] = s[3];",
    "out of its integer type's range": "a.counts[0] = (int)(1e20f * a.n);",
    "shifted too far": "a.counts[0] = 1u << (a.n + 30);",
    "division by 0": "a.counts[0] = 7 / (a.n - 5);",
}


@pytest.mark.parametrize("match", FAULTS)
def test_faults_are_reported(match, probe, monkeypatch):
    limit = 0.3 if "in time" in match else 10
    with pytest.raises(shim.Fault, match=match):
        probe.run(monkeypatch, FAULTS[match], limit_s=limit)
    probe.run(monkeypatch, "a.floats[0] = 7;")  # the next launch is none the worse
    assert probe.floats[0] == 7


BARRIERS = """
  __shared__ unsigned long long sum;
  if (threadIdx.x == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, 1ull << blockIdx.x);
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) a.counts[blockIdx.x] = sum;
  a.floats[blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x;
"""
MISSING = "__shared__ float s[64]; s[threadIdx.x] = threadIdx.x; %s a.floats[threadIdx.x] = s[63 - threadIdx.x];"
SHUFFLES = """
  unsigned long long all = threadIdx.x, down = threadIdx.x;
  for (int bits = 16; bits; bits /= 2) all += __shfl_xor_sync(0xffffffffu, all, bits);
  for (int by = 16; by; by /= 2) down += __shfl_down_sync(0xffffffffu, down, by);
  a.counts[threadIdx.x / 32] = all;
  if (threadIdx.x % 32 == 0) a.counts[2 + threadIdx.x / 32] = down;
  a.floats[threadIdx.x] = __shfl_sync(0xffffffffu, (float)threadIdx.x, 5);
"""


@pytest.mark.parametrize("order", shim.ORDERS)
def test_right_kernels_run_in_every_order(order, monkeypatch):
    """And one that lacks its barrier is wrong in every order: shared memory is garbage at first."""
    for block in (1, 32, 96, 256):
        probe = Probe()
        probe.run(monkeypatch, BARRIERS, block=block, order=order)
        assert probe.counts.tolist() == [block, 2 * block, 0, 0]
        assert probe.floats.tolist() == [*range(block)] * 2 + [0] * (1024 - 2 * block)
    probe.run(monkeypatch, MISSING % "__syncthreads();", order=order)
    assert probe.floats[:64].tolist() == [*range(63, -1, -1)]
    probe.run(monkeypatch, MISSING % "", order=order)
    assert probe.floats[:64].tolist() != [*range(63, -1, -1)]
    probe.run(monkeypatch, SHUFFLES, order=order)
    low, high = sum(range(32)), sum(range(32, 64))
    assert probe.counts.tolist() == [low, high, low, high]
    assert probe.floats[:64].tolist() == [5] * 32 + [37] * 32


def test_arguments_of_another_size_are_refused(probe, monkeypatch):
    probe.run(monkeypatch, "")
    with pytest.raises(shim.Fault, match="takes 24 bytes of arguments, not 8"):
        shim.Text("probe.cu").run("k", b"12345678", 1, 1)
    with pytest.raises(shim.Fault, match="takes 0 bytes"):
        shim.Text("probe.cu").run("other", bytes(probe.args), 1, 1)
