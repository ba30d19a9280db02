"""Time pack and unpack, memcpy and torch, in turn, on the parameter lists of shapes.json.

    python benchmarks/kernels/pack.py                     # host memory, one thread
    python benchmarks/kernels/pack.py --device cuda       # one GPU: a device-to-device copy, torch._foreach_copy_

Every result is checked before it is timed. One row a case and list goes to
benchmarks/results/kernels_pack.jsonl; `ratio` is the peer's time by ours: the median over rounds of
the two times of one round.
"""

import argparse
import ctypes
import json
import math
import time

import torch
from timing import HERE, add_options, prepare, print_row, rows_of_lists, write_rows

from collectives import kernels

SHAPES = json.loads((HERE / "shapes.json").read_text())
SCALE = 1.0 / 3.0
libc = ctypes.CDLL(None)


def tensors_of(name, dtype, device):
    """Return a list's tensors, each an allocation of its own."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for shape in SHAPES[name]["shapes"]:
        made.append(torch.randn(shape, generator=generator).to(dtype).to(device))
    assert len(made) == SHAPES[name]["tensors"] and sum(t.numel() for t in made) == SHAPES[name]["parameters"]
    return made


def memcpy(to, source):
    """Return a call that copies as many bytes from one flat tensor to another as fit in both."""
    if to.device.type == "cuda":
        return lambda: to.copy_(source)
    nbytes = min(to.nbytes, source.nbytes)
    words = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(nbytes)
    return lambda kept=(to, source): libc.memcpy(*words)


def views_of(flat, table):
    """Return the tensors' places in the flat buffer, in their shapes."""
    return [
        flat[offset : offset + tensor.numel()].view(tensor.shape)
        for tensor, offset in zip(table.tensors, table.offsets, strict=True)
    ]


def case_pack_copy(name, device):
    """pack fp32 -> fp32: against one memcpy of the same bytes, torch.cat, and torch._foreach_copy_
    into views.
    """
    tensors = tensors_of(name, torch.float32, device)
    table = kernels.Table(tensors, torch.float32)
    flat = torch.zeros(table.total, device=device)
    other = torch.zeros(table.total, device=device)
    joined = torch.empty(sum(t.numel() for t in tensors), device=device)
    views = views_of(other, table)
    kernels.pack(table, flat)
    torch._foreach_copy_(views, tensors)
    assert torch.equal(flat, other)
    rows = [tensor.view(-1) for tensor in tensors]
    assert torch.equal(torch.cat(rows, out=joined), torch.cat([v.flatten() for v in views_of(flat, table)]))
    calls = {
        "ours": lambda: kernels.pack(table, flat),
        "memcpy": memcpy(other, flat),
        "cat_out": lambda: torch.cat(rows, out=joined),
        "cat": lambda: torch.cat([t.flatten() for t in tensors]),
        "foreach_copy": lambda: torch._foreach_copy_(views, tensors),
    }
    return calls, 2 * 4 * table.total


def case_pack_bf16_norm(name, device):
    """pack fp32 -> bf16 with scale and norm: against torch's cat, mul, to, norm."""
    tensors = tensors_of(name, torch.float32, device)
    table = kernels.Table(tensors, torch.bfloat16)
    flat = torch.zeros(table.total, dtype=torch.bfloat16, device=device)
    found = kernels.Statistics(device)

    def chain():
        scaled = torch.cat([t.flatten() for t in tensors]).mul(SCALE)
        return scaled.to(torch.bfloat16), scaled.norm()

    kernels.pack(table, flat, scale=SCALE, statistics=found)
    want, norm = chain()
    assert torch.equal(torch.cat([v.flatten() for v in views_of(flat, table)]), want)
    exact = math.sqrt(sum((t.double() * SCALE).square().sum().item() for t in tensors))
    assert abs(found.norm.item() - exact) < 1e-6 * exact and found.nonfinite.item() == 0
    calls = {
        "ours": lambda: kernels.pack(table, flat, scale=SCALE, statistics=found),
        "memcpy": memcpy(torch.empty_like(flat).view(torch.uint8), flat.view(torch.uint8)),
        "chain": chain,
    }
    return calls, (4 + 2) * table.total


