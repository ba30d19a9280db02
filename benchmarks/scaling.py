"""Predict a training step of DDP, FSDP2 and ours on 8 to 1,024 GPUs from published rates.

    python benchmarks/scaling.py            # prints the tables
    python benchmarks/scaling.py --write    # puts them into docs/scaling.md, too

Nothing here was measured on several GPUs. A step is two queues, each in order: what the GPU computes, and what goes
over the network. A collective waits for the gradients that it sends, a unit's computation for the parameters that were
gathered. A collective that takes SMs makes the GPU compute slower by their share. Passes over memory are those that
`benchmarks.counts` has counted. The host is left out: it must submit a step faster than the GPU computes it.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from collectives.gradients.bucket_cap import default_bucket_cap

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scaling.md"
RANKS = (8, 64, 1024)
NODE = 8  # GPUs of a node
ADAM = 12  # bytes a parameter of an fp32 master and two moments
AUTOCAST = 18.0  # bytes a parameter: fp32 parameter, gradient and two moments, autocast's copy in bf16
NCCL = "https://github.com/NVIDIA/nccl"
TESTS = "https://github.com/NVIDIA/nccl-tests"


@dataclass(frozen=True)
class Rate:
    """One published number: its value in SI units, how the page shows it, and where it is from."""

    value: float
    shown: str
    source: str


RATES = {
    "flops": Rate(989e12 / 2, "989 TFLOP/s in bf16; half of it here, an assumption", "H100's data sheet, dense"),
    "memory": Rate(4.3e12, "4.8 TB/s; 4.3 TB/s here, an assumption", "H200's data sheet"),
    "ring": Rate(360e9, "365 to 370 GB/s of bus bandwidth in a node (360 here)", f"{NCCL}/issues/1455"),
    "switch": Rate(480e9, "480 GB/s where the NVSwitch sums (NVLS)", f"{NCCL}/issues/1455, {TESTS}/issues/212"),
    "port": Rate(47e9, "46 to 48 GB/s of a GPU's 400 Gb/s port (47 here)", f"{TESTS}/issues/290"),
    "start": Rate(6.6e-6, "6.6 us for a collective without data", f"{NCCL}: src/tuning/cost_model.cc, LL"),
    "step_in_node": Rate(0.6e-6, "0.6 us per step over NVLink", "the same, hwLatencies"),
    "step_between": Rate(1e-6, "1 us per step of a ring between nodes", f"{NCCL}: src/graph/tuning.cc, getNetOverhead"),
    "tree_step": Rate(5e-6, "5 us per level of a tree between nodes", "src/tuning/cost_model.cc, hwLatencies"),
    "ring_sms": Rate(24 / 132, "24 of 132 SMs for a ring", f"{NCCL}: channels on 8 GPUs with NVLink 4"),
    "switch_sms": Rate(16 / 132, "16 of 132 SMs for a sum in the switch", f"{NCCL}: src/transport/nvls.cc"),
}  # fmt: skip


@dataclass(frozen=True)
class Transformer:
    """A decoder with SwiGLU and untied embeddings, trained on one sequence of `tokens` a GPU; a layer is a unit."""

    name: str
    layers: int
    hidden: int
    ffn: int
    vocabulary: int = 32000
    tokens: int = 4096

    @property
    def units(self) -> list[int]:
        """Parameters of each unit in the order of the forward; the first has all that is in no layer."""
        layer = 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden
        return [2 * self.vocabulary * self.hidden + self.hidden, *[layer] * self.layers]

    @property
    def forward_flops(self) -> list[float]:
        """Operations of each unit's forward: 2 a parameter and token, and causal attention; a backward takes twice."""
        layer = 2 * self.units[1] * self.tokens + 2 * self.tokens**2 * self.hidden
        return [2 * self.vocabulary * self.hidden * self.tokens, *[layer] * self.layers]

    @property
    def activation_bytes(self) -> int:
        """34 bytes a token, hidden unit and layer (Korthikanti et al. 2022), with a fused attention."""
        return 34 * self.tokens * self.hidden * self.layers


MODELS = (Transformer("7B", 32, 4096, 11008), Transformer("1.3B", 24, 2048, 5504))


@dataclass(frozen=True)
class Way:
    """One way to train.

    ``passes``: of docs/counts.md, how often a backward reads or writes the gradients' bytes in fp32. ``grad``,
    ``param``: bytes of an element on the wire. ``sums_in_switch``: its sums go by NVLS, which takes no averages.
    ``sharded``: units are gathered and their gradients scattered. ``inside``: the optimizer steps this rank's part
    between a reduce-scatter and an all-gather. ``kept``: units that are not gathered again in the backward. ``casts``:
    bytes a parameter that autocast reads and writes. ``bucket_bytes``: None for our default for so many ranks and
    gradients.
    """

    name: str
    passes: float
    grad: int
    param: int
    sums_in_switch: bool = True
    sharded: bool = False
    inside: bool = False
    kept: int = 0
    casts: float = 0.0
    bucket_bytes: int | None = None


