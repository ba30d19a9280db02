"""Hooks around optimizer steps: refuse optimizers that can't step shards, and reshard after the
step.

- Optimizers that use a parameter as a whole (its rows and columns, its norm, its singular values)
  are refused: a shard has none of these. They are recognised by their class, at their first step.
- Optimizers that split the parameters over the ranks themselves (torch's ZeroRedundancyOptimizer)
  are refused: they take parameters to be equal on all ranks, and would overwrite one rank's shards
  with another's. They are recognised in the same way.
"""

from __future__ import annotations

import functools
import re

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InvalidUsage
from ..optim import FusedOptimizer
from .scheduler import Scheduler, find_schedulers, find_units, open_schedulers

__all__ = ["check_elementwise", "register_optimizer_hooks", "replaced", "trim_pool"]

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


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise `InvalidUsage` where an optimizer that can't step shards has some; whole parameters are
    allowed.
    """
    exchanges = _exchanges(type(optimizer))
    if _is_elementwise(type(optimizer)) and not exchanges:
        return
    units = find_units(param for group in optimizer.param_groups for param in group["params"])
    split = [unit for unit in units if unit.ranks.shard is not None]
    if not split:
        return
    name = type(optimizer).__name__
    problem = (
        f"takes parameters to be equal on all ranks, and each rank has other pieces of {split[0]!r}: step with the "
        "optimizer inside of it; each rank steps its pieces alone already"
        if exchanges
        else "looks at a parameter as a whole (its rows, its norm, or all parameters at once), and this rank has a "
        "piece of it: use an optimizer that works element by element (SGD, Adam, AdamW, ...), give the parameters of "
        f"{split[0]!r} to another one, or keep them whole by ignored_params or ShardingStrategy.NO_SHARD"
    )
    raise InvalidUsage(f"{name} {problem}", op=f"{name}.step", rank=split[0].ranks.world.rank)


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


@functools.cache
def register_optimizer_hooks() -> None:
    """Register the hooks on all optimizers, once."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
