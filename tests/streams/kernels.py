"""This package's CUDA kernels on the simulated GPU: their CUDA text runs on the CPU, and what each uses is noted."""

from __future__ import annotations

import ctypes

from . import device, graphs
from .checker import checker, site

WIDTHS = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]  # bytes of an element, by NCCL's code
OPAQUE = 32
READS, WRITES = False, True


def width(code: int) -> int:
    return code - OPAQUE if code >= OPAQUE else WIDTHS[code]


def rows_of(address: int, count: int, dtype) -> list:
    import numpy

    return numpy.frombuffer(ctypes.string_at(address, count * dtype.itemsize), dtype) if count else []


class Uses:
    """The ranges of memory that a kernel uses."""

    def __init__(self):
        self.found: list = []

    def add(self, address: int, nbytes: int, writes: bool, shape: str) -> None:
        if address and nbytes > 0:
            self.found.append((int(address), int(address) + int(nbytes), writes, shape))

    def array(self, address: int, count: int, code: int, writes: bool) -> None:
        self.add(address, count * width(code), writes, f"elements of {width(code)} bytes[{count}]")

    def table(self, address: int, nbytes: int) -> None:
        """A table that is on the GPU; one on the host goes along by value."""
        if address and checker.block_at(address) is not None:
            self.add(address, nbytes, READS, "a table")

    def number(self, number) -> None:
        self.add(number.at, 4 if number.type == 7 else 8, READS, "a scalar")

    def work(self, work) -> None:
        self.add(work.sums, 8 * work.tiles, WRITES, "the tiles' sums")
        self.add(work.bad, 4 * work.tiles, WRITES, "the tiles' counts")

    def scale(self, args) -> None:
        self.add(args.scale_at, 4, READS, "a factor")


def _cast(uses, args, abi):
    uses.scale(args)
    uses.table(args.tensors, args.count * abi.TENSOR.itemsize)
    for row in rows_of(args.tensors, args.count, abi.TENSOR):
        count, offset, code = int(row["count"]), int(row["offset"]), int(row["type"])
        unpacks = bool(args.flags & abi.FROM_FLAT)
        padding = 0 if unpacks else int(row["padding"])
        if not args.flags & abi.MEASURE:
            at = args.flat + offset * width(args.flat_type)
            uses.array(at, count + padding, args.flat_type, READS if unpacks else WRITES)
        uses.array(int(row["data"]), count, code, WRITES if unpacks else READS)


def _finish(uses, args, abi):
    uses.add(args.work.sums, 8 * args.shares, READS, "the tiles' sums")
    uses.add(args.work.bad, 4 * args.shares, READS, "the tiles' counts")
    uses.add(args.sum_of_squares, 8, WRITES, "a sum of squares")
    uses.add(args.nonfinite, 8, WRITES, "a count")


def _reduce(uses, args, abi):
    uses.scale(args)
    sources = _pointers(uses, args.sources, args.n)
    for source in sources:
        uses.array(source, args.count, args.source_type, READS)
    uses.array(args.out, args.count, args.out_type, WRITES)


def _pointers(uses, address: int, count: int) -> list[int]:
    uses.table(address, 8 * count)
    return list((ctypes.c_uint64 * count).from_address(address)) if count else []


def _encoder(uses, to):
    uses.add(to.wire, _wire_nbytes(to.count, to.format, to.block), WRITES, f"a wire buffer of {to.count} elements")
    uses.array(to.residual, to.count, to.residual_type, WRITES)


def _decoder(uses, source):
    uses.scale(source)
    wires = _pointers(uses, source.wires, source.wire_count) if source.wires else [source.wire]
    for wire in wires:
        nbytes = _wire_nbytes(source.count, source.format, source.block)
        uses.add(wire, nbytes, READS, f"a wire buffer of {source.count} elements")


