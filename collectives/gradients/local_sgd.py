"""Post-local SGD: each rank steps on its own gradients, and every k-th step the ranks' models are
averaged.

The model can be averaged only after the optimizer's step, which any torch.optim.Optimizer may make.
So one hook for all optimizers is installed as long as there is a `LocalSGD`. Source: Lin, Stich,
Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020 (arXiv 2018), and torch's
post_localSGD_hook with PeriodicModelAverager.

All ranks must average after the same step, or they wait for each other for ever. Steps can't be
counted, since a GradScaler leaves them out where this rank's gradients aren't finite. Backwards
can. So after the backward that precedes an average the ranks agree on whether all of them will
step, which they do if all have finite gradients. If not, they agree again after the next backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..compression import all_reduce_average
from ..cuda_state import refuse_capture
from ..errors import InvalidArgument, InvalidUsage
from ..kernels import Table, pack, unpack
from ..kernels.parameter_arrays import is_dense
from ..optimizer_state import state_dtype
from .grad_memory import flat_memory

__all__ = ["LocalSGD"]

_CHUNK_BYTES = 25 << 20  # that are averaged at a time
_PATIENCE = 100  # backwards for which an average may wait; a GradScaler needs some 20 to find its first scale
_STEPS, _NOT_FINITE, _IDLE = 0.0, 1.0, 2.0  # a rank's vote after a backward; the largest wins


class _ModuleState:
    """Parameters whose gradients come in one backward, and counters of these backwards."""

    def __init__(self, backwards: int = 0, waiting: int | None = None):
        self.backwards = backwards
        self.waiting = waiting  # the backward since which an average is due; None: it isn't
        self.comm = None
        self.params: list[weakref.ref] = []  # in the order of the first backward's buckets
        self.due: set[int] = set()  # ids of those to be averaged after their optimizer's next step

    def live_params(self) -> list[torch.nn.Parameter]:
        """Return the parameters that are alive."""
        return [param for param in (reference() for reference in self.params) if param is not None]


class LocalSGD:
    """Averages gradients in the first `after` backwards, and then the model after every `every`-th.

    Only backwards whose gradients DDP reduces count, not those in `no_sync`. A module is averaged
    over its communicator's ranks after the first optimizer step that follows, each optimizer's
    parameters after its own step; buffers and optimizer states are not. If a rank's gradients
    aren't finite, or are 0 throughout (DDP's `join` makes such on ranks that have run out of
    inputs), the average waits for the next backward for which neither holds. So a GradScaler may
    leave out the steps of one rank alone. Ranks that decide in another way whether to step are an
    error of the program: `Mismatch` on the host engine, a hang on NCCL.
    """

    def __init__(self, every: int, after: int = 0):
        self.every = every
        self.after = after
        self._modules: list[weakref.ref] = []  # in the order of their first backwards; their parameters hold them
        self._module_of = WeakIdKeyDictionary()
        self._loaded: list[dict] = []
        self._current: _ModuleState | None = None
        self._largest: list[torch.Tensor] = []  # magnitudes in the buckets of this backward, if an average is due
        _register(self)

    # ---- A backward.

    def observe_bucket(self, comm, bucket) -> bool:
        """Record a bucket of a backward; return whether its gradients must be averaged."""
        refuse_capture(
            comm.device, "local_steps counts backwards on the host: capture a step of a HookState without it"
        )
        module = self._find_module(bucket)
        module.comm = comm
        if module.backwards < self.after:
            return True
        if self._average_due(module):
            self._largest.append(torch.linalg.vector_norm(bucket.flat, torch.inf, dtype=state_dtype(bucket.flat)))
        return False

    def end_backward(self) -> None:
        """Count the backward, after its last bucket.

        If an average is due after it, blocks until all ranks have come. Raises `InvalidUsage` where
        the average has waited for 100 backwards for finite gradients of all ranks or for an
        optimizer's step.
        """
        module, self._current = self._current, None
        if module is None:
            return
        due = self._average_due(module)
        module.backwards += 1
        if not due:
            return
        if module.waiting is None:
            module.waiting = module.backwards
        vote = self._agree_on_step(module)
        late = module.backwards - module.waiting > _PATIENCE
        if late and vote == _NOT_FINITE:
            raise InvalidUsage(
                f"the models were to be averaged after backward {module.waiting}, and in each of the {_PATIENCE} since "
                "then some rank's gradients were not finite"
            )
        if late and vote == _STEPS:
            raise InvalidUsage(
                f"the models were to be averaged after backward {module.waiting}, and in {_PATIENCE} more no "
                "torch.optim.Optimizer with their parameters has stepped: where none does, call average()"
            )
        if vote == _STEPS:
            module.due.update(id(param) for param in module.live_params())

    def _average_due(self, module: _ModuleState) -> bool:
        """Return whether the model is to be averaged after the backward under way."""
        local = module.backwards + 1 - self.after
        return local > 0 and (module.waiting is not None or local % self.every == 0)

    def _agree_on_step(self, module: _ModuleState) -> float:
        """Return the ranks' common vote on whether all will step. A collective that blocks."""
        largest, self._largest = self._largest, []
        peak = torch.stack([each.double() for each in largest]).amax()  # NaN where one is
        vote = torch.where(peak.isfinite(), torch.where(peak == 0, _IDLE, _STEPS), _NOT_FINITE).reshape(1)
        module.comm.all_reduce(vote, "max")
        return vote.item()

    def _find_module(self, bucket) -> _ModuleState:
        """Return the state of a bucket's module; a new one at its first backward."""
        if bucket.index == 0:
            self._current, self._largest = None, []
        module = self._current
        if module is None:
            known = (self._module_of.get(param) for param in bucket.params)
            module = next((each for each in known if each is not None), None)
        if module is None:
            module = _ModuleState(**self._loaded.pop(0)) if self._loaded else _ModuleState()
            self._modules.append(weakref.ref(module))
        for param in bucket.params:
            if param not in self._module_of:  # one that two modules share stays the first one's
                self._module_of[param] = module
                module.params.append(weakref.ref(param))
        self._current = module
        return module

    # ---- Averaging.

    def average_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Average those of an optimizer's parameters that are due, after its step.

        Blocks until all ranks have come.
        """
        for module in self._live_modules():
            if module.due:
                held = {id(param) for group in optimizer.param_groups for param in group["params"]}
                self._average(module, [param for param in module.live_params() if id(param) in held & module.due])

    def average(self) -> None:
        """Average all modules now, as at the end of training; all ranks must call it."""
        for module in self._live_modules():
            self._average(module, module.live_params())

    def _average(self, module: _ModuleState, params: list) -> None:
        if not params:
            return
        average_parameters(module.comm, params)
        module.due.difference_update(map(id, params))
        module.waiting = None

    def _live_modules(self) -> list[_ModuleState]:
        return [module for module in (reference() for reference in self._modules) if module is not None]

    # ---- State.

    def state_dict(self) -> dict:
        """Return the counters, by module in the order of their first backwards."""
        counted = [{"backwards": module.backwards, "waiting": module.waiting} for module in self._live_modules()]
        return {"modules": counted + self._loaded}

    def load_state_dict(self, state: dict) -> None:
        """Load a `state_dict` for modules whose first backward comes from now on, in that order."""
        self._loaded = [dict(each) for each in state["modules"]]
        self._modules, self._module_of, self._current = [], WeakIdKeyDictionary(), None


@torch.no_grad()
def average_parameters(comm, params: list[torch.nn.Parameter]) -> None:
    """Replace parameters by their averages over a communicator's ranks, 25 MiB at a time.

    All ranks must call it. Sums of bf16 and fp16 are rounded once, by the engine. The parameters'
    version counters advance, so that autograd and the optimizers' master weights notice.
    """
    for dtype in dict.fromkeys(param.dtype for param in params):
        memory = [_memory(param) for param in params if param.dtype is dtype]
        real = memory[0].dtype
        buffer = comm.empty(min(_CHUNK_BYTES // real.itemsize, sum(part.numel() for part in memory)), real)
        for parts, offsets in _chunks(memory, buffer.numel()):
            table = Table(parts, real, offsets=offsets)
            flat = buffer[: offsets[-1] + parts[-1].numel()]
            pack(table, flat)
            all_reduce_average(comm, flat)
            unpack(flat, table)


def _memory(param: torch.nn.Parameter) -> torch.Tensor:
    """View a parameter's elements in the order of its memory, as reals."""
    if not is_dense(param):
        raise InvalidArgument(
            f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} has gaps or overlaps in its "
            "memory and can't be averaged: make it from a contiguous tensor"
        )
    return flat_memory(param)


def _chunks(memory: list[torch.Tensor], most: int) -> Iterator[tuple[list[torch.Tensor], list[int]]]:
    """Yield parts of 1-D tensors that together have at most `most` elements, and their offsets."""
    parts, offsets, used = [], [], 0
    for each in memory:
        begin = 0
        while begin < each.numel():
            end = min(each.numel(), begin + most - used)
            parts.append(each[begin:end])
            offsets.append(used)
            used += end - begin
            begin = end
            if used == most:
                yield parts, offsets
                parts, offsets, used = [], [], 0
    if parts:
        yield parts, offsets


# ---- The step post-hook of all optimizers.

_instances: list[weakref.ref] = []  # in the order in which they were made, which is the same on all ranks
_handle = None


def _register(local: LocalSGD) -> None:
    global _handle
    _instances.append(weakref.ref(local, _unregister))
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_post_step_hook)


def _unregister(reference) -> None:
    global _handle
    _instances.remove(reference)
    if not _instances and _handle is not None:
        _handle.remove()
        _handle = None


def _post_step_hook(optimizer, args, kwargs) -> None:
    for reference in list(_instances):
        local = reference()
        if local is not None:
            local.average_after_step(optimizer)