def case_unpack_copy(name, device):
    """unpack fp32 -> fp32: against memcpy of the same bytes in one piece, and torch._foreach_copy_
    from views.
    """
    tensors = tensors_of(name, torch.float32, device)
    table = kernels.Table(tensors, torch.float32)
    flat = torch.randn(table.total, device=device)
    other = torch.zeros(table.total, device=device)
    views = views_of(flat, table)
    kernels.unpack(flat, table)
    assert all(torch.equal(t, v) for t, v in zip(tensors, views, strict=True))
    calls = {
        "ours": lambda: kernels.unpack(flat, table),
        "memcpy": memcpy(other, flat),
        "foreach_copy": lambda: torch._foreach_copy_(tensors, views),
    }
    return calls, 2 * 4 * table.total


def case_unpack_bf16_add(name, device):
    """unpack bf16 -> fp32 with scale, adding: against torch's mul of the cast flat buffer and
    _foreach_add_.
    """
    tensors = [torch.zeros_like(t) for t in tensors_of(name, torch.float32, device)]
    table = kernels.Table(tensors, torch.bfloat16)
    flat = torch.randn(table.total, device=device).to(torch.bfloat16)
    wide = flat.float()
    views = views_of(wide, table)
    kernels.unpack(flat, table, scale=SCALE, add=True)
    assert all(torch.equal(t, v * SCALE) for t, v in zip(tensors, views, strict=True))

    def chain():
        torch.mul(flat, SCALE, out=wide)
        torch._foreach_add_(tensors, views)

    calls = {"ours": lambda: kernels.unpack(flat, table, scale=SCALE, add=True), "chain": chain}
    return calls, (2 + 4 + 4) * table.total


CASES = {
    "pack_fp32_fp32": case_pack_copy,
    "pack_fp32_bf16_scale_norm": case_pack_bf16_norm,
    "unpack_fp32_fp32": case_unpack_copy,
    "unpack_bf16_fp32_scale_add": case_unpack_bf16_add,
}


def seconds_of(call, repeats=2000, best_of=7):
    """Return the least mean of `repeats` calls, in seconds."""
    call()
    means = []
    for _ in range(best_of):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        means.append((time.perf_counter() - start) / repeats)
    return min(means)


def call_costs(device):
    """Return microseconds of making and checking a table of ResNet-50's tensors, and of packing two
    tiny tensors.
    """
    tensors = [torch.empty(math.prod(s), device=device) for s in SHAPES["resnet50"]["shapes"]]
    table = kernels.Table(tensors, torch.float32)
    tiny = kernels.Table([torch.ones(4, device=device), torch.ones(4, device=device)], torch.float32)
    flat = torch.empty(8, device=device)
    found = kernels.Statistics(device)
    costs = {
        "build_us": seconds_of(lambda: kernels.Table(tensors, torch.float32), 200),
        "verify_us": seconds_of(lambda: table.verify("pack"), 500),
        "tiny_pack_us": seconds_of(lambda: kernels.pack(tiny, flat)),
        "tiny_pack_norm_us": seconds_of(lambda: kernels.pack(tiny, flat, statistics=found)),
    }
    return {name: round(seconds * 1e6, 2) for name, seconds in costs.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "kernels_pack.jsonl", 15)
    parser.add_argument("--lists", nargs="*", default=list(SHAPES))
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    device, common = prepare(arguments)
    rows = [print_row({"benchmark": "kernels_pack", "case": "call_costs", **call_costs(device), **common})]
    rows += rows_of_lists("kernels_pack", CASES, device, arguments)
    write_rows([{**row, **common} for row in rows], arguments)


if __name__ == "__main__":
    main()
