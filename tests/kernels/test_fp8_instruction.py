"""The instruction that rounds to fp8 since sm_89, `cvt.rn.satfinite`: what PTX says that it does, against our functors.

PTX: to nearest, ties to even, subnormals kept; what is larger than the format's largest number becomes that number; the
sign is kept, of zeros too; every NaN becomes the one NaN 0x7f.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.kernels import cuda

from . import shim
from .test_quantization import check_quantize
from .ways import made
from .wire_cases import residual_of

FORMATS = ("fp8_e4m3", "fp8_e5m2")


def patterns() -> np.ndarray:
    """fp32 patterns of all classes: each sign and exponent (0 and 255 too) with all upper 4 bits of the mantissa.

    Below them nothing, a single bit at any place, one less and one more, all ones: every tie and its two neighbours.
    """
    lows = {0, (1 << 19) - 1}
    for bit in range(20):
        lows |= {(1 << bit) + more for more in (-1, 0, 1) if 0 <= (1 << bit) + more < 1 << 19}
    tops = np.arange(2 * 256 * 16, dtype=np.uint32) << 19
    return (tops[:, None] | np.array(sorted(lows), dtype=np.uint32)[None]).ravel().view(np.float32)


# The instruction for the shim: the element whose value is nearest, the even one of two.
INSTRUCTION = """
#define __CUDA_ARCH__ 900
#include <math.h>
#include <stdint.h>
#include <string.h>
static float shim_value(int bits, int exponent_bits, int mantissa_bits, int largest);
static uint16_t shim_cvt(float high, float low, int exponent_bits, int mantissa_bits, int largest) {
  int bias = (1 << (exponent_bits - 1)) - 1, found[2];
  for (int which = 0; which < 2; ++which) {
    float x = which ? high : low;
    double most = shim_value(largest, exponent_bits, mantissa_bits, largest), nearest = INFINITY;
    double magnitude = fmin(fabs((double)x), most);
    int best = 0;
    for (int bits = 0; bits <= largest; ++bits) {
      int exponent = bits >> mantissa_bits, fraction = bits & ((1 << mantissa_bits) - 1);
      double value = exponent ? ldexp(fraction + (1 << mantissa_bits), exponent - bias - mantissa_bits)
                              : ldexp(fraction, 1 - bias - mantissa_bits);
      double far = fabs(value - magnitude);
      if (far < nearest || (far == nearest && bits % 2 == 0)) nearest = far, best = bits;
    }
    found[which] = isnan(x) ? 0x7f : (signbit(x) ? 0x80 : 0) | best;
  }
  return (uint16_t)(found[1] << 8 | found[0]);
}
static float shim_value(int bits, int exponent_bits, int mantissa_bits, int largest) {
  int bias = (1 << (exponent_bits - 1)) - 1, magnitude = bits & 0x7f;
  int exponent = magnitude >> mantissa_bits, fraction = magnitude & ((1 << mantissa_bits) - 1);
  double value = exponent ? ldexp(fraction + (1 << mantissa_bits), exponent - bias - mantissa_bits)
                          : ldexp(fraction, 1 - bias - mantissa_bits);
  if (magnitude > largest) value = exponent_bits == 5 && fraction == 0 ? INFINITY : NAN;
  return (float)(bits & 0x80 ? -value : value);
}
static uint16_t shim_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return isnan(x) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
static uint16_t shim_f16(float x) {
  _Float16 half = (_Float16)x;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return isnan(x) ? 0x7fff : bits;
}
static float shim_larger(float most, float x) { return isnan(most) || isnan(x) ? NAN : fmaxf(most, fabsf(x)); }
"""


@functools.cache
def text(source: str) -> shim.Text:
    """A source as it is for sm_90, with functions in place of the instructions."""
    found = cuda.source_text(source)
    places = {
        'asm("{ .reg .f32 m; abs.f32 m, %2; max.NaN.f32 %0, %1, m; }" : "=f"(larger) '
        ': "f"(coll_bits_float((uint32_t)most)), "f"(x));': "larger = shim_larger(coll_bits_float((uint32_t)most), x);",
        "coll_halves_to_two(halves, low, high);": "",
        'asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"\n'
        '      : "=f"(*low), "=f"(*high) : "r"(halves));': "",
    }
    for name, numbers in (("e4m3x2", "4, 3, 0x7e"), ("e5m2x2", "5, 2, 0x7b")):
        asm = f'asm("cvt.rn.satfinite.{name}.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));'
        places[asm] = f"two = shim_cvt(high, low, {numbers});"
        asm = f'asm("cvt.rn.f16x2.{name} %0, %1;" : "=r"(halves) : "h"((uint16_t)two));'
        places[asm] = f"*low = shim_value(two & 0xff, {numbers}), *high = shim_value(two >> 8 & 0xff, {numbers});"
    for name in ("bf16", "f16"):
        asm = f'asm("cvt.rn.{name}x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));'
        places[asm] = f"two = (uint32_t)shim_{name}(high) << 16 | shim_{name}(low);"
    for asm, function in places.items():
        assert asm in found, asm
        found = found.replace(asm, function)
    assert "asm(" not in found
    return shim.Text(source, INSTRUCTION + found, "-O0")


def way():
    return shim.cuda_text(grid=2, block=256, texts=text)


@pytest.mark.parametrize("format", FORMATS)
def test_wires_by_the_instruction(format):
    for count, residual in ((4097, None), (8192 + 3, torch.float32)):
        check_quantize(way, made(count), format, 128, scale=0.37, residual=residual_of(count, residual))


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_casts_by_the_instruction(to):
    """NaN too, with its sign, and as bf16 and fp16 with its payload: the host's bits, of one type and of several."""
    x = torch.from_numpy(patterns()[::29].copy())
    x[1000], x[5001] = torch.inf, -torch.inf
    assert x.isnan().any()
    for tensors in ([x[1:4099], x[4100:]], [x[1:4099], x[4100:].bfloat16(), x[:700].double().half()]):
        table = kernels.Table(tensors, to)
        wanted, found = (torch.zeros(table.total, dtype=to) for _ in range(2))
        kernels.pack(table, wanted)
        with way() as ran:
            kernels.pack(table, found)
        assert len(ran) == 1 and (ran[0] == "coll_cast") == (len(tensors) == 3)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
