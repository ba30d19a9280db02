"""Training by each front end, by torch's own DDP and by FSDP2: a step, and its parameters."""

from __future__ import annotations

import contextlib
import gc
import os
import socket

import torch
import torch.distributed as dist
from torch import nn

import collectives
from collectives import optim
from collectives.sharded import fully_shard

__all__ = ["EXACT", "LARGE", "SMALL", "WAYS", "Model", "Way", "process_group"]

LR = 1e-3
MAX_NORM = 1e9  # clips nothing: the norm is taken, and the parameters stay comparable
WARM = 12  # steps before a capture


class Model:
    """Blocks of two Linears; each block is a unit."""

    def __init__(self, blocks: int, width: int, inner: int, rows: int):
        self.blocks, self.width, self.inner, self.rows = blocks, width, inner, rows

    def build(self, device) -> nn.Sequential:
        torch.manual_seed(1)
        made = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(self.width, self.inner), nn.ReLU(), nn.Linear(self.inner, self.width))
                for _ in range(self.blocks)
            )
        )
        return made.to(device)

    def batch(self, device, rank: int) -> torch.Tensor:
        return torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(rank)).to(device)


SMALL = Model(3, 32, 48, 8)
LARGE = Model(8, 1024, 4096, 512)  # 67 million parameters


@contextlib.contextmanager
def process_group(device: torch.device):
    """Open torch's default group of the ranks that the environment names: over NCCL on a GPU, else
    over Gloo.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    dist.init_process_group(backend)
    try:
        yield
    finally:
        gc.collect()  # Gloo may abort at the end where a DDP object is left
        dist.destroy_process_group()


# ---- How each is made: (module, optimizer, what follows the backward).
def _none():
    pass


def alone(model, device):
    return model, torch.optim.SGD(model.parameters(), LR), _none


def ddp(model, device, hook=False, steps=False, **state):
    on = {"device_ids": [device.index]} if device.type == "cuda" else {}
    module = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=model.bucket_cap_mb, **on
    )
    optimizer = optim.SGD(model.parameters(), lr=LR) if steps else torch.optim.SGD(model.parameters(), LR)
    if hook:
        if steps:
            state["optimizer"] = optimizer
        module.register_comm_hook(collectives.HookState(**state), collectives.fused_allreduce)
    return module, optimizer, _none


def hooked(**how):
    return lambda model, device: ddp(model, device, hook=True, **how)


def _empty_hook(state, bucket):
    """Return a bucket as it is: what a backward of DDP's costs beside its hook."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _allreduce_hook(state, bucket):
    """Do what torch's own `allreduce_hook` does, for a process group whose futures hold nothing."""
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda _: buffer)


def with_hook(hook):
    def make(model, device):
        module, *rest = ddp(model, device)
        module.register_comm_hook(None, hook)
        return module, *rest

    return make


def overlapping_buckets(model, device):
    made = collectives.GradientBuckets(model.parameters(), bucket_cap_mb=model.bucket_cap_mb, overlap=True)
    return model, torch.optim.SGD(model.parameters(), LR), made.all_reduce


def fsdp2(**how):
    def make(model, device):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard as torch_fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for module in (*model, model):
            torch_fully_shard(module, mesh=mesh, **how)
        return model, torch.optim.SGD(model.parameters(), LR), _none

    return make


def sharded(**how):
    def make(model, device):
        for module in (*model, model):
            fully_shard(module, **how)
        return model, torch.optim.SGD(model.parameters(), LR), _none

    return make


def horovod(model, device):
    import collectives.horovod as hvd

    hvd.init()
    plain = torch.optim.SGD(model.parameters(), LR)
    return model, hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters()), _none


WAYS = {
    "alone": alone,
    "ddp": ddp,
    "ddp, empty hook": with_hook(_empty_hook),
    "ddp, allreduce_hook": with_hook(_allreduce_hook),
    "hook": hooked(),
    "hook, 2 streams": hooked(streams=2),
    "hook, max_norm": hooked(max_norm=MAX_NORM),
    "hook, bf16": hooked(wire="bf16"),
    "hook, int8 with error feedback": hooked(wire="int8", error_feedback=True),
    "hook, optimizer": hooked(steps=True),
    "buckets, overlap": overlapping_buckets,
    "fsdp2": fsdp2(),
    "fsdp2, kept": fsdp2(reshard_after_forward=False),
    "sharded": sharded(),
    "sharded, kept": sharded(reshard_after_forward=False),
    "horovod": horovod,
    "hook, replayed": hooked(),
    "sharded, replayed": sharded(),
}
# The ways whose parameters must be close to plain DDP's; the others don't synchronise, or round what they send.
EXACT = [name for name in WAYS if not any(word in name for word in ("alone", "empty", "bf16", "int8"))]


class Way:
    """One way to train a model on this rank's batch."""

    def __init__(self, name: str, model: Model, device: torch.device, rank: int, bucket_cap_mb: float = 25.0):
        self.name = name
        self.device = device
        self.model = model.build(device)
        self.model.bucket_cap_mb = bucket_cap_mb
        self.batch = model.batch(device, rank)
        if name.endswith("replayed") and device.type == "cuda":
            self.step = self._captured()
        else:
            self.module, self.optimizer, self.after = WAYS[name](self.model, device)

    def _captured(self):
        """Return what replays a step that was captured in a CUDA graph; the parameters are as before."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.module, self.optimizer, self.after = WAYS[self.name](self.model, self.device)
            params = list(self.module.parameters())
            first = [param.detach().clone() for param in params]
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        with torch.no_grad():
            for param, value in zip(params, first, strict=True):
                param.copy_(value)
        return graph.replay

    def step(self) -> None:
        """Forward, backward, what follows it, the optimizer: nothing that a training loop wouldn't
        have.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.module(self.batch).square().mean().backward()
        self.after()
        self.optimizer.step()

    @torch.no_grad()
    def parameters(self) -> list[torch.Tensor]:
        """Return copies of the whole parameters; all ranks call it."""
        units = [module for module in self.model.modules() if hasattr(module, "unshard")]
        for module in units:
            module.unshard()
        found = [param.detach().clone().to(self.device) for param in self.model.parameters()]
        for module in units:
            module.reshard()
        return found
