"""Measure the peak memory of a rank that trains a sharded module, by torch's FSDP2 and by us.

    python benchmarks/sharded/memory.py                       # 2 ranks, two models, both AdamWs
    python benchmarks/sharded/memory.py --optimizers torch --ways fsdp2 ours

Each way runs in processes of its own, where malloc gives every array of 64 KiB or more a mapping of
its own, so that what is freed is no longer counted. A small model has been trained the same way
before, and the whole one run once, so that libraries, threads, connections, staging slots and the
scratch memory of matrix products are there; what they took is `runtime`, and is not in the other
numbers. All is in bytes a rank, mean of the ranks.

`peak`: of the steps after the third. What is counted is what the system holds for the rank:
malloc's memory, torch's or Gloo's, and the memory that our engine shares. A shared page lies in
memory once and is seen by all ranks that have read it, so that it counts in the resident set of
each; here it is divided by their number, as in the proportional set (Pss_Anon + Pss_Shmem of
smaps_rollup). That has no high-water mark. So: the resident set's (VmHWM, cleared before each of
forward, backward and optimizer), less how much larger the resident set is than the proportional one
right after. This is right as long as what is shared at the peak still is right after it; our
buffers are, as they are kept and used again: the proportional set read without pause by a thread
while steps were made came to 0.2 MiB more than this at the most. Files are in neither, but where
new pages of a library are read during a step.

`live`: the peak less 16 bytes a parameter and rank (parameter, gradient, two states of AdamW), by
the bytes of the largest unit: what is gathered, gradients that aren't reduced yet, buffers,
activations. `kept`: behind the last step, gradients set to None, less 12 bytes a parameter and
rank: 0 where nothing but the shards is kept. `to_fsdp2`: the peak by FSDP2's. `activations`: what a
forward leaves where nothing is sharded, `alone`. `to_plan`: the peak of each part by what
`memory_plan` says with these activations; it counts all of them from the begin of the forward to
the end of the backward. Rows go to benchmarks/results/sharded_memory.jsonl; the exit status is 1
where `ours` takes more than `fsdp2`, or is not within 10% of the plan with the activations, or
between that and the plan without.
"""

import gc
import itertools
import sys

import torch
import torch.distributed as dist
from imports import (
    append_rows,
    make_parser,
    proportional_set_size,
    provenance,
    reset_peak,
    return_freed_memory,
    rows_of,
    status_bytes,
)
from ways import GROUPS, MODELS, OPTIMIZERS, PARTS, WAYS, Way

from collectives.sharded import memory_plan

LR = 1e-4
STEPS = 8
FIRST = 3  # steps that aren't counted: buffers and states are made in them
SMALL = {"8xLinear1024": "3xLinear128", "gpt6x384": "gpt2x64"}  # what makes the runtime ready for it
TOLERANCE = 0.1  # of the plan
PLANNED = {  # arguments of memory_plan, by way
    "ours": {},
    "ours_keep": {"reshard_after_forward": False},
    "ours_shard_optimizer": {"strategy": "SHARD_OPTIMIZER"},
    "ours_no_shard": {"strategy": "NO_SHARD"},
}


class Meter:
    """The peak of each part of a step; `part` is called where one ends and the next begins."""

    def __init__(self):
        self.peaks = dict.fromkeys(PARTS, 0)

    def begin(self):
        reset_peak()

    def end(self, part):
        peak = status_bytes("VmHWM") - status_bytes("VmRSS") + data()
        self.peaks[part] = max(self.peaks[part], peak)
        reset_peak()


def data():
    """Bytes of this process that are no file's, the shared ones by the number of those that share
    them.
    """
    return proportional_set_size("Anon", "Shmem")


