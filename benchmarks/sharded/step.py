"""Time a sharded training step by torch's FSDP2 over Gloo and by us, beside DDP and one rank.

    python benchmarks/sharded/step.py                                # 2 ranks, two models; starts the ranks itself
    python benchmarks/sharded/step.py --ways theirs --models gpt6x384
    python benchmarks/sharded/step.py --optimizers ours

A step is forward, backward and AdamW on one thread a rank. The ways: `alone`, the plain module on
each rank, nothing sharded and nothing synced, on both ranks at one time, so that cores and memory
are shared as in the others; `ddp`, `collectives.DistributedDataParallel` with `fused_allreduce`;
`fsdp2`, torch's `fully_shard` over Gloo; `fsdp2_ours`, the same with `collectives.sharded.fsdp2`;
`fsdp2_backend`, FSDP2 on a process group of our backend, `alloc`: with buffers of its memory
(`set_allocate_memory_from_process_group_for_comm`);
`ours`, `collectives.sharded.fully_shard`, of the same units; `keep`: with
reshard_after_forward=False; `shard_optimizer` and `no_shard`: strategies of `ShardedDataParallel`.
The optimizer is torch's AdamW(foreach=True) for all ways, or `collectives.optim.AdamW` for all.

The ways take turns, a few steps each, forwards in one round and backwards in the next; the first
step of a turn isn't counted. A turn's time is the median of its steps, of the slower rank; a way's
the median of its turns. `added`: what a way adds to `alone`, by what `fsdp2` adds, (way - alone) /
(fsdp2 - alone), of these times, and the quartiles of what it is in each round. Alone a rank steps
all parameters, sharded only its own, which takes off of what is added; `added_backprop` leaves the
optimizer out. `to_ddp`: the way's step by DDP's, likewise.

Before anything is timed and after it the parameters are compared, which all have made the same
steps: those of `ddp` and of all of ours must be the same to the bit, those of FSDP2 as close as an
order of summation makes them, and a rank left alone must have gone elsewhere. Rows go to
benchmarks/results/sharded_step.jsonl, one a model and optimizer; the exit status is 1 where `ours`
is above what is asked.
"""

import statistics
import sys

import torch
import torch.distributed as dist
from imports import Wrong, make_parser, run, slowest
from ways import GROUPS, MODELS, OPTIMIZERS, PARTS, WAYS, Way

LR = 1e-4
CHECKED = 3  # steps before the first comparison
SKIPPED = 1  # steps at the start of a turn
TURN_SECONDS = 0.3  # about
CLOSE = 0.05  # of the largest change of a parameter
MAX_ADDED, MAX_TO_DDP = 0.3, 1.2  # limits of `ours`


def verify(ways, kind):
    """Compare the parameters of all ways.

    Returns how far each is from the first exact one, by the largest change.
    """
    reference = next((way for way in ways if way.exact), None) or next(way for way in ways if way.name != "alone")
    right = reference.parameters()
    moved = {key: (right[key] - first).abs().max().item() for key, first in kind.build().named_parameters()}
    apart = {}
    for way in ways:
        found = way.parameters()
        if list(found) != list(right):
            raise Wrong(f"{way.name}: other names of parameters than {reference.name}'s")
        # By parameter, since a bias moves otherwise than a weight.
        far = max((found[key] - right[key]).abs().max().item() / moved[key] for key in right)
        (apart[way.name],) = slowest([far])
        if way.name == "alone":
            if apart[way.name] < CLOSE:
                raise Wrong(f"alone: the parameters are {reference.name}'s, so that this comparison can't fail")
        elif way.exact and not all(torch.equal(found[key], right[key]) for key in right):
            raise Wrong(f"{way.name}: the parameters aren't {reference.name}'s to the bit: {far:.2e} apart")
        elif not apart[way.name] <= CLOSE:  # nan is not
            raise Wrong(f"{way.name}: the parameters are {far:.2e} apart from {reference.name}'s")
    return apart


