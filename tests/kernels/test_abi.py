"""The two declarations of the kernels' arguments, C and Python, agree: sizes, offsets, numbers, constants."""

from __future__ import annotations

import ctypes
import re
import subprocess

import numpy
import pytest

from collectives import arrays, layout
from collectives.kernels import abi, cuda

from . import shim
from .registers import KERNELS

# Python's name for a struct is the C name in camel case, without coll_: CastArgs is coll_cast_args.
STRUCTS = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower(): each
    for name, each in vars(abi).items()
    if isinstance(each, type) and issubclass(each, ctypes.Structure) and each is not ctypes.Structure
}
# Rows of tables as NumPy types: TENSOR is coll_tensor.
ROWS = {name.lower(): each for name, each in vars(abi).items() if isinstance(each, numpy.dtype)}
CONSTANTS = {name: value for name, value in vars(abi).items() if name.isupper() and isinstance(value, int)}
CODES = {
    "I8": "int8", "U8": "uint8", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16",
    "F32": "float32", "F64": "float64", "BF16": "bfloat16", "E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2",
}  # fmt: skip


def enumerators() -> dict[int, str]:
    """The kernels' numbers and names in C. A number may have several CUDA kernels; the shortest name is its own."""
    shortest: dict[int, str] = {}
    for kernel in KERNELS:
        name = shortest.setdefault(kernel.number, kernel.name)
        shortest[kernel.number] = min(name, kernel.name, key=len)
    words = {number: name.removeprefix("coll_").split("_") for number, name in shortest.items()}
    return {number: "collKernel" + "".join(map(str.capitalize, each)) for number, each in words.items()}


def expected() -> dict[str, int]:
    """What the C side must say: an expression of C, and its value by Python."""
    values = {
        "COLL_TILE": layout.TILE,
        "COLL_BLOCK": cuda.BLOCK,
        "(int)collKernelCount": None,  # more than the highest number
    }
    for name, struct in STRUCTS.items():
        values[f"sizeof(coll_{name})"] = ctypes.sizeof(struct)
        for field, kind in struct._fields_:
            values[f"offsetof(coll_{name}, {field})"] = getattr(struct, field).offset
            values[f"sizeof(coll_{name}::{field})"] = ctypes.sizeof(kind)
    for name, rows in ROWS.items():
        values[f"sizeof(coll_{name})"] = rows.itemsize
        for field, (kind, offset) in rows.fields.items():
            values[f"offsetof(coll_{name}, {field})"] = offset
            values[f"sizeof(coll_{name}::{field})"] = kind.itemsize
    values |= {f"(int){name}": number for number, name in enumerators().items()}
    values |= {f"COLL_{name}": value for name, value in CONSTANTS.items()}
    numbers = {dtype: code for code, dtype in arrays.DTYPE_NAMES.items()}
    values |= {f"COLL_{name}": numbers[dtype] for name, dtype in CODES.items()}
    return values


@pytest.fixture(scope="module")
def said() -> dict[str, int]:
    """The same expressions by the C++ compiler."""
    expressions = list(expected())
    lines = "".join(f'  printf("%lld\\n", (long long)({expression}));\n' for expression in expressions)
    text = (
        '#include "prelude.h"\n#include <stdio.h>\n#include "coll/kernel_abi.h"\n#include "../cuda/tile.cuh"\n'
        f"int main() {{\n{lines}}}\n"
    )
    source, program = shim.folder() / "abi.cpp", shim.folder() / "abi"
    source.write_text(text)
    include = cuda.kernels_folder() / "include"
    command = [*shim.compiler(), "-std=c++17", "-Wno-invalid-offsetof", f"-I{shim.HERE}", f"-I{include}"]
    subprocess.run([*command, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return dict(zip(expressions, map(int, printed.split()), strict=True))


def test_c_and_python_agree(said):
    values = expected()
    count = values.pop("(int)collKernelCount")
    assert count is None and said["(int)collKernelCount"] > max(kernel.number for kernel in KERNELS)
    wrong = {name: (said[name], value) for name, value in values.items() if said[name] != value}
    assert not wrong, f"expression: (C, Python): {wrong}"
