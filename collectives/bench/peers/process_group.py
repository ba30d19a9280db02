"""torch.distributed's process groups, of any backend: torch's Gloo, NCCL, MPI and UCC, and ours.

Our own backend, "collectives", shows what torch.distributed adds to our communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ... import __version__
from ...comm.communicator import Communicator
from ...torch_compat import premul_sum
from ..buffers import Buffers
from ..cases import MULSUM, Case
from ..control import Control
from ..implementation import InProcessImplementation, PeerMissing, Unsupported

__all__ = ["ProcessGroupPeer"]

_LIMIT = timedelta(seconds=300)  # of one collective
_OPS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}  # fmt: skip
# torch 2.13 has other names for two of them, and warns of the old ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupPeer(InProcessImplementation):
    """torch.distributed's process group over all ranks. Raises `PeerMissing`.

    ``backend``: its name in ``init_process_group``.
    """

    def __init__(self, backend: str, comm: Communicator, control: Control):
        super().__init__(comm.rank)
        # Ours is called by its engine's name, which is "nccl", too.
        self.name = {"nccl": "torch nccl", "collectives": "c10d collectives"}.get(backend, backend)
        self.size, self.device = comm.size, comm.device
        self.is_bound = backend != "gloo"  # Gloo's own thread must run, too
        if not dist.is_backend_available(backend):
            raise PeerMissing(f"not installed (this torch, {torch.__version__}, is built without it)")
        devices = dist.Backend.backend_capability.get(backend, [])
        if devices and self.device.type not in devices:
            raise PeerMissing(f"it is for {' and '.join(devices)} memory, and ours is measured on {self.device.type}")
        if backend == "gloo" and self.device.type != "cpu":
            raise PeerMissing("Gloo is measured on host memory only: --engine host")
        try:
            if dist.is_initialized():
                self.group = dist.new_group(backend=backend, timeout=_LIMIT)
            else:
                store = dist.PrefixStore(f"bench/{backend}", control.store)
                dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=_LIMIT)
                self.group = dist.group.WORLD
        except (RuntimeError, ValueError) as error:
            raise PeerMissing(f"its group can't be opened: {error}") from error
        versions = {"torch": torch.__version__}
        if backend == "collectives":
            versions["collectives"] = __version__
        if backend == "nccl":
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        self.fields = {"engine": self.name, "versions": versions}

    def barrier(self) -> None:
        dist.barrier(self.group)
        if self.device.type != "cpu":
            torch.cuda.synchronize()

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        if not in_place and case.op.name in ("all_reduce", "broadcast", "reduce"):
            return f"torch's {case.op.name} is in place only"
        return None

    def make_first_call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except dist.DistError:  # of the connection
            raise
        except (RuntimeError, ValueError, TypeError) as error:  # the dtype, or the reduction
            raise Unsupported(str(error).partition("\n")[0]) from error

    def make_call(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        name, root, group = case.op.name, case.root, self.group
        send, recv, at_root = buffers.send, buffers.recv, self.rank == case.root
        op = premul_sum(float(MULSUM)) if case.redop == "mulsum" else _OPS.get(case.redop)
        return {
            "all_reduce": partial(dist.all_reduce, recv, op, group),
            "reduce_scatter": partial(_reduce_scatter, recv, send, op, group),
            "all_gather": partial(_all_gather, recv, send, group),
            "broadcast": partial(dist.broadcast, recv, root, group),
            "reduce": partial(dist.reduce, recv, root, op, group),
            "all_to_all": partial(dist.all_to_all_single, recv, send, group=group),
            "gather": partial(dist.gather, send, list(recv.chunk(self.size)) if at_root else None, root, group),
            "scatter": partial(dist.scatter, recv, list(send.chunk(self.size)) if at_root else None, root, group),
            "sendrecv": partial(self._send_and_receive, send, recv),
        }[name]

    def _send_and_receive(self, send: torch.Tensor, recv: torch.Tensor) -> None:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        both = [dist.P2POp(dist.isend, send, after, self.group), dist.P2POp(dist.irecv, recv, before, self.group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self.group)  # that of the first peer ends the others, too
