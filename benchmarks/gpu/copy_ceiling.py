"""Bandwidth of this GPU's memory: copies on the device, fills, copies from and to pinned memory.

Each copy's result is checked. A rate counts the bytes that are read and written. Buffers rotate, so
that none is in the L2 cache when it is used again. Kernels are compared with `copy_device`.
"""

from __future__ import annotations

import statistics
import sys

import torch

from .program import Program, events_seconds, is_gpu, open_device

SIZES = (1 << 20, 25 << 20, 256 << 20, 1 << 30)
ROTATED = 2 << 30  # bytes of all buffers of one case together, at least; four times the largest L2 and more
SECONDS = 0.3


def rotating(function, pairs):
    """Return a call that takes the next pair each time."""
    state = [0]

    def call():
        function(*pairs[state[0] % len(pairs)])
        state[0] += 1

    return call


def rate(call, device, nbytes: int, dry: bool) -> dict:
    """Return microseconds and GB/s: the median of five rounds."""
    call()
    (once, _) = events_seconds(call, device, 1)
    times = 2 if dry else max(5, min(2000, int(SECONDS / 5 / max(once, 1e-6))))
    found = [events_seconds(call, device, times)[0] for _ in range(2 if dry else 5)]
    middle = statistics.median(found)
    return {"us": round(middle * 1e6, 2), "gb_per_s": round(nbytes / middle / 1e9, 1), "calls": times}


def copies(program, device, nbytes: int, dry: bool) -> None:
    """Time copies of one size."""
    count = 2 if dry else max(2, min(64, ROTATED // (2 * nbytes)))
    pattern = torch.arange(nbytes // 4, device=device, dtype=torch.int32)
    sources = [pattern + number for number in range(count)]
    targets = [torch.zeros_like(pattern) for _ in range(count)]
    copy = rotating(lambda to, source: to.copy_(source), list(zip(targets, sources, strict=True)))
    program.row(case="copy_device", nbytes=nbytes, **rate(copy, device, 2 * nbytes, dry))
    for to, source in zip(targets, sources, strict=True):
        to.copy_(source)
        assert torch.equal(to, source), "a copy differs"
    fill = rotating(lambda to: to.zero_(), [(each,) for each in targets])
    program.row(case="fill", nbytes=nbytes, **rate(fill, device, nbytes, dry))
    assert not targets[0].any()
    del sources, targets
    if nbytes <= 256 << 20:
        host = torch.arange(nbytes // 4, dtype=torch.int32)
        host = host.pin_memory() if is_gpu(device) else host
        there = torch.empty(nbytes // 4, dtype=torch.int32, device=device)
        program.row(
            case="pinned_to_device", nbytes=nbytes,
            **rate(lambda: there.copy_(host, non_blocking=True), device, nbytes, dry),
        )  # fmt: skip
        assert torch.equal(there, pattern)
        program.row(
            case="device_to_pinned", nbytes=nbytes,
            **rate(lambda: host.copy_(there, non_blocking=True), device, nbytes, dry),
        )  # fmt: skip


def main() -> int:
    program = Program(__doc__, "copy_ceiling")
    arguments = program.parse()
    device = open_device(arguments.device)
    for nbytes in (4096,) if arguments.dry else SIZES:
        program.attempt("copies", copies, program, device, nbytes, arguments.dry, nbytes=nbytes)
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
