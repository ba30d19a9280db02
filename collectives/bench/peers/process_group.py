"""torch.distributed's process groups, which our rank processes call from Python: torch's own, Gloo
and NCCL, and that of our backend, which shows what torch.distributed adds to our communicator.
"""

from __future__ import annotations

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
from ..implementation import InProcessImplementation, PeerMissing

__all__ = ["ProcessGroupPeer"]

_LIMIT = timedelta(seconds=300)  # of one collective
_BACKENDS = {"backend": "collectives"}  # by the peer's name, where it is another one
_TYPES = {
    "backend": "int8 uint8 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split(),
    "gloo": "int8 uint8 int32 int64 float16 bfloat16 float32 float64".split(),
    "nccl": "int8 uint8 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split(),
}
_MOVES_ONLY = ("float8_e4m3fn", "float8_e5m2")


class ProcessGroupPeer(InProcessImplementation):
    """torch.distributed's process group over all ranks. Raises `PeerMissing`."""

    def __init__(self, backend: str, comm: Communicator, control: Control):
        super().__init__(comm.rank)
        self.backend = backend
        # Ours has that engine, too.
        self.name = {"nccl": "torch nccl", "backend": "c10d backend"}.get(backend, backend)
        self.size = comm.size
        # Gloo's own thread must run, too: bound to a core it was slower by a tenth to a third.
        self.binds = backend != "gloo"
        self.device = comm.device
        if backend == "nccl" and comm.device.type != "cuda":
            raise PeerMissing(
                "torch's NCCL needs GPUs, and ours is measured on the host"
                if torch.cuda.is_available()
                else "torch's NCCL needs GPUs, and there is none"
            )
        if backend == "gloo" and comm.device.type != "cpu":
            raise PeerMissing("Gloo is measured on host memory only: --engine host")
        if not dist.is_available() or not dist.is_backend_available(_BACKENDS.get(backend, backend)):
            raise PeerMissing(f"not installed (this torch, {torch.__version__}, is built without it)")
        versions = {"torch": torch.__version__}
        if backend == "backend":
            versions["collectives"] = __version__
        if backend == "nccl":
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        self.fields = {"engine": backend, "versions": versions}
        name = _BACKENDS.get(backend, backend)
        store = dist.HashStore() if comm.size == 1 else dist.PrefixStore(f"bench/{backend}", control.store)
        if not dist.is_initialized():
            dist.init_process_group(name, store=store, rank=comm.rank, world_size=comm.size, timeout=_LIMIT)
            self.group = dist.group.WORLD
        else:
            self.group = dist.new_group(backend=name, timeout=_LIMIT)

    def barrier(self) -> None:
        dist.barrier(self.group)
        if self.device.type != "cpu":
            torch.cuda.synchronize()

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        name, kind = case.op.name, case.kind.name
        if in_place and not case.op.in_place:
            return f"{name} has no form in place"
        if not in_place and name in ("all_reduce", "broadcast", "reduce"):
            return f"torch's {name} is in place only"
        if kind not in _TYPES[self.backend] or (case.redop and kind in _MOVES_ONLY):
            return f"torch's {self.backend} has no {kind}"
        if case.redop in ("avg", "mulsum") and self.backend == "gloo":
            return f"Gloo has no reduction {case.redop!r}"
        return None

    def make_call(self, case: Case, buffers: Buffers):
        name, root, group = case.op.name, case.root, self.group
        send, recv, at_root = buffers.send, buffers.recv, self.rank == case.root
        op = None
        if case.redop == "mulsum":
            op = premul_sum(float(MULSUM))
        elif case.redop:
            op = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}.get(
                case.redop, dist.ReduceOp.AVG if case.redop == "avg" else dist.ReduceOp.SUM
            )
        if name == "all_reduce":
            return partial(dist.all_reduce, recv, op, group)
        if name == "reduce":
            return partial(dist.reduce, recv, root, op, group)
        if name == "broadcast":
            return partial(dist.broadcast, recv, root, group)
        if name == "reduce_scatter":
            return partial(dist.reduce_scatter_tensor, recv, send, op, group)
        if name == "all_gather":
            return partial(dist.all_gather_into_tensor, recv, send, group)
        if name == "all_to_all":
            return partial(dist.all_to_all_single, recv, send, group=group)
        if name == "gather":
            return partial(dist.gather, send, list(recv.chunk(self.size)) if at_root else None, root, group)
        if name == "scatter":
            return partial(dist.scatter, recv, list(send.chunk(self.size)) if at_root else None, root, group)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.device.type == "cuda":
            both = [dist.P2POp(dist.isend, send, after, group), dist.P2POp(dist.irecv, recv, before, group)]

            def batched():
                for work in dist.batch_isend_irecv(both):
                    work.wait()

            return batched

        def sendrecv():
            sent, got = dist.isend(send, after, group), dist.irecv(recv, before, group)
            got.wait()
            sent.wait()

        return sendrecv

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()  # of the other backend, too: all groups end together
