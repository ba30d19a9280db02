"""Parameter reads: a module's forward that reads the parameters of another unit, without calling its
module, gathers that unit.

Modules do so: ``nn.MultiheadAttention`` computes with ``out_proj.weight``,
``nn.TransformerEncoderLayer`` in eval with the weights of all its inner modules, and a language
model's loss with ``lm_head.weight``. What they would read is a shard. So while a unit is sharded,
the ``_parameters`` of its modules are `GatheringParameters`, in which an attribute is looked up
(``module.weight``). ``module.parameters()`` and state dicts, which iterate, get shards.

A unit that was gathered for a read stays gathered until the forward that has read it ends.
"""

from __future__ import annotations

import threading
import weakref

import torch

from ..errors import InvalidUsage
from ..torch_compat import current_graph_task_id
from .module_changes import check_not_written, param_versions
from .saved_tensors import Buffer, saved_buffers
from .unit import Unit

__all__ = ["ForwardReads", "gather_at_reads"]


def gather_at_reads(unit: Unit) -> None:
    """Gather a unit where the forward of another module reads its parameters."""
    unit.registration.intercept_reads(weakref.ref(unit), _on_read)


class _Forwards(threading.local):
    """This thread's forwards in progress, the innermost last."""

    def __init__(self):
        self.running: list[ForwardReads] = []


_forwards = _Forwards()


def _on_read(reference: weakref.ref[Unit]) -> None:
    unit = reference()
    if unit is None or unit.is_unsharded_registered or unit.registration.has_substitutes:
        return
    if _forwards.running:
        _forwards.running[-1].gather(unit)
    # Activation checkpointing recomputes a part of a forward.
    elif unit.scheduler.graph_task is not None and current_graph_task_id() != -1:
        unit.scheduler.pre_forward(unit, True, prefetch=False)


class ForwardReads:
    """The units that a unit's forward in progress has gathered by its reads.

    `in_backward`: activation checkpointing recomputes it. `saves`: autograd saves tensors for the
    backward. `buffers`: those of which it saves references, see `look_up_saved_params`; None: it
    saves the tensors. A context manager.
    """

    def __init__(self, unit: Unit, in_backward: bool, saves: bool, buffers: list[Buffer] | None):
        self._unit = unit
        self._in_backward = in_backward
        self._saves = saves
        self._buffers = buffers
        self._versions: dict[Unit, list[int]] = {}  # unit -> its parameters' at the first read

    def __enter__(self):
        _forwards.running.append(self)
        return self

    def __exit__(self, kind, error, traceback):
        _forwards.running.remove(self)
        for unit, before in self._versions.items():
            unit.is_read = False
            if error is None:
                self._end(unit, before)

    def gather(self, unit: Unit) -> None:
        """Gather a unit; it stays gathered until the forward ends."""
        if self._buffers is None and self._saves and any(not group.shares_memory for group in unit.groups):
            raise InvalidUsage(
                f"the forward of {self._unit!r}, which has no shards, reads {unit.params[0].name} of {unit!r} without "
                "calling its module: make them one unit, or call the module",
                op="forward", rank=unit.ranks.world.rank,
            )  # fmt: skip
        unit.scheduler.pre_forward(unit, self._in_backward, prefetch=False)
        if self._buffers is not None:
            self._buffers += saved_buffers(unit)
        unit.is_read = True
        self._versions[unit] = param_versions(unit) if unit.gathers else []

    def _end(self, unit: Unit, before: list[int]) -> None:
        if self._in_backward:
            return
        if before:
            check_not_written(unit, before)
        scheduler, computes_gradients = unit.scheduler, torch.is_grad_enabled()
        if scheduler.reshards_after_forward(unit):
            unit.reshard(post_forward=computes_gradients)
        elif not scheduler.depth:  # of another communicator, none of whose units is in a forward
            unit.to_sharded() if computes_gradients else unit.reshard()
