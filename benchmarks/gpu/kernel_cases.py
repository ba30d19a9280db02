"""A call of every kernel, with the bytes that it must move and a check of its result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from collectives import kernels
from collectives.layout import WIRE_FORMATS, wire_layout

__all__ = ["CASES", "Case"]

BLOCK = 256
SOURCES = 4
SCALE = 0.25
TENSORS = 8  # that a table has


class Case(NamedTuple):
    """``call`` runs the kernel; ``check`` raises AssertionError where what it has written is wrong."""

    call: Callable[[], None]
    nbytes: int
    check: Callable[[], None]


def whole_numbers(count: int, device, number: int = 0) -> torch.Tensor:
    """Return fp32 values of which every type holds every sum exactly."""
    return ((torch.arange(count, device=device) * (number + 3)) % 3 - 1).float()


def parts_of(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of equal parts, each in memory of its own."""
    return [part.clone() for part in flat.chunk(TENSORS)]


def same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert torch.equal(found, wanted), f"{what}: a wrong result"


def pack(source: str, to: str, scale: float, statistics: bool, nbytes: int, device) -> Case:
    source_type, flat_type = getattr(torch, source), getattr(torch, to)
    count = nbytes // source_type.itemsize // (TENSORS * 16) * TENSORS * 16
    values = whole_numbers(count, device).to(source_type)
    table = kernels.Table(parts_of(values), flat_type)
    flat = torch.zeros(table.total, dtype=flat_type, device=device)
    found = kernels.Statistics(device) if statistics else None

    def check():
        same(flat, (values.float() * scale).to(flat_type), "pack")
        if found is not None:
            wanted = (values.double() * scale).square().sum()
            assert torch.allclose(found.sum_of_squares, wanted.reshape(1), rtol=1e-6), "pack: a wrong norm"

    moved = count * (source_type.itemsize + flat_type.itemsize)
    return Case(lambda: kernels.pack(table, flat, scale=scale, statistics=found), moved, check)


