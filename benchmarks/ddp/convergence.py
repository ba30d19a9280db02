"""Compare the losses and bytes of a DDP training with our hook on several wires.

The model is that of examples/train_digits.py.

    python benchmarks/ddp/convergence.py                    # 2 ranks; starts the ranks itself

The same parameters, batches and steps for each wire: fp32, and bf16 and int8 with error feedback
(both also without). `train_loss`: the mean over the last epoch's steps, all ranks' pictures;
`test_loss` and `test_accuracy` on the 360 pictures that aren't trained on; means over some seeds
(of the split, the parameters and the order). `train_by_fp32` and `test_by_fp32`: the ratio of those
means to fp32's, and its standard error, of the seeds' paired differences. `nudged` is fp32 from
parameters that are changed by one part in a million: by how much runs differ that should be the
same. `wire_bytes`: what a rank sends for a step, counted by HookState, and `of_fp32` its ratio.

After each run parameters must be the same bit for bit on all ranks, else it ends with status 1.
Rows go to benchmarks/results/ddp_convergence.jsonl.
"""

import copy
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from expected import same_everywhere
from launch import make_parser, run
from torch.nn import functional

import collectives

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_digits  # noqa: E402

WIRES = {
    "fp32": {},
    "nudged": {},
    "bf16_ef": {"wire": "bf16", "error_feedback": True},
    "int8_ef": {"wire": "int8", "error_feedback": True},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
}


def train(wire, initial, batches, test, steps):
    """Train one copy of the model; return the last epoch's mean loss, test loss and accuracy, and
    bytes a step.
    """
    trainer = train_digits.Trainer(wire, copy.deepcopy(initial))
    if wire == "nudged":
        with torch.no_grad():
            for parameter in trainer.ddp.parameters():
                parameter.mul_(1 + 1e-6)
    state = collectives.HookState(**WIRES[wire])
    trainer.ddp.register_comm_hook(state, collectives.fused_allreduce)
    losses = torch.stack([trainer.step(*batches[step]) for step in range(steps)]).double()
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    same_everywhere(wire, [parameter.detach() for parameter in trainer.ddp.parameters()])
    with torch.no_grad():
        scores = trainer.ddp.module(test[0])
        loss = functional.cross_entropy(scores, test[1]).item()
        accuracy = (scores.argmax(1) == test[1]).double().mean().item()
    last = losses[-batches.steps_per_epoch :].mean().item()
    return {"train_loss": last, "test_loss": loss, "test_accuracy": accuracy, "wire_bytes": state.bytes_on_wire}


def paired(runs, fp32, key):
    """Return the ratio of two means, and its standard error, from runs by seed."""
    base = statistics.fmean(run[key] for run in fp32)
    differences = [(mine[key] - other[key]) / base for mine, other in zip(runs, fp32, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return round(1 + statistics.fmean(differences), 5), round(error, 5)


def work(rank, arguments):
    """Yield a row for each wire."""
    found = {wire: [] for wire in arguments.wires}
    for seed in arguments.seeds:
        torch.manual_seed(seed)
        train_x, train_y, *test = train_digits.load_data(seed, torch.device("cpu"))
        batches = train_digits.Batches(train_x, train_y, 64, rank, dist.get_world_size(), seed)
        steps = arguments.steps or arguments.epochs * batches.steps_per_epoch
        initial = train_digits.build_model(arguments.hidden)
        for wire in arguments.wires:
            found[wire].append(train(wire, initial, batches, test, steps))
    fp32 = found["fp32"]
    for wire, runs in found.items():
        means = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
        row = {"benchmark": "ddp/convergence", "wire": wire, "ranks": dist.get_world_size(), "steps": steps} | {
            key: round(value, 6) for key, value in means.items()
        }
        for short in ("train", "test"):
            row[f"{short}_by_fp32"], row[f"{short}_error"] = paired(runs, fp32, f"{short}_loss")
        row["of_fp32"] = round(means["wire_bytes"] / statistics.fmean(run["wire_bytes"] for run in fp32), 5)
        row["seeds"] = arguments.seeds
        yield row


def show(row):
    losses = ", ".join(
        f"{short} loss {row[f'{short}_loss']:.5f} ({row[f'{short}_by_fp32']:.4f} +- {row[f'{short}_error']:.4f})"
        for short in ("train", "test")
    )
    line = f"accuracy {row['test_accuracy']:.4f}, {row['of_fp32']:.4f} of fp32's bytes"
    print(f"{row['wire']:8s} {losses}, {line}", flush=True)


def main():
    parser = make_parser(__doc__, "ddp_convergence.jsonl")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), help="beside fp32 (default: all)")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training set (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="stop after so many steps, whatever --epochs says")
    parser.add_argument("--hidden", type=int, default=512, help="width of the hidden layers (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.wires = list(dict.fromkeys(("fp32", *arguments.wires)))
    run(work, arguments, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
