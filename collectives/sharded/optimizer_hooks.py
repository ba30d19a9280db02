"""Hooks around optimizer steps: refuse optimizers that can't step shards, and reshard after the
step.

- Optimizers that use a parameter as a whole (its rows and columns, its norm, its singular values)
  are refused: a shard has none of these. They are recognised at their first step, by the names of
  their classes, and classes that aren't known by a trial on tiny parameters.
- Optimizers that split the parameters over the ranks themselves (torch's ZeroRedundancyOptimizer)
  are refused: they take parameters to be equal on all ranks, and would overwrite one rank's shards
  with another's. They are recognised by their names.
"""

from __future__ import annotations

import functools
import re
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InvalidArgument, InvalidUsage
from ..optim import FusedOptimizer
from .full_param_optimizer import FullParamOptimizer
from .optimizer_trial import differs_on_shards
from .scheduler import Scheduler, find_schedulers, find_units, open_schedulers

__all__ = [
    "check_elementwise", "register_elementwise_optimizer", "register_optimizer_hooks", "replaced", "trim_pool",
]  # fmt: skip

# Parts of the names of such classes, in lower case and without "_"...
_PARTS = re.compile("adafactor|muon|shampoo|novograd|lbfgs|adammini|dadapt|prodigy|galore")
# ... and whole words of them, which are too short to be looked for as parts.
_WORDS = {"lamb", "lars", "larc", "soap", "came", "sm3", "kfac", "psgd", "sgdp", "adamp", "spam", "ranger"}


@functools.cache
def _exchanges(cls: type) -> bool:
    """Whether a class exchanges parameters between the ranks."""
    return any("zeroredundancy" in each.__name__.replace("_", "").lower() for each in cls.__mro__)


@functools.cache
def _is_elementwise(cls: type) -> bool:
    for each in cls.__mro__:
        if each in (torch.optim.Optimizer, object):
            continue
        words = re.findall(r"[A-Z]+[0-9]*(?![a-z])|[A-Z]?[a-z]+[0-9]*", each.__name__)
        if _PARTS.search(each.__name__.replace("_", "").lower()) or _WORDS & {
            form for word in map(str.lower, words) for form in (word, word.rstrip("0123456789"))
        }:
            return False
    return True


# torch's classes that are known to work element by element: no trial is made of these, but of their subclasses.
_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD SparseAdam"
_KNOWN = {getattr(torch.optim, name) for name in _NAMES.split()} | {FullParamOptimizer}
_registered: set[type] = set()  # what users have registered
_checked = weakref.WeakSet()  # optimizers that may step shards


def register_elementwise_optimizer(optimizer_class: type) -> type:
    """Let optimizers of a class step shards, whatever its name is and a trial finds; return the class.

    Each element of a parameter must be stepped by what that element, its gradient and its state are
    alone, or the ranks train something else than one process does. For this class and not its
    subclasses. Also a class decorator. Raises `InvalidArgument` for what is no optimizer's class.
    """
    if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, torch.optim.Optimizer):
        raise InvalidArgument(
            f"register_elementwise_optimizer takes a subclass of torch.optim.Optimizer, not {optimizer_class!r:.60}",
            op="register_elementwise_optimizer",
        )
    _registered.add(optimizer_class)
    return optimizer_class


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidUsage` where an optimizer that can't step shards has some; whole parameters are
    allowed.
    """
    cls = type(optimizer)
    if cls in _KNOWN or cls in _registered or isinstance(optimizer, FusedOptimizer) or optimizer in _checked:
        return
    units = find_units(param for group in optimizer.param_groups for param in group["params"])
    split = [unit for unit in units if unit.ranks.shard is not None]
    if not split:
        return
    name, by_name, dims = cls.__name__, not _is_elementwise(cls), _dims_of_shards(optimizer, split)
    if _exchanges(cls):
        problem = (
            f"takes parameters to be equal on all ranks, and each rank has other pieces of {split[0]!r}: step with the "
            "optimizer inside of it; each rank steps its pieces alone already"
        )
    elif by_name or differs_on_shards(optimizer, dims):
        problem = "looks at a parameter as a whole (its rows, its norm, or all parameters at once)" + (
            "," if by_name else "; a trial on tiny parameters gave other results for their parts;"
        )
        problem += (
            f" and this rank has a piece of it: let collectives.sharded.FullParamOptimizer(params, {name}, ...) step "
            "whole parameters, each on one rank, use an optimizer that works element by element (SGD, Adam, AdamW, "
            f"...), or keep the parameters of {split[0]!r} whole by ignored_params or ShardingStrategy.NO_SHARD; if "
            f"{name} does work element by element, say so by collectives.sharded.register_elementwise_optimizer"
        )
    else:
        if any(dims):
            _checked.add(optimizer)
        return
    raise InvalidUsage(f"{name} {problem}", op=f"{name}.step", rank=split[0].ranks.world.rank)


def _dims_of_shards(optimizer: torch.optim.Optimizer, units) -> list[set[int]]:
    """Return the numbers of dimensions of the shards with a gradient in each param group."""
    shards = {id(param.shard) for unit in units for param in unit.params}
    return [
        {param.dim() for param in group["params"] if id(param) in shards and param.grad is not None}
        for group in optimizer.param_groups
    ]


# Parameters that were replaced by shards -> their names. An optimizer, or another module, may still
# hold them.
replaced = WeakIdKeyDictionary()


def _before_step(optimizer, _args, _kwargs) -> None:
    """Refuse optimizers that can't step shards, and trim the pool for torch's optimizers."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in replaced:
                raise InvalidUsage(
                    f"the optimizer holds {replaced[param]}, which was sharded after the optimizer was made: make the "
                    "optimizer from the sharded module's parameters()",
                    op=f"{type(optimizer).__name__}.step",
                )
    check_elementwise(optimizer)
    for scheduler in open_schedulers():
        scheduler.host_copies.wait()  # with offloading, all-gathers may still read what the step writes
    if not isinstance(optimizer, FusedOptimizer):  # torch's, whose temporaries are as large as the parameters
        for scheduler in find_schedulers(param for group in optimizer.param_groups for param in group["params"]):
            trim_pool(scheduler)


def trim_pool(scheduler: Scheduler) -> None:
    """Unmap the pool's idle blocks, where parameters are resharded after the forward. Elsewhere the
    blocks are many, and the peak of memory has passed.
    """
    if any(unit.reshard_after_forward and unit.gathers and not unit.persistent for unit in scheduler.units):
        scheduler.pool.trim()


def _after_step(optimizer, _args, _kwargs) -> None:
    """Reshard what is gathered, since the shards are newer."""
    for unit in find_units(param for group in optimizer.param_groups for param in group["params"]):
        unit.post_optim_step()
        if unit.scheduler.graph_task is None:  # else each rank steps the parameters of which it has a part
            unit.scheduler.count_step()


@functools.cache
def register_optimizer_hooks() -> None:
    """Register the hooks on all optimizers, once."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