def unpack(source: str, to: str, nbytes: int, device) -> Case:
    flat_type, tensor_type = getattr(torch, source), getattr(torch, to)
    count = nbytes // flat_type.itemsize // (TENSORS * 16) * TENSORS * 16
    flat = whole_numbers(count, device).to(flat_type)
    tensors = [torch.zeros(count // TENSORS, dtype=tensor_type, device=device) for _ in range(TENSORS)]
    table = kernels.Table(tensors, flat_type)

    def check():
        same(torch.cat(tensors), (flat.float() * SCALE).to(tensor_type), "unpack")

    moved = count * (flat_type.itemsize + tensor_type.itemsize)
    return Case(lambda: kernels.unpack(flat, table, scale=SCALE), moved, check)


def reduce_n(dtype: str, nbytes: int, device, out_type: str | None = None) -> Case:
    kind = getattr(torch, dtype)
    count = max(16, nbytes // kind.itemsize // 16 * 16)
    values = [whole_numbers(count, device, number).to(kind) for number in range(SOURCES)]
    out = torch.zeros(count, dtype=getattr(torch, out_type or dtype), device=device)
    table = kernels.Sources(values)

    def check():
        wanted = values[0].double()
        for each in values[1:]:
            wanted = wanted + each.double()
        same(out.double(), wanted, f"reduce_n of {dtype}")

    moved = SOURCES * values[0].nbytes + out.nbytes
    return Case(lambda: kernels.reduce_n(table, out), moved, check)


def wires(format: str, sources: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for each in sources:
        nbytes = wire_layout(each.numel(), format, BLOCK).nbytes
        found.append(torch.zeros(nbytes, dtype=torch.uint8, device=each.device))
        kernels.quantize(each, found[-1], format=format, block=BLOCK)
    return found


def within(found: torch.Tensor, x: torch.Tensor, format: str, times: float = 1.0) -> None:
    """Hold what came over a wire against the documented bound."""
    spec = WIRE_FORMATS[format]
    scale = 1.0
    if spec.scaled:
        scale = (x.view(-1, BLOCK).abs().amax(dim=1, keepdim=True) / spec.limit).expand(-1, BLOCK).reshape(-1)
    bound = (spec.relative * x.abs() + spec.absolute * scale) * (times * (1 + 2.0**-13)) + 2.0**-149
    assert ((x - found).abs() <= bound).all(), f"{format}: past its bound"


def noise(nbytes: int, device, number: int = 0) -> torch.Tensor:
    count = max(BLOCK, nbytes // 4 // BLOCK * BLOCK)
    generator = torch.Generator(device="cpu").manual_seed(number)
    some = torch.randn(min(count, 1 << 16), generator=generator).to(device)
    return some.repeat(-(-count // some.numel()))[:count].contiguous()


def quantize(format: str, nbytes: int, device, *, feedback: bool = False, seed: int | None = None) -> Case:
    x = noise(nbytes, device)
    wire = torch.zeros(wire_layout(x.numel(), format, BLOCK).nbytes, dtype=torch.uint8, device=device)
    residual = torch.zeros_like(x) if feedback else None

    def check():
        if residual is not None:
            residual.zero_()
            kernels.quantize(x, wire, format=format, block=BLOCK, residual=residual, seed=seed)
        out = torch.empty_like(x)
        kernels.dequantize(wire, out, format=format, block=BLOCK)
        within(out, x, format, 1.0 if seed is None else 2.0)
        if residual is not None:
            same(residual, x - out, "the residual")

    moved = x.nbytes + wire.nbytes + (2 * x.nbytes if feedback else 0)
    call = functools.partial(kernels.quantize, x, wire, format=format, block=BLOCK, residual=residual, seed=seed)
    return Case(call, moved, check)


def dequantize(format: str, nbytes: int, device) -> Case:
    x = noise(nbytes, device)
    (wire,) = wires(format, [x])
    out = torch.empty_like(x)
    call = functools.partial(kernels.dequantize, wire, out, format=format, block=BLOCK)
    return Case(call, wire.nbytes + out.nbytes, lambda: within(out, x, format))


def quantize_parts(format: str, nbytes: int, device) -> Case:
    """All ranks' parts of a bucket by one kernel, as a compressed all-reduce sends them."""
    x = noise(nbytes, device)
    numel = -(-x.numel() // (SOURCES * BLOCK)) * BLOCK
    width = wire_layout(numel, format, BLOCK).nbytes
    parts = kernels.WireParts(SOURCES, numel, width)
    sent = torch.zeros(SOURCES * width, dtype=torch.uint8, device=device)

    def check():
        out = torch.empty_like(x)
        kernels.dequantize(sent, out, format=format, block=BLOCK, parts=parts)
        within(out, x, format)

    call = functools.partial(kernels.quantize, x, sent, format=format, block=BLOCK, parts=parts)
    return Case(call, x.nbytes + sent.nbytes, check)


def dequantize_parts(format: str, nbytes: int, device) -> Case:
    x = noise(nbytes, device)
    numel = -(-x.numel() // (SOURCES * BLOCK)) * BLOCK
    width = wire_layout(numel, format, BLOCK).nbytes
    parts = kernels.WireParts(SOURCES, numel, width)
    sent, out = torch.zeros(SOURCES * width, dtype=torch.uint8, device=device), torch.empty_like(x)
    kernels.quantize(x, sent, format=format, block=BLOCK, parts=parts)
    call = functools.partial(kernels.dequantize, sent, out, format=format, block=BLOCK, parts=parts)
    return Case(call, sent.nbytes + out.nbytes, lambda: within(out, x, format))


def reduce_wires(format: str, nbytes: int, device) -> Case:
    sources = [noise(nbytes, device, number) for number in range(SOURCES)]
    sent = wires(format, sources)
    table = kernels.WireTable(sent)
    out = torch.empty_like(sources[0])

    def check():
        total = torch.zeros_like(out)
        for wire in sent:
            part = torch.empty_like(out)
            kernels.dequantize(wire, part, format=format, block=BLOCK)
            total = total + part
        same(out, total, "reduce_wires")

    call = functools.partial(kernels.reduce_wires, table, out, format=format, block=BLOCK)
    return Case(call, SOURCES * sent[0].nbytes + out.nbytes, check)


def requantize(format: str, nbytes: int, device, *, feedback: bool = False) -> Case:
    sources = [noise(nbytes, device, number) for number in range(SOURCES)]
    count = sources[0].numel()
    sent = wires(format, sources)
    table = kernels.WireTable(sent)
    out = torch.zeros_like(sent[0])
    residual = torch.zeros_like(sources[0]) if feedback else None
    call = functools.partial(
        kernels.requantize, table, out, count=count, format=format, block=BLOCK, residual=residual
    )  # fmt: skip

    def check():
        total, again = torch.empty_like(sources[0]), torch.zeros_like(out)
        left = None
        if residual is not None:  # calls before this one have left something in it
            residual.zero_()
            call()
            left = torch.zeros_like(residual)
        kernels.reduce_wires(table, total, format=format, block=BLOCK)
        kernels.quantize(total, again, format=format, block=BLOCK, residual=left)
        same(out, again, "requantize")
        if residual is not None:
            same(residual, left, "the residual of requantize")

    return Case(call, (SOURCES + 1) * out.nbytes + (2 * residual.nbytes if feedback else 0), check)


def stepped(rule: str, nbytes: int, device) -> Case:
    from collectives import optim

    count = max(64, nbytes // 4)
    first = noise(4 * count, device)
    grad = noise(4 * count, device, 1)
    ours, theirs = (torch.nn.Parameter(first.clone()) for _ in range(2))
    ours.grad, theirs.grad = grad, grad.clone()
    how = {"momentum": 0.9} if rule == "SGD" else {}
    optimizer = getattr(optim, rule)([ours], lr=1e-3, **how)
    right = getattr(torch.optim, rule)([theirs], lr=1e-3, foreach=True, **how)
    steps = [0, 0]  # of ours, and of torch's

    def call():
        optimizer.step()
        steps[0] += 1

    def check():
        if steps[0] <= 3:
            while steps[1] < steps[0]:
                right.step()
                steps[1] += 1
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-7)
        assert torch.isfinite(ours).all(), f"{rule}: not finite"

    states = 1 if rule == "SGD" else 2
    return Case(call, (3 + 2 * states) * ours.nbytes, check)


CASES: dict[str, Callable[[int, torch.device], Case]] = {
    "pack fp32": functools.partial(pack, "float32", "float32", 1.0, False),
    "pack fp32, scale": functools.partial(pack, "float32", "float32", SCALE, False),
    "pack fp32 to bf16, scale, norm": functools.partial(pack, "float32", "bfloat16", SCALE, True),
    "pack fp32 to fp16, scale": functools.partial(pack, "float32", "float16", SCALE, False),
    "pack bf16, scale": functools.partial(pack, "bfloat16", "bfloat16", SCALE, False),
    "pack fp64, scale": functools.partial(pack, "float64", "float64", SCALE, False),
    "pack fp32 to e4m3, scale": functools.partial(pack, "float32", "float8_e4m3fn", SCALE, False),
    "pack fp32 to e5m2, scale, norm": functools.partial(pack, "float32", "float8_e5m2", SCALE, True),
    "pack bf16 to fp16, scale, norm": functools.partial(pack, "bfloat16", "float16", SCALE, True),
    "unpack bf16 to fp32": functools.partial(unpack, "bfloat16", "float32"),
    "unpack fp16 to fp32": functools.partial(unpack, "float16", "float32"),
    **{
        f"reduce {name}": functools.partial(reduce_n, name)
        for name in (
            "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64", "int8", "int32", "int64",
        )
    },
    "reduce float32 to float64": functools.partial(reduce_n, "float32", out_type="float64"),
    **{
        f"{name} {format}": functools.partial(function, format)
        for format in WIRE_FORMATS if WIRE_FORMATS[format].scaled or format in ("bf16", "fp16")
        for name, function in (
            ("quantize", quantize), ("quantize with residual", functools.partial(quantize, feedback=True)),
            ("quantize at random", functools.partial(quantize, seed=7)),
            ("dequantize", dequantize), ("reduce wires", reduce_wires), ("requantize", requantize),
            ("requantize with residual", functools.partial(requantize, feedback=True)),
            ("quantize parts", quantize_parts), ("dequantize parts", dequantize_parts),
        )
    },
    "SGD": functools.partial(stepped, "SGD"),
    "AdamW": functools.partial(stepped, "AdamW"),
}  # fmt: skip