WAYS = (
    Way("DDP, AdamW (fused)", 2.0, 4, 4, casts=6.0, bucket_bytes=25 << 20),
    Way("DDP with our hook", 4.0, 4, 4, casts=6.0),
    Way("DDP with our hook, AdamW inside, bf16", 1.0, 2, 2, inside=True),
    Way("FSDP2, AdamW (fused)", 4.773, 4, 2, sums_in_switch=False, sharded=True),
    Way("our fully_shard", 2.679, 4, 2, sharded=True, kept=1),
)


@dataclass(frozen=True)
class Task:
    """Work of one queue: seconds alone, the tasks for which it waits, the share of the SMs that it takes."""

    name: object
    seconds: float
    after: tuple = ()
    share: float = 0.0


def simulate(compute: list[Task], network: list[Task]) -> tuple[float, float]:
    """Return the seconds until all tasks have ended, and those in which the GPU computed nothing.

    Raises ValueError where tasks wait for each other.
    """
    queues = ([*compute], [*network])
    left = [queue[0].seconds if queue else 0.0 for queue in queues]
    done: set = set()
    now = idle = 0.0
    while queues[0] or queues[1]:
        ready = [bool(queue) and done.issuperset(queue[0].after) for queue in queues]
        if not any(ready):
            raise ValueError(f"tasks wait for each other: {[queue[0].name for queue in queues if queue]}")
        speeds = (1.0 - queues[1][0].share if ready[1] else 1.0, 1.0)
        spent = min(left[side] / speeds[side] for side in (0, 1) if ready[side])
        now += spent
        idle += 0.0 if ready[0] else spent
        for side in (0, 1):
            if not ready[side]:
                continue
            left[side] -= spent * speeds[side]
            if left[side] <= 1e-15:
                done.add(queues[side].pop(0).name)
                left[side] = queues[side][0].seconds if queues[side] else 0.0
    return now, idle


