"""The training steps whose operations are counted: our front ends, and torch's DDP and FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import collectives
from benchmarks.front_ends import Model
from collectives import optim
from collectives.sharded import MixedPrecisionPolicy, fully_shard

PARTS = 4  # buckets, units
WIDTH = 64
BUCKET_MB = 0.03  # a block's gradients fill a bucket
LR = 1e-3


@dataclasses.dataclass
class Step:
    """A model and its step. `counted`: called after the backward, and counted; `rest`: not counted."""

    module: nn.Module
    batch: torch.Tensor
    parameters: list
    counted: Callable[[], object] = lambda: None
    rest: Callable[[], object] = lambda: None

    def region(self) -> None:
        for param in self.parameters:
            param.grad = None
        self.module(self.batch).square().mean().backward()
        self.counted()


@dataclasses.dataclass(frozen=True)
class Way:
    """``base``: the way without communication whose counts are subtracted; ``all_reduce_ranks``: of torch's
    all-reduces, by the number of ranks.
    """

    name: str
    make: Callable[[], Step]
    ours: bool = True
    base: str = "alone"
    all_reduce_ranks: Callable[[int], int] = lambda ranks: ranks
    least_ranks: int = 2


def make_model(dtype=torch.float32):
    device = torch.device("cuda", 0)
    made = Model(PARTS, WIDTH, WIDTH, 8)
    return made.build(device).to(dtype), made.batch(device, 0)


def alone(dtype=torch.float32) -> Step:
    model, batch = make_model(dtype)
    step = torch.optim.SGD(model.parameters(), LR).step
    return Step(model, batch.to(dtype), list(model.parameters()), rest=step)


# ---- DDP.
def ddp(state=None, hook=None, *, adamw=False, group=None, optimizer=False, bf16=False) -> Step:
    model, batch = make_model(torch.bfloat16 if bf16 else torch.float32)
    params = list(model.parameters())
    batch = batch.to(params[0].dtype)
    module = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB / (2 if bf16 else 1), process_group=group
    )
    if isinstance(state, dict):
        options = dict(state)
        if optimizer:
            options["optimizer"] = optim.AdamW(params, lr=LR, master_weights=bf16)
        state = collectives.HookState(**options)
        hook = collectives.fused_allreduce
    if hook is not None:
        module.register_comm_hook(state, hook)
    if optimizer:
        return Step(module, batch, params, counted=options["optimizer"].step)
    if adamw:
        return Step(module, batch, params, counted=torch.optim.AdamW(params, LR, fused=True).step)
    return Step(module, batch, params, rest=torch.optim.SGD(params, LR).step)


def hooked(*, optimizer=False, bf16=False, **state):
    return lambda: ddp(state, optimizer=optimizer, bf16=bf16)


class EchoWork(dist._Work):
    """An operation that has ended. Its future holds the tensors, as NCCL's does."""

    def __init__(self, tensors):
        super().__init__()
        self._future = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout=None):
        return True

    def get_future(self):
        return self._future


class EchoGroup(dist.ProcessGroup):
    """Process group for torch's DDP, whose reducer takes no group "fake": the futures of that hold nothing."""

    def __init__(self, recorder):
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._recorder = recorder

    def allreduce(self, tensors, options):
        self._recorder.call_of_torch("all_reduce", tensors, self.size())
        return EchoWork(tensors)

    def broadcast(self, tensors, options):
        self._recorder.call_of_torch("broadcast", tensors, self.size())
        return EchoWork(tensors)

    def allgather(self, outputs, inputs, options):
        self._recorder.call_of_torch("all_gather", outputs[0], self.size())
        for output in outputs[0]:
            output.copy_(inputs[0])
        return EchoWork(outputs)

    def getBackendName(self):
        return "echo"


recorder = None  # of this process


