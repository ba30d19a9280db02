"""Ways to make a training step: by torch over Gloo, and by us."""

import contextlib
import functools
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives import optim

LR = 1e-3

GROUPS = {
    "sync": ("plain", "no_sync", "nothing", "nothing_view", "gloo", "gloo_view", "hook", "hook_view", "ours"),
    "backend": ("no_sync", "gloo", "gloo_view", "backend", "backend_view"),
    "compressed": ("no_sync", "gloo", "gloo_bf16", "ours", "ours_bf16", "ours_bf16_ef", "ours_int8_ef"),
    "stepped": (
        "no_sync", "gloo", "gloo_clip", "gloo_adamw", "gloo_clip_adamw", "ours_clip", "ours_adamw", "ours_clip_adamw",
    ),
}  # fmt: skip
# Whose time ours is compared with; all others with "gloo".
PEERS = {
    "ours_bf16": "gloo_bf16", "ours_bf16_ef": "gloo_bf16", "ours_int8_ef": "gloo_bf16",
    "ours_clip": "gloo_clip", "ours_adamw": "gloo_adamw", "ours_clip_adamw": "gloo_clip_adamw",
}  # fmt: skip
KINDS = {
    "plain": "own", "no_sync": "own", "nothing": "own", "nothing_view": "own", "gloo": "close", "gloo_view": "close",
    "backend": "close", "backend_view": "close", "hook": "mean", "hook_view": "mean",
    "ours": "mean", "gloo_bf16": "bf16", "ours_bf16": "bf16", "ours_bf16_ef": "bf16",
    "ours_int8_ef": "int8", "gloo_clip": "clipped",
    "ours_clip": "clipped", "gloo_adamw": "adamw", "ours_adamw": "adamw", "gloo_clip_adamw": "clipped adamw",
    "ours_clip_adamw": "clipped adamw",
}  # fmt: skip
STATES = {
    "ours": {}, "ours_bf16": {"wire": "bf16"}, "ours_bf16_ef": {"wire": "bf16", "error_feedback": True},
    "ours_int8_ef": {"wire": "int8", "error_feedback": True},
}  # fmt: skip


def nothing(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Leave the bucket as it is: a hook that costs what DDP itself does around hooks."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def to_bf16(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's bf16_compress_hook, which DDP refuses on the CPU by its name."""
    return default_hooks.bf16_compress_hook(state, bucket)


@functools.cache
def backend_group():
    """Return the process group of our backend over all ranks."""
    return dist.new_group(backend="collectives")


class Way:
    """One way to make a step: a module, the context in which it runs, and what follows the
    backward.
    """

    def __init__(self, name, model, max_norm=1.0, options=None):
        self.name = name
        self.kind = KINDS[name]
        self.model = model
        self.max_norm = max_norm
        self.optimizer = self.state = None
        self.context = contextlib.nullcontext
        self.times = []
        clips, steps = "clip" in name, name.endswith("adamw")
        view = {"gradient_as_bucket_view": True} if name.endswith("_view") else {}
        if name.startswith("ours"):
            self._build_ours(clips, steps, options or {})
            return
        if name.startswith("backend"):
            view["process_group"] = backend_group()
        self.module = model if name == "plain" else DistributedDataParallel(model, **view)
        if name == "no_sync":
            self.context = self.module.no_sync
        elif name.startswith("nothing"):
            self.module.register_comm_hook(None, nothing)
        elif name.startswith("hook"):
            self.state = collectives.HookState(**(options or {}))
            self.module.register_comm_hook(self.state, collectives.fused_allreduce)
        elif name == "gloo_bf16":
            self.module.register_comm_hook(None, to_bf16)
        self.clips = clips
        if steps:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def _build_ours(self, clips, steps, options):
        self.module = collectives.DistributedDataParallel(self.model)
        state = {**STATES.get(self.name, {}), **options}
        self.clips = False  # in the hook
        if clips:
            state["max_norm"] = self.max_norm
        if steps:
            self.optimizer = state["optimizer"] = optim.AdamW(self.model.parameters(), lr=LR)
        self.state = collectives.HookState(**state)
        self.module.register_comm_hook(self.state, collectives.fused_allreduce)

    def step(self, batch):
        """Make one step; return its seconds. Gradients are set to None before, untimed."""
        self.module.zero_grad(set_to_none=True)
        start = time.perf_counter()
        with self.context():
            self.module(batch).square().mean().backward()
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        return time.perf_counter() - start

    def gradients(self):
        return [parameter.grad for parameter in self.model.parameters()]

    def shared_buckets(self):
        """Return how many of the buckets our hook has made memory that the ranks share, as text; or
        None.
        """
        state = self.state
        return None if state is None else state._registrations.describe()

    def drop_gradients(self):
        """Drop the gradients: other ways are next."""
        self.module.zero_grad(set_to_none=True)
