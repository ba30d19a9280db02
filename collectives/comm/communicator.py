"""Communicator: the collectives of a set of ranks on torch, NumPy and CuPy arrays.

All arguments are checked before anything is sent. An operation has two paths: the short one in C,
of blocking calls on plain arrays (`_nccl.ArrayCalls`), which `with_fast_path` puts before a
method, and the full one in `operations`, which takes what the short one refuses. `arguments` has
the checks, `opening` and `closing` the begin and the end of a communicator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, overload

import torch

from .._nccl import TagOfCalls, with_fast_path
from ..arrays import Reader
from ..environment import read_switch
from ..errors import InvalidUsage
from ..torch_compat import untraced
from . import closing, flight_recorder, opening, operations
from .algorithms.executor import AlgorithmExecutor
from .arguments import parse_timeout
from .barrier import barrier
from .config import CommConfig, parse_config
from .cuda_queue import CudaQueue
from .engine import Engine
from .group import Group
from .host_queue import HostQueue
from .lifetime import ClosedHandle, open_comms
from .registration import CommMemory, Registration
from .watchdog import watch, watch_child
from .work import Work

if TYPE_CHECKING:
    from ..argument_types import Algorithm, Array, Op, Stream

__all__ = ["Communicator"]

_NO_GUARD = contextlib.nullcontext()


@untraced
class Communicator(CommMemory):
    """A set of ranks that call the same operations in the same order.

    `collectives.init()` makes one from the launcher's variables. The constructor blocks until all
    ranks have come.

    Arrays are torch tensors, NumPy arrays (host engine) and CuPy arrays (NCCL), contiguous and on
    the communicator's device. An operation uses an array where it lies, and autograd doesn't record
    the operation. An input that shares memory with an output, otherwise than in place, is copied
    first. On the host a call blocks until the operation is done; on CUDA it is ordered on torch's
    current stream, or on `stream`. With ``async_op=True`` it returns a `Work`.

    Every operation raises `InvalidArgument` for what can't be sent, `Mismatch` where the ranks
    don't make the same call (NCCL: with COLLECTIVES_CHECK=1), `RemoteError` where a rank died,
    `CollectiveTimeout` past the time limit, and `InvalidUsage` after `close()`. Where one rank's
    arguments can't be sent, it waits up to a second for the other ranks, which get a `Mismatch` (on
    the host, on one node). A communicator stays open until `close()`, `abort()` or the interpreter's
    end, even if the program drops it.

    Args:
        engine: The library, from `collectives.comm.engine.get_engine`.
        unique_id: 128 bytes, the same on all ranks.
        rank: The number of this rank, from 0.
        size: The number of ranks.
        device: The device whose memory is sent.
        local_rank: The number of this rank among those of its node.
        local_size: The number of ranks on this rank's node. None: all ranks on the host, 1 with
            NCCL.
        timeout: The limit of one operation, in seconds. None: no limit.
        peers: A record for each rank, which becomes the attribute `peers`.
        deterministic: all_reduce, reduce_scatter and all_gather reduce in rank order, so that the
            bits depend on the arrays alone: with the algorithm "native" or "direct" on the host,
            with "direct" on NCCL. The same on all ranks; children inherit it.
        config: A `CommConfig` or a dict of its fields, the same on all ranks; children inherit it.
        native: The open binding object, if there is one already.
        agrees: False opens the communicator without the collective by which the ranks compare their
            settings, for sends and receives alone.
    """

    engine: Engine
    """The loaded library, and the type of its device."""
    rank: int
    """The number of this rank, from 0."""
    size: int
    """The number of ranks."""
    local_rank: int
    """The number of this rank among those of its node."""
    local_size: int
    """The number of ranks on this rank's node."""
    device: torch.device
    """The device whose memory is sent."""
    config: CommConfig
    """The settings of NCCL with which it was opened."""
    tag: int = TagOfCalls()
    """The tag of the calls from now on, a number of `collectives.comm.make_tag`; 0: none.

    The ranks of the host engine on one node compare it with each collective: where their tags differ,
    all raise `Mismatch` with the tags' names. Errors, the watchdog and the flight recorder name it on
    all engines. The calls of a `group` have the tag that is set when the group ends."""
    peers: tuple | None
    """A record for each rank, with its ``rank``, ``host``, ``pid`` and ``device``; None where the
    ranks have not exchanged them."""

    def __init__(
        self, engine: Engine, unique_id: bytes, rank: int, size: int, *,
        device, local_rank: int = 0, local_size: int | None = None, timeout: float | None = 1800.0, peers=None,
        deterministic: bool = False, config: CommConfig | dict | None = None, native=None, agrees: bool = True,
    ):  # fmt: skip
        config = parse_config(config)
        native, device = opening.open_native(engine, unique_id, rank, size, device, config, native)
        self._initialize(native, engine, device, local_rank, local_size, timeout, bool(deterministic), config, peers)
        flight_recorder.attach(self, sha256(unique_id).hexdigest()[:12])
        if agrees:
            opening.agree(self)

    def _initialize(
        self, native, engine, device, local_rank, local_size, timeout, deterministic, config, peers=None, chunk=0
    ):  # fmt: skip
        self.engine, self.device, self.config, self.peers = engine, device, config, peers
        self._deterministic, self._chunk = deterministic, chunk  # the ranks agree on the first one's when it is opened
        self._native, self._on_host = native, engine.device_type == "cpu"
        try:
            self._open(local_rank, local_size, timeout)
        except BaseException:
            closing.discard(self)
            raise

    def _open(self, local_rank, local_size, timeout):
        self.rank, self.size = self._native.rank, self._native.size
        self.local_rank = local_rank
        self.local_size = (self.size if self._on_host else 1) if local_size is None else local_size
        self._checks_calls = read_switch("COLLECTIVES_CHECK") and not self._on_host
        self._reader = Reader(self.device, self.rank)
        self._queue = HostQueue(self) if self._on_host else CudaQueue(self)
        self._fast_path = opening.open_array_calls(self)
        self._algorithms: AlgorithmExecutor | None = None
        self._registrations: set[Registration] = set()
        self._owned: list = []  # communicators and others that end with this one, in the order of opening
        self._barrier_tensor = None
        self._flight: flight_recorder.Flight | None = None
        self._refusal: tuple | None = None  # of the last call that this rank alone couldn't make: `parts.refuse_call`
        self._child_count = 0  # splits and shrinks, which all ranks make in one order
        self.timeout = timeout
        open_comms[id(self)] = self
        if not self._on_host:
            watch(self)

    @property
    def timeout(self) -> float | None:
        """Limit of one operation in seconds; None: no limit.

        An operation past it fails with `CollectiveTimeout` and ends the communicator. NCCL has no
        such limit: there a watchdog thread aborts the communicator some two seconds after the
        limit, and the next wait, operation or `close()` raises the error.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None):
        self._timeout = parse_timeout(seconds, self.rank)
        if self._on_host:
            self._native.set_timeout(seconds)

    @property
    def machines(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of each node, in the order of the nodes' first ranks; None if not known.

        They are known for the communicators that `init()` and the DDP hook open, and on the host.
        """
        return opening.ranks_by_node(self)

    @property
    def deterministic(self) -> bool:
        """Whether reductions are in rank order only."""
        return self._deterministic

    @property
    def closed(self) -> bool:
        """Whether `close()` or `abort()` was called, or this is a forked child."""
        return type(self._native) is ClosedHandle

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy, which can't be used."""
        return type(self._native) is ClosedHandle and self._native.forked

    def __repr__(self):
        state = f", {self._native.reason}" if self.closed else ""
        return f"<Communicator rank {self.rank} of {self.size}, engine {self.engine.name} on {self.device}{state}>"

    def __reduce__(self):
        raise InvalidUsage("a communicator can't be pickled or copied: open one in each process", rank=self.rank)

    @overload
    def all_reduce(
        self, array: Array, op: Op = "sum", *, async_op: Literal[False] = False, algorithm: Algorithm | None = None,
        stream: Stream = None, share: Array | None = None, out: Array | None = None
    ) -> None: ...

    @overload
    def all_reduce(
        self, array: Array, op: Op = "sum", *, async_op: Literal[True], algorithm: Algorithm | None = None,
        stream: Stream = None, share: Array | None = None, out: Array | None = None
    ) -> Work: ...

    @overload
    def all_reduce(
        self, array: Array, op: Op = "sum", *, async_op: bool, algorithm: Algorithm | None = None,
        stream: Stream = None, share: Array | None = None, out: Array | None = None
    ) -> Work | None: ...

    @with_fast_path
    def all_reduce(
        self, array: Array, op: Op = "sum", *, async_op: bool = False, algorithm: Algorithm | None = None,
        stream: Stream = None, share: Array | None = None, out: Array | None = None
    ) -> Work | None:
        """Reduce `array` over all ranks, in place, or into `out`; every rank gets the result.

        C: ncclAllReduce, and collHostAllReduceShare with `share`.

        Args:
            array: The array to reduce, of any of NCCL's 12 dtypes. With `out` it is not changed.
            op: "sum", "prod", "max", "min", "avg", a ``torch.distributed.ReduceOp``, or a number:
                each rank's array is multiplied by its number, then summed.
            async_op: Return a `Work` at once.
            algorithm: "native", the library's own; "ring" or "direct", which can't be used in a
                group. None: "native", or what `deterministic` asks for.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
            share: An array of 2 float64. The pass over the data adds to it this rank's share of the
                result's [sum of squares, count of non-finite elements] when it has succeeded: the
                shares of all ranks add up to those of the whole array. It needs the host engine, a
                floating dtype and the native algorithm, which is used; else `InvalidUsage` or
                `InvalidArgument`. Don't use it before the operation is done.
            out: The array that gets the result, of the same size and dtype. None: `array` gets it.
        """
        return operations.all_reduce(self, array, op, async_op, algorithm, stream, share, out)

    @overload
    def reduce(
        self, array: Array, root: int = 0, op: Op = "sum", *, async_op: Literal[False] = False, stream: Stream = None
    ) -> None: ...

    @overload
    def reduce(
        self, array: Array, root: int = 0, op: Op = "sum", *, async_op: Literal[True], stream: Stream = None
    ) -> Work: ...

    @overload
    def reduce(
        self, array: Array, root: int = 0, op: Op = "sum", *, async_op: bool, stream: Stream = None
    ) -> Work | None: ...

    @with_fast_path
    def reduce(
        self, array: Array, root: int = 0, op: Op = "sum", *, async_op: bool = False, stream: Stream = None
    ) -> Work | None:
        """Reduce `array` over all ranks; `root` gets the result, in place.

        The other ranks' arrays are not changed. C: ncclReduce.

        Args:
            array: The array to reduce, as in `all_reduce`.
            root: The rank that gets the result.
            op: The reduction, as in `all_reduce`.
            async_op: Return a `Work` at once.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.reduce(self, array, root, op, async_op, stream)

    @overload
    def reduce_scatter(
        self, out: Array, inp: Array, op: Op = "sum", *, async_op: Literal[False] = False,
        algorithm: Algorithm | None = None, stream: Stream = None, share: Array | None = None
    ) -> None: ...

    @overload
    def reduce_scatter(
        self, out: Array, inp: Array, op: Op = "sum", *, async_op: Literal[True], algorithm: Algorithm | None = None,
        stream: Stream = None, share: Array | None = None
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self, out: Array, inp: Array, op: Op = "sum", *, async_op: bool, algorithm: Algorithm | None = None,
        stream: Stream = None, share: Array | None = None
    ) -> Work | None: ...

    @with_fast_path
    def reduce_scatter(
        self, out: Array, inp: Array, op: Op = "sum", *, async_op: bool = False, algorithm: Algorithm | None = None,
        stream: Stream = None, share: Array | None = None
    ) -> Work | None:
        """Reduce `inp` over all ranks; rank r gets part r of `size` equal ones in `out`.

        In place where `out` is part `rank` of `inp`. C: ncclReduceScatter, and
        collHostReduceScatterShare with `share`.

        Args:
            out: This rank's part of the result, of the dtype of `inp`.
            inp: The array to reduce, with `size` times as many elements as `out`.
            op: The reduction, as in `all_reduce`.
            async_op: Return a `Work` at once.
            algorithm: As in `all_reduce`.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
            share: As in `all_reduce`, for the elements in `out`.
        """
        return operations.reduce_scatter(self, out, inp, op, async_op, algorithm, stream, share)

    @overload
    def all_gather(
        self, out: Array, inp: Array, *, async_op: Literal[False] = False, algorithm: Algorithm | None = None,
        stream: Stream = None
    ) -> None: ...

    @overload
    def all_gather(
        self, out: Array, inp: Array, *, async_op: Literal[True], algorithm: Algorithm | None = None,
        stream: Stream = None
    ) -> Work: ...

    @overload
    def all_gather(
        self, out: Array, inp: Array, *, async_op: bool, algorithm: Algorithm | None = None, stream: Stream = None
    ) -> Work | None: ...

    @with_fast_path
    def all_gather(
        self, out: Array, inp: Array, *, async_op: bool = False, algorithm: Algorithm | None = None,
        stream: Stream = None
    ) -> Work | None:
        """Gather every rank's `inp` into `out` on every rank, in rank order.

        In place where `inp` is part `rank` of `out`. C: ncclAllGather.

        Args:
            out: The array for all parts, with `size` times as many elements as `inp`.
            inp: This rank's part, of any dtype.
            async_op: Return a `Work` at once.
            algorithm: As in `all_reduce`.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.all_gather(self, out, inp, async_op, algorithm, stream)

    @overload
    def broadcast(
        self, array: Array, root: int = 0, *, async_op: Literal[False] = False, stream: Stream = None
    ) -> None: ...

    @overload
    def broadcast(self, array: Array, root: int = 0, *, async_op: Literal[True], stream: Stream = None) -> Work: ...

    @overload
    def broadcast(self, array: Array, root: int = 0, *, async_op: bool, stream: Stream = None) -> Work | None: ...

    @with_fast_path
    def broadcast(self, array: Array, root: int = 0, *, async_op: bool = False, stream: Stream = None) -> Work | None:
        """Send `root`'s array to all ranks, in place. C: ncclBroadcast.

        Args:
            array: The array to send, or to receive into, of any dtype.
            root: The rank that sends.
            async_op: Return a `Work` at once.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.broadcast(self, array, root, async_op, stream)

    @overload
    def all_to_all(
        self, out: Array, inp: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, *, async_op: Literal[False] = False, stream: Stream = None
    ) -> None: ...

    @overload
    def all_to_all(
        self, out: Array, inp: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, *, async_op: Literal[True], stream: Stream = None
    ) -> Work: ...

    @overload
    def all_to_all(
        self, out: Array, inp: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, *, async_op: bool, stream: Stream = None
    ) -> Work | None: ...

    @with_fast_path
    def all_to_all(
        self, out: Array, inp: Array, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, *, async_op: bool = False, stream: Stream = None
    ) -> Work | None:
        """Send part r of `inp` to rank r, and receive rank r's into part r of `out`.

        Split sizes are rows along dimension 0, one number for each rank, as in
        ``torch.distributed.all_to_all_single``. Where the parts that one rank sends and another one
        expects differ, all ranks raise `Mismatch`. Where the arguments of one rank contradict each
        other, it raises `InvalidArgument`, and the other ranks get a `Mismatch` with the error's text
        (NCCL: with COLLECTIVES_CHECK=1).

        C: ncclAlltoAll; ncclSend and ncclRecv in a group for unequal parts and for NCCL before
        2.28.3.

        Args:
            out: The array to receive into, or a list of one array for each rank.
            inp: The array to send, of any dtype, or a list of one array for each rank, all of one
                dtype.
            output_split_sizes: The rows to receive from each rank. None: equal parts.
            input_split_sizes: The rows to send to each rank. None: equal parts.
            async_op: Return a `Work` at once.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.all_to_all(self, out, inp, output_split_sizes, input_split_sizes, async_op, stream)

    @overload
    def gather(
        self, out: Array | None, inp: Array, root: int = 0, *, async_op: Literal[False] = False,
        stream: Stream = None
    ) -> None: ...

    @overload
    def gather(
        self, out: Array | None, inp: Array, root: int = 0, *, async_op: Literal[True], stream: Stream = None
    ) -> Work: ...

    @overload
    def gather(
        self, out: Array | None, inp: Array, root: int = 0, *, async_op: bool, stream: Stream = None
    ) -> Work | None: ...

    @with_fast_path
    def gather(
        self, out: Array | None, inp: Array, root: int = 0, *, async_op: bool = False, stream: Stream = None
    ) -> Work | None:
        """Gather every rank's `inp` into `root`'s `out`, in rank order.

        In place where `inp` is part `root` of `out`. C: ncclGather; ncclSend and ncclRecv before
        NCCL 2.28.3.

        Args:
            out: The array for all parts on `root`; None on the other ranks.
            inp: This rank's part, of any dtype.
            root: The rank that receives.
            async_op: Return a `Work` at once.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.gather_or_scatter(self, "gather", out, inp, root, async_op, stream)

    @overload
    def scatter(
        self, out: Array, inp: Array | None, root: int = 0, *, async_op: Literal[False] = False,
        stream: Stream = None
    ) -> None: ...

    @overload
    def scatter(
        self, out: Array, inp: Array | None, root: int = 0, *, async_op: Literal[True], stream: Stream = None
    ) -> Work: ...

    @overload
    def scatter(
        self, out: Array, inp: Array | None, root: int = 0, *, async_op: bool, stream: Stream = None
    ) -> Work | None: ...

    @with_fast_path
    def scatter(
        self, out: Array, inp: Array | None, root: int = 0, *, async_op: bool = False, stream: Stream = None
    ) -> Work | None:
        """Send part r of `root`'s `inp` to rank r's `out`.

        In place where `out` is part `root` of `inp`. C: ncclScatter; ncclSend and ncclRecv before
        NCCL 2.28.3.

        Args:
            out: The array for this rank's part.
            inp: The array with all parts on `root`, of any dtype; None on the other ranks.
            root: The rank that sends.
            async_op: Return a `Work` at once.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.gather_or_scatter(self, "scatter", out, inp, root, async_op, stream)

    @overload
    def send(self, array: Array, peer: int, *, async_op: Literal[False] = False, stream: Stream = None) -> None: ...

    @overload
    def send(self, array: Array, peer: int, *, async_op: Literal[True], stream: Stream = None) -> Work: ...

    @overload
    def send(self, array: Array, peer: int, *, async_op: bool, stream: Stream = None) -> Work | None: ...

    @with_fast_path
    def send(self, array: Array, peer: int, *, async_op: bool = False, stream: Stream = None) -> Work | None:
        """Send `array` to rank `peer`, which must call `recv`. C: ncclSend.

        On the host it blocks until the peer has called `recv`, whatever the size. Two ranks that
        both send first wait until the time limit: put their calls into a `group`. Raises `Mismatch`
        on both ranks where count or dtype differ.

        Args:
            array: The array to send, of any dtype.
            peer: The rank that receives.
            async_op: Return a `Work` at once.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.send_or_recv(self, "send", array, peer, async_op, stream)

    @overload
    def recv(self, array: Array, peer: int, *, async_op: Literal[False] = False, stream: Stream = None) -> None: ...

    @overload
    def recv(self, array: Array, peer: int, *, async_op: Literal[True], stream: Stream = None) -> Work: ...

    @overload
    def recv(self, array: Array, peer: int, *, async_op: bool, stream: Stream = None) -> Work | None: ...

    @with_fast_path
    def recv(self, array: Array, peer: int, *, async_op: bool = False, stream: Stream = None) -> Work | None:
        """Receive rank `peer`'s `send` into `array`. C: ncclRecv.

        Args:
            array: The array to receive into, of any dtype.
            peer: The rank that sends.
            async_op: Return a `Work` at once.
            stream: The CUDA stream that orders the operation. None: torch's current stream.
        """
        return operations.send_or_recv(self, "recv", array, peer, async_op, stream)

    def barrier(self) -> None:
        """Block until all ranks have come and all earlier operations are done. Not in a group."""
        barrier(self)

    def group(self) -> Group:
        """Make the calls of a ``with`` block one operation, as several sends and receives must be.

        The arguments of the calls are checked at once. The calls are issued when the block ends; if
        the block raises, none is issued. C: ncclGroupStart, ncclGroupEnd.
        """
        return Group(self)

    def split(self, color: int | None, key: int | None = None, *, config=None) -> Communicator | None:
        """Make one communicator for each color. All ranks call it.

        Blocks until all have called it, on the host at most for `timeout`; past it
        `CollectiveTimeout` names the ranks that didn't come, and this communicator can't be used
        any more. A rank of a part that fails while the part's ranks connect is an error on all of
        them: `RemoteError` names that rank, or the rank that it waited for. This communicator then
        stays as it is; but on several nodes of the host engine it can't be used any more. Errors
        have this communicator's rank numbers. C: ncclCommSplit (NCCL 2.18).

        Args:
            color: The number of this rank's part. None or -1: this rank gets no communicator.
            key: The order of the ranks in the part. None: as in this communicator.
            config: A `CommConfig` or a dict of its fields, the same on all ranks of a color, and
                None on all or none. A field that it leaves out is this communicator's.

        Returns:
            The communicator of this rank's part; None for the color None or -1.

        Raises:
            Mismatch: Where `config` differs.
        """
        return _open_child(self, *opening.split(self, color, key, config))

    def shrink(self, exclude, *, abort: bool = False, config=None) -> Communicator:
        """Make a communicator without some of the ranks. All other ranks call it, and those don't.

        Blocks until the others have called it, on the host at most for `timeout`. Errors are as in
        `split`; after one, `shrink` can be called again by all ranks that are left, with a longer
        `exclude` where others have died. C: ncclCommShrink (NCCL 2.27).

        Args:
            exclude: The ranks to leave out.
            abort: Abort what is in flight first, as is needed where an excluded rank died.
            config: As in `split`, but not compared.
        """
        return _open_child(self, *opening.shrink(self, exclude, abort, config))

    def abort(self) -> None:
        """End everything in flight on this rank, from any thread, and close: waits raise `Aborted`.

        The other ranks' operations with this one raise `RemoteError`. C: ncclCommAbort.
        """
        closing.abort(self)

    def close(self) -> None:
        """Wait for what is in flight, then free the communicator. Harmless when called again.

        C: ncclCommDestroy. Raises the error with which the watchdog has ended the communicator, if
        no call has raised it before.
        """
        closing.close(self)

    def _abort_with_error(self, error) -> None:
        closing.abort_with_error(self, error)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        closing.leave(self, failed=kind is not None)

    def _pending_info(self):
        """Return what the engine, or an algorithm's step, waits for now; None for nothing."""
        info = None if self.closed else self._native.pending()
        return self._algorithms.pending() if info is None and self._algorithms is not None else info

    def _check_open(self, name: str) -> None:
        """Raise the error of an operation on a communicator that is closed."""
        if type(self._native) is ClosedHandle:
            self._native.raise_closed(name)

    def _device_guard(self):
        """Make the communicator's device the current one, to which stream 0 belongs."""
        if self._on_host or torch.cuda.current_device() == self.device.index:
            return _NO_GUARD
        return torch.cuda.device(self.device)


def _open_child(comm: Communicator, native, name: str, config: CommConfig) -> Communicator | None:
    """Make the communicator of a binding object that `split` or `shrink` has returned."""
    if native is None:
        return None
    child = Communicator.__new__(Communicator)
    child._initialize(native, *opening.inherit(comm, native, config))
    flight_recorder.attach_child(child, comm, name)
    watch_child(child, comm, name)
    return child
