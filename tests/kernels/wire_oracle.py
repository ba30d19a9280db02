"""What the wire formats must be: NumPy, from the definitions, sharing nothing with the kernels."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.oracle import DTYPES, decode, encode

__all__ = ["LIMITS", "Encoded", "carried_by", "decoded", "encoded", "philox_words"]

LIMITS = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp16": 0.0, "bf16": 0.0}
_TYPES = {"fp8_e4m3": "float8e4m3", "fp8_e5m2": "float8e5m2", "fp16": "float16", "bf16": "bfloat16"}
_TINY = np.float32(2.0**-126)


def philox(counter, key):
    """Philox4x32-10: ``counter`` of shape (..., 4) and ``key`` of two words, as uint64 that hold 32 bits."""
    c = [np.asarray(counter, dtype=np.uint64)[..., i] for i in range(4)]
    k0, k1 = (np.uint64(word) for word in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & low]
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(c, axis=-1)


def philox_words(seed: int, position: int, count: int) -> np.ndarray:
    """The 32 random bits of elements [position, position + count), as uint64."""
    first, last = position // 4, (position + count + 3) // 4
    index = np.arange(last - first, dtype=np.uint64) + np.uint64(first)
    zero = np.zeros_like(index)
    counter = np.stack([index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), zero, zero], axis=-1)
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)
    return words[position - 4 * first :][:count]


@dataclasses.dataclass
class Encoded:
    """A wire buffer's bytes, what it carries (float32), and which elements' residuals may be written."""

    wire: np.ndarray
    carried: np.ndarray
    kept: np.ndarray
    scales: np.ndarray  # of each element


def _neighbours(dtype, values):
    """The numbers of a type from 0 up, |values| clipped to the largest, and the index of the number below each."""
    bits = np.arange(1 << (8 * dtype.itemsize - 1))
    table = decode(dtype, bits.astype(dtype.storage))
    table = table[np.isfinite(table)]
    size = np.minimum(np.abs(values), table[-1])
    lower = np.searchsorted(table, size, side="right") - 1
    return table, size, lower


def _round_at_random(dtype, values, words):
    """Up where distance + draw reaches 1: both cut to as many bits as fp32 has more than the type."""
    shift = 23 - dtype.mantissa_bits
    finite = np.isfinite(values)
    table, size, lower = _neighbours(dtype, np.where(finite, values, 0.0).astype(np.float64))
    upper = np.minimum(lower + 1, len(table) - 1)
    unit = np.where(upper > lower, table[upper] - table[lower], 1.0)
    distance = np.floor((size - table[lower]) / unit * 2.0**shift).astype(np.uint64)
    up = distance + (words >> np.uint64(32 - shift)) >= np.uint64(1 << shift)
    code = np.where(up, upper, lower)
    sign = np.where(np.signbit(values), 1 << (8 * dtype.itemsize - 1), 0)
    nearest = encode(dtype, values)
    with np.errstate(all="ignore"):
        keep = ~np.isfinite(decode(dtype, nearest).astype(np.float32)) if dtype.itemsize > 1 else ~finite
    return np.where(keep, nearest, (code | sign).astype(dtype.storage))


def _padded(data: np.ndarray) -> np.ndarray:
    raw = np.ascontiguousarray(data).view(np.uint8)
    return np.concatenate([raw, np.zeros(-len(raw) % 16, dtype=np.uint8)])


def encoded(x: np.ndarray, format: str, block: int, seed=None, position: int = 0) -> Encoded:
    """The wire of float32 values."""
    count = len(x)
    words = None if seed is None else philox_words(seed, position, count)
    if not LIMITS[format]:
        dtype = DTYPES[_TYPES[format]]
        payload = encode(dtype, x) if words is None else _round_at_random(dtype, x, words)
        carried = decode(dtype, payload).astype(np.float32)
        return Encoded(_padded(payload), carried, np.isfinite(carried), np.ones(count, np.float32))
    limit = np.float32(LIMITS[format])
    blocks = -(-count // block)
    whole = np.zeros(blocks * block, dtype=np.float32)
    whole[:count] = np.abs(x)
    amax = whole.reshape(blocks, block).max(axis=1, initial=0)  # NaN and infinity come through
    with np.errstate(all="ignore"):
        finite = np.isfinite(amax)
        most = np.minimum(amax, np.nextafter(np.float32(np.finfo(np.float32).max), np.float32(0)))
        live = finite & (most >= limit * _TINY)
        scale = np.where(live, most / limit, np.where(finite, np.float32(0), np.float32(np.nan))).astype(np.float32)
        inverse = np.where(live, limit / most, np.float32(0)).astype(np.float32)
        each, each_live = np.repeat(scale, block)[:count], np.repeat(live, block)[:count]
        t = np.where(each_live, x * np.repeat(inverse, block)[:count], np.float32(0)).astype(np.float32)
        if format == "int8":
            if words is None:
                q = np.rint(t)
            else:
                fixed = np.trunc(t.astype(np.float64) * 2.0**23).astype(np.int64)
                q = (fixed + (words >> np.uint64(9)).astype(np.int64)) >> 23
            q = np.clip(q, -127, 127).astype(np.int8)
            payload, value = q.view(np.uint8), q.astype(np.float32)
        else:
            dtype = DTYPES[_TYPES[format]]
            payload = encode(dtype, t) if words is None else _round_at_random(dtype, t, words)
            value = decode(dtype, payload).astype(np.float32)
        carried = value * each
    wire = np.concatenate([_padded(payload), _padded(scale)])
    return Encoded(wire, carried, np.repeat(finite, block)[:count], each)


def decoded(wire: np.ndarray, count: int, format: str, block: int) -> np.ndarray:
    """The float32 values of a wire's bytes."""
    if not LIMITS[format]:
        dtype = DTYPES[_TYPES[format]]
        return decode(dtype, wire[: 2 * count].view(dtype.storage)).astype(np.float32)
    payload = wire[:count]
    at = -(-count // 16) * 16
    scales = np.repeat(wire[at : at + -(-count // block) * 4].view(np.float32), block)[:count]
    if format == "int8":
        value = payload.view(np.int8).astype(np.float32)
    else:
        value = decode(DTYPES[_TYPES[format]], payload).astype(np.float32)
    with np.errstate(all="ignore"):
        return value * scales


def carried_by(wires, count: int, format: str, block: int, average_over=None, scale=1.0) -> np.ndarray:
    """The sum of wires, in order, in float32, averaged and scaled."""
    with np.errstate(all="ignore"):
        total = decoded(wires[0], count, format, block)
        for wire in wires[1:]:
            total = total + decoded(wire, count, format, block)
        if average_over:
            total = total / np.float32(average_over)
        return total * np.float32(scale)