def measure(name, optimizer, rank, arguments):
    """Return the row of one model and optimizer."""
    kind = MODELS[name]
    batches = kind.batches(rank)
    ways = [Way(way, kind, optimizer, LR) for way in arguments.ways]
    for way in ways:
        for _ in range(CHECKED):
            way.step(batches)
        way.drop_gradients()
    verify(ways, kind)
    once = []
    for way in ways:
        once.append(statistics.median(sum(way.step(batches)) for _ in range(3)))
        way.drop_gradients()
    steps = max(2, min(200, int(arguments.turn_seconds / slowest([statistics.mean(once)])[0])))  # one for all ranks
    rounds = {way.name: [] for way in ways}  # of the medians of the parts and of the whole
    for number in range(arguments.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            dist.barrier()
            parts = [way.step(batches) for _ in range(SKIPPED + steps)][SKIPPED:]
            times = [*zip(*parts, strict=True), [sum(of_step) for of_step in parts]]
            rounds[way.name].append(slowest([statistics.median(of_part) * 1e3 for of_part in times]))
            way.drop_gradients()
    apart = verify(ways, kind)
    medians = {way: [statistics.median(part) for part in zip(*times, strict=True)] for way, times in rounds.items()}
    return {
        "benchmark": "sharded/step", "model": name, "optimizer": optimizer,
        "parameter_bytes": sum(value.nbytes for value in kind.build().parameters()), "batch": kind.batch,
        "ranks": dist.get_world_size(), "threads": torch.get_num_threads(), "steps": steps * arguments.rounds,
        **{f"{way}_ms": round(times[-1], 3) for way, times in medians.items()},
        "parts_ms": {
            way: {part: round(value, 3) for part, value in zip(PARTS, times[:-1], strict=True)}
            for way, times in medians.items()
        },
        **ratios(rounds), "apart": {way: float(f"{value:.3g}") for way, value in apart.items()},
    }  # fmt: skip


def ratios(rounds):
    """Return `added`, `added_backprop` and `to_ddp` by way: of the medians, and the rounds'
    quartiles.
    """
    found = {"added": {}, "added_backprop": {}, "to_ddp": {}}
    alone, fsdp2, ddp = (rounds.get(way) for way in ("alone", "fsdp2", "ddp"))
    for way, times in rounds.items():
        if way == "alone":
            continue
        if alone and fsdp2:
            found["added"][way] = compared(times, fsdp2, alone, slice(3, 4))
            found["added_backprop"][way] = compared(times, fsdp2, alone, slice(0, 2))
        if ddp:
            found["to_ddp"][way] = compared(times, ddp, [[0.0] * 4] * len(times), slice(3, 4))
    return found


def compared(way, peer, base, parts):
    """Return (way - base) / (peer - base) for the sum of some parts: of the medians, and the
    rounds' quartiles.
    """
    sums = [[sum(times[parts]) for times in each] for each in (way, peer, base)]
    medians = [statistics.median(each) for each in sums]
    by_round = [(w - b) / (p - b) for w, p, b in zip(*sums, strict=True)]
    quarters = statistics.quantiles(by_round, n=4) if len(by_round) > 1 else [by_round[0]] * 3
    return [
        round(value, 4) for value in ((medians[0] - medians[2]) / (medians[1] - medians[2]), quarters[0], quarters[2])
    ]


def work(rank, arguments):
    for name in arguments.models:
        for optimizer in arguments.optimizers:
            yield measure(name, optimizer, rank, arguments)


def show(row):
    print(f"{row['model']}, AdamW of {row['optimizer']}, {row['ranks']} ranks")
    for way, parts in row["parts_ms"].items():
        line = f"  {way:20s} {row[f'{way}_ms']:8.2f} ms = " + " + ".join(f"{parts[part]:7.2f}" for part in PARTS)
        if way in row["added"]:
            (added, low, high), backprop = row["added"][way], row["added_backprop"][way][0]
            line += f"   adds {added:6.2f} ({low:.2f} to {high:.2f}) of fsdp2's, {backprop:6.2f} without optimizer"
        if way in row["to_ddp"]:
            line += f"   {row['to_ddp'][way][0]:5.2f} of ddp"
        print(line, flush=True)


def within_limits(row):
    """Return whether `ours` is as good as asked, or wasn't measured."""
    return row["added"].get("ours", [0])[0] <= MAX_ADDED and row["to_ddp"].get("ours", [0])[0] <= MAX_TO_DDP


def main():
    parser = make_parser(__doc__, "sharded_step.jsonl")
    option = parser.add_argument
    option("--models", nargs="+", choices=MODELS, default=["8xLinear1024", "gpt6x384"], help="(default: %(default)s)")
    option("--ways", nargs="+", choices=[*GROUPS, *WAYS], default=["all"], help="(default: %(default)s)")
    option("--optimizers", nargs="+", choices=OPTIMIZERS, default=["torch"], help="AdamW's (default: %(default)s)")
    option("--rounds", type=int, default=20, help="turns of every way (default: %(default)s)")
    option("--turn-seconds", type=float, default=TURN_SECONDS, help="one turn (default: %(default)s)")
    arguments = parser.parse_args()
    # By name, each once, in the order of the groups.
    arguments.ways = list(dict.fromkeys(way for named in arguments.ways for way in GROUPS.get(named, (named,))))
    if arguments.ways == ["alone"]:
        parser.error("alone is compared with other ways: name some")
    return 0 if all(map(within_limits, run(work, arguments, show))) else 1


if __name__ == "__main__":
    sys.exit(main())
