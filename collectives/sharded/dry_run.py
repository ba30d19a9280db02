"""Dry run of a sharded module's steps on the meta device, to count the memory that they take.

The units, their scheduler and autograd are the real ones. Only the modules' computation is left
out: a forward uses each parameter once, in the order in which the modules hold them, and a backward
makes a gradient of it. The communicators do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .buffer_pool import BufferPool
from .group_buffers import GroupBuffers
from .live_bytes import LiveBytes
from .managed_params import units_in
from .mesh import Ranks
from .module import ShardedModule
from .module_group import ModuleGroup
from .optimizer_hooks import trim_pool
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy
from .scheduler import Scheduler
from .sharding import attach
from .streams import HostCopies
from .unit import Unit

__all__ = ["CUDA_BLOCK", "DryRun", "NoOpCommunicator", "Skeleton"]

CUDA_BLOCK = 512  # bytes; torch's allocator counts in these
_META = torch.device("meta")
_ON_HOST = "on the host"  # the kind of memory beside a GPU's, which isn't counted


class _NewestLibrary:
    """Stands for an NCCL with all functions, which gathers by the communicator itself."""

    version = 0

    def has(self, function: str) -> bool:
        return True


class NoOpCommunicator:
    """Communicator of rank 0 of `size` ranks on the meta device. Its operations do nothing."""

    rank = 0
    device = _META
    closed = False
    engine = SimpleNamespace(library=_NewestLibrary())

    def __init__(self, size: int, *, on_host: bool):
        self.size = self.local_size = size
        self._on_host = on_host

    def all_gather(self, out, inp, async_op: bool = False):
        return self._work(async_op, out, inp)

    def reduce_scatter(self, out, inp, op, async_op: bool = False):
        return self._work(async_op, out, inp)

    def all_reduce(self, tensor, op, async_op: bool = False):
        return self._work(async_op, tensor)

    def empty(self, n: int, dtype: torch.dtype, *, window: bool = False) -> torch.Tensor:
        if window:  # the counter knows them by this operation
            return torch.empty_strided((n,), (1,), dtype=dtype, device=_META)
        return torch.empty(n, dtype=dtype, device=_META)

    def register(self, tensor: torch.Tensor) -> None:
        pass

    register_window = register

    def deregister(self, registration: None) -> None:
        pass

    def _work(self, async_op: bool, *tensors) -> _NoOpWork | None:
        return _NoOpWork(tensors, ends_in_wait=self._on_host) if async_op else None


class _NoOpWork:
    """Work that holds its tensors until it has ended: with `wait` on the host, where a GPU's stream
    has only been told to wait.
    """

    def __init__(self, tensors: tuple, *, ends_in_wait: bool):
        self._tensors = tensors
        self._ends_in_wait = ends_in_wait

    def wait(self) -> None:
        if self._ends_in_wait:
            self._tensors = ()

    def release(self) -> None:
        self._tensors = ()


class _NoOpCopies(HostCopies):
    """Copies that do nothing."""

    def to_device(self, out, host):
        return out

    def to_host(self, host, tensor, after=None) -> None:
        pass

    def after_copies(self, device):
        return contextlib.nullcontext()


class _Counter(LiveBytes):
    """Counts a step's memory by kind, with what is always there.

    `kept`: bytes that are always there; `activations`: those there through forward and backward.
    `phase`, `where`: forward, backward or step, and the unit in which it is. `peaks`: of each phase
    the most bytes at one time, the unit, and the bytes by kind.
    """

    def __init__(self, pool: _MetaPool, *, block: int):
        super().__init__(block=block)
        self._pool = pool
        self.kept = self.activations = 0
        self.phase = self.where = ""
        self.peaks: dict[str, tuple[int, str, dict[str, int]]] = {}
        self._kind: str | None = None

    def enter(self, phase: str, where: str = "") -> None:
        """Begin a phase."""
        self.phase, self.where = phase, where
        self.record_peak()

    @contextlib.contextmanager
    def counting_as(self, kind: str) -> Iterator[None]:
        """Count what is allocated inside the block as of a kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def kind_of(self, function) -> str:
        """Return the kind of memory that an operation of the units allocates: a post-forward shard
        is a clone, a window has strides, the output of a reduction is empty, and all else comes from
        adding and casting gradients.
        """
        if self._kind is not None:
            return self._kind
        name = function.overloadpacket.__name__
        return {"clone": "gathered", "empty_strided": "gathered", "empty": "flat"}.get(name, "full_gradients")

    def record_peak(self, work: int = 0) -> None:
        """Count what is live now, and `work` bytes of an optimizer's temporaries."""
        activations = self.activations if self.phase != "step" else 0
        fixed = self.kept + activations + work
        highest = self.peaks[self.phase][0] if self.phase in self.peaks else -1
        # What was freed may be counted in `_allocated`; the pool's tensors are counted in it and in `reserved`.
        if self._allocated + self._pool.reserved + fixed <= highest:
            return
        what = {"gathered": 0, "full_gradients": 0, "flat": 0, "gradients": 0} | self.bytes_by_kind()
        what.pop(_ON_HOST, None)
        what |= {"idle": self._pool.count_idle(), "work": work, "activations": activations}
        total = self.kept + sum(what.values())
        if total > highest:
            self.peaks[self.phase] = total, self.where, what


