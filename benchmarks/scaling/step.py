"""Predicted training steps: from counts of bytes, passes and SMs, and published rates of GPUs and networks.

A step is two queues, each in order: what the GPU computes, and what goes over the network. A
collective waits for the gradients that it takes, and what computes waits for the parameters that
were gathered. While a collective runs that takes SMs, the GPU computes by so much slower.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

from collectives.gradients.bucket_cap import default_bucket_cap

from .predictions import NETWORKS, best
from .transformer import Transformer

__all__ = ["RATES", "WAYS", "Prediction", "Rates", "StepWay", "Task", "predict_step", "simulate", "wire_bytes"]

COUNTS = Path(__file__).resolve().parent.parent / "results" / "counts.json"
ADAM_STATE = 12  # bytes a parameter: fp32 master, and two moments
GPU_BYTES = (80e9, 141e9)  # H100, H200


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU and its network, bytes/s.

    `ring_bus`, `nvls_bus`: bus bandwidth in a node, of a ring and of sums in the switch; `port`: of a
    GPU's own network port; `hbm`: of kernels that only move data. `mfu`: the share of `flops` that
    the model reaches without communication. `latency`: whether a collective has a start.
    """

    ring_bus: float = 360e9
    nvls_bus: float = 480e9
    port: float = 47e9
    hbm: float = 4.3e12
    flops: float = 989e12
    mfu: float = 0.5
    sms: int = 132
    ring_ctas: int = 24
    nvls_ctas: int = 16
    node: int = 8
    latency: bool = True

    def bus(self, nvls: bool, ranks: int) -> float:
        """Return the bus bandwidth of a collective; across nodes at most what the node's ports carry."""
        inside = self.nvls_bus if nvls else self.ring_bus
        return inside if ranks <= self.node else min(inside, self.node * self.port)

    def start(self, op: str, ranks: int) -> float:
        """Return the seconds of a collective of no bytes: NCCL's own latencies; a ring's for gathers and scatters."""
        if ranks == 1 or not self.latency:
            return 0.0
        algorithms = ("ring", "tree") if op == "all_reduce" else ("ring",)
        return min(best(op, algorithm, ranks, 8, NETWORKS["dgx-h100"])[0] for algorithm in algorithms)


RATES = Rates()


@dataclass(frozen=True)
class StepWay:
    """A way to train.

    ``grad``, ``param``: bytes of an element on the wire. ``counted``: the row of `benchmarks.counts`
    with its passes over memory, or "" where ``derived`` are these, in fp32 gradients. ``local``: bytes
    a parameter that a GPU holds whatever the ranks. ``nvls``: sums run in the switch. ``gather_sms``:
    whether gathers take SMs in a node. ``sharded``: the parameters are. ``inside``: the optimizer
    steps the shards between a reduce-scatter and an all-gather. ``casts``: bytes a parameter that
    autocast moves. ``gather_copies``: those into and out of a gather's buffer. ``bucket_bytes`` None: our
    default for so many ranks and gradients.
    """

    name: str
    grad: int
    param: int
    counted: str
    local: float
    nvls: bool = True
    gather_sms: bool = True
    sharded: bool = False
    inside: bool = False
    all_reduce: bool = True
    kept_units: int = 0
    derived: float = 0.0
    casts: float = 0.0
    gather_copies: float = 0.0
    bucket_bytes: float | None = None

    @property
    def passes(self) -> float:
        return counted_rows()[self.counted]["passes"] if self.counted else self.derived

    def gathers(self, units: int) -> int:
        """Return the all-gathers of a step: a forward's, and a backward's but of units that were kept."""
        return 2 * units - self.kept_units if self.sharded else units if self.inside else 0


# Parameters in fp32 under autocast: parameters, gradients, two moments, and autocast's copies in bf16.
AUTOCAST = 18.0
CASTS = 6.0  # read in fp32, written in bf16
WAYS = (
    StepWay("DDP, torch's, AdamW (fused)", 4, 4, "DDP, torch's", AUTOCAST, casts=CASTS, bucket_bytes=25 * 2**20),
    StepWay("DDP, hook, AdamW (fused)", 4, 4, "DDP, hook", AUTOCAST, casts=CASTS),
    StepWay("DDP, hook, wire bf16", 2, 4, "DDP, hook, bf16", AUTOCAST, nvls=False, casts=CASTS),
    # As `optimizer_in_hook` derives it: gradients in bf16 are copied into the buckets.
    StepWay("DDP, hook, AdamW inside, bf16 parameters", 2, 2, "", 4.0, inside=True, all_reduce=False, derived=1.0,
            gather_copies=4.0),
    StepWay("DDP, hook, AdamW inside, bf16 views", 2, 2, "", 4.0, inside=True, all_reduce=False, derived=1.0),
    # torch's FSDP2 reduces by AVG, which NCCL doesn't do in the switch.
    StepWay("FSDP2, torch's, AdamW (fused)", 4, 2, "FSDP2, torch's, bf16", 0.0, nvls=False, sharded=True,
            all_reduce=False),
    StepWay("fully_shard, AdamW (fused)", 4, 2, "fully_shard, bf16", 0.0, gather_sms=False, sharded=True,
            all_reduce=False, kept_units=2),
)  # fmt: skip


