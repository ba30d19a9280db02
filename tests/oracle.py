"""What the collectives must compute: NumPy, written from the definitions and sharing nothing with the engine.

Two oracles. ``exact`` is the value in float64 (Python's whole numbers for integers) with ``tolerance``, the bound that
any engine has to keep. ``rank_ordered`` is the bits that the host engine promises: floats of 32 bits and fewer are
summed in float32 in rank order, float64 in float64, with one rounding to the type at the end; an average divides the
sum. Integers wrap around and their average truncates toward zero; min and max let NaN through; a pre-multiplied sum
adds scalar_i * x_i, each rank with its own scalar. fp8 (OCP E4M3FN and E5M2) saturates at the largest finite value.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

__all__ = ["DTYPES", "OPS", "DType", "exact", "make", "rank_ordered", "same", "tolerance"]

OPS = ("sum", "prod", "max", "min", "avg")  # and "premul", which is made for a communicator


@dataclasses.dataclass(frozen=True)
class DType:
    """A type of NCCL. ``storage`` is the NumPy type that carries its bits; ``fp8`` and bf16 are carried as unsigned."""

    name: str
    code: int
    storage: np.dtype
    exponent_bits: int = 0  # 0: an integer
    mantissa_bits: int = 0

    @property
    def itemsize(self) -> int:
        return self.storage.itemsize

    @property
    def is_float(self) -> bool:
        return self.exponent_bits > 0

    @property
    def is_small(self) -> bool:
        """Carried as bits and computed with in float32."""
        return self.is_float and self.itemsize < 4

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next value."""
        return 2.0**-self.mantissa_bits if self.is_float else 0.0


def _dtype(name, code, storage, exponent_bits=0, mantissa_bits=0):
    return name, DType(name, code, np.dtype(storage), exponent_bits, mantissa_bits)


DTYPES = dict(
    [
        _dtype("int8", 0, np.int8),
        _dtype("uint8", 1, np.uint8),
        _dtype("int32", 2, np.int32),
        _dtype("uint32", 3, np.uint32),
        _dtype("int64", 4, np.int64),
        _dtype("uint64", 5, np.uint64),
        _dtype("float16", 6, np.uint16, 5, 10),
        _dtype("float32", 7, np.float32, 8, 23),
        _dtype("float64", 8, np.float64, 11, 52),
        _dtype("bfloat16", 9, np.uint16, 8, 7),
        _dtype("float8e4m3", 10, np.uint8, 4, 3),
        _dtype("float8e5m2", 11, np.uint8, 5, 2),
    ]
)


@functools.cache
def _values(dtype: DType) -> np.ndarray:
    """The value of every bit pattern of a small float, as float64, from the definition."""
    bits = np.arange(1 << (8 * dtype.itemsize), dtype=np.int64)
    bias = (1 << (dtype.exponent_bits - 1)) - 1
    mantissa = bits & ((1 << dtype.mantissa_bits) - 1)
    exponent = (bits >> dtype.mantissa_bits) & ((1 << dtype.exponent_bits) - 1)
    sign = np.where(bits >> (8 * dtype.itemsize - 1), -1.0, 1.0)
    top = (1 << dtype.exponent_bits) - 1
    normal = (1.0 + mantissa * dtype.epsilon) * np.exp2((exponent - bias).astype(np.float64))
    subnormal = mantissa * dtype.epsilon * 2.0 ** (1 - bias)
    value = np.where(exponent == 0, subnormal, normal)
    if dtype.name == "float8e4m3":  # no infinity; one NaN a sign
        value[(exponent == top) & (mantissa == 7)] = np.nan
    else:
        value[exponent == top] = np.where(mantissa[exponent == top] == 0, np.inf, np.nan)
    return sign * value


