"""The optimizer inside of the hook, derived: bytes a parameter on the wire and in memory, and a step's milliseconds."""

from __future__ import annotations

import dataclasses

from .step import RATES, WAYS, Rates, predict_step
from .transformer import Transformer

__all__ = ["DERIVED", "Line", "derivation", "rates_of_the_derivation", "steps", "times"]

BUS, HBM = 350e9, 4.3e12  # bytes/s


@dataclasses.dataclass(frozen=True)
class Line:
    """Bytes a parameter of one part of a step; of `shared` ones each rank has the n-th part, of `others` the rest."""

    what: str
    nbytes: float
    shared: bool = False
    wire: bool = False
    others: bool = False

    def of(self, ranks: int) -> float:
        """Return the bytes a parameter on one of so many ranks; on the wire as rings send them."""
        if self.wire or self.others:
            return self.nbytes * (ranks - 1) / ranks
        return self.nbytes / ranks if self.shared else self.nbytes


_INSIDE = (
    Line("reduce-scatter of bf16 gradients", 2, wire=True),
    Line("all-gather of bf16 parameters", 2, wire=True),
    Line("gradients copied into buckets: read 2, written 2", 4),
    Line("AdamW with 1/n and the clip factor: gradient read 2; master, two moments read and written 3 x 8; "
         "bf16 parameter written 2", 28, shared=True),
)  # fmt: skip
DERIVED = {
    "DDP, torch's, AdamW (fused)": (
        Line("all-reduce of fp32 gradients: 2 x 4", 8, wire=True),
        Line("autocast: parameters read in fp32, written in bf16", 4 + 2),
        Line("gradients copied into buckets: read 4, written 4", 8),
        Line("AdamW: gradient read 4; parameter, two moments read and written 3 x 8", 28),
    ),
    "DDP, hook, AdamW inside, bf16 parameters": (
        *_INSIDE,
        Line("own parameters into the gather's buffer: read 2, written 2", 4, shared=True),
        Line("others' parameters out of it: read 2, written 2", 4, others=True),
    ),
    "DDP, hook, AdamW inside, bf16 views": _INSIDE,
}


def derivation(ranks: int) -> list[tuple[str, str, float, str]]:
    """Return (way, part of the step, bytes a parameter, where: "wire" or "memory")."""
    return [
        (way, line.what, line.of(ranks), "wire" if line.wire else "memory")
        for way, lines in DERIVED.items()
        for line in lines
    ]


def times(way: str, parameters: int, ranks: int) -> tuple[float, float]:
    """Return the seconds of a way's bytes on the wire, and in memory."""
    lines = DERIVED[way]
    wire = sum(line.of(ranks) for line in lines if line.wire) * parameters / BUS
    return wire, sum(line.of(ranks) for line in lines if not line.wire) * parameters / HBM


def rates_of_the_derivation() -> Rates:
    """Return the rates of the derivation: one bus bandwidth, for sums and gathers alike."""
    return dataclasses.replace(RATES, ring_bus=BUS, nvls_bus=BUS, hbm=HBM)


def steps(model: Transformer, ranks: int):
    """Return the predicted steps of the two ways."""
    ways = {way.name: way for way in WAYS}
    return {name: predict_step(ways[name], model, ranks, rates_of_the_derivation()) for name in DERIVED}
