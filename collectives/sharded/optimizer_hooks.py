"""What can't be right on pieces, and is refused in place of wrong in silence.

- Optimizers that look at a parameter as a whole (its rows and columns, its norm, its singular values): a piece has none
  of these. Recognised by their class, at their first step.
- Optimizers that share out the parameters over the ranks themselves (torch's ZeroRedundancyOptimizer): they take
  them to be equal on all ranks, and would overwrite one rank's pieces with another's. Recognised in the same way.
- torch.distributed.checkpoint.state_dict's functions of optimizers: each rank's pieces would be taken for all of the
  state. They all begin a state by one function of that module, which is changed here to raise.
"""

from __future__ import annotations

import functools
import re

import torch
from torch.distributed.checkpoint import state_dict as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InvalidUsage
from ..optim import _Optimizer
from .scheduler import find_schedulers, find_units, open_schedulers

__all__ = ["check_elementwise", "patch_dcp_optimizer_state", "register_optimizer_hooks", "replaced"]

# What the names of such classes contain, without "_" and in small letters...
_PARTS = re.compile("adafactor|muon|shampoo|novograd|lbfgs|adammini|dadapt|prodigy|galore")
# ... or have as one of their words: too short to be looked for anywhere.
_WORDS = {"lamb", "lars", "larc", "soap", "came", "sm3", "kfac", "psgd", "sgdp", "adamp", "spam", "ranger"}


# Of those that exchange parameters between the ranks.
_EXCHANGING = re.compile("zeroredundancy")


@functools.cache
def _exchanges(cls: type) -> bool:
    return any(_EXCHANGING.search(each.__name__.replace("_", "").lower()) for each in cls.__mro__)


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
    """Raise `InvalidUsage` where an optimizer that can't step pieces holds some, but for whole ones."""
    exchanges = _exchanges(type(optimizer))
    if _is_elementwise(type(optimizer)) and not exchanges:
        return
    units = find_units(param for group in optimizer.param_groups for param in group["params"])
    split = [unit for unit in units if unit.ranks.shard is not None]
    if split and exchanges:
        raise InvalidUsage(
            f"{type(optimizer).__name__} takes parameters to be equal on all ranks, and each rank has other pieces of "
            f"{split[0]!r}: step with the optimizer inside of it; each rank steps its pieces alone already",
            op=f"{type(optimizer).__name__}.step", rank=split[0].ranks.world.rank,
        )  # fmt: skip
    if split:
        raise InvalidUsage(
            f"{type(optimizer).__name__} looks at a parameter as a whole (its rows, its norm, or all parameters at "
            "once), and this rank has a piece of it: use an optimizer that works element by element (SGD, Adam, AdamW, "
            f"...), give the parameters of {split[0]!r} to another one, or keep them whole by ignored_params or "
            "ShardingStrategy.NO_SHARD",
            op=f"{type(optimizer).__name__}.step", rank=split[0].ranks.world.rank,
        )  # fmt: skip


@functools.cache
def patch_dcp_optimizer_state() -> None:
    """Let torch.distributed.checkpoint.state_dict's functions raise for optimizers of pieces.

    ``get_state_dict``, ``get_optimizer_state_dict``, ``set_state_dict`` and ``set_optimizer_state_dict`` call this one
    by its name in their module, so that it doesn't matter who has imported them, and when.
    """
    begin = torchs._init_optim_state

    @functools.wraps(begin)
    def _init_optim_state(optim, *args, **kwargs):
        if find_units(param for group in optim.param_groups for param in group["params"]):
            raise InvalidUsage(
                "torch.distributed.checkpoint.state_dict's functions take this rank's pieces for the optimizer's whole "
                "state: use collectives.sharded.get_optimizer_state_dict and set_optimizer_state_dict (with "
                "get_model_state_dict and set_model_state_dict in place of get_state_dict and set_state_dict), or "
                "collectives.sharded.save and load",
                op="get_optimizer_state_dict",
            )
        return begin(optim, *args, **kwargs)

    torchs._init_optim_state = _init_optim_state


# Parameters that were replaced by pieces -> their names: an optimizer, or another module, may still hold them.
replaced = WeakIdKeyDictionary()


def _before_step(optimizer, _args, _kwargs) -> None:
    """Refuse what an optimizer can't have meant, and give one of torch's the memory that nothing is gathered into."""
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
        scheduler.host_copies.wait()  # gathers may still read what the step writes, where pieces lie on the host
    if not isinstance(optimizer, _Optimizer):  # torch's, with temporaries as large as the parameters
        for scheduler in find_schedulers(param for group in optimizer.param_groups for param in group["params"]):
            # Where parameters stay gathered until the backward, the blocks are many, and the peak is past.
            if any(unit.reshard_after_forward and unit.gathers and not unit.persistent for unit in scheduler.units):
                scheduler.pool.trim()


def _after_step(optimizer, _args, _kwargs) -> None:
    """Let go of what is gathered, since the pieces are newer."""
    for unit in find_units(param for group in optimizer.param_groups for param in group["params"]):
        unit.post_optim_step()


@functools.cache
def register_optimizer_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
