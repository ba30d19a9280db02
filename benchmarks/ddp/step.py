"""Time a training step under DDP: without sync, synced by torch over Gloo, and by us.

    python benchmarks/ddp/step.py                              # 2 ranks, three models; starts the ranks itself
    python benchmarks/ddp/step.py --ways compressed stepped    # torch's hooks; clipping and AdamW
    python benchmarks/ddp/step.py --state streams=2            # arguments of HookState

A step is forward and backward on one thread a rank, and for some ways clipping and AdamW (gradients
are set to None before, untimed). Blocks of steps are made in turn, in one run. The first steps of a
block aren't counted; a time is the median over all blocks, of the slower rank. The ways: the plain
module; DDP under `no_sync()`; a hook that does nothing, which shows what DDP takes itself, to copy
gradients into buckets and back (`nothing_view`: with `gradient_as_bucket_view`, which leaves the
copies out); torch's DDP with Gloo, with its bf16 hook, and followed by
`clip_grad_norm_` and by AdamW(fused=True); torch's DDP with our hook (`hook`, `hook_view`), and
with no hook on a process group of our backend (`backend`, `backend_view`); and
`collectives.DistributedDataParallel` with it (`ours`, and what follows that name: the wire, ef for
error feedback, clip for max_norm, adamw for optimizer=).

`added`: what a way adds to the step without sync, by what its peer adds: (way - no_sync) / (peer -
no_sync). The peer is Gloo, for the wires torch's bf16 hook (int8 too: torch has no such on the CPU),
and for clipping and AdamW the same after Gloo's sync; `added_to_gloo`: for the wires the same by
plain Gloo. `times`: the peer's step by the way's. Before anything is timed the results are checked:
without wires ours must be the rank-ordered mean of the ranks' gradients bit for bit, a compressed
one within its wire's error, the parameters after AdamW those of torch's on the mean; and the same
on all ranks. One row a model goes to benchmarks/results/ddp_step.jsonl.
"""

import argparse
import ast
import copy
import statistics
import sys

import torch
import torch.distributed as dist
from expected import Expected, Wrong, check, same_everywhere
from launch import make_parser, run, slowest
from ways import GROUPS, KINDS, LR, PEERS, Way

MODELS = {  # name: Linears, width, batch
    "8xLinear1024": (8, 1024, 32),
    "8xLinear2048": (8, 2048, 8),
    "3xLinear128": (3, 128, 32),
}
SKIPPED = 2  # steps at the start of a block
BLOCK_SECONDS = 0.5  # one block, about
TINY_LR = 1e-7  # learning rate while steps are timed: the model stays about what it is


def build(name):
    linears, width, _ = MODELS[name]
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(linears)))


def own_gradients(model, batch):
    model.zero_grad(set_to_none=True)
    model(batch).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


class Reference:
    """The plain module stepped by torch's AdamW on the mean of the ranks' gradients, clipped or
    not.
    """

    def __init__(self, model, clips, max_norm):
        self.model, self.clips, self.max_norm = model, clips, max_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)

    def step(self, batch):
        expected = Expected(own_gradients(self.model, batch))
        wanted = expected.clipped(self.max_norm) if self.clips else expected.mean
        for parameter, gradient in zip(self.model.parameters(), wanted, strict=True):
            parameter.grad = gradient.clone()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)


def verify(ways, name, batch, max_norm):
    """Compare the results of some steps, of which each has a batch of its own, with what they must
    be.
    """
    plain = build(name)
    kinds = {way.kind for way in ways}
    references = {
        kind: Reference(copy.deepcopy(plain), "clipped" in kind, max_norm) for kind in kinds if kind.endswith("adamw")
    }
    expected = None
    for number in range(2):  # DDP makes its buckets anew after the first one
        expected = Expected(own_gradients(plain, batch + number), expected)
        for reference in references.values():
            reference.step(batch + number)
        for way in ways:
            way.step(batch + number)
            if way.optimizer is not None:
                _check_parameters(way, references[way.kind].model)
            else:
                check(way.name, way.kind, way.gradients(), expected, max_norm)
            way.drop_gradients()


