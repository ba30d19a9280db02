"""Ways to run a kernel on host memory, guarded arrays for it to work on, and values to put there."""

from __future__ import annotations

import contextlib

import numpy as np
import torch

from collectives import kernels
from collectives.errors import InvalidArgument
from tests.buffers import Guarded, memory_of

from . import shim

__all__ = ["HOSTS", "ISAS", "TEXTS", "Place", "bits", "made"]


def instruction_sets() -> list[str]:
    found = []
    for name in ("baseline", "avx2", "avx512"):
        with contextlib.suppress(InvalidArgument):
            found.append(kernels.use_isa(name))
    kernels.use_isa()
    return found


@contextlib.contextmanager
def host(isa: str, threads: int = 1):
    kernels.use_isa(isa)
    kernels.set_num_threads(threads)
    try:
        yield
    finally:
        kernels.use_isa()
        kernels.set_num_threads(None)


ISAS = instruction_sets()
HOSTS = [(f"{isa} {count}", lambda isa=isa, count=count: host(isa, count)) for isa in ISAS for count in (1, 2)]
TEXTS = [
    (f"text {grid}x{block} {order}", lambda g=grid, b=block, o=order: shim.cuda_text(grid=g, block=b, order=o))
    for grid, block, order in ((1, 32, "forward"), (3, 64, "reverse"), (2, 256, 1), (5, 96, "forward"))
]


def array(buffer: Guarded, dtype: torch.dtype) -> torch.Tensor:
    """The buffer as a tensor, at its very address."""
    if isinstance(buffer.block, np.ndarray):
        inner = torch.from_numpy(buffer.block[buffer.start : buffer.start + buffer.nbytes])
    else:
        inner = buffer.block[buffer.start : buffer.start + buffer.nbytes]
    return inner.view(dtype)


def bits(tensor: torch.Tensor) -> np.ndarray:
    if not tensor.numel():
        return np.zeros(0, dtype=np.uint8)
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


class Place:
    """Guarded memory for the arrays of one call; all guard zones are looked at in the end."""

    def __init__(self, engine: str = "host", offset: int = 0):
        self.memory = memory_of(engine)
        self.offset = offset  # elements past a 64-byte boundary
        self.buffers = []

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        itemsize = 4 if dtype == torch.uint8 else dtype.itemsize  # wires keep to 4 bytes
        self.buffers.append(Guarded(self.memory, count * dtype.itemsize, self.offset * itemsize))
        return array(self.buffers[-1], dtype)

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        tensor = self.empty(values.numel(), values.dtype)
        tensor.copy_(values)
        return tensor

    def check(self):
        assert all(buffer.guards_intact() for buffer in self.buffers), "written outside of an array"


def made(count: int, seed: int = 0, *, specials: bool = True) -> torch.Tensor:
    """fp32 values whose size differs from one 64 to the next; with specials also runs of 0, NaN, largest and least."""
    rng = np.random.default_rng(seed + count)
    sizes = np.repeat(np.exp2(rng.integers(-20, 20, count // 64 + 1)), 64)[:count]
    values = (rng.standard_normal(count) * sizes).astype(np.float32)
    if specials:
        odd = np.array([0.0, -0.0, 1e-45, -1e-42, 2e-38, 3.4e38, -3.4028235e38, np.inf, -np.inf, np.nan], np.float32)
        for start in range(0, count, 700):
            values[start : start + rng.integers(1, 400)] = rng.choice(odd[: rng.integers(1, len(odd) + 1)])
        values[rng.random(count) < 0.01] = 0.0
    return torch.from_numpy(values)