def _wire_nbytes(count: int, code: int, block: int) -> int:
    """What quantize.h lays out: elements, and for 8-bit formats a scale for each block, both padded to 16 bytes."""
    payload = -(-count * width(code) // 16) * 16
    return payload if width(code) > 1 else payload + -(-4 * -(-count // block) // 16) * 16


def _parts(parts, count: int):
    """Give each part's first element, the bytes to its wire, and its number of elements."""
    first = wire_at = 0
    while first < parts.total and count:
        yield first, wire_at, min(count, parts.total - first)
        first, wire_at = first + parts.stride, wire_at + parts.wire_stride


def _quantize(uses, args, abi):
    uses.scale(args)
    to = args.to
    for first, wire_at, count in _parts(args.parts, to.count):
        uses.array(args.source + first * width(args.source_type), count, args.source_type, READS)
        residual = to.residual and to.residual + first * width(to.residual_type)
        _encoder(uses, abi.Encoder(to.wire + wire_at, residual, count, 0, 0, to.format, to.block, to.residual_type))


def _dequantize(uses, args, abi):
    source = getattr(args, "from")
    if args.parts.wire_stride == 0:
        _decoder(uses, source)
    for first, wire_at, count in _parts(args.parts, source.count):
        if args.parts.wire_stride:
            own = abi.Decoder(0, source.wire + wire_at, 1, count, source.scale_at, 1.0, source.format, source.block)
            _decoder(uses, own)
        uses.array(args.out + first * width(args.out_type), count, args.out_type, WRITES)


def _requantize(uses, args, abi):
    _decoder(uses, getattr(args, "from"))
    _encoder(uses, args.to)


def _optimizer(uses, args, abi):
    update = args.update
    for name in ("lr", "grad_scale", "clip", "nonfinite"):
        uses.number(getattr(update, name))
    uses.table(update.parameters, update.count * abi.PARAMETER.itemsize)
    for row in rows_of(update.parameters, update.count, abi.PARAMETER):
        count, code = int(row["count"]), int(row["param_type"])
        state = 8 if width(code) == 8 else 4
        uses.array(int(row["param"]), count, code, WRITES)
        uses.array(int(row["grad"]), count, int(row["grad_type"]), READS)
        for name in ("master", "first", "second", "largest"):
            uses.add(int(row[name]), count * state, WRITES, f"{name}[{count}]")
        if row["step"]["at"]:
            uses.add(int(row["step"]["at"]), 4 if row["step"]["type"] == 7 else 8, READS, "a step's number")


BY_ARGS = {
    "CastArgs": _cast, "FinishArgs": _finish, "ReduceArgs": _reduce, "QuantizeArgs": _quantize,
    "DequantizeArgs": _dequantize, "RequantizeArgs": _requantize, "SgdArgs": _optimizer, "AdamArgs": _optimizer,
}  # fmt: skip


def uses_of(args) -> list:
    """What a kernel reads and writes: (first address, last address, writes or not, description)."""
    from collectives.kernels import abi

    uses = Uses()
    if type(args).__name__ != "FinishArgs":
        uses.work(args.work)
    BY_ARGS[type(args).__name__](uses, args, abi)
    return uses.found


loads: list[str] = []  # the kernels that this process would have compiled and loaded into a GPU, in order
_loaded: set[tuple[str, int]] = set()


def load(kernel, index: int) -> None:
    """Stand for collectives.kernels.cuda.load: note a kernel that isn't on this GPU yet."""
    if (kernel.name, index) not in _loaded:
        _loaded.add((kernel.name, index))
        loads.append(kernel.name)


def launch(kernel, args, on, rows=None, kept=None) -> None:
    """Stand for collectives.kernels.cuda.launch: run a kernel's CUDA text on the CPU, on torch's current stream."""
    import torch

    from collectives.kernels import cuda
    from tests.kernels import shim

    index = torch.cuda.current_device() if on.index is None else on.index
    load(kernel, index)
    stream = (index << 40) | device.library.simulated_current_stream(index)
    where, held = site(), []

    def place() -> int:
        held.append(rows.on_device())
        return held[0].data_ptr()

    values = bytes(cuda.arguments(kernel, args, rows, place))
    checker.flush()
    accesses = uses_of(args)
    accesses += [(each.data_ptr(), each.data_ptr() + each.nbytes, READS, "a table") for each in held]
    capture = graphs.capture_id(stream)
    checker.submit(checker.operation, f"kernel {kernel.name}", stream, accesses, where, device.known())
    tiles = args.work.tiles

    def run():
        shim.text_of(kernel.source).run(kernel.name, values, max(1, min(3, tiles)), 64, "forward", 60.0)

    if capture is not None:
        capture.uses(accesses, f"kernel {kernel.name}", stream, where)
        capture.calls.append(run)
    checker.flush()
    if any(checker.block_at(low) is None for low, *_ in accesses):
        return  # reported; the memory isn't there
    run()


def install() -> None:
    """Send the package's launches here, and note what its kernels on the host do with pinned memory."""
    from collectives.kernels import cuda, execution

    cuda.launch, cuda.load = launch, load
    on_host = execution.run_on_host

    def run_on_host(kernel, args, rows=None):
        pinned = [each for each in uses_of(args) if (block := checker.block_at(each[0])) and block.kind == "pinned"]
        if pinned:
            checker.submit(checker.host_access, f"kernel {kernel.name}", pinned, site(), device.known())
        return on_host(kernel, args, rows)

    execution.run_on_host = run_on_host
