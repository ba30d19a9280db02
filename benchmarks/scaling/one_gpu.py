"""What one GPU can confirm of the predictions: rates of kernels, a step of one rank, host times."""

from __future__ import annotations

from .step import RATES, counted_rows

__all__ = ["predicted_on_one_gpu"]

# The model of benchmarks.gpu.steps: 8 blocks of Linear(1024, 4096) and Linear(4096, 1024).
PARAMETERS = 8 * (2 * 1024 * 4096 + 1024 + 4096)
# Its ways, by the rows of counts that have their passes over memory.
STEPS = {
    "ddp": "DDP, torch's", "hook": "DDP, hook", "hook, max_norm": "DDP, hook, max_norm",
    "hook, int8 with error feedback": "DDP, hook, int8 with error feedback", "buckets, overlap": "GradientBuckets",
    "fsdp2": "FSDP2, torch's", "sharded": "fully_shard", "horovod": "Horovod's DistributedOptimizer",
}  # fmt: skip
# Microseconds of the host: of a bucket, of a unit both ways, of a fused batch.
HOST = {
    "step: hook": 20.0, "step: hook, max_norm": 20.0, "step: hook, int8 with error feedback": 20.0,
    "step: buckets, overlap": 20.0, "step: sharded": 120.0, "step: sharded, kept": 60.0,
    "hvd.grouped_allreduce_": 30.0,
}  # fmt: skip


def predicted_on_one_gpu() -> dict:
    """Return bytes/s of a kernel that only moves data, milliseconds that each way's step takes more than the model
    alone, and microseconds of the host.
    """
    rows = counted_rows()
    more = {way: rows[name]["passes"] * 4 * PARAMETERS / RATES.hbm * 1e3 for way, name in STEPS.items()}
    return {
        "kernel_bytes_per_s": RATES.hbm,
        "step_more_than_alone_ms": {way: round(ms, 4) for way, ms in more.items()},
        "host_us": HOST,
    }