def bf16_hook(state, bucket):
    """Call torch's `bf16_compress_hook`, whose name DDP refuses on a build without NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def torch_ddp(hook=None, adamw=False):
    def make() -> Step:
        group = EchoGroup(recorder)
        return ddp(group if hook is not None else None, hook, adamw=adamw, group=group)

    return make


def buckets() -> Step:
    model, batch = make_model()
    params = list(model.parameters())
    made = collectives.GradientBuckets(params, bucket_cap_mb=1.1 * BUCKET_MB, first_bucket_mb=1.1 * BUCKET_MB)
    return Step(model, batch, params, counted=made.all_reduce, rest=torch.optim.SGD(params, LR).step)


# ---- Shards.
def sharded(*, mixed=False, hsdp=False, optimizer=False, **state):
    def make() -> Step:
        model, batch = make_model()
        how = {}
        if mixed:
            how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if hsdp:
            how["mesh"] = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replica", "shard"))
        if state or optimizer:
            how["hook_state"] = collectives.HookState(**state)
        for module in (*model, model):
            fully_shard(module, **how)
        params = list(model.parameters())
        if optimizer:
            how["hook_state"].optimizer = optim.AdamW(params, lr=LR)
            return Step(model, batch, params, counted=how["hook_state"].optimizer.step)
        return Step(model, batch, params, rest=torch.optim.SGD(params, LR).step)

    return make


def fsdp2(*, mixed=False, hsdp=False, adamw=False):
    def make() -> Step:
        model, batch = make_model()
        how = {"mesh": init_device_mesh("cuda", (dist.get_world_size(),))}
        if mixed:
            how["mp_policy"] = TorchMixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if hsdp:
            how["mesh"] = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replica", "shard"))
        for module in (*model, model):
            torch_fully_shard(module, **how)
        params = list(model.parameters())
        if adamw:
            return Step(model, batch, params, counted=torch.optim.AdamW(params, LR, fused=True).step)
        return Step(model, batch, params, rest=torch.optim.SGD(params, LR).step)

    return make


# ---- Horovod's interface.
def horovod() -> Step:
    import collectives.horovod as hvd

    hvd.init()
    model, batch = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), LR), named_parameters=model.named_parameters(),
        groups=[list(block.parameters()) for block in model],
    )

    def rest():
        with optimizer.skip_synchronize():
            optimizer.step()

    return Step(model, batch, list(model.parameters()), counted=optimizer.synchronize, rest=rest)


def halved(ranks: int) -> int:
    return ranks // 2


WAYS = (
    Way("alone", alone),
    Way("alone, bf16", lambda: alone(torch.bfloat16)),
    Way("DDP, torch's", torch_ddp(), ours=False),
    Way("DDP, torch's bf16 hook", torch_ddp(bf16_hook), ours=False),
    Way("DDP, hook", hooked()),
    Way("DDP, hook, bf16", hooked(wire="bf16")),
    Way("DDP, hook, max_norm", hooked(max_norm=1.0)),
    Way("DDP, hook, int8 with error feedback", hooked(wire="int8", error_feedback=True)),
    Way("GradientBuckets", buckets),
    Way("Horovod's DistributedOptimizer", horovod),
    Way("FSDP2, torch's", fsdp2(), ours=False),
    Way("fully_shard", sharded()),
    Way("FSDP2, torch's, bf16", fsdp2(mixed=True), ours=False, base="alone, bf16"),
    Way("fully_shard, bf16", sharded(mixed=True), base="alone, bf16"),
    Way("FSDP2, torch's, HSDP", fsdp2(hsdp=True), ours=False, all_reduce_ranks=halved, least_ranks=4),
    Way("fully_shard, HSDP", sharded(hsdp=True), least_ranks=4),
    Way("fully_shard, gathered as int8", sharded(gather="int8")),
    Way("fully_shard, max_norm", sharded(max_norm=1.0)),
    Way("DDP, torch's, and AdamW (fused)", torch_ddp(adamw=True), ours=False),
    Way("DDP, hook, AdamW inside", hooked(optimizer=True)),
    Way("DDP, hook, AdamW inside, bf16", hooked(optimizer=True, bf16=True), base="alone, bf16"),
    Way("DDP, hook, AdamW inside, bf16 views", hooked(optimizer=True, bf16=True, parameters_as_bucket_view=True),
        base="alone, bf16"),
    Way("FSDP2, torch's, and AdamW (fused)", fsdp2(adamw=True), ours=False),
    Way("fully_shard, AdamW inside", sharded(optimizer=True)),
)
