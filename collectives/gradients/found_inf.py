"""found_inf of GradScalers: a non-finite gradient in one rank's shard counts on every rank.

A scaler looks at its own rank's gradients. Ranks with other findings would go on with other scales,
and with a step that only some make. So torch's scalers exchange their findings, in one all-reduce
of a number, where a DDP hook has reduced only this rank's shard of the gradients: in ``unscale_``, or
in ``step`` for optimizers that unscale themselves. Sharded parameters need no exchange here:
`collectives.sharded.RaggedTensor` makes it where it is asked whether gradients are finite.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..torch_patches import patch_scaler_checks

__all__ = ["share_found_inf"]

_finders: list[Callable] = []


def share_found_inf(find_comms: Callable) -> None:
    """Let torch's scalers exchange their findings in shards' gradients from here on.

    `find_comms`: a function that returns the communicators over which an optimizer's gradients are
    sharded.
    """
    if find_comms not in _finders:
        _finders.append(find_comms)
    patch_scaler_checks(_all_reduce_found_inf)


def _all_reduce_found_inf(scaler, optimizer) -> None:
    """Make a scaler's findings in an optimizer's gradients the maximum of all ranks'."""
    state = scaler._per_optimizer_states[id(optimizer)]
    comms = [comm for find_comms in _finders for comm in find_comms(optimizer) if comm.size > 1]
    if not comms:
        return
    found = state["found_inf_per_device"]
    if not found:  # this rank has no gradients
        found[scaler._scale.device] = torch.zeros((), dtype=torch.float32, device=scaler._scale.device)
    for comm in comms:
        each = torch.stack([one.to(comm.device).reshape(()) for one in found.values()]).max().reshape(1)
        comm.all_reduce(each, "max")
        for one in found.values():
            one.copy_(each[0].to(one.device))
