"""The oracle is checked against NumPy's and torch's own types, and against values worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests import oracle
from tests.oracle import DTYPES

SMALL = ["float16", "bfloat16", "float8e4m3", "float8e5m2"]


def torch_type(name):
    import torch

    return {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float8e4m3": torch.float8_e4m3fn,
        "float8e5m2": torch.float8_e5m2,
    }[name]


@pytest.mark.parametrize("name", SMALL)
def test_decode_agrees_with_torch_on_every_bit_pattern(name):
    import torch

    dtype = DTYPES[name]
    bits = np.arange(1 << (8 * dtype.itemsize)).astype(dtype.storage)
    signed = torch.from_numpy(bits.view(f"i{dtype.itemsize}"))
    want = signed.view(torch_type(name)).to(torch.float64).numpy()
    got = oracle.decode(dtype, bits)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(want)[~np.isnan(want)])


@pytest.mark.parametrize("name", SMALL)
def test_encode_agrees_with_torch(name):
    import torch

    dtype = DTYPES[name]
    rng = np.random.default_rng(7)
    finite = oracle.decode(dtype, np.arange(1 << (8 * dtype.itemsize)).astype(dtype.storage))
    finite = np.sort(finite[np.isfinite(finite)])
    middles = (finite[1:] + finite[:-1]) / 2  # ties: exact in float32 for all four types
    values = np.concatenate(
        [finite, middles, np.nextafter(middles, np.inf), rng.standard_normal(3000) * finite[-1] / 4]
    )
    values = values[np.abs(values) <= finite[-1]].astype(np.float32)
    want = torch.from_numpy(values).to(torch_type(name)).view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    got = oracle.encode(dtype, values)
    np.testing.assert_array_equal(got, want.numpy().view(dtype.storage))


def test_past_the_range():
    values = np.array([np.inf, -np.inf, 1e30, -1e30, np.nan])
    assert oracle.encode(DTYPES["float8e4m3"], values).tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F]
    assert oracle.encode(DTYPES["float8e5m2"], values).tolist() == [0x7B, 0xFB, 0x7B, 0xFB, 0x7F]
    half = oracle.encode(DTYPES["float16"], np.array([65504.0, 65519.9, 65520.0, -70000.0, np.inf]))
    assert half.tolist() == [0x7BFF, 0x7BFF, 0x7C00, 0xFC00, 0x7C00]
    with np.errstate(over="ignore"):
        numpy_own = np.array([65504.0, 65519.9, 65520.0, -70000.0, np.inf]).astype(np.float16)
    assert half.tolist() == numpy_own.view("u2").tolist()


def test_integers_wrap_and_average_toward_zero():
    int8 = DTYPES["int8"]
    x = [np.array([100, -3, -128, 7], np.int8), np.array([100, -2, -1, -8], np.int8)]
    assert oracle.rank_ordered(int8, "sum", x).tolist() == [-56, -5, 127, -1]
    assert oracle.rank_ordered(int8, "avg", x).tolist() == [-28, -2, 63, 0]
    assert oracle.rank_ordered(int8, "premul", x, [2, 3]).tolist() == [-12, -12, -3, -10]
    for op in (*oracle.OPS, "premul"):
        scalars = [2, 3]
        exact = oracle.exact(int8, op, x, scalars)
        assert oracle.rank_ordered(int8, op, x, scalars).tolist() == exact.tolist()


@pytest.mark.parametrize("name", DTYPES)
def test_rank_ordered_is_within_the_tolerance(name):
    dtype = DTYPES[name]
    for op, n in itertools.product([*oracle.OPS, "premul"], (1, 2, 7)):
        inputs = [oracle.make(dtype, 3000, 100 + r) for r in range(n)]
        scalars = None
        if op == "premul":
            scalars = [oracle.decode(dtype, oracle.encode(dtype, np.array([1 + r * 0.75])))[0] for r in range(n)]
        got = oracle.rank_ordered(dtype, op, inputs, scalars)
        good = oracle.within(dtype, got, op, inputs, scalars)
        assert good.all(), (op, n, got[~good][:4], oracle.exact(dtype, op, inputs, scalars)[~good][:4])


def test_tolerance_notices_a_wrong_bit():
    dtype = DTYPES["float32"]
    inputs = [np.abs(oracle.make(dtype, 1000, r, specials=False)) for r in range(2)]
    got = oracle.rank_ordered(dtype, "sum", inputs)
    wrong = (got.view(np.uint32) ^ np.uint32(4)).view(np.float32)  # 4 units in the last place
    assert oracle.within(dtype, got, "sum", inputs).all()
    assert not oracle.within(dtype, wrong, "sum", inputs).any()
    assert not oracle.same(dtype, wrong, got).any()
