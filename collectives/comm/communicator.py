"""Communicator: the collectives of a set of ranks on torch, NumPy and CuPy arrays.

All arguments are checked before anything is sent. `arguments` has the checks, `launch` what happens
to a valid operation, `closing` the ways in which a communicator ends.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from threading import get_ident

import torch

from .._nccl import OPS, SHRINK_ABORT, ArrayCalls, Comm
from ..arrays import ITEMSIZE, Buffer, Reader, parse_rank
from ..environment import check_variables, read_switch
from ..errors import InvalidArgument, InvalidUsage
from ..torch_compat import cuda_get_device
from . import closing
from .algorithms.executor import AlgorithmExecutor, run_algorithm
from .algorithms.policy import Policy, agree_on_policy, select_algorithm
from .arguments import (
    invalid,
    parse_allocation,
    parse_int,
    parse_peer,
    parse_reduction,
    parse_size,
    parse_split_sizes,
    parse_timeout,
    read_on_root,
    read_pair,
    stream_handle,
)
from .barrier import barrier
from .cuda_queue import CudaQueue
from .engine import Engine, resolve_device
from .fingerprint import PREMUL, fingerprint_of
from .fingerprint import check as check_fingerprints
from .group import Group, open_groups
from .host_queue import HostQueue
from .launch import launch
from .lifetime import ClosedHandle, open_comms
from .memory import allocate
from .multinode.comm import MultiNodeComm, NoFastPath
from .multinode.topology import group_ranks_by_node
from .reductions import all_reduce_out_of_place, reduce_with_stats
from .registration import Registration, deregister, register
from .steps import all_to_all_steps, gather_steps, scatter_steps
from .watchdog import status_store_of, watch
from .work import Work

__all__ = ["Communicator"]

_NO_GUARD = contextlib.nullcontext()


class Communicator:
    """A set of ranks that call the same operations in the same order.

    `engine`: from `collectives.comm.engine.get_engine`; `unique_id`: 128 bytes, the same on all
    ranks; `rank` of `size`; `device`: whose memory is sent; `timeout`: limit of one operation in
    seconds, None for no limit; `native`: the open binding object, if there is one already. Blocks
    until all ranks have come. `collectives.init()` makes one from the launcher's variables.

    Arrays are torch tensors, NumPy arrays (host engine) and CuPy arrays (NCCL), contiguous and on
    the communicator's device; they are used in place and never copied. Tensors are taken as data:
    autograd doesn't record the operation. On the host a call blocks until the operation is done; on
    CUDA it is ordered on torch's current stream, or on `stream`. With ``async_op=True`` it returns
    a `Work`.

    All operations raise `InvalidArgument` for what can't be sent, `Mismatch` where the ranks don't
    make the same call (NCCL: with COLLECTIVES_CHECK=1), `RemoteError` where a rank died,
    `CollectiveTimeout` past the time limit, `InvalidUsage` after `close()`. A communicator stays
    open until `close()`, `abort()` or the interpreter's end, even if the program drops it.

    `algorithm` of all_reduce, reduce_scatter and all_gather: "native", what the library does;
    "ring" or "direct", not in groups; None: what `collectives.tune` found best, or
    COLLECTIVES_ALGORITHM's, else native. `deterministic`: these reduce in rank order, so that the
    bits depend on nothing but the arrays: native or direct on the host, direct on NCCL; the same on
    all ranks, and inherited by `split` and `shrink`.
    """

    def __init__(
        self, engine: Engine, unique_id: bytes, rank: int, size: int, *,
        device, local_rank: int = 0, local_size: int | None = None, timeout: float | None = 1800.0, peers=None,
        deterministic: bool = False, native=None,
    ):  # fmt: skip
        if not isinstance(engine, Engine):
            raise InvalidArgument(f"engine must come from collectives.comm.engine.get_engine(), not {engine!r}")
        size = parse_size(size)
        rank = parse_rank(rank, size, "rank", rank=None, name="Communicator")
        check_variables()
        device = resolve_device(engine, device)
        if native is not None:
            pass
        elif engine.device_type == "cpu":
            native = engine.library.comm_init_rank(size, unique_id, rank)
        else:
            config = {"blocking": 1} if engine.library.has("ncclCommInitRankConfig") else None
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # creates torch's CUDA context, which NCCL then uses
                native = engine.library.comm_init_rank(size, unique_id, rank, config=config)
        self._initialize(native, engine, device, local_rank, local_size, timeout, Policy(False, 0, {}, {}), peers)
        try:
            with self._device_guard():
                self._set_policy(agree_on_policy(self, bool(deterministic)))
        except BaseException:
            self.abort()
            raise

    def _initialize(self, native, engine, device, local_rank, local_size, timeout, policy, peers=None):
        self.engine = engine
        self.device = device
        self.rank = native.rank
        self.size = native.size
        self.local_rank = local_rank
        self.local_size = (self.size if engine.device_type == "cpu" else 1) if local_size is None else local_size
        self.peers = peers
        self._native = native
        self._on_host = engine.device_type == "cpu"
        self._reader = Reader(device, self.rank)
        self._queue = HostQueue(self) if self._on_host else CudaQueue(self)
        self._checks_calls = read_switch("COLLECTIVES_CHECK") and not self._on_host
        # The fast path of blocking calls on plain arrays. What it refuses goes through the methods
        # below, which check everything.
        current_device = None if self._on_host or self._checks_calls else cuda_get_device()
        other = not isinstance(native, Comm)
        self._fast_path = (
            NoFastPath() if other else ArrayCalls(native, self._reader.array_reader, open_groups, current_device)
        )
        self._registrations: set[Registration] = set()
        self._child_count = 0  # splits and shrinks, which all ranks make in one order
        self._barrier_tensor = None
        self._algorithms: AlgorithmExecutor | None = None
        self._set_policy(policy)
        self._timeout = None
        self.timeout = timeout
        self._external_streams: set[int] = set()  # streams that others created, and may have destroyed
        open_comms[id(self)] = self
        if not self._on_host:
            watch(self)

    # ---- Properties.

    @property
    def timeout(self) -> float | None:
        """Limit of one operation in seconds; None: no limit.

        An operation past it fails with `CollectiveTimeout`, and the communicator can't be used any
        more. NCCL has no such limit: there a watchdog thread aborts the communicator some two
        seconds after the limit, and the next wait, operation or `close()` raises the error.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None):
        seconds = parse_timeout(seconds, self.rank)
        if self._on_host:
            self._native.set_timeout(seconds)
        self._timeout = seconds

    @property
    def machines(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of each node, in the order of the nodes' first ranks; None if not known.

        They are known for the communicators that `init()` and the DDP hook open, and on the host.
        """
        if self.peers is not None:
            return group_ranks_by_node(peer.node for peer in self.peers)
        return (tuple(range(self.size)),) if self._on_host else None

    @property
    def deterministic(self) -> bool:
        """Whether reductions are in rank order only."""
        return self._policy.deterministic

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

    # ---- Collectives.

    def all_reduce(
        self, array, op="sum", *, async_op: bool = False, algorithm=None, stream=None, share=None, out=None
    ) -> Work | None:
        """Reduce `array` over all ranks, in place, or into `out`; every rank gets the result.

        `op`: "sum", "prod", "max", "min", "avg", a number (each rank's array is multiplied by its
        number, then summed) or the ``torch.distributed.ReduceOp``. Takes NCCL's 12 dtypes. C:
        ncclAllReduce.

        `share`: 2 float64, to which the pass over the data adds this rank's share of the result's
        [sum of squares, count of non-finite elements] when it has succeeded: the shares of all
        ranks add up to those of the whole array. It needs the host engine, a floating type and the
        native algorithm, which is used; else `InvalidUsage` or `InvalidArgument`. It must not be
        used until the operation is done. C: collHostAllReduceShare.

        `out`: an array of the same size and dtype that doesn't overlap `array`; `array` is not
        changed.
        """
        if out is not None:
            return all_reduce_out_of_place(self, out, array, op, async_op, algorithm, stream, share)
        if share is not None:
            src = self._reader.read(array, "all_reduce", writes=True)
            return reduce_with_stats(self, "all_reduce", src, src, (array,), op, share, async_op, algorithm, stream)
        if self._choices is not None or (algorithm is not None and algorithm != "native"):
            src = self._reader.read(array, "all_reduce", writes=True)
            selected = select_algorithm(self, "all_reduce", algorithm, src.nbytes, op)
            if selected != "native":
                self._reader.check_reducible(src, "all_reduce")
                return run_algorithm(self, selected, "all_reduce", src, src, (array,), array, op, async_op, stream)
        if not async_op and stream is None and self._fast_path.all_reduce(array, op):
            return None
        ptr, count, dtype = self._reader.read_for_reduction(array, "all_reduce")
        if self._on_host and type(op) is str and not async_op and stream is None and not open_groups:
            code = OPS.get(op)
            if code is not None:  # nothing is allocated
                self._native.all_reduce(ptr, ptr, count, dtype, code, 0)
                return None
        code, scalar = parse_reduction(self, op, dtype, "all_reduce")
        steps = (("all_reduce", (ptr, ptr, count, dtype, code)),)
        fingerprint = self._checks_calls and fingerprint_of(
            "all_reduce", dtype=dtype, count=count, op=PREMUL if scalar else code
        )
        nbytes = count * ITEMSIZE[dtype]
        return launch(self, "all_reduce", steps, (array,), array, nbytes, fingerprint, async_op, stream, scalar)

    def reduce(self, array, root: int = 0, op="sum", *, async_op: bool = False, stream=None) -> Work | None:
        """Reduce `array` over all ranks; `root` gets the result, in place.

        The other ranks' arrays are not changed. `op` and dtypes as in `all_reduce`. C: ncclReduce.
        """
        if not async_op and stream is None and self._fast_path.reduce(array, root, op):
            return None
        root = parse_peer(self, root, "root", "reduce")
        buffer = self._reader.read(array, "reduce", writes=self.rank == root)
        self._reader.check_reducible(buffer, "reduce")
        code, scalar = parse_reduction(self, op, buffer.code, "reduce")
        out = buffer.ptr if self.rank == root else 0
        steps = (("reduce", (buffer.ptr, out, buffer.count, buffer.code, code, root)),)
        fingerprint = self._checks_calls and fingerprint_of(
            "reduce", dtype=buffer.code, count=buffer.count, op=PREMUL if scalar else code, root=root
        )
        return launch(self, "reduce", steps, (array,), array, buffer.nbytes, fingerprint, async_op, stream, scalar)

    def reduce_scatter(
        self, out, inp, op="sum", *, async_op: bool = False, algorithm=None, stream=None, share=None
    ) -> Work | None:
        """Reduce `inp` over all ranks; rank r gets part r of `size` equal ones in `out`.

        `inp` has `size` times as many elements as `out`, of the same dtype. In place where `out` is
        part `rank` of `inp`. C: ncclReduceScatter. `share`: as in `all_reduce`, of the elements in
        `out`. C: collHostReduceScatterShare.
        """
        name = "reduce_scatter"
        chosen = share is not None or self._choices is not None or (algorithm is not None and algorithm != "native")
        if not chosen and not async_op and stream is None and self._fast_path.reduce_scatter(out, inp, op):
            return None
        dst, src = read_pair(self, out, inp, name)
        self._reader.check_reducible(src, name)
        self._reader.check_size(src, dst, self.size, name, "inp", "out")
        self._reader.check_overlap(src, dst, name, self.rank, "the only form in place is out == part `rank` of inp")
        if share is not None:
            return reduce_with_stats(self, name, dst, src, (out, inp), op, share, async_op, algorithm, stream)
        if chosen:
            selected = select_algorithm(self, name, algorithm, src.nbytes, op)
            if selected != "native":
                return run_algorithm(self, selected, name, dst, src, (out, inp), out, op, async_op, stream)
        code, scalar = parse_reduction(self, op, src.code, name)
        steps = ((name, (src.ptr, dst.ptr, dst.count, dst.code, code)),)
        fingerprint = self._checks_calls and fingerprint_of(
            name, dtype=dst.code, count=dst.count, op=PREMUL if scalar else code
        )
        return launch(self, name, steps, (out, inp), out, src.nbytes, fingerprint, async_op, stream, scalar)

    def all_gather(self, out, inp, *, async_op: bool = False, algorithm=None, stream=None) -> Work | None:
        """Gather every rank's `inp` into `out` on every rank, in rank order. Takes any dtype.

        `out` has `size` times as many elements as `inp`. In place where `inp` is part `rank` of
        `out`. C: ncclAllGather.
        """
        name = "all_gather"
        chosen = self._choices is not None or (algorithm is not None and algorithm != "native")
        if not chosen and not async_op and stream is None and self._fast_path.all_gather(out, inp):
            return None
        dst, src = read_pair(self, out, inp, name)
        self._reader.check_size(dst, src, self.size, name, "out", "inp")
        self._reader.check_overlap(dst, src, name, self.rank, "the only form in place is inp == part `rank` of out")
        if chosen:
            selected = select_algorithm(self, name, algorithm, dst.nbytes)
            if selected != "native":
                return run_algorithm(self, selected, name, dst, src, (out, inp), out, None, async_op, stream)
        steps = ((name, (src.ptr, dst.ptr, src.units, src.code)),)
        fingerprint = self._checks_calls and fingerprint_of(name, dtype=src.tag, count=src.units)
        return launch(self, name, steps, (out, inp), out, dst.nbytes, fingerprint, async_op, stream, label=src.label)

    def broadcast(self, array, root: int = 0, *, async_op: bool = False, stream=None) -> Work | None:
        """Send `root`'s array to all ranks, in place. Takes any dtype. C: ncclBroadcast."""
        if not async_op and stream is None and self._fast_path.broadcast(array, root):
            return None
        root = parse_peer(self, root, "root", "broadcast")
        src = self._reader.read(array, "broadcast", writes=self.rank != root)
        steps = (("broadcast", (src.ptr, src.ptr, src.units, src.code, root)),)
        fingerprint = self._checks_calls and fingerprint_of("broadcast", dtype=src.tag, count=src.units, root=root)
        return launch(
            self, "broadcast", steps, (array,), array, src.nbytes, fingerprint, async_op, stream, label=src.label
        )

    def all_to_all(
        self, out, inp, output_split_sizes=None, input_split_sizes=None, *, async_op: bool = False, stream=None
    ) -> Work | None:
        """Send part r of `inp` to rank r, and receive rank r's into part r of `out`.

        Takes any dtype; never in place. Without split sizes the parts are equal, in elements. The
        split sizes are rows along dimension 0, one for each rank, as in
        ``torch.distributed.all_to_all_single``; if only one list is passed, the other side is split
        evenly. C: ncclAlltoAll; ncclSend and ncclRecv in a group for unequal parts and for NCCL
        before 2.28.3.
        """
        name = "all_to_all"
        plain = output_split_sizes is None and input_split_sizes is None and stream is None
        if plain and not async_op and self._fast_path.all_to_all(out, inp):
            return None
        dst, src = read_pair(self, out, inp, name)
        self._reader.check_overlap(dst, src, name, None, "all_to_all has no form in place")
        if output_split_sizes is None and input_split_sizes is None:
            steps, fingerprint = self._even_all_to_all(dst, src)
        else:
            sends, sent_row = parse_split_sizes(self, inp, src, input_split_sizes, "input_split_sizes", "inp")
            receives, received_row = parse_split_sizes(self, out, dst, output_split_sizes, "output_split_sizes", "out")
            if None not in (sent_row, received_row) and sent_row != received_row:
                text = f"a row of inp has {sent_row} elements and a row of out {received_row}: they must be equal"
                raise invalid(self, name, text)
            own_send, own_receive = sends[self.rank], receives[self.rank]
            if own_send != own_receive:
                text = f"rank {self.rank} sends {own_send} elements to itself and receives {own_receive}"
                raise invalid(self, name, text)
            steps = all_to_all_steps(dst, src, sends, receives)
            fingerprint = self._checks_calls and fingerprint_of("all_to_all with split sizes", dtype=src.tag)
        return launch(self, name, steps, (out, inp), out, src.nbytes, fingerprint, async_op, stream, label=src.label)

    def _even_all_to_all(self, dst: Buffer, src: Buffer):
        """Return the steps and the fingerprint of an all_to_all of equal parts."""
        name = "all_to_all"
        if src.count % self.size:
            text = f"inp has {src.count} elements, which {self.size} ranks can't share evenly: pass split sizes"
            raise invalid(self, name, text)
        self._reader.check_size(dst, src, 1, name, "out", "inp")
        units = src.units // self.size
        fingerprint = self._checks_calls and fingerprint_of(name, dtype=src.tag, count=units)
        if self.engine.library.has("ncclAlltoAll"):
            return ((name, (src.ptr, dst.ptr, units, src.code)),), fingerprint
        return all_to_all_steps(dst, src, [units] * self.size, [units] * self.size), fingerprint

    def gather(self, out, inp, root: int = 0, *, async_op: bool = False, stream=None) -> Work | None:
        """Gather every rank's `inp` into `root`'s `out`, in rank order. Takes any dtype.

        `out` is None on the other ranks. In place where `inp` is part `root` of `out`. C:
        ncclGather; ncclSend and ncclRecv before NCCL 2.28.3.
        """
        name = "gather"
        root = parse_peer(self, root, "root", name)
        src = self._reader.read(inp, name, writes=False, what="inp")
        dst = read_on_root(self, out, root, name, "out", writes=True)
        if dst is not None:
            self._reader.check_same_dtype(dst, src, name)
            self._reader.check_size(dst, src, self.size, name, "out", "inp")
            self._reader.check_overlap(dst, src, name, root, "the only form in place is inp == part `root` of out")
        steps = gather_steps(self.engine.library, dst, src, root, self.size)
        fingerprint = self._checks_calls and fingerprint_of(name, dtype=src.tag, count=src.units, root=root)
        held = (inp,) if out is None else (out, inp)
        return launch(self, name, steps, held, out, src.nbytes, fingerprint, async_op, stream, label=src.label)

    def scatter(self, out, inp, root: int = 0, *, async_op: bool = False, stream=None) -> Work | None:
        """Send part r of `root`'s `inp` to rank r's `out`. Takes any dtype.

        `inp` is None on the other ranks. In place where `out` is part `root` of `inp`.
        C: ncclScatter; ncclSend and ncclRecv before NCCL 2.28.3.
        """
        name = "scatter"
        root = parse_peer(self, root, "root", name)
        dst = self._reader.read(out, name, writes=True, what="out")
        src = read_on_root(self, inp, root, name, "inp", writes=False)
        if src is not None:
            self._reader.check_same_dtype(dst, src, name)
            self._reader.check_size(src, dst, self.size, name, "inp", "out")
            self._reader.check_overlap(src, dst, name, root, "the only form in place is out == part `root` of inp")
        steps = scatter_steps(self.engine.library, dst, src, root, self.size)
        fingerprint = self._checks_calls and fingerprint_of(name, dtype=dst.tag, count=dst.units, root=root)
        held = (out,) if inp is None else (out, inp)
        return launch(self, name, steps, held, out, dst.nbytes, fingerprint, async_op, stream, label=dst.label)

    def send(self, array, peer: int, *, async_op: bool = False, stream=None) -> Work | None:
        """Send `array` to rank `peer`, which must call `recv`. Takes any dtype. C: ncclSend."""
        if not async_op and stream is None and self._fast_path.send(array, peer):
            return None
        return self._point_to_point("send", array, peer, async_op, stream)

    def recv(self, array, peer: int, *, async_op: bool = False, stream=None) -> Work | None:
        """Receive rank `peer`'s `send` into `array`. Takes any dtype. C: ncclRecv."""
        if not async_op and stream is None and self._fast_path.recv(array, peer):
            return None
        return self._point_to_point("recv", array, peer, async_op, stream)

    def barrier(self) -> None:
        """Block until all ranks have come and all earlier operations are done. Not in a group."""
        barrier(self)

    def group(self) -> Group:
        """Make the calls of a ``with`` block one operation, as several sends and receives must be.

        Their arguments are checked at once, and they are issued when the block ends; if it raises,
        none is. C: ncclGroupStart, ncclGroupEnd.
        """
        self._check_open("group")
        return Group(self)

    # ---- Other communicators, memory.

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Make one communicator for each color; `key` orders its ranks (None: as in this one).

        All ranks call it; a rank with the color None or -1 gets None. C: ncclCommSplit (NCCL 2.18).
        """
        color = -1 if color is None else parse_int(self, color, "color", -1, "split", 2**31)
        key = self.rank if key is None else parse_int(self, key, "key", -(2**31), "split", 2**31)
        with self._device_guard():
            native = self._native.split(color, key)
        self._child_count += 1
        return None if native is None else self._open_child(native, f"split{self._child_count}/{color}")

    def shrink(self, exclude, *, abort: bool = False) -> Communicator:
        """Make a communicator without the ranks in `exclude`; all others call it, and those don't.

        `abort`: abort what is in flight first, as it must be where an excluded rank died.
        C: ncclCommShrink (NCCL 2.27).
        """
        excluded = sorted({parse_rank(r, self.size, "exclude", rank=self.rank, name="shrink") for r in exclude})
        if self.rank in excluded:
            raise invalid(self, "shrink", f"rank {self.rank} is to be left out, so it must not call shrink")
        if abort and self._algorithms is not None:
            self._algorithms.abort()
        with self._device_guard():
            native = self._native.shrink(excluded, flags=SHRINK_ABORT if abort else 0)
        self._child_count += 1
        return self._open_child(native, f"shrink{self._child_count}")

    def empty(self, n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor of `n` elements in memory that the engine uses with no staging copy.

        A local call. `dtype` None: torch's default. The contents are undefined. The memory is freed
        with the last tensor that views it, also after `close()`. On the host it is shared with the
        other ranks. A forked child (a DataLoader's worker) can't change the parent's contents. It
        sees what the parent writes later in the pages that the child has not written itself, so it
        must not use the memory as a snapshot. C: ncclMemAlloc (NCCL 2.19).
        """
        self._check_open("empty")
        n, dtype = parse_allocation(self, n, dtype)
        return allocate(self.engine.library, self.device, n, dtype)

    def register(self, array) -> Registration:
        """Register an array's memory, so that the engine may use it with no staging copy.

        The array is held alive until `deregister` or `close()`. A local call, and no other thread
        may write to the array meanwhile. On the host the allocation becomes shared memory at its
        address, where that is possible: see the result's `zero_copy`. C: ncclCommRegister (NCCL
        2.19).
        """
        return register(self, array)

    def deregister(self, registration: Registration) -> None:
        """End a registration; no operation that uses the array may be in flight.

        C: ncclCommDeregister. On the host `InvalidUsage` is raised while asynchronous operations
        are in flight: the peers may use the array's memory, which becomes this process's own again.
        On CUDA it waits for the GPU.
        """
        deregister(self, registration)

    # ---- The end.

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
        if kind is not None and (
            self.closed or self._queue.busy() or (self._on_host and self._pending_info() is not None)
        ):
            self.abort()  # what is in flight may never end
        else:
            self.close()

    # ---- Internals.

    def _pending_info(self):
        """Return what the engine, or an algorithm's step, waits for now; None for nothing."""
        info = None if self.closed else self._native.pending()
        return self._algorithms.pending() if info is None and self._algorithms is not None else info

    def _open_child(self, native, name: str) -> Communicator:
        """Make the communicator of a binding object that `split` or `shrink` has returned."""
        child = Communicator.__new__(Communicator)
        engine, peers = self.engine, None
        if isinstance(native, MultiNodeComm):
            local, peers = (native.local_rank, native.local_size), native.peers
        elif self._on_host:  # its ranks are on one node, and its parent's may be on several
            local = native.rank, native.size
            engine = engine if native.library is engine.library else replace(engine, library=native.library)
        else:  # NCCL's ranks keep the local rank that the launcher gave
            local = self.local_rank, self.local_size
        child._initialize(native, engine, self.device, *local, self._timeout, self._policy, peers)
        status = status_store_of(self)
        if status is not None:
            watch(child, status.with_prefix(name))
        return child

    def _point_to_point(self, name: str, array, peer, async_op, stream):
        peer = parse_peer(self, peer, "peer", name)
        buffer = self._reader.read(array, name, writes=name == "recv")
        if peer == self.rank and get_ident() not in open_groups:
            raise InvalidUsage(
                f"a {name} with oneself needs its other half in the same `with comm.group():` block", op=name, rank=peer
            )
        steps = ((name, (buffer.ptr, buffer.units, buffer.code, peer)),)
        return launch(self, name, steps, (array,), array, buffer.nbytes, None, async_op, stream, label=buffer.label)

    def _check_open(self, name: str) -> None:
        """Raise the error of an operation on a communicator that is closed."""
        if type(self._native) is ClosedHandle:
            self._native.raise_closed(name)

    def _set_policy(self, policy: Policy) -> None:
        self._policy = policy
        self._choices = policy.choices_for(self.engine.name, self.size)

    def _device_guard(self):
        """Make the communicator's device the current one, to which stream 0 belongs."""
        if self._on_host or torch.cuda.current_device() == self.device.index:
            return _NO_GUARD
        return torch.cuda.device(self.device)

    def _check_fingerprints(self, fingerprints, grouped: bool = False) -> None:
        """Raise `Mismatch` unless all ranks make the same calls, with COLLECTIVES_CHECK only."""
        if self._checks_calls and fingerprints:
            with self._device_guard():
                check_fingerprints(
                    self._native,
                    fingerprints,
                    device=self.device,
                    stream=stream_handle(self, None),
                    grouped=grouped,
                )
