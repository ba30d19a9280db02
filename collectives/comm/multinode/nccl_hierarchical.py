"""NCCL's all-reduce, reduce-scatter and all-gather in two levels: inside of each machine, then between machines.

A choice (``collectives.init(hierarchical=True)``), since NCCL knows the machines by itself. In the place of the
binding's communicator; what it doesn't do in two levels it leaves to that one, `flat`: other operations, groups,
averages of integers, and for reduce-scatter and all-gather ranks that aren't numbered machine by machine.
"""

from __future__ import annotations

import torch

from ..._nccl import DTYPES, OPS
from ...arrays import ITEMSIZE
from ...cuda_state import stream_from_address
from ...errors import CollectivesError, InvalidUsage
from ..group import run_grouped
from .comm import NoShortWay
from .topology import Layout

__all__ = ["TwoLevels", "use_two_levels"]

_AVG, _SUM = OPS["avg"], OPS["sum"]
_INTEGERS = {code for name, code in DTYPES.items() if "int" in name}


def use_two_levels(comm) -> None:
    """Make a communicator reduce and gather in two levels from now on; nothing where all ranks are on one level."""
    layout = Layout(comm.machines, comm.rank)
    if 1 < len(layout.machines) < comm.size:
        with comm._guard():
            comm._native = TwoLevels(comm._native, layout, comm.device)
        comm._short = NoShortWay()


class TwoLevels:
    """A communicator of the binding's with two more beside it. ``layout``: as many ranks on each machine."""

    def __init__(self, flat, layout: Layout, device: torch.device):
        if len({len(ranks) for ranks in layout.machines}) > 1:
            told = ", ".join(str(len(ranks)) for ranks in layout.machines)
            raise InvalidUsage(
                f"hierarchical=True needs as many ranks on each machine, and there are {told}: leave it out, or start "
                "the job evenly",
                op="init", rank=flat.rank,
            )  # fmt: skip
        self.flat = flat
        self._layout = layout
        self._device = device
        self._rows = layout.in_rows
        self._inside = flat.split(layout.machine, layout.local)
        try:
            self._between = flat.split(layout.local, layout.machine)
        except BaseException:
            self._inside.abort()
            raise
        self._ops: dict[int, int] = {}  # premultiplied sums of `flat` -> those of `inside`
        self._scratch: dict[int, torch.Tensor] = {}  # on the host, by queue, in which its users follow each other
        self._old: list[torch.Tensor] = []  # may be in use yet

    def __getattr__(self, name: str):
        return getattr(self.flat, name)

    @property
    def machine_count(self) -> int:
        """The number of machines."""
        return len(self._layout.machines)

    def all_reduce(self, send, recv, count, dtype, op, stream=0, config=None) -> None:
        """Reduce-scatter inside, all-reduce of the piece between the machines, all-gather inside."""
        size, width = self._inside.size, ITEMSIZE[dtype]
        piece = count // size // 16 * 16
        if not piece or (op == _AVG and dtype in _INTEGERS):
            self.flat.all_reduce(send, recv, count, dtype, op, stream)
            return
        own = recv + self._inside.rank * piece * width
        self._inside.reduce_scatter(send, own, piece, dtype, self._ops.get(op, op), stream)
        self._between.all_reduce(own, own, piece, dtype, _SUM if op in self._ops else op, stream)
        self._inside.all_gather(own, recv, piece, dtype, stream)
        main = piece * size
        if main < count:
            self.flat.all_reduce(send + main * width, recv + main * width, count - main, dtype, op, stream)

    def reduce_scatter(self, send, recv, recvcount, dtype, op, stream=0, config=None) -> None:
        """Reduce-scatter inside, for each machine's ranks, then between the machines."""
        if not self._rows or not recvcount or (op == _AVG and dtype in _INTEGERS):
            self.flat.reduce_scatter(send, recv, recvcount, dtype, op, stream)
            return
        nbytes = recvcount * ITEMSIZE[dtype]
        scratch = self._borrow(nbytes * self._between.size, stream)
        sums = scratch.data_ptr()

        def inside(machine: int) -> None:
            block = send + machine * self._inside.size * nbytes
            self._inside.reduce_scatter(block, sums + machine * nbytes, recvcount, dtype, self._ops.get(op, op), stream)

        self._each_machine(inside)
        self._between.reduce_scatter(sums, recv, recvcount, dtype, _SUM if op in self._ops else op, stream)

    def all_gather(self, send, recv, sendcount, dtype, stream=0, config=None) -> None:
        """All-gather between the machines, then inside, for each machine's ranks."""
        if not self._rows or not sendcount:
            self.flat.all_gather(send, recv, sendcount, dtype, stream)
            return
        nbytes = sendcount * ITEMSIZE[dtype]
        scratch = self._borrow(nbytes * self._between.size, stream)
        blocks = scratch.data_ptr()
        self._between.all_gather(send, blocks, sendcount, dtype, stream)

        def inside(machine: int) -> None:
            to = recv + machine * self._inside.size * nbytes
            self._inside.all_gather(blocks + machine * nbytes, to, sendcount, dtype, stream)

        self._each_machine(inside)

    def create_premul_sum(self, value, dtype) -> int:
        """Make the op for both levels."""
        op = self.flat.create_premul_sum(value, dtype)
        self._ops[op] = self._inside.create_premul_sum(value, dtype)
        return op

    def destroy_op(self, op: int) -> None:
        """Free an op of `create_premul_sum`."""
        self._inside.destroy_op(self._ops.pop(op))
        self.flat.destroy_op(op)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit operations on all levels; host engine only."""
        for native in (self.flat, self._inside, self._between):
            native.set_timeout(seconds)

    def wait_for_calls(self) -> None:
        """Wait for the calls of other threads on all levels."""
        for native in (self.flat, self._inside, self._between):
            native.wait_for_calls()

    def async_error(self) -> int:
        """Give the first level's result that is no success."""
        codes = (native.async_error() for native in (self.flat, self._inside, self._between))
        return next((code for code in codes if code), 0)

    def abort(self) -> None:
        """End everything on all levels."""
        for native in (self._inside, self._between, self.flat):
            if native.handle:
                native.abort()

    def destroy(self) -> None:
        """Free all levels; the first error is raised when all have had their turn."""
        failed = None
        for native in (self._inside, self._between, self.flat):
            try:
                native.destroy()
            except CollectivesError as error:
                failed = failed or error
        self._scratch.clear()
        self._old.clear()
        if failed is not None:
            raise failed

    def _each_machine(self, call) -> None:
        run_grouped(self.flat.library, [(call, (machine,)) for machine in range(self._between.size)])

    def _borrow(self, nbytes: int, stream: int) -> torch.Tensor:
        """Give scratch memory to the operations of one stream.

        On CUDA it is that stream's own memory, so that letting go of it after the calls is in order, in a capture too.
        On the host a queue may come to the calls later: there it grows by doubling, and is kept until the end.
        """
        if self._device.type == "cuda":
            with torch.cuda.device(self._device), torch.cuda.stream(stream_from_address(stream, self._device)):
                return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        have = self._scratch.get(stream)
        if have is None or have.numel() < nbytes:
            if have is not None:
                self._old.append(have)
            size = 1 << max(12, (nbytes - 1).bit_length())
            self._scratch[stream] = have = torch.empty(size, dtype=torch.uint8)
        return have