@functools.cache
def counted_rows() -> dict[str, dict]:
    """Return the rows of `benchmarks.counts`, by their names."""
    return {row["way"]: row for row in json.loads(COUNTS.read_text())["rows"]}


def wire_bytes(way: StepWay, parameters: int, units: int, ranks: int) -> float:
    """Return the bytes that a rank sends in a step, as rings send them; units of equal size."""
    part = parameters * (ranks - 1) / ranks
    if way.all_reduce:
        return 2 * part * way.grad
    return part * way.grad + part / units * way.gathers(units) * way.param


# ---- The two queues.
@dataclass(frozen=True)
class Task:
    """Work of one queue: its name, its seconds alone, the tasks that it waits for, the share of the SMs it takes."""

    name: object
    seconds: float
    after: tuple = ()
    share: float = 0.0


def simulate(compute: list[Task], network: list[Task]) -> tuple[float, float]:
    """Return when all has ended, and how long the GPU computed nothing; raises ValueError where tasks wait for ever."""
    queues, at, left = (compute, network), [0, 0], [0.0, 0.0]
    done: set = set()
    now = idle = 0.0
    for side in (0, 1):
        left[side] = queues[side][0].seconds if queues[side] else 0.0
    while at[0] < len(compute) or at[1] < len(network):
        running = [None, None]
        for side in (0, 1):
            if at[side] < len(queues[side]) and done.issuperset(queues[side][at[side]].after):
                running[side] = queues[side][at[side]]
        if running == [None, None]:
            waiting = [queues[side][at[side]].name for side in (0, 1) if at[side] < len(queues[side])]
            raise ValueError(f"tasks wait for each other: {waiting}")
        speed = (1.0 - running[1].share if running[1] is not None else 1.0, 1.0)
        step = min(left[side] / speed[side] for side in (0, 1) if running[side] is not None)
        now += step
        idle += step if running[0] is None else 0.0
        for side in (0, 1):
            if running[side] is None:
                continue
            left[side] -= step * speed[side]
            if left[side] <= 1e-15:
                done.add(running[side].name)
                at[side] += 1
                left[side] = queues[side][at[side]].seconds if at[side] < len(queues[side]) else 0.0
    return now, idle


# ---- A step.
@dataclass(frozen=True)
class Prediction:
    """`seconds` of a step; `compute_seconds` of its arithmetic alone; `exposed`: seconds in which the GPU waits for the
    network; `bytes_needed` a GPU; `fits`: memory sizes of `GPU_BYTES` that hold it.
    """

    way: str
    ranks: int
    seconds: float
    compute_seconds: float
    network_seconds: float
    memory_seconds: float
    exposed: float
    bytes_needed: float
    fits: tuple[float, ...]


def optimizer_bytes(way: StepWay, ranks: int) -> float:
    """Return the bytes a parameter that AdamW moves: parameter, two moments and master read and written, the gradient
    read, a parameter of another type than its master's written; and that the all-gather copies.
    """
    owners = ranks if way.sharded or way.inside else 1
    moved = 24 + (way.grad if way.inside else 4) + (way.param if way.inside and way.param < 4 else 0)
    return moved / owners + (way.gather_copies if ranks > 1 else 0.0)


def memory_needed(way: StepWay, model: Transformer, ranks: int) -> float:
    """Return the bytes that a step needs on a GPU."""
    states = way.local
    if way.inside:
        states += ADAM_STATE / ranks
    if way.sharded:
        states += (ADAM_STATE + 4) / ranks
    unit = max(model.units())
    buffers = unit * (3 * way.param + 2 * way.grad) if way.sharded else 0
    return states * model.parameters + buffers + model.activation_bytes


def predict_step(way: StepWay, model: Transformer, ranks: int, rates: Rates = RATES) -> Prediction:
    """Predict a step of a model on so many GPUs, 8 of them a node."""
    tasks = _Tasks(way, model, ranks, rates)
    compute, network = tasks.build()
    seconds, idle = simulate(compute, network)
    arithmetic = 3 * sum(model.forward_flops()) / (rates.flops * rates.mfu)
    needed = memory_needed(way, model, ranks)
    return Prediction(
        way.name, ranks, seconds, arithmetic, sum(task.seconds for task in network),
        (way.passes * 4 + way.casts + optimizer_bytes(way, ranks)) * model.parameters / rates.hbm, idle, needed,
        tuple(size for size in GPU_BYTES if needed <= size),
    )  # fmt: skip


