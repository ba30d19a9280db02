"""Post-local SGD: each rank steps on its own gradients, and every k-th step the ranks' models are averaged.

The model can be averaged only after the optimizer's step, and any torch.optim.Optimizer may make that: one hook for all
of them sees it, installed as long as there is a `LocalSGD`. Source: Lin, Stich, Patel, Jaggi, Don't Use Large
Mini-Batches, Use Local SGD, ICLR 2020 (arXiv 2018), and torch's post_localSGD_hook with PeriodicModelAverager.

Which step that is must be the same one on all ranks, or they wait for each other for ever. Steps can't be counted,
since a GradScaler leaves them out where this rank's gradients aren't finite; backwards can. So after the backward
after which the models are to be averaged the ranks agree on whether all of them will step: whether all have finite
gradients. If not they ask again after the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InvalidArgument, InvalidUsage
from ..kernels import Table, pack, unpack

__all__ = ["LocalSGD"]

_PIECE = 25 << 20  # bytes that are averaged at a time
_PATIENCE = 100  # backwards for which an average may wait; a GradScaler needs some 20 to find its first scale
_STEPS, _NOT_FINITE, _IDLE = 0.0, 1.0, 2.0  # what a rank says of a backward; the largest counts


class _Module:
    """The parameters whose gradients come in one backward, and how many there were."""

    def __init__(self, backwards: int = 0, waiting: int | None = None):
        self.backwards = backwards
        self.waiting = waiting  # since which backward an average is wanted; None: it isn't
        self.comm = None
        self.params: list[weakref.ref] = []  # in the order of the first backward's buckets
        self.due: set[int] = set()  # ids of those to be averaged after their optimizer's next step

    def living(self) -> list[torch.nn.Parameter]:
        return [param for param in (reference() for reference in self.params) if param is not None]


class LocalSGD:
    """Average gradients in the first `after` backwards, and then the model after every `every`-th.

    Backwards are those whose gradients DDP reduces, not those in `no_sync`. A module is averaged over its
    communicator's ranks after the first optimizer step that follows, each optimizer's parameters after its own step;
    buffers and optimizer states are not. Where a rank's gradients aren't finite, or are 0 throughout (DDP's `join`
    makes them on ranks that have run out of inputs), that waits for the next backward for which neither holds; so a
    GradScaler may leave out the steps of one rank alone. Ranks that decide otherwise whether to step are an error of
    the program: `Mismatch` on the host engine, a hang on NCCL.
    """

    def __init__(self, every: int, after: int = 0):
        for name, value, least in (("every", every, 1), ("after", after, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgument(f"{name} must be an int from {least} up, not {value!r:.60}")
        self.every = every
        self.after = after
        self._modules: list[weakref.ref] = []  # in the order of their first backwards; their parameters hold them
        self._module_of = WeakIdKeyDictionary()
        self._loaded: list[dict] = []
        self._current: _Module | None = None
        self._largest: list[torch.Tensor] = []  # magnitudes in the buckets of this backward, where they are asked for
        _join(self)

    # ---- A backward.

    def sees(self, comm, bucket) -> bool:
        """Take note of a bucket of a backward; tell whether its gradients must still be averaged."""
        module = self._find(bucket)
        module.comm = comm
        if module.backwards < self.after:
            return True
        if self._wanted(module):
            self._largest.append(torch.linalg.vector_norm(bucket.flat, torch.inf, dtype=_at_least_fp32(bucket.flat)))
        return False

    def end_backward(self) -> None:
        """Count the backward whose last bucket was seen.

        Where the model is to be averaged after it, blocks until all ranks have come. Raises `InvalidUsage` where that
        has been waiting for 100 backwards for finite gradients of all ranks or for an optimizer's step.
        """
        module, self._current = self._current, None
        if module is None:
            return
        wanted = self._wanted(module)
        module.backwards += 1
        if not wanted:
            return
        if module.waiting is None:
            module.waiting = module.backwards
        said = self._agree(module)
        late = module.backwards - module.waiting > _PATIENCE
        if late and said == _NOT_FINITE:
            raise InvalidUsage(
                f"the models were to be averaged after backward {module.waiting}, and in each of the {_PATIENCE} since "
                "then some rank's gradients were not finite"
            )
        if late and said == _STEPS:
            raise InvalidUsage(
                f"the models were to be averaged after backward {module.waiting}, and in {_PATIENCE} more no "
                "torch.optim.Optimizer with their parameters has stepped: where none does, call average()"
            )
        if said == _STEPS:
            module.due.update(id(param) for param in module.living())

    def _wanted(self, module: _Module) -> bool:
        """Whether the model is to be averaged after the backward under way."""
        local = module.backwards + 1 - self.after
        return local > 0 and (module.waiting is not None or local % self.every == 0)

    def _agree(self, module: _Module) -> float:
        """Find out whether all ranks will step."""
        largest, self._largest = self._largest, []
        peak = torch.stack([each.double() for each in largest]).amax()  # NaN where one is
        said = torch.where(peak.isfinite(), torch.where(peak == 0, _IDLE, _STEPS), _NOT_FINITE).reshape(1)
        module.comm.all_reduce(said, "max")
        return said.item()

    def _find(self, bucket) -> _Module:
        """Give the module that a bucket is of; a new one at its first backward."""
        if bucket.index == 0:
            self._current, self._largest = None, []
        module = self._current
        if module is None:
            known = (self._module_of.get(param) for param in bucket.params)
            module = next((each for each in known if each is not None), None)
        if module is None:
            module = _Module(**self._loaded.pop(0)) if self._loaded else _Module()
            self._modules.append(weakref.ref(module))
        for param in bucket.params:
            if param not in self._module_of:  # one that two modules share stays the first one's
                self._module_of[param] = module
                module.params.append(weakref.ref(param))
        self._current = module
        return module

    # ---- Averaging.

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Average what is due of an optimizer's parameters, now that it has stepped; blocks until all ranks have."""
        for module in self._living():
            if module.due:
                held = {id(param) for group in optimizer.param_groups for param in group["params"]}
                self._average(module, [param for param in module.living() if id(param) in held & module.due])

    def average(self) -> None:
        """Average all modules that have been seen, now, as at the end of training; all ranks must call it."""
        for module in self._living():
            self._average(module, module.living())

    def _average(self, module: _Module, params: list) -> None:
        if not params:
            return
        average(module.comm, params)
        module.due.difference_update(map(id, params))
        module.waiting = None

    def _living(self) -> list[_Module]:
        return [module for module in (reference() for reference in self._modules) if module is not None]

    # ---- What is kept.

    def state_dict(self) -> dict:
        """Give the counters, by module in the order of their first backwards."""
        counted = [{"backwards": module.backwards, "waiting": module.waiting} for module in self._living()]
        return {"modules": counted + self._loaded}

    def load_state_dict(self, state: dict) -> None:
        """Take what `state_dict` gave, for modules that are seen from now on, in their order."""
        self._loaded = [dict(each) for each in state["modules"]]
        self._modules, self._module_of, self._current = [], WeakIdKeyDictionary(), None