def work(rank, arguments):
    """Yield the row of one model, optimizer and way.

    All in the rank: what is freed here, others don't inherit.
    """
    model, optimizer, name, activations = arguments
    return_freed_memory()
    before = data()
    small = MODELS[SMALL.get(model, model)]
    train(Way(name, small, optimizer, LR), small.batches(rank), None)
    kind = MODELS[model]
    batches = kind.batches(rank)
    kind.loss(kind.build(), *batches[0]).backward()
    gc.collect()
    base = data()
    meter = Meter()
    way = Way(name, kind, optimizer, LR)
    train(way, batches, meter)
    gc.collect()
    dist.barrier()
    kept = data() - base
    found = [base - before, kept, *(meter.peaks[part] - base for part in PARTS)]
    mean = torch.tensor(found, dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.SUM)
    runtime, kept, *peaks = (mean / dist.get_world_size()).long().tolist()
    whole = kind.build()
    own = sum(parameter.nbytes for parameter in whole.parameters())
    largest = max(sum(parameter.nbytes for parameter in unit.parameters()) for unit in kind.units(whole))
    share = own // (1 if name in ("alone", "ddp", "ours_no_shard") else dist.get_world_size())
    row = {
        "benchmark": "sharded/memory", "model": model, "optimizer": optimizer, "way": name,
        "ranks": dist.get_world_size(), "batch": kind.batch, "parameter_bytes": own, "largest_unit": largest,
        "runtime": runtime, "kept_bytes": kept, "kept": round((kept - 3 * share) / largest, 3),
        "peak": max(peaks), "peaks": dict(zip(PARTS, peaks, strict=True)),
        "live": round((max(peaks) - 4 * share) / largest, 3),
    }  # fmt: skip
    if name == "alone":
        row["activations"] = row["peaks"]["forward"] - kept
    elif name in PLANNED and activations is not None:
        row["activations"] = activations
        plan = memory_plan(
            whole, dist.get_world_size(), lambda parameters: OPTIMIZERS[optimizer](parameters, lr=LR),
            units=kind.units(whole), activations=activations, **PLANNED[name],
        )  # fmt: skip
        row["to_plan"] = {
            part: round(row["peaks"][part] / planned, 4)
            for part, planned in zip(PARTS, plan.peaks.values(), strict=True)
        }
    yield row


def train(way, batches, meter):
    """Make the steps; drop the gradients after each."""
    for step in range(STEPS):
        counted = meter is not None and step >= FIRST
        dist.barrier()
        if counted:
            meter.begin()
        way.step(batches, meter.end if counted else None)
        way.drop_gradients()


def main():
    parser = make_parser(__doc__, "sharded_memory.jsonl")
    option = parser.add_argument
    option("--models", nargs="+", choices=MODELS, default=["8xLinear1024", "gpt6x384"], help="(default: %(default)s)")
    option("--ways", nargs="+", choices=[*GROUPS, *WAYS], default=["all"], help="(default: %(default)s)")
    option(
        "--optimizers", nargs="+", choices=OPTIMIZERS, default=["torch", "ours"], help="AdamW's (default: %(default)s)"
    )
    arguments = parser.parse_args()
    ways = list(dict.fromkeys(way for named in arguments.ways for way in GROUPS.get(named, (named,))))
    where = provenance()
    rows, good = [], True
    for model, optimizer in itertools.product(arguments.models, arguments.optimizers):
        peaks, activations = {}, None
        for way in ways:
            (row,) = rows_of(work, arguments.ranks, (model, optimizer, way, activations))
            activations = row.get("activations", activations)
            peaks[way] = row["peak"]
            if "fsdp2" in peaks:
                row["to_fsdp2"] = round(row["peak"] / peaks["fsdp2"], 4)
            rows.append({**row, **where})
            show(row)
            good &= way != "ours" or within_limits(row)
    append_rows(rows, arguments.output)
    return 0 if good else 1


def within_limits(row):
    good = row.get("to_fsdp2", 0) <= 1
    for part, ratio in row.get("to_plan", {}).items():
        left_out = 0 if part == "optimizer" else row["activations"] * ratio / row["peaks"][part]
        good &= 1 - left_out - TOLERANCE <= ratio <= 1 + TOLERANCE
    return good


def show(row):
    mib = {key: row[key] / 2**20 for key in ("peak", "runtime", "kept_bytes")}
    parts = ", ".join(f"{part} {value / 2**20:.1f}" for part, value in row["peaks"].items())
    ratios = f"; {row['to_fsdp2']:.3f} of fsdp2" if "to_fsdp2" in row else ""
    if "to_plan" in row:
        ratios += f"; {', '.join(f'{ratio:.3f}' for ratio in row['to_plan'].values())} of the plan"
    print(
        f"{row['model']:12s} AdamW of {row['optimizer']:5s} {row['way']:20s} peak {mib['peak']:7.1f} MiB ({parts}), "
        f"{row['live']:6.3f} live units; kept {mib['kept_bytes']:7.1f} ({row['kept']:+.3f} units); runtime "
        f"{mib['runtime']:.1f}{ratios}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
