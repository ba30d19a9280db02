"""Check of a sharded optimizer's hyperparameters: each rank steps a part of the parameters, and all
ranks must do it with the same learning rates, momenta and so on.

On the host the ranks compare them before anything of a backward is reduced. On CUDA no rank waits:
the result of each backward's comparison arrives while later backwards run, and is checked then.
"""

from __future__ import annotations

import struct

import torch

from ..comm.agree import ComparedValue, verify_same
from ..cuda_state import has_completed
from ..errors import Mismatch

__all__ = ["HyperparameterCheck"]

_KEYS = (
    "lr", "momentum", "dampening", "nesterov", "betas", "eps", "amsgrad", "weight_decay", "decoupled_weight_decay",
    "maximize", "master_weights", "stochastic_rounding", "seed",
)  # fmt: skip
_PROBLEM = "the ranks step with different hyperparameters"
_CURE = "each rank steps a part of the parameters, and all parts need the same: set them, and step schedulers, alike"


class HyperparameterCheck:
    """Compares the values of an optimizer's groups between the ranks in each backward.

    A collective.
    """

    def __init__(self):
        self._values: list = []
        self._compared_value: ComparedValue | None = None
        self._compared = None  # the communicator of the last comparison that blocked
        self._own = self._gathered = self._on_host = self._copied = None

    def compare(self, comm, optimizer) -> None:
        """Raise `Mismatch` on all ranks where their values differ.

        On CUDA it may be raised some backwards later. There the values of device tensors aren't
        compared, and nothing is compared while a graph is captured.
        """
        if comm.size == 1:
            return
        values = [_plain_values(group) for group in optimizer.param_groups]
        changed = values != self._values
        if changed:
            named = {f"{key} of group {at}": value for at, each in enumerate(values) for key, value in each.items()}
            self._values, self._compared_value = values, ComparedValue(named.items())
        if comm._on_host or self._compared is not comm:
            verify_same(comm, _PROBLEM, self._compared_value, _CURE)
            self._compared, self._own = comm, None
        elif not torch.cuda.is_current_stream_capturing():
            self._check_last(comm)
            self._exchange(comm, changed)

    def _exchange(self, comm, changed: bool) -> None:
        """All-gather the digest of the values and the first learning rate, and copy the result to
        the host.
        """
        if self._own is None:
            self._own = torch.empty(2, dtype=torch.int64, device=comm.device)
            self._gathered = torch.empty(comm.size, 2, dtype=torch.int64, device=comm.device)
            self._on_host = torch.empty(comm.size, 2, dtype=torch.int64, pin_memory=True, device="cpu")
            self._copied = None
            changed = True
        if changed:  # filled by value: a copy from the host would wait
            self._own[0].fill_(self._compared_value.digest)
            self._own[1].fill_(struct.unpack("q", struct.pack("d", self._first_lr()))[0])
        comm.all_gather(self._gathered, self._own)
        if self._copied is None:
            self._on_host.copy_(self._gathered, non_blocking=True)
            self._copied = torch.cuda.current_stream(comm.device).record_event()

    def _first_lr(self) -> float:
        rate = self._values[0].get("lr")
        return float(rate) if isinstance(rate, int | float) else float("nan")

    def _check_last(self, comm) -> None:
        """Check the last copy, if it has arrived."""
        if self._copied is None or not has_completed(self._copied):
            return
        self._copied = None
        rows = self._on_host.tolist()
        differing = [rank for rank, row in enumerate(rows) if row != rows[comm.rank]]
        if differing:
            rates = [struct.unpack("d", struct.pack("q", row[1]))[0] for row in rows]
            listed = ", ".join(f"{rate!r} on rank {rank}" for rank, rate in enumerate(rates[:16]))
            raise Mismatch(
                f"{_PROBLEM}, in one of the last backwards (lr of group 0: {listed}; here {self._values!r:.300}): "
                f"{_CURE}",
                rank=comm.rank, peers=differing,
            )  # fmt: skip


def _plain_values(group: dict) -> dict:
    """Return a group's values that a step depends on, as numbers; None for tensors on a GPU."""
    found = {key: _plain(group[key]) for key in _KEYS if key in group}
    if not group.get("stochastic_rounding"):
        found.pop("seed", None)
    return found


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" else None
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
