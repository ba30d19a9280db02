"""Models, and ways to train them: alone, by DDP, by torch's FSDP2, by us."""

import functools
import time
import warnings

import torch
import torch.distributed as dist
from imports import GPT, cut, load_text, loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import collectives
from collectives import optim
from collectives.sharded import ModuleWrapPolicy, ShardedDataParallel, ShardingStrategy, fsdp2, fully_shard

CONTEXT = 64  # characters of a text, as in the example
BATCHES = 4  # they come in turn

# ---- The models: how each is built, what its units are beside the root, what a batch is, and its loss.


class Linears:
    """Linears one after the other; the squared distance to random numbers."""

    def __init__(self, count, width, batch):
        self.count, self.width, self.batch = count, width, batch

    def build(self):
        torch.manual_seed(1)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.count)))

    def units(self, model):
        return list(model)

    def batches(self, rank):
        generator = torch.Generator().manual_seed(rank)
        return [
            tuple(torch.randn(self.batch, self.width, generator=generator) for _ in range(2)) for _ in range(BATCHES)
        ]

    def loss(self, module, x, y):
        return nn.functional.mse_loss(module(x), y)


class CharGPT:
    """The GPT of examples/char_gpt.py on its text; each block is a unit."""

    def __init__(self, layers, width, batch):
        self.layers, self.width, self.batch = layers, width, batch

    def build(self):
        torch.manual_seed(1)
        return GPT(self.layers, self.width, CONTEXT)

    def units(self, model):
        return list(model.blocks)

    def batches(self, rank):
        text, _ = load_text(1 << 16)
        generator = torch.Generator().manual_seed(rank)
        starts = torch.randint(len(text) - CONTEXT, (BATCHES, self.batch), generator=generator)
        return [cut(text, CONTEXT, some) for some in starts]

    def loss(self, module, texts, following):
        return loss_of(module, texts, following)


MODELS = {
    "8xLinear1024": Linears(8, 1024, 32),
    "gpt6x384": CharGPT(6, 384, 8),
    "3xLinear128": Linears(3, 128, 32),
    "3xLinear512": Linears(3, 512, 32),
    "gpt2x64": CharGPT(2, 64, 2),
}

# ---- The ways.


def alone(model, units):
    return model


def ddp(model, units):
    module = collectives.DistributedDataParallel(model)
    module.register_comm_hook(collectives.fused_allreduce)
    return module


@functools.cache
def _backend_mesh():
    """Return the mesh of all ranks over a process group of our backend."""
    return DeviceMesh.from_group(dist.new_group(backend="collectives"), "cpu")


def _fsdp2(model, units, ours=False, backend=False, allocates=False, **options):
    if backend:
        options["mesh"] = _backend_mesh()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own
        for module in (*units, model):
            torch_fully_shard(module, **options)
    # FSDP2 warns in each first forward that the logits are a view, which nobody writes to here.
    warnings.filterwarnings("ignore", message=".* returned a view tensor", category=UserWarning)
    if ours:
        gather, scatter = fsdp2.AllGather(), fsdp2.ReduceScatter()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
    if allocates:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def _ours(model, units, **options):
    for module in (*units, model):
        fully_shard(module, **options)
    return model


def _module_class(model, units, strategy):
    policy = ModuleWrapPolicy({type(unit) for unit in units})
    return ShardedDataParallel(model, sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=policy)


WAYS = {
    "alone": alone,
    "ddp": ddp,
    "fsdp2": _fsdp2,
    "fsdp2_keep": functools.partial(_fsdp2, reshard_after_forward=False),
    "fsdp2_ours": functools.partial(_fsdp2, ours=True),
    "fsdp2_ours_keep": functools.partial(_fsdp2, ours=True, reshard_after_forward=False),
    "fsdp2_backend": functools.partial(_fsdp2, backend=True),
    "fsdp2_backend_alloc": functools.partial(_fsdp2, backend=True, allocates=True),
    "ours": _ours,
    "ours_keep": functools.partial(_ours, reshard_after_forward=False),
    "ours_shard_optimizer": functools.partial(_module_class, strategy="SHARD_OPTIMIZER"),
    "ours_no_shard": functools.partial(_module_class, strategy="NO_SHARD"),
}
GROUPS = {
    "theirs": ("alone", "ddp", "fsdp2", "fsdp2_keep", "fsdp2_ours", "fsdp2_ours_keep"),
    "backend": ("alone", "fsdp2", "fsdp2_ours", "fsdp2_backend", "fsdp2_backend_alloc"),
    "asked": ("alone", "ddp", "fsdp2", "ours"),
    "all": tuple(WAYS),
}
OPTIMIZERS = {
    "torch": functools.partial(torch.optim.AdamW, foreach=True),
    "ours": optim.AdamW,
}
PARTS = ("forward", "backward", "optimizer")  # of a step
# Ways whose parameters must be the same to the bit; others sum in an order of their own.
EXACT = ("ddp", "ours")


class Way:
    """One way to train a model."""

    def __init__(self, name, kind, optimizer, lr):
        self.name = name
        self.kind = kind
        self.model = kind.build()
        self.module = WAYS[name](self.model, kind.units(self.model))
        self.optimizer = OPTIMIZERS[optimizer](self.module.parameters(), lr=lr)
        self.exact = name.split("_")[0] in EXACT
        self.made = 0  # steps

    def step(self, batches, ended=None):
        """Make a step on the batch whose turn it is; return the seconds of forward, backward and
        optimizer.

        ``ended``: a function that is called with the name of each part when it has ended.
        """
        batch = batches[self.made % len(batches)]
        self.made += 1
        parts = self._parts(batch)
        seconds = []
        for name in PARTS:
            start = time.perf_counter()
            next(parts)
            seconds.append(time.perf_counter() - start)
            if ended is not None:
                ended(name)
        parts.close()
        return seconds

    def _parts(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.kind.loss(self.module, *batch)
        yield
        loss.backward()
        yield
        del loss
        self.optimizer.step()
        yield

    @torch.no_grad()
    def parameters(self):
        """Return the whole parameters by name; all ranks must call it."""
        sharded = [module for module in self.model.modules() if hasattr(module, "unshard")]
        for module in sharded:
            module.unshard()
        found = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        for module in sharded:
            module.reshard()
        return found

    def drop_gradients(self):
        """Drop the gradients: other ways are next."""
        self.optimizer.zero_grad(set_to_none=True)