@torch.no_grad()
def average(comm, params: list[torch.nn.Parameter]) -> None:
    """Replace parameters by their averages over a communicator's ranks, 25 MiB at a time; all ranks must call it.

    Sums of bf16 and fp16 are rounded once, by the engine. Their version counters move, so that autograd and the
    optimizers' master weights notice.
    """
    for dtype in dict.fromkeys(param.dtype for param in params):
        memory = [_memory(param) for param in params if param.dtype is dtype]
        real = memory[0].dtype
        buffer = comm.empty(min(_PIECE // real.itemsize, sum(part.numel() for part in memory)), real)
        for parts, offsets in _pieces(memory, buffer.numel()):
            table = Table(parts, real, offsets=offsets)
            flat = buffer[: offsets[-1] + parts[-1].numel()]
            pack(table, flat)
            comm.all_reduce(flat, "avg")
            unpack(flat, table)


def _memory(param: torch.nn.Parameter) -> torch.Tensor:
    """View a parameter's elements in the order of its memory, as reals."""
    real = torch.view_as_real(param) if param.is_complex() else param
    if real.is_contiguous():
        return real.view(-1)
    inward = real.permute(sorted(range(real.dim()), key=real.stride, reverse=True))  # of channels last, say
    if not inward.is_contiguous():
        raise InvalidArgument(
            f"a parameter of shape {tuple(param.shape)} and strides {param.stride()} has gaps or overlaps in its "
            "memory and can't be averaged: make it from a contiguous tensor"
        )
    return inward.view(-1)


def _pieces(memory: list[torch.Tensor], most: int) -> Iterator[tuple[list[torch.Tensor], list[int]]]:
    """Give parts of 1-D tensors that together have no more than so many elements, and their offsets."""
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


def _at_least_fp32(values: torch.Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


# ---- The hook of all optimizers.

_living: list[weakref.ref] = []  # in the order in which they were made, which is the same on all ranks
_handle = None


def _join(local: LocalSGD) -> None:
    global _handle
    _living.append(weakref.ref(local, _leave))
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_stepped)


def _leave(reference) -> None:
    global _handle
    _living.remove(reference)
    if not _living and _handle is not None:
        _handle.remove()
        _handle = None


def _stepped(optimizer, args, kwargs) -> None:
    for reference in list(_living):
        local = reference()
        if local is not None:
            local.stepped(optimizer)
