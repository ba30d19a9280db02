"""Values to send by a wire format, what the oracle makes of them, and the formats' error bounds."""

from __future__ import annotations

import numpy as np
import torch

from collectives import kernels
from collectives.layout import WIRE_FORMATS, wire_layout
from tests.oracle import DTYPES, DType, encode

from . import wire_oracle
from .ways import bits, made

FORMATS = tuple(WIRE_FORMATS)
SCALED = tuple(name for name in FORMATS if WIRE_FORMATS[name].scaled)
PLAIN = tuple(name for name in FORMATS if not WIRE_FORMATS[name].scaled)
COUNTS = (0, 1, 3, 127, 128, 129, 1023, 4095, 4096, 4097, 9973)
MANY = 33 * 4096 + 77  # more than one part of the thread pool
SEED = 0x9E3779B97F4A7C15
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def residual_of(count: int, dtype: torch.dtype | None, seed: int = 1) -> torch.Tensor | None:
    return None if dtype is None else made(count, seed, specials=False).to(dtype)


def made_as(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Of any floating dtype; fp8's within its range, past which torch makes NaN of them."""
    if dtype.itemsize == 1:
        return (made(count, specials=False) * 2.0**-12).clamp(-448, 448).to(dtype)
    return made(count, specials=dtype.itemsize > 2).to(dtype)


def values_in(source: torch.Tensor, scale: float, residual: torch.Tensor | None) -> np.ndarray:
    """x, as the docstring defines it."""
    with np.errstate(all="ignore"):
        if source.dtype == torch.float64:
            x = (source.numpy() * scale).astype(np.float32)
        else:
            x = source.float().numpy() * np.float32(scale)
        return x if residual is None else x + residual.float().numpy()


def left_over(x: np.ndarray, sent: wire_oracle.Encoded, before: torch.Tensor | None) -> torch.Tensor | None:
    if before is None:
        return None
    with np.errstate(all="ignore"):
        left = torch.from_numpy(np.where(sent.kept, x - sent.carried, 0.0).astype(np.float32)).to(before.dtype)
    return torch.where(torch.from_numpy(sent.kept), left, before)


def same_or_nan(got: torch.Tensor, want: torch.Tensor) -> bool:
    got, want = got.cpu(), want.cpu()
    nan = got.float().isnan() & want.float().isnan()
    same = (bits(got) == bits(want)).reshape(got.numel(), got.itemsize).all(axis=1)
    return bool((torch.from_numpy(same) | nan).all())


def same_wire(format, got: np.ndarray, want: np.ndarray) -> bool:
    """The same bytes; but NaN as fp16 or bf16 has any bits."""
    same = got == want
    if format in PLAIN and not same.all():
        dtype = torch.float16 if format == "fp16" else torch.bfloat16
        nan = [torch.from_numpy(each.copy()).view(dtype).isnan().numpy() for each in (got, want)]
        same |= np.repeat(nan[0] & nan[1], 2)
    return bool(same.all()) and len(got) == len(want)


def send(x, format, block, seed=None, position=0):
    """The wire of some fp32 values, by the oracle."""
    return torch.from_numpy(wire_oracle.encoded(np.asarray(x), format, block, seed, position).wire)


def oracle_type(dtype: torch.dtype) -> DType:
    return DTYPES[{torch.float8_e4m3fn: "float8e4m3", torch.float8_e5m2: "float8e5m2"}.get(dtype, str(dtype)[6:])]


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By the oracle: torch's fp8 doesn't saturate."""
    with np.errstate(all="ignore"):
        stored = encode(oracle_type(dtype), values.numpy())
    return torch.from_numpy(stored.view(np.uint8)).view(dtype) if len(stored) else torch.empty(0, dtype=dtype)


def rounding_of(seed):
    return "nearest" if seed is None else "random"


def carried_of(x: torch.Tensor, format, block, seed=None) -> torch.Tensor:
    wire = torch.empty(wire_layout(x.numel(), format, block).nbytes, dtype=torch.uint8)
    out = torch.empty(x.numel())
    kernels.quantize(x, wire, format=format, block=block, seed=seed)
    kernels.dequantize(wire, out, format=format, block=block)
    return out


def scales_of(x: np.ndarray, format, block) -> np.ndarray:
    return wire_oracle.encoded(x, format, block).scales.astype(np.float64)


def check_bound(x: np.ndarray, carried: np.ndarray, format, block, seed):
    spec = WIRE_FORMATS[format]
    scale = scales_of(x, format, block)
    x, carried = x.astype(np.float64), carried.astype(np.float64)
    factor = (1 if seed is None else 2) * (1 + 2.0**-14)
    bound = factor * (spec.relative * np.abs(x) + spec.absolute * scale) + 2.0**-149
    with np.errstate(invalid="ignore"):
        fits = np.isfinite(scale) & (scale > 0)
        fits &= np.abs(x) < (65520 if format == "fp16" else 3.39e38)
        far = np.abs(x - carried)
    assert (far[fits] <= bound[fits]).all(), (x[fits][far[fits] > bound[fits]], carried[fits][far[fits] > bound[fits]])
    assert (carried[np.isfinite(scale) & (scale == 0)] == 0).all()
    assert np.isnan(carried[np.isnan(scale)]).all()
    return (far[fits & (bound > 0)] / bound[fits & (bound > 0)]).max(initial=0)
