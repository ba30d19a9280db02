"""Measure the memory that our hook takes beyond DDP's own, with its optimizer's state.

    python benchmarks/ddp/memory.py

A model of 8 x Linear(1024) is trained some steps on 2 ranks by torch's DDP with a hook that does
nothing, and by ours with several settings, each in processes of its own, where malloc gives large
arrays mappings of their own. `extra`: how much larger the peak of a rank's memory inside of a
backward is than with the hook that does nothing, as a mean of the ranks; `kept`: the same between
two steps. What the ranks share is counted once (staging slots, memory of ``comm.empty()``, shared
buckets): the peak is the resident set's high-water mark, cleared before each backward, less what
the proportional set is smaller than the resident one. The largest bucket is the measure: `allowed`
is one bucket a stream; with error feedback the residuals, one fp32 copy of the parameters, are
stated apart and taken off. The results are checked as step.py does.

`optimizer_share`: elements of AdamW's state that a rank keeps, by those of the whole; at most 1/n
and the padding, n elements' alignment a bucket. On 2 and 4 ranks. Rows go to
benchmarks/results/ddp_memory.jsonl; the exit status is 1 where a setting takes more than it may.
"""

import gc
import sys

import torch
import torch.distributed as dist
from expected import Expected, check, same_everywhere
from launch import append_rows, make_parser, provenance, rows_of, slowest
from process_memory import proportional_set_size, reset_peak, return_freed_memory, status_bytes
from torch.nn.parallel import DistributedDataParallel
from ways import nothing

import collectives
from collectives import optim

STEPS = 6
SLACK = 1 << 20  # bytes: Python objects, tables of launches, communicators
KINDS = {"default": "mean", "streams": "mean", "max_norm": "clipped", "bf16": "bf16", "int8_ef": "int8"}
SETTINGS = {
    "nothing": None,
    "default": {},
    "streams": {"streams": 2},
    "max_norm": {"max_norm": 1e-4},
    "bf16": {"wire": "bf16"},
    "int8_ef": {"wire": "int8", "error_feedback": True},
}


def build(width):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))


def make(setting, model, bucket_view, sizes):
    module = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    state = None if SETTINGS[setting] is None else collectives.HookState(**SETTINGS[setting])
    hook = nothing if state is None else collectives.fused_allreduce

    def sized(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes[bucket.index()] = bucket.buffer().nbytes
        return hook(state, bucket)

    module.register_comm_hook(state, sized)
    return module


def memory_work(rank, arguments):
    """Yield one row of what the ranks keep and of the peak."""
    return_freed_memory()
    setting, width, bucket_view = arguments.setting, arguments.width, arguments.bucket_view
    batch = torch.randn(8, width, generator=torch.Generator().manual_seed(rank))
    model = build(width)
    sizes = {}
    module = make(setting, model, bucket_view, sizes)
    peaks = []
    for step in range(STEPS):
        module.zero_grad(set_to_none=True)
        loss = module(batch).square().mean()
        dist.barrier()
        reset_peak()
        loss.backward()
        if step >= STEPS // 2:  # DDP's buckets are the final ones, and shared
            peaks.append(status_bytes("VmHWM"))
        del loss
    gc.collect()
    dist.barrier()
    kept = proportional_set_size()
    peak = max(peaks) - status_bytes("VmRSS") + kept
    both = torch.tensor([kept, peak], dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.SUM)
    kept, peak = (both / dist.get_world_size()).long().tolist()
    if setting in KINDS:
        found = [parameter.grad.clone() for parameter in model.parameters()]
        plain = build(width)
        plain(batch).square().mean().backward()
        expected = Expected([parameter.grad for parameter in plain.parameters()])
        check(setting, KINDS[setting], found, expected, SETTINGS[setting].get("max_norm"))
    yield {
        "setting": setting, "ranks": dist.get_world_size(), "bucket_view": bucket_view,
        "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "largest_bucket": max(sizes.values()), "buckets": len(sizes), "kept": kept, "peak": peak,
    }  # fmt: skip


def optimizer_work(rank, arguments):
    """Yield one row of the optimizer's state inside of the hook."""
    width = arguments.width
    batch = torch.randn(8, width, generator=torch.Generator().manual_seed(rank))
    model = build(width)
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)
    module = collectives.DistributedDataParallel(model)
    module.register_comm_hook(collectives.HookState(optimizer=optimizer), collectives.fused_allreduce)
    for _ in range(3):
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()
    same_everywhere("optimizer", [parameter.detach() for parameter in model.parameters()])
    states = optimizer.state.values()
    held = sum(state[key].numel() for state in states for key in ("exp_avg", "exp_avg_sq"))
    whole = 2 * sum(parameter.numel() for parameter in model.parameters())
    size = dist.get_world_size()
    buckets = len(module.reducer._get_zeros_like_grad_buckets())
    most = whole / size + 2 * buckets * size * 4  # a bucket's rest is under `size` times 4 elements, twice
    yield {
        "setting": "optimizer", "ranks": size, "parameter_bytes": 2 * whole, "buckets": buckets,
        "optimizer_share": slowest([held / whole])[0], "allowed": most / whole,
    }  # fmt: skip