def start_seconds(op: str, ranks: int, rate) -> float:
    """Return the seconds of a collective of no bytes: an all-reduce takes a ring or a tree, others a ring."""
    rounds = 2 if op == "all_reduce" else 1
    ring = rounds * (ranks - 1) * rate("step_in_node" if ranks <= NODE else "step_between")
    levels = (max(1, ranks // NODE) - 1).bit_length()
    tree = 2 * ((NODE - 1).bit_length() * rate("step_in_node") + levels * rate("tree_step"))
    return rate("start") + (min(ring, tree) if op == "all_reduce" else ring)


class Step:
    """A step of a model by one way on so many GPUs. ``rates``: seconds and bytes/s in place of `RATES`."""

    def __init__(self, way: Way, model: Transformer, ranks: int, **rates: float):
        self.way, self.model, self.ranks = way, model, ranks
        self._rates = rates
        self.parameters = sum(model.units)
        self.bucket_bytes = way.bucket_bytes or default_bucket_cap(ranks, self.parameters * way.grad)
        self.forward = [flops / self.rate("flops") for flops in model.forward_flops]
        self.compute, self.network = self._shards() if way.sharded else self._buckets()
        self.seconds, self.exposed = simulate(self.compute, self.network)

    def rate(self, name: str) -> float:
        return self._rates.get(name, RATES[name].value)

    @property
    def bytes_needed(self) -> float:
        """Bytes of a GPU's memory: states, the largest units whole, activations."""
        way, units = self.way, self.model.units
        if way.sharded:
            states = (ADAM + 4) / self.ranks * self.parameters + max(units) * (3 * way.param + 2 * way.grad)
        else:
            states = (4.0 + ADAM / self.ranks if way.inside else AUTOCAST) * self.parameters
        return states + self.model.activation_bytes

    def _collective(self, op: str, name, parameters: int, itemsize: int, after: tuple) -> Task:
        way, ranks = self.way, self.ranks
        in_switch = op != "all_gather" and way.sums_in_switch
        bandwidth = self.rate("switch" if in_switch else "ring")
        if ranks > NODE:
            bandwidth = min(bandwidth, NODE * self.rate("port"))
        sent = parameters * itemsize * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)
        calls = 1 if way.sharded else max(1, round(parameters * way.grad / self.bucket_bytes))
        share = self.rate("switch_sms" if in_switch else "ring_sms")
        return Task(name, sent / bandwidth + calls * start_seconds(op, ranks, self.rate), after, share)

    def _copies(self, parameters: int) -> float:
        return self.way.passes * 4 * parameters / self.rate("memory")

    def _update(self, parameters: int) -> float:
        """Seconds of AdamW: parameter and two moments read and written, the gradient read; in parts where sharded."""
        way = self.way
        moved = 24 + (way.grad + way.param if way.inside else 4)
        copied = 2 * way.param if way.inside else 0.0  # into the gather's buffer and out of it
        return (moved / (self.ranks if way.sharded or way.inside else 1) + copied) * parameters / self.rate("memory")

    def _buckets(self) -> tuple[list[Task], list[Task]]:
        way, units = self.way, self.model.units
        compute, network, reduced, count = [], [], [], 0
        for unit, parameters in enumerate(units):
            compute.append(Task(("forward", unit), self.forward[unit] + way.casts * parameters / self.rate("memory")))
        for unit in reversed(range(len(units))):
            ready = ("backward", unit)
            compute.append(Task(ready, 2 * self.forward[unit] + self._copies(units[unit])))
            count += units[unit]
            if unit and count * way.grad < self.bucket_bytes:
                continue  # the next unit is in this bucket, too
            reduced.append(("reduced", unit))
            if way.inside:
                network.append(self._collective("reduce_scatter", reduced[-1], count, way.grad, (ready,)))
                network.append(Task(("updated", unit), self._update(count)))
                network.append(self._collective("all_gather", ("gathered", unit), count, way.param, ()))
            else:
                network.append(self._collective("all_reduce", reduced[-1], count, way.grad, (ready,)))
            count = 0
        if not way.inside:
            compute.append(Task("optimizer", self._update(self.parameters), tuple(reduced)))
        return compute, network

    def _shards(self) -> tuple[list[Task], list[Task]]:
        """A gather starts one unit ahead; in the backward a unit's reduction comes behind the next one's gather."""
        way, units = self.way, self.model.units
        compute, network = [], []

        def communicate(op: str, phase: str, unit: int, after: tuple) -> None:
            itemsize = way.param if op == "all_gather" else way.grad
            network.append(self._collective(op, (phase, unit), units[unit], itemsize, after))

        for unit in range(len(units)):
            communicate("all_gather", "gathered", unit, (("forward", unit - 2),) if unit > 1 else ())
            compute.append(Task(("forward", unit), self.forward[unit], (("gathered", unit),)))
        order = list(reversed(range(len(units))))
        again = order[way.kept :]
        before = ("forward", order[0])
        for unit in order:
            if again and again[0] == unit:
                communicate("all_gather", "again", again.pop(0), (before,))
            gathered = () if unit in order[: way.kept] else (("again", unit),)
            compute.append(Task(("backward", unit), 2 * self.forward[unit] + self._copies(units[unit]), gathered))
            if again:
                communicate("all_gather", "again", again.pop(0), (before,))
            before = ("backward", unit)
            communicate("reduce_scatter", "reduced", unit, (before,))
        reduced = tuple(("reduced", unit) for unit in order)
        compute.append(Task("optimizer", self._update(self.parameters), reduced))
        return compute, network


# ---- The page.
def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


def steps_table(model: Transformer) -> str:
    """Return the predicted steps of a model. One star: more than an H100's 80 GB; two: more than an H200's 141."""
    header = ["step", *(f"{ranks:,} GPUs" for ranks in RANKS), "network, 8 GPUs", "GPU idle, 8 GPUs", "memory, 8 GPUs"]
    rows = []
    for way in WAYS:
        steps = [Step(way, model, ranks) for ranks in RANKS]
        stars = ["*" * sum(step.bytes_needed > size for size in (80e9, 141e9)) for step in steps]
        times = [f"{step.seconds * 1e3:.0f} ms{star}" for step, star in zip(steps, stars, strict=True)]
        network = sum(task.seconds for task in steps[0].network)
        rows.append([way.name, *times, f"{network * 1e3:.0f} ms", f"{steps[0].exposed * 1e3:.0f} ms",
                     f"{steps[0].bytes_needed / 1e9:.0f} GB"])  # fmt: skip
    arithmetic = 3 * sum(model.forward_flops) / RATES["flops"].value
    title = f"{model.name}: {sum(model.units):,} parameters, {model.tokens:,} tokens per GPU"
    return f"{title}, {arithmetic * 1e3:.0f} ms of arithmetic:\n\n{table(header, rows)}"


def texts() -> dict[str, str]:
    """Return the parts of the page by their marks."""
    rates = table(["number", "source"], [[rate.shown, rate.source] for rate in RATES.values()])
    return {"rates": rates, "steps": "\n\n".join(map(steps_table, MODELS))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    parts = texts()
    print("\n\n".join(parts.values()))
    if parser.parse_args().write:
        for name, text in parts.items():
            marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            PAGE.write_text(marks.sub(lambda mark, text=text: f"{mark[1]}{text}\n{mark[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
