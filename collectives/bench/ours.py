"""Our communicator as an implementation: algorithm, zero-copy and wire are the ways to use it."""

from __future__ import annotations

import inspect
from functools import partial

import torch

from .. import __version__
from .._nccl import OPS as CODES
from ..arrays import TORCH_CODES
from ..comm.communicator import Communicator
from ..kernels import Table, pack, unpack
from .buffers import Buffers
from .cases import MULSUM, Case, DataType
from .implementation import InProcessImplementation

__all__ = ["OurImplementation"]


class OurImplementation(InProcessImplementation):
    """A communicator, whose methods are called on arrays from torch or from ``comm.empty()``.

    For a reduction or broadcast out of place, which has no method, the binding is called
    (``ncclAllReduce`` with two addresses). ``algorithm``: "auto" leaves the choice to the library.
    """

    peer = False

    def __init__(self, comm: Communicator, algorithm: str, zero_copy: bool, wire: DataType | None):
        super().__init__(comm.rank)
        self.comm, self.algorithm, self.zero_copy, self.wire = comm, algorithm, zero_copy, wire
        self.device = comm.device
        self._wire_arrays = None
        nodes = len(comm.machines or ()) or 1
        engine = comm.engine.name + (f" on {nodes} machines" if nodes > 1 else "")
        words = [engine]
        words += [] if algorithm == "auto" else [algorithm]
        words += [wire.short] if wire else []
        words += ["zero-copy"] if zero_copy else []
        self.name = " ".join(words)
        self.fields = {
            "engine": engine,
            "algorithm": algorithm,
            "zero_copy": zero_copy,
            "wire": wire.name if wire else None,
            "versions": {"collectives": __version__, comm.engine.name: comm.engine.version, "torch": torch.__version__},
        }

    def allocate(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return self.comm.empty(n, dtype) if self.zero_copy else super().allocate(n, dtype)

    def barrier(self) -> None:
        self.comm.barrier()

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        direct = case.op.name in ("all_reduce", "reduce", "broadcast") and not in_place
        if in_place and not case.op.in_place:
            return f"{case.op.name} has no form in place"
        if direct and case.redop == "mulsum":
            return "the premultiplied sum is measured in place only"
        if self.algorithm == "auto":
            return None
        if direct:
            return f"{case.op.name} with a named algorithm is in place only" if self.algorithm != "native" else None
        if "algorithm" not in inspect.signature(self._method(case)).parameters:
            return None if self.algorithm == "native" else f"{case.op.name} has no algorithm but the library's"
        return None

    def prepare(self, case: Case, in_place: bool, arrays: int = 1) -> None:
        self._wire_arrays = None
        super().prepare(case, in_place, arrays)

    def release(self) -> None:
        super().release()
        self._wire_arrays = None

    def _method(self, case: Case):
        return getattr(self.comm, "send" if case.op.name == "sendrecv" else case.op.name)

    def make_call(self, case: Case, buffers: Buffers):
        if self.wire is None:
            return self._call_on(case, buffers.send, buffers.recv, buffers.in_place)
        if self.device.type == "cpu" and self.algorithm in ("native", "auto") and case.op.name == "all_reduce":
            wide = buffers.recv.dtype in (torch.float32, torch.float64)
            if wide and case.redop != "mulsum":
                return self._cast_in_engine(case, buffers)
        return self._cast(case, buffers)

    def _cast_in_engine(self, case: Case, buffers: Buffers):
        """Return the host engine's call that rounds the data while it copies them into the
        slots.
        """
        send = buffers.recv if buffers.in_place else buffers.send
        codes = TORCH_CODES[send.dtype], TORCH_CODES[self.wire.dtype], CODES[case.redop]
        return partial(self.comm._native.all_reduce_cast, send.data_ptr(), buffers.recv.data_ptr(), case.count, *codes)

    def _cast(self, case: Case, buffers: Buffers):
        """Return a call that casts to arrays of the wire's dtype, makes the call on these, and
        casts back.
        """
        layout, dtype = case.layout(self.rank), self.wire.dtype
        if self._wire_arrays is None:  # all calls of a case have these, fresh data or not
            if buffers.in_place:
                whole = self.allocate(layout.total, dtype)
                send = whole[layout.send_at : layout.send_at + layout.send]
                recv = whole[layout.recv_at : layout.recv_at + layout.recv]
            else:
                send, recv = self.allocate(layout.send, dtype), self.allocate(layout.recv, dtype)
            self._wire_arrays = send, recv
        send, recv = self._wire_arrays
        call = self._call_on(case, send, recv, buffers.in_place)
        sends = layout.send and (case.op.name != "broadcast" or self.rank == case.root)
        receives = layout.recv and (case.op.name != "reduce" or self.rank == case.root)
        before = partial(pack, Table([buffers.send], dtype), send) if sends else _nothing
        after = partial(unpack, recv, Table([buffers.recv], dtype)) if receives else _nothing

        def cast_and_call():
            before()
            call()
            after()

        return cast_and_call

    def _call_on(self, case: Case, send, recv, in_place: bool):
        comm, name, root = self.comm, case.op.name, case.root
        op = MULSUM if case.redop == "mulsum" else case.redop
        options = {} if self.algorithm == "auto" else {"algorithm": self.algorithm}
        if name in ("all_reduce", "reduce", "broadcast"):
            if not in_place:
                return self._out_of_place(case, send, recv)
            if name == "all_reduce":
                return partial(comm.all_reduce, recv, op, **options)
            return partial(comm.reduce, recv, root, op) if name == "reduce" else partial(comm.broadcast, recv, root)
        if name == "reduce_scatter":
            return partial(comm.reduce_scatter, recv, send, op, **options)
        if name == "all_gather":
            return partial(comm.all_gather, recv, send, **options)
        if name == "all_to_all":
            return partial(comm.all_to_all, recv, send)
        if name == "gather":
            return partial(comm.gather, recv if self.rank == root else None, send, root)
        if name == "scatter":
            return partial(comm.scatter, recv, send if self.rank == root else None, root)
        after, before = (self.rank + 1) % comm.size, (self.rank - 1) % comm.size

        def sendrecv():
            with comm.group():
                comm.send(send, after)
                comm.recv(recv, before)

        return sendrecv

    def _out_of_place(self, case: Case, send, recv):
        native, dtype = self.comm._native, TORCH_CODES[send.dtype]
        stream = 0 if self.device.type == "cpu" else torch.cuda.current_stream(self.device).cuda_stream
        pair = send.data_ptr(), recv.data_ptr(), case.count, dtype
        if case.op.name == "broadcast":
            return partial(native.broadcast, *pair, case.root, stream)
        rooted = (case.root,) if case.op.name == "reduce" else ()
        return partial(getattr(native, case.op.name), *pair, CODES[case.redop], *rooted, stream)


def _nothing():
    pass
