"""Our communicator as an implementation; algorithm and memory are the ways to use it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .. import __version__
from ..comm.communicator import Communicator
from ..errors import InvalidArgument
from .buffers import Buffers
from .cases import MULSUM, Case
from .implementation import InProcessImplementation, Unsupported

__all__ = ["OurImplementation"]

_WITH_ALGORITHM = ("all_reduce", "reduce_scatter", "all_gather")


class OurImplementation(InProcessImplementation):
    """A communicator, whose methods are called on arrays from torch or from ``comm.empty()``.

    ``algorithm``: "native" is the library's, which a call without the argument takes.
    """

    is_ours = True

    def __init__(self, comm: Communicator, algorithm: str, zero_copy: bool):
        super().__init__(comm.rank)
        self.comm, self.algorithm, self.zero_copy = comm, algorithm, zero_copy
        self.device = comm.device
        nodes = len(comm.machines or ()) or 1
        engine = comm.engine.name + (f" on {nodes} machines" if nodes > 1 else "")
        self.name = " ".join([engine, *[algorithm] * (algorithm != "native"), *["zero-copy"] * zero_copy])
        self.fields = {
            "engine": engine,
            "algorithm": algorithm,
            "zero_copy": zero_copy,
            "versions": {"collectives": __version__, comm.engine.name: comm.engine.version, "torch": torch.__version__},
        }

    def allocate(self, n: int, dtype: torch.dtype) -> torch.Tensor:
        return self.comm.empty(n, dtype) if self.zero_copy else super().allocate(n, dtype)

    def barrier(self) -> None:
        self.comm.barrier()

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        name = case.op.name
        if not in_place and name in ("reduce", "broadcast"):
            return f"{name} is in place only"
        if self.algorithm == "native" or name in _WITH_ALGORITHM:
            return None
        return f"{name} has no algorithm but the library's"

    def make_first_call(self, call: Callable[[], object]) -> None:
        try:
            call()
        except InvalidArgument as error:  # raised on all ranks before anything is sent
            raise Unsupported(str(error)) from error

    def make_call(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        comm, name, root = self.comm, case.op.name, case.root
        send, recv, at_root = buffers.send, buffers.recv, self.rank == case.root
        op = MULSUM if case.redop == "mulsum" else case.redop
        options = {} if self.algorithm == "native" else {"algorithm": self.algorithm}
        out = {} if buffers.in_place else {"out": recv}
        after, before = (self.rank + 1) % comm.size, (self.rank - 1) % comm.size

        def sendrecv():
            with comm.group():
                comm.send(send, after)
                comm.recv(recv, before)

        return {
            "all_reduce": partial(comm.all_reduce, send, op, **out, **options),
            "reduce_scatter": partial(comm.reduce_scatter, recv, send, op, **options),
            "all_gather": partial(comm.all_gather, recv, send, **options),
            "broadcast": partial(comm.broadcast, recv, root),
            "reduce": partial(comm.reduce, recv, root, op),
            "all_to_all": partial(comm.all_to_all, recv, send),
            "gather": partial(comm.gather, recv if at_root else None, send, root),
            "scatter": partial(comm.scatter, recv, send if at_root else None, root),
            "sendrecv": sendrecv,
        }[name]
