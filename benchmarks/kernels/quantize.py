"""Time the wire formats, memcpy and torch's operators for the same, in turn.

    python benchmarks/kernels/quantize.py                     # host memory, one thread
    python benchmarks/kernels/quantize.py --device cuda       # one GPU: a device-to-device copy, the same chains

Every result is checked before it is timed. One row a case and format goes to
benchmarks/results/kernels_quantize.jsonl; ``chain_ratio`` is the chain's time by ours, ``of_copy``
our rate by the copy's, each over the bytes that have to be read and written: the median over rounds
of the two times of one round. The chains are as one writes them, with results that torch allocates.
"""

import argparse
import statistics

import torch
from timing import add_options, in_turn, prepare, print_row, ratio, write_rows

from collectives import kernels
from collectives.layout import WIRE_FORMATS, wire_layout

BLOCK = 256
WIRES = 4
TORCH = {
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


# ---- The same by torch's operators.
def chain_quantize(x, format):
    """Return (elements, scales) as torch has them."""
    spec = WIRE_FORMATS[format]
    if not spec.scaled:
        return x.to(TORCH[format]), None
    rows = x.view(-1, BLOCK)
    scales = rows.abs().amax(dim=1, keepdim=True) / spec.limit
    scaled = rows / scales
    if format == "int8":
        scaled = scaled.round_().clamp_(-127, 127)
    return scaled.to(TORCH[format]), scales


def chain_dequantize(elements, scales):
    """Return float32 values."""
    return elements.float() if scales is None else elements.float().mul_(scales).view(-1)


def chain_feedback(x, residual, format):
    """Return (elements, scales), and leave in ``residual`` what they don't carry."""
    residual.add_(x)
    elements, scales = chain_quantize(residual, format)
    residual.sub_(chain_dequantize(elements, scales))
    return elements, scales


def chain_sum(sent):
    """Return the sum of several (elements, scales)."""
    total = chain_dequantize(*sent[0])
    for elements, scales in sent[1:]:
        total.add_(chain_dequantize(elements, scales))
    return total


# ---- Cases. Each returns our call, the chain's, and the bytes that any such operation has to move.
def case_quantize(format, x, *, seed=None):
    """fp32 to a wire; torch has no random rounding, its chain is the same."""
    wire = torch.empty(wire_layout(x.numel(), format, BLOCK).nbytes, dtype=torch.uint8, device=x.device)
    kernels.quantize(x, wire, format=format, block=BLOCK, seed=seed)
    out = torch.empty_like(x)
    kernels.dequantize(wire, out, format=format, block=BLOCK)
    check(x, out, format, 1 if seed is None else 2)

    def ours():
        kernels.quantize(x, wire, format=format, block=BLOCK, seed=seed)

    return ours, lambda: chain_quantize(x, format), x.nbytes + wire.nbytes


def case_random(format, x):
    """The same with rounding at random."""
    return case_quantize(format, x, seed=1)


def case_feedback(format, x):
    """fp32 to a wire, with a residual in fp32."""
    wire = torch.empty(wire_layout(x.numel(), format, BLOCK).nbytes, dtype=torch.uint8, device=x.device)
    residual, other = torch.zeros_like(x), torch.zeros_like(x)
    out = torch.empty_like(x)
    kernels.quantize(x, wire, format=format, block=BLOCK, residual=residual)
    kernels.dequantize(wire, out, format=format, block=BLOCK)
    assert torch.equal(x - out, residual)

    def ours():
        kernels.quantize(x, wire, format=format, block=BLOCK, residual=residual)

    return ours, lambda: chain_feedback(x, other, format), x.nbytes + 2 * residual.nbytes + wire.nbytes


def case_dequantize(format, x):
    """A wire to fp32."""
    (wire,), (sent,) = sent_by(format, [x])
    out = torch.empty_like(x)
    kernels.dequantize(wire, out, format=format, block=BLOCK)
    check(x, out, format)
    ours = lambda: kernels.dequantize(wire, out, format=format, block=BLOCK)  # noqa: E731
    return ours, lambda: chain_dequantize(*sent), wire.nbytes + out.nbytes


def sent_by(format, sources):
    """Return the wires of several sources, ours and the chain's."""
    wires = []
    for x in sources:
        wires.append(torch.empty(wire_layout(x.numel(), format, BLOCK).nbytes, dtype=torch.uint8, device=x.device))
        kernels.quantize(x, wires[-1], format=format, block=BLOCK)
    return wires, [chain_quantize(x, format) for x in sources]


def case_reduce(format, x):
    """4 wires summed to fp32."""
    wires, sent = sent_by(format, [x, x.flip(0), -x, x * 2])
    out = torch.empty_like(x)
    table = kernels.WireTable(wires)
    kernels.reduce_wires(table, out, format=format, block=BLOCK)
    parts = [torch.empty_like(x) for _ in wires]
    for wire, part in zip(wires, parts, strict=True):
        kernels.dequantize(wire, part, format=format, block=BLOCK)
    assert torch.equal(out, ((parts[0] + parts[1]) + parts[2]) + parts[3])
    ours = lambda: kernels.reduce_wires(table, out, format=format, block=BLOCK)  # noqa: E731
    return ours, lambda: chain_sum(sent), WIRES * wires[0].nbytes + out.nbytes


def case_requantize(format, x):
    """4 wires summed and quantised again to one."""
    wires, sent = sent_by(format, [x, x.flip(0), -x, x * 2])
    total, result, again = torch.empty_like(x), torch.empty_like(wires[0]), torch.empty_like(wires[0])
    table = kernels.WireTable(wires)
    kernels.reduce_wires(table, total, format=format, block=BLOCK)
    kernels.quantize(total, again, format=format, block=BLOCK)
    kernels.requantize(table, result, count=x.numel(), format=format, block=BLOCK)
    assert torch.equal(result, again)
    ours = lambda: kernels.requantize(table, result, count=x.numel(), format=format, block=BLOCK)  # noqa: E731
    return ours, lambda: chain_quantize(chain_sum(sent), format), (WIRES + 1) * result.nbytes


CASES = {
    "quantize": case_quantize,
    "quantize_random": case_random,
    "quantize_feedback": case_feedback,
    "dequantize": case_dequantize,
    "reduce_wires_4": case_reduce,
    "requantize_4": case_requantize,
}


def check(x, out, format, factor=1):
    """Hold what came over the wire against the documented bound."""
    spec = WIRE_FORMATS[format]
    scale = 1.0
    if spec.scaled:
        scale = (x.view(-1, BLOCK).abs().amax(dim=1, keepdim=True) / spec.limit).expand(-1, BLOCK).reshape(-1)
    bound = (spec.relative * x.abs() + spec.absolute * scale) * (factor * (1 + 2.0**-13)) + 2.0**-149
    assert ((x - out).abs() <= bound).all(), format


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "kernels_quantize.jsonl", 11)
    parser.add_argument("--count", type=int, default=32 << 20, help="values; a multiple of 256")
    parser.add_argument("--formats", nargs="*", default=["int8", "fp8_e4m3", "fp8_e5m2", "bf16", "fp16"])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    device, common = prepare(arguments)
    x = torch.randn(arguments.count, generator=torch.Generator().manual_seed(1)).to(device)
    other = torch.empty_like(x)
    rows = []
    for case in arguments.cases:
        for format in arguments.formats:
            ours, chain, nbytes = CASES[case](format, x)
            times = in_turn({"ours": ours, "chain": chain, "copy": lambda: other.copy_(x)}, device, arguments.rounds)
            least = nbytes / (2 * x.nbytes)  # of the copy's bytes
            row = {"benchmark": "kernels_quantize", "case": case, "format": format, "block": BLOCK, "count": x.numel()}
            row |= {f"{name}_ms": round(statistics.median(each) * 1e3, 4) for name, each in times.items()}
            row["gb_per_s"] = round(nbytes / statistics.median(times["ours"]) / 1e9, 2)
            row["of_copy"] = ratio([copy * least for copy in times["copy"]], times["ours"])
            row["chain_ratio"] = ratio(times["chain"], times["ours"], 2)
            rows.append({**print_row(row), **common})
            del ours, chain
    write_rows(rows, arguments)


if __name__ == "__main__":
    main()
