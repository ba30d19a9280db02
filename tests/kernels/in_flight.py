"""Bytes that each CUDA kernel has on their way from memory on a multiprocessor, by the compiler's report alone.

By Little's law a GPU's memory is busy while a multiprocessor has latency times rate on its way: about 40 KB on GPUs of
2 to 8 TB/s. A thread's part is what it loads before it first waits: in the PTX, the loads of one stretch with no store,
no barrier and no jump, whose addresses depend on none of them. Blocks at a time follow from registers and shared
memory. Stores wait for nobody, so a kernel that writes w bytes for each byte that it reads keeps 1 + w times as much
busy. ``python -m tests.kernels.in_flight`` prints the table.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple
from unittest import mock

from collectives.kernels import cuda

from .registers import ARCHITECTURES, SOURCES, Usage, usage

__all__ = ["CASES", "LEAST", "TOO_FEW", "blocks_held", "bytes_in_flight", "loads_of"]

LEAST = 40_000  # bytes on a multiprocessor
SHARED = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}  # bytes of a multiprocessor
REGISTERS, WARPS = 65536, 64  # of a multiprocessor; 32 blocks are never reached with 8 warps each
RESERVED = 1 << 10  # bytes of shared memory that the system takes for each block


class Case(NamedTuple):
    """What is counted: the least of the common cases of a kernel.

    ``loads``: bytes that a thread loads before it waits. ``written``: bytes for each byte that is read.
    """

    what: str
    loads: int
    written: float


PAIRS = {"f32": 4, "bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}
CASES = {
    "coll_copy": Case("any", 64, 1),
    **{
        f"coll_cast_{one}_{other}": Case("16 elements", 16 * PAIRS[one], PAIRS[other] / PAIRS[one])
        for one, other in (
            ("f32", "f32"), ("f32", "bf16"), ("f32", "f16"), ("f32", "e4m3"), ("f32", "e5m2"), ("bf16", "f32"),
            ("bf16", "bf16"), ("f16", "f32"),
        )
    },
    "coll_cast": Case("fp32 to fp8", 64, 1 / 4),
    "coll_cast_wide": Case("fp64", 128, 1),
    "coll_reduce": Case("4 sources, 2 at a time", 64, 1 / 4),
    **{f"coll_reduce_{name}": Case("4 sources, 2 at a time", 32, 1 / 4) for name in "bf16 f16".split()},
    **{f"coll_reduce_{name}": Case("4 sources, 2 at a time", 16, 1 / 4) for name in "e4m3 e5m2 int8".split()},
    **{f"coll_reduce_{name}": Case("4 sources, 2 at a time", 64, 1 / 4) for name in "f64 int32 int64".split()},
    "coll_reduce_wide": Case("4 sources of fp32, 2 at a time", 32, 1 / 2),
    "coll_quantize": Case("fp32 to int8", 64, 1 / 4),
    "coll_quantize_feedback": Case("fp32 to int8; the residual comes after", 64, 1 / 4),
    "coll_dequantize": Case("one wire of int8 to fp32", 16, 4),
    "coll_reduce_wires": Case("4 wires of int8 to fp32, 2 at a time", 32, 1),
    "coll_requantize": Case("4 wires of int8", 64, 1 / 4),
    "coll_requantize_feedback": Case("4 wires of int8; the residual comes after", 64, 1 / 4),
    "coll_adam": Case("fp32", 32, 3 / 4),
    "coll_sgd": Case("fp32 with momentum", 32, 2 / 3),
}

# Kernels that have fewer on their way, and why that is.
TOO_FEW: dict[tuple[str, str], str] = {
    **{
        (f"coll_reduce_{name}", arch): "one byte an element; with all rows at once it has 80 registers and more, which "
        "leaves two or three blocks. No front end's default has gradients of this type"
        for name in ("e4m3", "e5m2", "int8")
        for arch in ARCHITECTURES
    },
    **{
        (
            "coll_reduce_wide",
            arch,
        ): "sums of narrow types in fp64 take 107 registers, two blocks; no front end asks for it"
        for arch in ARCHITECTURES
    },
    ("coll_reduce_wires", "sm_100"): "two blocks: the compiler spills registers for three",
}

# What a text is compiled for, so that the stretches of other types aren't taken for this one's.
PINS = {
    "quantize.cu": (
        ("switch (format) {", "switch (COLL_I8) {"),
        ("switch (type) {", "switch (COLL_F32) {"),
        ("switch (a.out_type) {", "switch (COLL_F32) {"),
    ),
}

_LOAD = re.compile(
    r"^\s*(@!?%p\d+ )?ld(?:\.global)?(?:\.nc)?(?:\.v(\d))?\.([a-z])(\d+)\s+\{?([^;]*?)\}?, \[([^\]]*)\];"
)
_REGISTER = re.compile(r"%\w+")
_ENDS = re.compile(r"^\s*(?:(?:@!?%p\d+ )?(?:st\.|bar\.|barrier\.|atom\.|red\.|ret|call)|bra)")


def stretches(ptx: str) -> list[list[int]]:
    """The bytes of the loads of each stretch, of which none waits for another one.

    Not counted are a wire's scales and tables' addresses, single numbers of 4 and 8 bytes that many threads share: they
    come from the caches, and what is on its way already stays so while a thread waits for one.
    """
    found, loads, pending = [], [], set()
    for line in ptx.splitlines():
        load = _LOAD.match(line)
        if load is not None:
            _, count, kind, bits, into, address = load.groups()
            n, size = int(count or 1), int(bits) // 8
            if n == 1 and (kind == "f" or size == 8):
                continue
            if not pending.isdisjoint(_REGISTER.findall(address)):  # its address has to come first
                found.append(loads)
                loads, pending = [], set()
            loads.append(n * size)
            pending.update(_REGISTER.findall(into))
        elif _ENDS.match(line):
            found.append(loads)
            loads, pending = [], set()
        else:  # what is made of a loaded value waits for it, too
            registers = _REGISTER.findall(line)
            if registers and not pending.isdisjoint(registers[1:]):
                pending.add(registers[0])
    return [*found, loads]


@functools.cache
def loads_of(source: str) -> dict[str, int]:
    """The most bytes that a thread of each kernel of a source loads before it waits."""
    text = cuda.source_text(source)
    for before, after in PINS.get(source, ()):
        assert before in text, before
        text = text.replace(before, after)
    with mock.patch.object(cuda, "source_text", lambda name: text):
        ptx = cuda.compile_source(source, "compute_90")[0].decode()
    kernels = re.split(r"^\.visible \.entry (\w+)\(", ptx, flags=re.MULTILINE)[1:]
    return {
        name: max(map(sum, stretches(body)))
        for name, body in zip(kernels[::2], kernels[1::2], strict=True)
    }  # fmt: skip


def blocks_held(used: Usage) -> int:
    """Blocks of 256 threads that a multiprocessor holds at a time."""
    by_registers = REGISTERS // (-(-used.registers // 8) * 8 * cuda.BLOCK)
    return min(by_registers, WARPS * 32 // cuda.BLOCK, SHARED[used.arch] // (used.shared + RESERVED))


def bytes_in_flight(used: Usage) -> int:
    """Bytes of reads and of the writes that follow from them, on a multiprocessor."""
    case = CASES[used.kernel]
    return int(blocks_held(used) * cuda.BLOCK * case.loads * (1 + case.written))


def main() -> None:
    print(f"{'kernel':22} {'case':34} {'arch':7} {'blocks':>6} {'loads of a thread':>17} {'in flight':>9}")
    for source in SOURCES:
        loads = loads_of(source)
        for arch in ARCHITECTURES:
            for each in usage(source, arch):
                if each.kernel in CASES:
                    case = CASES[each.kernel]
                    what = f"{case.loads:3} of {loads[each.kernel]:3} in the PTX"
                    counts = f"{blocks_held(each):6} {what:>17} {bytes_in_flight(each):9,}"
                    print(f"{each.kernel:22} {case.what:34} {arch:7} {counts}")


if __name__ == "__main__":
    main()