class _Tasks:
    """The tasks of a step."""

    def __init__(self, way: StepWay, model: Transformer, ranks: int, rates: Rates):
        self.way, self.model, self.ranks, self.rates = way, model, ranks, rates
        self.units = model.units()
        self.bucket_bytes = way.bucket_bytes or default_bucket_cap(ranks, model.parameters * way.grad)
        self.forward = [flops / (rates.flops * rates.mfu) for flops in model.forward_flops()]

    def collective(self, op: str, name, parameters: int, itemsize: int, after: tuple) -> Task:
        ranks, rates, way = self.ranks, self.rates, self.way
        nbytes = parameters * itemsize
        part = nbytes * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
        sums = op != "all_gather"
        nvls = sums and way.nvls
        calls = 1 if way.sharded else max(1, round(parameters * way.grad / self.bucket_bytes))
        seconds = part / rates.bus(nvls, ranks) + calls * rates.start(op, ranks)
        ctas = rates.nvls_ctas if nvls else rates.ring_ctas
        if not sums and not way.gather_sms and ranks <= rates.node:
            ctas = 0  # copy engines
        return Task(name, seconds, after, ctas / rates.sms if ranks > 1 else 0.0)

    def copies(self, unit: int) -> float:
        return self.way.passes * 4 * self.units[unit] / self.rates.hbm

    def update(self, parameters: int) -> float:
        return optimizer_bytes(self.way, self.ranks) * parameters / self.rates.hbm

    def build(self) -> tuple[list[Task], list[Task]]:
        """Return the tasks of both queues."""
        if self.way.sharded:
            return self._sharded()
        casts = [self.way.casts * count / self.rates.hbm for count in self.units]
        compute = [Task(("forward", unit), self.forward[unit] + casts[unit]) for unit in range(len(self.units))]
        network, reduced, count, grad = [], [], 0, self.way.grad
        for unit in reversed(range(len(self.units))):
            compute.append(Task(("backward", unit), 2 * self.forward[unit] + self.copies(unit)))
            ready = (("backward", unit),)
            count += self.units[unit]
            if unit and count * grad < self.bucket_bytes:
                continue  # the next unit is in this bucket, too
            reduced.append(("reduced", unit))
            if not self.way.inside:
                network.append(self.collective("all_reduce", ("reduced", unit), count, grad, ready))
            else:
                network.append(self.collective("reduce_scatter", ("reduced", unit), count, grad, ready))
                network.append(Task(("updated", unit), self.update(count)))
                network.append(self.collective("all_gather", ("gathered", unit), count, self.way.param, ()))
            count = 0
        if not self.way.inside:
            compute.append(Task("optimizer", self.update(self.model.parameters), tuple(reduced)))
        return compute, network

    def _sharded(self) -> tuple[list[Task], list[Task]]:
        """Gathers are started one unit ahead; in the backward a unit's reduction comes behind the next one's gather."""
        way, units = self.way, len(self.units)
        compute, network = [], []
        kept = set(range(units - way.kept_units, units))

        def gather(phase, unit, after):
            return self.collective("all_gather", (phase, unit), self.units[unit], way.param, after)

        for unit in range(units):
            network.append(gather("gathered", unit, (("forward", unit - 2),) if unit > 1 else ()))
            compute.append(Task(("forward", unit), self.forward[unit], (("gathered", unit),)))
        again = [unit for unit in reversed(range(units)) if unit not in kept]
        started = ("forward", units - 1)
        for unit in reversed(range(units)):
            if again and again[0] == unit:
                network.append(gather("again", again.pop(0), (started,)))
            after = () if unit in kept else (("again", unit),)
            compute.append(Task(("backward", unit), 2 * self.forward[unit] + self.copies(unit), after))
            if again:  # the next one's, while this one computes
                network.append(gather("again", again.pop(0), (started,)))
            started = ("backward", unit)
            network.append(
                self.collective("reduce_scatter", ("reduced", unit), self.units[unit], way.grad, (started,))
            )
        reduced = tuple(("reduced", unit) for unit in range(units))
        compute.append(Task("optimizer", self.update(self.model.parameters), reduced))
        return compute, network


def without_network(rates: Rates = RATES) -> Rates:
    """Return rates of a network that takes no time and no SMs."""
    free = float("inf")
    return dataclasses.replace(
        rates, ring_bus=free, nvls_bus=free, port=free, latency=False, ring_ctas=0, nvls_ctas=0
    )