def _check_parameters(way, reference):
    found = [parameter.detach() for parameter in way.model.parameters()]
    for index, (mine, right) in enumerate(zip(found, reference.parameters(), strict=True)):
        # A step is about LR; where a gradient is nearly eps a rounding of it shows.
        if not torch.allclose(mine, right, rtol=1e-6, atol=LR * 0.01):
            raise Wrong(f"{way.name}: parameter {index} isn't what AdamW makes of the mean gradient")
    same_everywhere(way.name, found)


def measure(name, rank, arguments):
    """Return the row of one model."""
    _, width, rows = MODELS[name]
    batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(rank))
    max_norm = 0.5 * Expected(own_gradients(build(name), batch)).norm
    options = dict(arguments.state)
    ways = [Way(way, build(name), max_norm, options) for way in arguments.ways]
    verify(ways, name, batch, max_norm)
    for way in ways:
        if way.optimizer is not None:
            way.optimizer.param_groups[0]["lr"] = TINY_LR
    taken = sum(statistics.median(way.step(batch) for _ in range(3)) for way in ways) / len(ways)
    steps = max(3, min(200, int(arguments.block_seconds / slowest([taken])[0])))  # one number for all ranks
    for _ in range(arguments.rounds):
        for way in ways:
            dist.barrier()
            way.times += [way.step(batch) for _ in range(SKIPPED + steps)][SKIPPED:]
            way.drop_gradients()
    ms = dict(zip(arguments.ways, slowest([statistics.median(way.times) * 1e3 for way in ways]), strict=True))
    count = sum(parameter.numel() for parameter in ways[0].model.parameters())
    return {
        "benchmark": "ddp/step", "model": name, "gradient_bytes": 4 * count, "batch": rows,
        "ranks": dist.get_world_size(), "threads": torch.get_num_threads(), "state": options,
        "steps": steps * arguments.rounds,
        **{f"{way}_ms": round(value, 4) for way, value in ms.items()},
        **compared(ms), "shared": {way.name: way.shared_buckets() for way in ways if way.state is not None},
    }  # fmt: skip


def compared(ms):
    """Return `added`, `added_to_gloo` and `times` by way, as the top of this file says."""
    added, to_gloo, times = {}, {}, {}
    base, gloo = ms.get("no_sync"), ms.get("gloo")
    for way, value in ms.items():
        peer = ms.get(PEERS.get(way, "gloo"))
        if way == "no_sync" or way == "plain" or peer is None or base is None:
            continue
        added[way] = round((value - base) / (peer - base), 4)
        times[way] = round(peer / value, 3)
        if way in PEERS and gloo is not None:
            to_gloo[way] = round((value - base) / (gloo - base), 4)
    return {"added": added, "added_to_gloo": to_gloo, "times": times}


def work(rank, arguments):
    for name in arguments.models:
        yield measure(name, rank, arguments)


def pair(text):
    """Parse KEY=VALUE; a value that is no Python literal is a string."""
    key, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return key, value


def main():
    parser = make_parser(__doc__, "ddp_step.jsonl")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all three")
    parser.add_argument("--ways", nargs="+", choices=[*GROUPS, *KINDS], default=["sync"], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every way (default: %(default)s)")
    parser.add_argument("--block-seconds", type=float, default=BLOCK_SECONDS, help="one turn (default: %(default)s)")
    parser.add_argument("--state", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="of our HookStates")
    arguments = parser.parse_args()
    # By name, each once, in the order of the groups.
    arguments.ways = list(dict.fromkeys(way for named in arguments.ways for way in GROUPS.get(named, (named,))))

    def show(row):
        print(row["model"])
        for way in arguments.ways:
            line = f"  {way:16s} {row[f'{way}_ms']:9.2f} ms"
            if way in row["added"]:
                peer = PEERS.get(way, "gloo")
                line += f"   adds {row['added'][way]:5.2f} of what {peer} adds, {row['times'][way]:5.2f} times as fast"
            print(line, flush=True)

    run(work, arguments, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
