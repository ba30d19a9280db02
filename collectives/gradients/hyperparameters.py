"""Whether the ranks step with the same learning rates, momenta and so on, where each steps a part of the parameters.

On the host the ranks compare them before anything of a backward is reduced. On CUDA nobody is to wait: there each
backward's comparison comes back while later ones run, and is looked at when it is there.
"""

from __future__ import annotations

import struct

import torch

from ..comm.consensus import RankOptions
from ..cuda_state import has_completed
from ..errors import Mismatch

__all__ = ["Hyperparameters"]

_KEYS = (
    "lr", "momentum", "dampening", "nesterov", "betas", "eps", "amsgrad", "weight_decay", "decoupled_weight_decay",
    "maximize", "master_weights", "stochastic_rounding", "seed",
)  # fmt: skip
_WHAT = "the ranks step with different hyperparameters"
_CURE = "each rank steps a part of the parameters, and all parts need the same: set them, and step schedulers, alike"


class Hyperparameters:
    """The values of an optimizer's groups, compared between the ranks in each backward; a collective of all of them."""

    def __init__(self):
        self._values: list = []
        self._given: RankOptions | None = None
        self._compared = None  # the communicator of the last comparison that blocked
        self._own = self._everyones = self._on_host = self._copied = None

    def compare(self, comm, optimizer) -> None:
        """Raise `Mismatch` on all ranks where their values differ; on CUDA maybe some backwards later.

        There the values of device tensors aren't compared, and nothing is while a graph is captured.
        """
        if comm.size == 1:
            return
        values = [_plain(group) for group in optimizer.param_groups]
        changed = values != self._values
        if changed:
            told = {f"{key} of group {at}": value for at, each in enumerate(values) for key, value in each.items()}
            self._values, self._given = values, RankOptions(told)
        if comm._on_host or self._compared is not comm:
            self._given.verify_same(comm, _WHAT, _CURE, Mismatch)
            self._compared, self._own = comm, None
        elif not torch.cuda.is_current_stream_capturing():
            self._look(comm)
            self._exchange(comm, changed)

    def _exchange(self, comm, changed: bool) -> None:
        """Send these values' digest and the first learning rate, and have all ranks' copied to the host."""
        if self._own is None:
            self._own = torch.empty(2, dtype=torch.int64, device=comm.device)
            self._everyones = torch.empty(comm.size, 2, dtype=torch.int64, device=comm.device)
            self._on_host = torch.empty(comm.size, 2, dtype=torch.int64, pin_memory=True)
            self._copied = None
            changed = True
        if changed:  # by value: a copy from the host would wait
            self._own[0].fill_(self._given.digest)
            self._own[1].fill_(struct.unpack("q", struct.pack("d", self._rate()))[0])
        comm.all_gather(self._everyones, self._own, algorithm="native")
        if self._copied is None:
            self._on_host.copy_(self._everyones, non_blocking=True)
            self._copied = torch.cuda.current_stream(comm.device).record_event()

    def _rate(self) -> float:
        rate = self._values[0].get("lr")
        return float(rate) if isinstance(rate, int | float) else float("nan")

    def _look(self, comm) -> None:
        """Look at the last copy, if it is there."""
        if self._copied is None or not has_completed(self._copied):
            return
        self._copied = None
        rows = self._on_host.tolist()
        unlike = [rank for rank, row in enumerate(rows) if row != rows[comm.rank]]
        if unlike:
            rates = [struct.unpack("d", struct.pack("q", row[1]))[0] for row in rows]
            told = ", ".join(f"{rate!r} on rank {rank}" for rank, rate in enumerate(rates[:16]))
            raise Mismatch(
                f"{_WHAT}, in one of the last backwards (lr of group 0: {told}; here {self._values!r:.300}): {_CURE}",
                rank=comm.rank, peers=unlike,
            )  # fmt: skip


def _plain(group: dict) -> dict:
    """Give a group's values that a step depends on, as numbers; without those that are tensors on a GPU."""
    found = {key: _number(group[key]) for key in _KEYS if key in group}
    if not group.get("stochastic_rounding"):
        found.pop("seed", None)
    return found


def _number(value):
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" else None
    return tuple(map(_number, value)) if isinstance(value, tuple | list) else value