class _MetaPool(BufferPool):
    """Buffer pool on the meta device. It looks at its tensors to see which were freed."""

    def __init__(self):
        super().__init__()
        self._lent: list[tuple[StorageWeakRef, torch.Tensor, int]] = []

    def allocate(self, comm, n: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the meta device."""
        self._collect()
        nbytes = n * dtype.itemsize
        block = self._block(_BlockAllocator, nbytes)
        tensor = torch.empty(n, dtype=dtype, device=_META)
        self._lent.append((StorageWeakRef(tensor.untyped_storage()), block, nbytes))
        return tensor

    def trim(self) -> None:
        """Drop the free blocks."""
        self._collect()
        super().trim()

    def count_idle(self) -> int:
        """Return the bytes of the blocks that no tensor views."""
        return self.reserved - self.allocated + sum(nbytes for storage, _, nbytes in self._lent if storage.expired())

    def _collect(self) -> None:
        for storage, block, nbytes in self._lent:
            if storage.expired():
                self._returned.append((block, nbytes))
        self._lent = [lent for lent in self._lent if not lent[0].expired()]


class _BlockAllocator:
    """Makes the pool's blocks, which the counter leaves out."""

    @staticmethod
    def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
        return _NO_MEMORY.expand(n)


_NO_MEMORY = torch.empty(1, dtype=torch.uint8, device=_META)


class _CountedBuffers(GroupBuffers):
    """Buffers of a group that are counted as of a kind; memory that stays is the gradients'."""

    def __init__(self, buffers: GroupBuffers, counter: _Counter, kind: str):
        super().__init__(buffers.ranks, buffers.pool, device=buffers.device, store=buffers.store, pinned=False)
        self._counter = counter
        self._kind = kind

    def alloc(self, n, dtype, custom=None):
        with self._counter.counting_as(self._kind):
            return super().alloc(n, dtype)

    def acquire(self, purpose, n, dtype, custom=None):
        with self._counter.counting_as(self._kind):
            return super().acquire(purpose, n, dtype)

    def alloc_stored(self, n, dtype, *, shared, device=None):
        with self._counter.counting_as(_ON_HOST if self.offloads else "gradients"):
            return torch.empty(n, dtype=dtype, device=_META)


class _CountedScheduler(Scheduler):
    """Scheduler that tells the counter at which unit it is."""

    def __init__(self, comm: NoOpCommunicator, counter: _Counter, pool: _MetaPool):
        super().__init__(comm, None)
        self._counter = counter
        self.pool = pool
        self.host_copies = _NoOpCopies()

    def pre_forward(self, unit, in_backward, *, prefetch=True):
        self._counter.where = unit.name
        super().pre_forward(unit, in_backward, prefetch=prefetch)

    def pre_backward(self, unit):
        self._counter.where = unit.name
        super().pre_backward(unit)


class _Use(torch.autograd.Function):
    """Stands for a module's use of a parameter: its backward makes a gradient of the parameter's size."""

    @staticmethod
    def forward(ctx, x, param, counter, where):
        ctx.form = param.shape, param.dtype
        ctx.counter, ctx.where = counter, counter.where = counter, where
        return torch.empty(0, dtype=x.dtype, device=_META)  # as x is

    @staticmethod
    def backward(ctx, grad):
        ctx.counter.where = ctx.where
        made = None
        if ctx.needs_input_grad[1]:
            shape, dtype = ctx.form
            with ctx.counter.counting_as("full_gradients"):
                made = torch.empty(shape, dtype=dtype, device=_META)
        return grad, made, None, None


class Skeleton(nn.Module):
    """A module without its computation. `unit_name`: the name of the unit that it belongs to."""

    def __init__(self, unit_name: str):
        super().__init__()
        self.unit_name = unit_name
        self.counter: _Counter | None = None

    def forward(self, x):
        for name in self._parameters:
            x = _Use.apply(x, self._parameters[name], self.counter, self.unit_name)
        for child in self._modules.values():
            x = child(x)
        return x


class DryRun:
    """Steps of a module of `Skeleton`s on the meta device.

    `ranks`: of `NoOpCommunicator`s. `overlap`: whether collectives overlap with the computation;
    None: as on these ranks.
    """

    def __init__(self, root: Skeleton, ranks: Ranks, *, overlap: bool | None):
        self.root = root
        self.ranks = ranks
        self.on_gpu = not ranks.world._on_host
        self.pool = _MetaPool()
        self.counter = _Counter(self.pool, block=CUDA_BLOCK if self.on_gpu else 1)
        for module in root.modules():
            module.counter = self.counter
        self._scheduler = _CountedScheduler(ranks.world, self.counter, self.pool)
        if overlap is not None:
            self._scheduler.should_overlap = overlap

    def shard(
        self, module: Skeleton | ModuleGroup, parameters: list, *, mp_policy: MixedPrecisionPolicy | None,
        offloads: bool, persistent: bool, reshard_after_forward: bool | int,
    ) -> Unit:  # fmt: skip
        """Make a module or a group a unit, as `fully_shard` does; inner ones first. `parameters`: as `Unit`
        takes them.
        """
        name = module[0].unit_name if isinstance(module, ModuleGroup) else module.unit_name
        unit = Unit(
            None, self.ranks, parameters=parameters, name=name, mp_policy=mp_policy, persistent=persistent,
            offload_policy=CPUOffloadPolicy() if offloads else None, pool=self.pool,
            host_copies=self._scheduler.host_copies,
        )  # fmt: skip
        for group in unit.groups:
            group.gradients.buffers = _CountedBuffers(group.buffers, self.counter, "flat")
            group.buffers = _CountedBuffers(group.buffers, self.counter, "gathered")
        unit.reshard_after_forward = bool(reshard_after_forward)
        if reshard_after_forward and reshard_after_forward is not True:
            unit.post_forward_comm = NoOpCommunicator(reshard_after_forward, on_host=not self.on_gpu)
        self._scheduler.registry.add(unit)
        attach(unit, module, ShardedModule, self._scheduler)
        return unit

    def run(self, steps: int, *, work: int, accumulate: bool, kept: int, activations: int) -> None:
        """Make steps, after which the counter has the peaks of the last one.

        `work`: bytes of the optimizer's temporaries; `accumulate`: several backwards a step; `kept`:
        bytes that are always there; `activations`: those there through forward and backward.
        """
        counter = self.counter
        counter.kept, counter.activations = kept, activations
        nothing = torch.empty(0, device=_META)
        with counter:
            for _ in range(steps):
                counter.peaks = {}
                self.root.zero_grad()
                for is_last in (False, False, True) if accumulate else (True,):
                    self.root.set_requires_gradient_sync(is_last)
                    counter.enter("forward", self.root.unit_name)
                    out = self.root(nothing)
                    counter.enter("backward", self.root.unit_name)
                    if out.requires_grad:
                        out.backward(nothing.to(out.dtype))
                counter.enter("step")
                if work:
                    trim_pool(self._scheduler)
                    counter.record_peak(work)
                for unit in units_in(self.root):
                    unit.post_optim_step()