@functools.cache
def _rounding(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """The finite values >= 0 of a small float in order of their bits, and the midpoints between neighbours."""
    half = _values(dtype)[: 1 << (8 * dtype.itemsize - 1)]
    finite = half[np.isfinite(half)]
    return finite, (finite[1:] + finite[:-1]) / 2


def decode(dtype: DType, bits: np.ndarray) -> np.ndarray:
    """The values of stored elements: float64 for small floats, the array itself for all other types."""
    return _values(dtype)[bits] if dtype.is_small else bits


def encode(dtype: DType, values: np.ndarray) -> np.ndarray:
    """Round values to the type, to nearest, ties to even; past the range fp8 saturates, the others give infinity."""
    if not dtype.is_float:
        return values.astype(dtype.storage)
    if not dtype.is_small:
        with np.errstate(over="ignore"):
            return values.astype(dtype.storage)
    values = np.asarray(values, dtype=np.float64)
    finite, midpoints = _rounding(dtype)
    size = np.abs(values)
    code = np.searchsorted(midpoints, size, side="left")  # index of the first midpoint >= size: ties go down
    tie = (code < len(midpoints)) & (size == midpoints[np.minimum(code, len(midpoints) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    if dtype.itemsize > 1:
        step = finite[-1] - finite[-2]
        code = np.where(size >= finite[-1] + step / 2, len(finite), code)  # the pattern after the largest is infinity
    nan = (1 << (8 * dtype.itemsize - 1)) - 1
    code = np.where(np.isnan(values), nan, code)
    sign = np.where(np.signbit(values), 1 << (8 * dtype.itemsize - 1), 0)
    return (code | sign).astype(dtype.storage)


def make(dtype: DType, count: int, seed: int, *, specials: bool = True) -> np.ndarray:
    """Made elements: a spread of sizes and signs, and now and then zero, a subnormal, the largest value or NaN."""
    rng = np.random.default_rng(seed)
    if not dtype.is_float:
        info = np.iinfo(dtype.storage)
        values = rng.integers(info.min, info.max, count, dtype=dtype.storage, endpoint=True)
        small = rng.integers(0 if info.min == 0 else -3, 4, count)
        return np.where(rng.random(count) < 0.5, small.astype(dtype.storage), values)
    values = rng.standard_normal(count) * np.exp2(rng.integers(-3, 4, count))
    bits = encode(dtype, values)
    if specials and count:
        largest = float(np.finfo(dtype.storage).max) if not dtype.is_small else _rounding(dtype)[0][-1]
        smallest = float(np.finfo(dtype.storage).smallest_subnormal) if not dtype.is_small else _rounding(dtype)[0][1]
        chosen = encode(dtype, np.array([0.0, -0.0, smallest, -smallest, largest, -largest, np.nan]))
        where = rng.random(count) < 0.06
        bits[where] = rng.choice(chosen, int(where.sum()))
    return bits


def _scaled(dtype: DType, values: list[np.ndarray], op: str, scalars) -> list[np.ndarray]:
    if op != "premul":
        return values
    return [v * v.dtype.type(s) for v, s in zip(values, scalars, strict=True)]


def _truncated_division(total: np.ndarray, n: int) -> np.ndarray:
    """Division toward zero, in the array's own integer type."""
    quotient = total // total.dtype.type(n)
    if total.dtype.kind == "i":
        remainder = total - quotient * total.dtype.type(n)
        quotient = quotient + ((remainder != 0) & (total < 0)).astype(total.dtype)
    return quotient


def _fold(values: list[np.ndarray], op: str) -> np.ndarray:
    step = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(op, np.add)  # maximum and minimum keep NaN
    result = values[0]
    for value in values[1:]:
        result = step(result, value)
    return result


def rank_ordered(dtype: DType, op: str, inputs: list[np.ndarray], scalars=None) -> np.ndarray:
    """The stored elements that the host engine promises; ``inputs``: an array a rank, ``scalars``: for "premul"."""
    work = np.float32 if dtype.is_small else dtype.storage
    with np.errstate(all="ignore"):
        values = [decode(dtype, x).astype(work) for x in inputs]
        result = _fold(_scaled(dtype, values, op, scalars), op)
        if op == "avg":
            n = len(inputs)
            result = result / result.dtype.type(n) if dtype.is_float else _truncated_division(result, n)
        return encode(dtype, result)


def exact(dtype: DType, op: str, inputs: list[np.ndarray], scalars=None) -> np.ndarray:
    """The value itself: float64 for floats, Python's integers (objects), taken into the type's range, for integers."""
    with np.errstate(all="ignore"):
        if dtype.is_float:
            values = _scaled(dtype, [decode(dtype, x).astype(np.float64) for x in inputs], op, scalars)
            result = _fold(values, op)
            return result / len(inputs) if op == "avg" else result
        values = [x.astype(object) for x in inputs]
        if op == "premul":
            values = [v * int(s) for v, s in zip(values, scalars, strict=True)]
        result = _fold(values, op)
        bits, low = 8 * dtype.itemsize, int(np.iinfo(dtype.storage).min)
        result = np.array([(int(v) - low) % (1 << bits) + low for v in result], dtype=object)
        if op == "avg":
            result = np.array([abs(v) // len(inputs) * (1 if v >= 0 else -1) for v in result], dtype=object)
        return result


def tolerance(
    dtype: DType, op: str, inputs: list[np.ndarray], scalars=None, *, narrow_sums: bool = False
) -> np.ndarray:
    """How far a result may lie from ``exact``, element by element; 0 for integers, min and max.

    Each of the n-1 steps may err by half an epsilon of what has been summed (or multiplied) so far, the last rounding
    by half an epsilon of the type, or half its smallest subnormal. ``narrow_sums``: the steps themselves are rounded to
    the type, which NCCL may do for 16- and 8-bit floats; without it they are float32's.
    """
    n = len(inputs)
    if not dtype.is_float or op in ("max", "min"):
        return np.zeros(len(inputs[0]))
    with np.errstate(all="ignore"):
        values = _scaled(dtype, [decode(dtype, x).astype(np.float64) for x in inputs], op, scalars)
        sizes = [np.abs(v) for v in values]
        reach = functools.reduce(np.multiply if op == "prod" else np.add, sizes)
        if op == "avg":
            reach = reach / n
        step = dtype.epsilon if narrow_sums or not dtype.is_small else 2.0**-23
        smallest = _rounding(dtype)[0][1] if dtype.is_small else float(np.finfo(dtype.storage).smallest_subnormal)
        roundings = n + (op in ("avg", "premul")) * 2
        return reach * (roundings * step / 2 * 1.01 + dtype.epsilon / 2) + smallest * (
            roundings if narrow_sums else 1
        )


def same(dtype: DType, got: np.ndarray, want: np.ndarray, *, zeros_alike: bool = False) -> np.ndarray:
    """Element by element: equal bits, or both NaN; with ``zeros_alike`` (min and max) also +0 for -0."""
    equal = got.view(f"u{dtype.itemsize}") == want.view(f"u{dtype.itemsize}")
    if dtype.is_float:
        a, b = decode(dtype, got), decode(dtype, want)
        equal |= np.isnan(a) & np.isnan(b)
        if zeros_alike:
            equal |= (a == 0) & (b == 0)
    return equal


def within(dtype: DType, got: np.ndarray, op: str, inputs: list[np.ndarray], scalars=None, *, narrow_sums=False):
    """Element by element: is the result as near to ``exact`` as ``tolerance`` demands.

    NaN must be NaN; but of min and max NCCL's kernels may give the number instead. Where the exact value or a partial
    result may pass the range of the type (or of float32), an infinity or the saturated value is accepted.
    """
    want = exact(dtype, op, inputs, scalars)
    if not dtype.is_float:
        return np.array([int(g) == w for g, w in zip(got, want, strict=True)], dtype=bool)
    bound = tolerance(dtype, op, inputs, scalars, narrow_sums=narrow_sums)
    value = decode(dtype, got).astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.abs(value - want) <= bound
        both_nan = np.isnan(value) & np.isnan(want)
        if narrow_sums and op in ("max", "min"):
            decoded = [decode(dtype, x).astype(np.float64) for x in inputs]
            near |= value == functools.reduce(np.fmax if op == "max" else np.fmin, decoded)
        limit = _rounding(dtype)[0][-1] if dtype.is_small else float(np.finfo(dtype.storage).max)
        values = [
            np.abs(v) for v in _scaled(dtype, [decode(dtype, x).astype(np.float64) for x in inputs], op, scalars)
        ]
        if op == "prod":
            reach = functools.reduce(np.maximum, np.multiply.accumulate(np.array(values)))
        else:
            reach = functools.reduce(np.add, values)
        beyond = (np.abs(value) >= limit) | (np.isnan(value) & ~np.isnan(want))
        overflow = (op not in ("max", "min")) & (reach >= limit * 0.99) & beyond
        # A product may become a subnormal on its way and grow again: what is lost there is not in the bound.
        if op == "prod":
            tiny = float(np.finfo(np.float64 if dtype.name == "float64" else np.float32).tiny)
            smallest_step = functools.reduce(np.minimum, np.multiply.accumulate(np.array(values)))
            near |= smallest_step < max(tiny, _rounding(dtype)[0][1] if dtype.is_small and narrow_sums else 0) * 2
    return near | both_nan | overflow