def beyond(row, baseline):
    """Return a row with what it takes more than the hook that does nothing, and what it may take."""
    streams = (SETTINGS[row["setting"]] or {}).get("streams", 1)
    kept, extra = row["kept"] - baseline["kept"], row.pop("peak") - baseline["peak"]
    residuals = row["parameter_bytes"] if row["setting"].endswith("_ef") else 0
    allowed = streams * row["largest_bucket"] + SLACK
    return {
        **row, "kept": kept, "residuals": residuals, "extra": extra, "allowed": allowed + residuals,
        "of_bucket": round((extra - residuals) / row["largest_bucket"], 4), "good": extra <= allowed + residuals,
    }  # fmt: skip


def measure(arguments):
    for gradients in arguments.gradients:
        arguments.bucket_view = gradients == "views"
        baseline = None
        for setting in ("nothing", *arguments.settings):
            arguments.setting = setting
            (row,) = rows_of(memory_work, 2, arguments)
            if baseline is None:
                baseline = row
            else:
                yield beyond(row, baseline)
    for ranks in arguments.ranks:
        (row,) = rows_of(optimizer_work, ranks, arguments)
        yield {**row, "good": row["optimizer_share"] <= row["allowed"]}


def main():
    parser = make_parser(__doc__, "ddp_memory.jsonl", ranks=False)
    parser.add_argument("--width", type=int, default=1024, help="of the model's Linears (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="with optimizer= (default: %(default)s)")
    parser.add_argument("--settings", nargs="*", choices=list(KINDS), default=list(KINDS), help="default: all")
    parser.add_argument(
        "--gradients", nargs="*", choices=["copies", "views"], default=["copies", "views"],
        help="of the buckets: DDP's gradient_as_bucket_view (default: both)",
    )  # fmt: skip
    arguments = parser.parse_args()
    where = provenance()
    rows = []
    for row in measure(arguments):
        rows.append({"benchmark": "ddp/memory", **row, **where})
        if row["setting"] == "optimizer":
            line = f"{row['optimizer_share']:.6f} of AdamW's state a rank, allowed {row['allowed']:.6f}"
        else:
            mib = {key: row[key] / 2**20 for key in ("kept", "extra", "residuals", "largest_bucket")}
            line = (
                f"{'views ' if row['bucket_view'] else 'copies'}  kept {mib['kept']:7.2f} MiB, extra "
                f"{mib['extra']:7.2f}, of it residuals {mib['residuals']:6.2f}; {row['of_bucket']:5.2f} of a bucket of "
                f"{mib['largest_bucket']:.1f} MiB"
            )
        print(f"{row['setting']:10s} {row['ranks']} ranks  {line}{'' if row['good'] else '  TOO MUCH'}", flush=True)
    append_rows(rows, arguments.output)
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
