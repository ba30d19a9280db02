"""The exception classes of this package. Every error that it raises is one of these.

Each carries the facts that a handler needs, apart from the sentence that a person reads: the
attributes of `CollectivesError`.
"""

from __future__ import annotations

from functools import partial

__all__ = [
    "Aborted",
    "CollectiveTimeout",
    "CollectivesError",
    "CudaError",
    "EngineUnavailable",
    "InternalError",
    "InvalidArgument",
    "InvalidUsage",
    "Mismatch",
    "MissingShards",
    "RemoteError",
    "TransportError",
]


_FIELDS = ("message", "code", "op", "rank", "peers", "seq", "nbytes", "detail", "tag")


class CollectivesError(RuntimeError):
    """Base of all errors of this package. Picklable; ``str()`` names the operation and the rank.

    Attributes:
        code: The ``ncclResult_t`` behind the error; None where there is none.
        op: The operation, such as ``"all_reduce"``; None where there is none.
        rank: The rank that raises; None where it isn't known.
        peers: The ranks that the error is about, maybe none.
        seq: The number of the operation.
        nbytes: The bytes of the operation.
        detail: The library's own words.
        tag: The name of the operation's tag, see `Communicator.tag`; None where it has none.
    """

    def __init__(
        self, message="", *, code=None, op=None, rank=None, peers=(), seq=None, nbytes=None, detail=None, tag=None
    ):  # fmt: skip
        self.message = str(message)
        self.code = code
        self.op = op
        self.rank = rank
        self.peers = tuple(peers)
        self.seq = seq
        self.nbytes = nbytes
        self.detail = detail if detail is not None else self.message
        self.tag = tag
        super().__init__(self.message)

    def __str__(self):
        op = f"{self.op} of {self.tag}" if self.op and self.tag else self.op or ""
        where = " ".join(part for part in (op, f"[rank {self.rank}]" if self.rank is not None else "") if part)
        return f"{where}: {self.message}" if where else self.message

    def __reduce__(self):
        return partial(type(self), **self._state()), ()

    def _state(self) -> dict:
        return {name: getattr(self, name) for name in _FIELDS}

    def with_addition(self, text: str) -> CollectivesError:
        """Return the same error with more text behind its message."""
        return type(self)(**{**self._state(), "message": self.message + text})


class EngineUnavailable(CollectivesError, ImportError):
    """An engine is not available, or its library is older and lacks a function.

    The message names the path and the symbol.
    """


class InvalidArgument(CollectivesError, ValueError):
    """An argument can't be used: its dtype, device, layout, size or range."""


class InvalidUsage(CollectivesError):
    """The call is not allowed now: a closed communicator, a forked child, an unmatched group."""


class Mismatch(InvalidUsage):
    """The ranks did not make the same call, or don't have the same options.

    Raised on every rank, with what each one called or has.
    """


class CudaError(CollectivesError):
    """CUDA or its driver reported an error (``ncclUnhandledCudaError``)."""


class TransportError(CollectivesError):
    """The system refused something between the ranks (``ncclSystemError``).

    Examples are sockets, shared memory and file descriptors.
    """


class InternalError(CollectivesError):
    """The library failed by a fault of its own (``ncclInternalError``)."""


class RemoteError(CollectivesError):
    """Another rank died or left; ``peers`` names it (``ncclRemoteError``)."""


class MissingShards(CollectivesError):
    """Shards died with all ranks that had them in memory; ``peers`` are the ranks whose they were."""


class CollectiveTimeout(CollectivesError, TimeoutError):
    """A wait exceeded its time limit; ``peers`` have not arrived (``ncclTimeout``)."""


class Aborted(CollectivesError):
    """``abort()`` on this rank has ended the operation."""
