"""Communicator: arrays in, Work out. Everything is checked here, before anything is sent."""

from __future__ import annotations

import contextlib
import operator
from dataclasses import replace
from threading import get_ident

import torch

from .._nccl import DTYPES, OPS, SHRINK_ABORT, ArrayCalls, Comm
from ..arrays import ITEMSIZE, Place, Reader, check_premul_scalar, parse_op, parse_rank
from ..environment import check_variables, read_switch
from ..errors import CollectiveTimeout, InvalidArgument, InvalidUsage
from ..torch_compat import cuda_current_raw_stream, cuda_get_device
from . import closing
from .algorithms.executor import Algorithms, run_by
from .algorithms.tune import Policy, agree_on, pick
from .engine import Engine, device_of, parse_device
from .fingerprint import PREMUL, agree, row
from .group import Call, Group, issue, open_groups
from .lifetime import Gone, opened
from .memory import Registration, allocate, memory_of, whole_allocation
from .multinode.comm import HostsComm, NoShortWay
from .multinode.topology import grouped
from .watchdog import notes_of, watch
from .work import CudaLane, HostLane, Work

__all__ = ["Communicator", "device_of", "parse_device"]

_UINT8 = DTYPES["uint8"]
_NO_GUARD = contextlib.nullcontext()
_WATCHDOG_SECONDS = 10.0


class Communicator:
    """A set of ranks that call the same operations in the same order.

    `engine`: from `collectives.comm.engine.get_engine`; `unique_id`: 128 bytes, the same on all ranks; `rank` of
    `size`; `device`: whose memory is sent; `timeout`: limit of one operation in seconds, None for no limit. Blocks
    until all ranks have come. `collectives.init()` makes one from the launcher's variables. `native`: the open
    binding object, where there is one already. Arrays are torch tensors, NumPy arrays (host engine) and CuPy arrays
    (NCCL), contiguous and on the communicator's device; they are used in place and never copied. Tensors are taken as
    data: autograd doesn't see the operation. On the host a call blocks until the operation is done; on CUDA it is
    ordered on torch's current stream, or on `stream`. With ``async_op=True`` it gives a `Work`. All operations raise
    `InvalidArgument` for what can't be sent, `Mismatch` where the ranks don't make the same call (NCCL: with
    COLLECTIVES_CHECK=1), `RemoteError` where a rank died, `CollectiveTimeout` past the time limit, `InvalidUsage`
    after `close()`. It stays open until `close()`, `abort()` or the interpreter's end, also where nobody holds it.
    `algorithm` of all_reduce, reduce_scatter and all_gather: "native", what the library does; "ring" or "direct", not
    in groups; None: what `collectives.tune` found best, or COLLECTIVES_ALGORITHM's, else native. `deterministic`:
    these reduce in rank order, so that the bits depend on nothing but the arrays: native or direct on the host,
    direct on NCCL; the same on all ranks, and inherited by `split` and `shrink`.
    """

    def __init__(
        self, engine: Engine, unique_id: bytes, rank: int, size: int, *,
        device, local_rank: int = 0, local_size: int | None = None, timeout: float | None = 1800.0, peers=None,
        deterministic: bool = False, native=None,
    ):  # fmt: skip
        if not isinstance(engine, Engine):
            raise InvalidArgument(f"engine must come from collectives.comm.engine.get_engine(), not {engine!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgument(f"size must be an int of at least 1, not {size!r}")
        rank = parse_rank(rank, size, "rank", rank=None, name="Communicator")
        check_variables()
        device = device_of(engine, device)
        if native is not None:
            pass
        elif engine.device_type == "cpu":
            native = engine.library.comm_init_rank(size, unique_id, rank)
        else:
            config = {"blocking": 1} if engine.library.has("ncclCommInitRankConfig") else None
            with torch.cuda.device(device):
                torch.cuda.current_stream().synchronize()  # makes torch's CUDA context, which NCCL takes over
                native = engine.library.comm_init_rank(size, unique_id, rank, config=config)
        try:
            with torch.cuda.device(device) if device.type == "cuda" else _NO_GUARD:
                policy = agree_on(native, engine.name, device, bool(deterministic))
        except BaseException:
            native.abort()
            raise
        self._adopt(native, engine, device, local_rank, local_size, timeout, policy, peers)

    def _adopt(self, native, engine, device, local_rank, local_size, timeout, policy, peers=None):
        self.engine = engine
        self.device = device
        self.rank = native.rank
        self.size = native.size
        self.local_rank = local_rank
        self.local_size = (self.size if engine.device_type == "cpu" else 1) if local_size is None else local_size
        self.peers = peers
        self._native = native
        self._on_host = engine.device_type == "cpu"
        self._read = Reader(device, self.rank)
        self._lane = HostLane(self) if self._on_host else CudaLane(self)
        self._checks = read_switch("COLLECTIVES_CHECK") and not self._on_host
        # The short way of blocking calls on plain arrays. What it doesn't take goes the longer way, which checks all.
        current_device = None if self._on_host or self._checks else cuda_get_device()
        other = not isinstance(native, Comm)
        self._short = (
            NoShortWay() if other else ArrayCalls(native, self._read.array_reader, open_groups, current_device)
        )
        self._registered: set[Registration] = set()
        self._children = 0  # splits and shrinks, which all ranks make in one order
        self._token = None
        self._algorithms: Algorithms | None = None
        self._use(policy)
        self._timeout = None
        self.timeout = timeout
        self._foreign: set[int] = set()  # streams that others made, and may have destroyed
        opened[id(self)] = self
        if not self._on_host:
            watch(self)

    # ---- What it is.

    @property
    def timeout(self) -> float | None:
        """Limit of one operation in seconds; None: no limit.

        An operation past it fails with `CollectiveTimeout` and the communicator is out of use. On NCCL, which knows no
        such limit, a thread beside the program's looks after it: it aborts the communicator some two seconds later,
        and what comes next raises the error: a wait, an operation, `close()`.
        """
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float | None):
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and seconds > 0):
            raise InvalidArgument(f"timeout must be above 0 s, or None for no limit, not {seconds!r}", rank=self.rank)
        if self._on_host:
            self._native.set_timeout(seconds)
        self._timeout = seconds

    @property
    def machines(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of each machine, in the order of the machines' first ranks; None where that isn't known here.

        It is known for what `init()` and the DDP hook open, and on the host.
        """
        if self.peers is not None:
            return grouped(peer.machine for peer in self.peers)
        return (tuple(range(self.size)),) if self._on_host else None

    @property
    def deterministic(self) -> bool:
        """Tell whether reductions are in rank order only."""
        return self._policy.deterministic

    @property
    def closed(self) -> bool:
        """Tell whether `close()` or `abort()` was called, or this is a forked child."""
        return type(self._native) is Gone

    @property
    def forked(self) -> bool:
        """Tell whether this is a forked child's copy, which can't be used."""
        return type(self._native) is Gone and self._native.forked

    def __repr__(self):
        state = f", {self._native.why}" if self.closed else ""
        return f"<Communicator rank {self.rank} of {self.size}, engine {self.engine.name} on {self.device}{state}>"

    def __reduce__(self):
        raise InvalidUsage("a communicator can't be pickled or copied: open one in each process", rank=self.rank)

    # ---- Collectives.

    def all_reduce(
        self, array, op="sum", *, async_op: bool = False, algorithm=None, stream=None, share=None, out=None
    ) -> Work | None:
        """Reduce `array` over all ranks, in place, or into `out`; every rank gets the result.

        `op`: "sum", "prod", "max", "min", "avg", a number (each rank's array is multiplied by its number, then summed)
        or the ``torch.distributed.ReduceOp``. Takes NCCL's 12 dtypes. C: ncclAllReduce.

        `share`: 2 float64, to which the pass over the data adds this rank's share of the result's [sum of squares,
        count of non-finite elements], once it has succeeded: the shares of all ranks add up to the whole. Host engine,
        floating types, native algorithm, which is taken; else `InvalidUsage` or `InvalidArgument`. It is to be
        left alone until the operation is done. C: collHostAllReduceShare.

        `out`: an array of the same size and dtype, apart from `array`, which stays as it is.
        """
        if out is not None:
            return self._all_reduce_apart(out, array, op, async_op, algorithm, stream, share)
        if share is not None:
            place = self._read.place(array, "all_reduce", writes=True)
            return self._sharing("all_reduce", place, place, (array,), op, share, async_op, algorithm, stream)
        if self._picks is not None or (algorithm is not None and algorithm != "native"):
            place = self._read.place(array, "all_reduce", writes=True)
            by = pick(self, "all_reduce", algorithm, place.nbytes, op)
            if by != "native":
                self._read.check_reducible(place, "all_reduce")
                return run_by(self, by, "all_reduce", place, place, (array,), array, op, async_op, stream)
        if not async_op and stream is None and self._short.all_reduce(array, op):
            return None
        ptr, count, dtype = self._read.read_in_place(array, "all_reduce")
        if self._on_host and type(op) is str and not async_op and stream is None and not open_groups:
            code = OPS.get(op)
            if code is not None:  # the short way: nothing is allocated
                self._native.all_reduce(ptr, ptr, count, dtype, code, 0)
                return None
        code, scalar = self._op(op, dtype, "all_reduce")
        steps = (("all_reduce", (ptr, ptr, count, dtype, code)),)
        described = self._checks and row("all_reduce", dtype=dtype, count=count, op=PREMUL if scalar else code)
        nbytes = count * ITEMSIZE[dtype]
        return self._launch("all_reduce", steps, (array,), array, nbytes, described, async_op, stream, scalar)

    def reduce(self, array, root: int = 0, op="sum", *, async_op: bool = False, stream=None) -> Work | None:
        """Reduce `array` over all ranks; only `root` gets the result, in place, and the others' arrays stay.

        `op` and dtypes as in `all_reduce`. C: ncclReduce.
        """
        if not async_op and stream is None and self._short.reduce(array, root, op):
            return None
        root = self._rank(root, "root", "reduce")
        place = self._read.place(array, "reduce", writes=self.rank == root)
        self._read.check_reducible(place, "reduce")
        code, scalar = self._op(op, place.code, "reduce")
        out = place.ptr if self.rank == root else 0
        steps = (("reduce", (place.ptr, out, place.count, place.code, code, root)),)
        described = self._checks and row(
            "reduce", dtype=place.code, count=place.count, op=PREMUL if scalar else code, root=root
        )
        return self._launch("reduce", steps, (array,), array, place.nbytes, described, async_op, stream, scalar)

    def reduce_scatter(
        self, out, inp, op="sum", *, async_op: bool = False, algorithm=None, stream=None, share=None
    ) -> Work | None:
        """Reduce `inp` over all ranks and give each rank its part: rank r gets part r of `size` equal ones in `out`.

        `inp` has `size` times as many elements as `out`, of the same dtype. In place where `out` is part `rank` of
        `inp`. C: ncclReduceScatter. `share`: as in `all_reduce`, of the elements in `out`.
        C: collHostReduceScatterShare.
        """
        name = "reduce_scatter"
        chosen = share is not None or self._picks is not None or (algorithm is not None and algorithm != "native")
        if not chosen and not async_op and stream is None and self._short.reduce_scatter(out, inp, op):
            return None
        to, of = self._pair(out, inp, name)
        self._read.check_reducible(of, name)
        self._read.check_size(of, to, self.size, name, "inp", "out")
        self._read.check_overlap(of, to, name, self.rank, "the only form in place is out == part `rank` of inp")
        if share is not None:
            return self._sharing(name, to, of, (out, inp), op, share, async_op, algorithm, stream)
        if chosen:
            by = pick(self, name, algorithm, of.nbytes, op)
            if by != "native":
                return run_by(self, by, name, to, of, (out, inp), out, op, async_op, stream)
        code, scalar = self._op(op, of.code, name)
        steps = ((name, (of.ptr, to.ptr, to.count, to.code, code)),)
        described = self._checks and row(name, dtype=to.code, count=to.count, op=PREMUL if scalar else code)
        return self._launch(name, steps, (out, inp), out, of.nbytes, described, async_op, stream, scalar)

    def all_gather(self, out, inp, *, async_op: bool = False, algorithm=None, stream=None) -> Work | None:
        """Gather every rank's `inp` into `out` on every rank, in rank order. Takes any dtype.

        `out` has `size` times as many elements as `inp`. In place where `inp` is part `rank` of `out`.
        C: ncclAllGather.
        """
        name = "all_gather"
        chosen = self._picks is not None or (algorithm is not None and algorithm != "native")
        if not chosen and not async_op and stream is None and self._short.all_gather(out, inp):
            return None
        to, of = self._pair(out, inp, name)
        self._read.check_size(to, of, self.size, name, "out", "inp")
        self._read.check_overlap(to, of, name, self.rank, "the only form in place is inp == part `rank` of out")
        if chosen:
            by = pick(self, name, algorithm, to.nbytes)
            if by != "native":
                return run_by(self, by, name, to, of, (out, inp), out, None, async_op, stream)
        steps = ((name, (of.ptr, to.ptr, of.units, of.code)),)
        described = self._checks and row(name, dtype=of.tag, count=of.units)
        return self._launch(name, steps, (out, inp), out, to.nbytes, described, async_op, stream, label=of.label)

    def broadcast(self, array, root: int = 0, *, async_op: bool = False, stream=None) -> Work | None:
        """Send `root`'s array to all ranks, in place. Takes any dtype. C: ncclBroadcast."""
        if not async_op and stream is None and self._short.broadcast(array, root):
            return None
        root = self._rank(root, "root", "broadcast")
        place = self._read.place(array, "broadcast", writes=self.rank != root)
        steps = (("broadcast", (place.ptr, place.ptr, place.units, place.code, root)),)
        described = self._checks and row("broadcast", dtype=place.tag, count=place.units, root=root)
        return self._launch(
            "broadcast", steps, (array,), array, place.nbytes, described, async_op, stream, label=place.label
        )

    def all_to_all(
        self, out, inp, output_split_sizes=None, input_split_sizes=None, *, async_op: bool = False, stream=None
    ) -> Work | None:
        """Send part r of `inp` to rank r, and receive rank r's into part r of `out`. Takes any dtype; never in place.

        Without split sizes the parts are equal, in elements. The split sizes are rows along dimension 0, one for each
        rank, as in ``torch.distributed.all_to_all_single``; where one list is given the other side is split evenly.
        C: ncclAlltoAll; ncclSend and ncclRecv in a group for unequal parts and for NCCL before 2.28.3.
        """
        name = "all_to_all"
        plain = output_split_sizes is None and input_split_sizes is None and stream is None
        if plain and not async_op and self._short.all_to_all(out, inp):
            return None
        to, of = self._pair(out, inp, name)
        self._read.check_overlap(to, of, name, None, "all_to_all has no form in place")
        if output_split_sizes is None and input_split_sizes is None:
            if of.count % self.size:
                raise self._wrong(
                    name, f"inp has {of.count} elements, which {self.size} ranks can't share evenly: pass split sizes"
                )
            self._read.check_size(to, of, 1, name, "out", "inp")
            units = of.units // self.size
            described = self._checks and row(name, dtype=of.tag, count=units)
            if self.engine.library.has("ncclAlltoAll"):
                steps = ((name, (of.ptr, to.ptr, units, of.code)),)
                return self._launch(
                    name, steps, (out, inp), out, of.nbytes, described, async_op, stream, label=of.label
                )
            sends = receives = [units] * self.size
        else:
            sends, sent_row = self._splits(inp, of, input_split_sizes, "input_split_sizes", "inp")
            receives, received_row = self._splits(out, to, output_split_sizes, "output_split_sizes", "out")
            if None not in (sent_row, received_row) and sent_row != received_row:
                raise self._wrong(
                    name, f"a row of inp has {sent_row} elements and a row of out {received_row}: they must be equal"
                )
            if sends[self.rank] != receives[self.rank]:
                raise self._wrong(
                    name,
                    f"rank {self.rank} sends {sends[self.rank]} elements to itself and receives {receives[self.rank]}",
                )
            described = self._checks and row("all_to_all with split sizes", dtype=of.tag)
        steps = []
        unit = ITEMSIZE[of.code]
        sent = received = 0
        for peer in range(self.size):
            steps.append(("send", (of.ptr + sent * unit, sends[peer], of.code, peer)))
            steps.append(("recv", (to.ptr + received * unit, receives[peer], to.code, peer)))
            sent += sends[peer]
            received += receives[peer]
        return self._launch(name, steps, (out, inp), out, of.nbytes, described, async_op, stream, label=of.label)

    def gather(self, out, inp, root: int = 0, *, async_op: bool = False, stream=None) -> Work | None:
        """Gather every rank's `inp` into `root`'s `out`, in rank order. Takes any dtype; `out` is None elsewhere.

        In place where `inp` is part `root` of `out`. C: ncclGather; ncclSend and ncclRecv before NCCL 2.28.3.
        """
        name = "gather"
        root = self._rank(root, "root", name)
        of = self._read.place(inp, name, writes=False, what="inp")
        to = self._root_only(out, root, name, "out", writes=True)
        if to is not None:
            self._read.check_same_dtype(to, of, name)
            self._read.check_size(to, of, self.size, name, "out", "inp")
            self._read.check_overlap(to, of, name, root, "the only form in place is inp == part `root` of out")
        if self.engine.library.has("ncclGather"):
            steps = ((name, (of.ptr, to.ptr if to else 0, of.units, of.code, root)),)
        else:
            steps = [("send", (of.ptr, of.units, of.code, root))]
            if to is not None:
                steps += [("recv", (to.part(r, self.size), of.units, of.code, r)) for r in range(self.size)]
        described = self._checks and row(name, dtype=of.tag, count=of.units, root=root)
        held = (inp,) if out is None else (out, inp)
        return self._launch(name, steps, held, out, of.nbytes, described, async_op, stream, label=of.label)

    def scatter(self, out, inp, root: int = 0, *, async_op: bool = False, stream=None) -> Work | None:
        """Send part r of `root`'s `inp` to rank r's `out`. Takes any dtype; `inp` is None elsewhere.

        In place where `out` is part `root` of `inp`. C: ncclScatter; ncclSend and ncclRecv before NCCL 2.28.3.
        """
        name = "scatter"
        root = self._rank(root, "root", name)
        to = self._read.place(out, name, writes=True, what="out")
        of = self._root_only(inp, root, name, "inp", writes=False)
        if of is not None:
            self._read.check_same_dtype(to, of, name)
            self._read.check_size(of, to, self.size, name, "inp", "out")
            self._read.check_overlap(of, to, name, root, "the only form in place is out == part `root` of inp")
        if self.engine.library.has("ncclScatter"):
            steps = ((name, (of.ptr if of else 0, to.ptr, to.units, to.code, root)),)
        else:
            steps = [("recv", (to.ptr, to.units, to.code, root))]
            if of is not None:
                steps += [("send", (of.part(r, self.size), to.units, to.code, r)) for r in range(self.size)]
        described = self._checks and row(name, dtype=to.tag, count=to.units, root=root)
        held = (out,) if inp is None else (out, inp)
        return self._launch(name, steps, held, out, to.nbytes, described, async_op, stream, label=to.label)

    def send(self, array, peer: int, *, async_op: bool = False, stream=None) -> Work | None:
        """Send `array` to rank `peer`, which must call `recv`. Takes any dtype. C: ncclSend."""
        if not async_op and stream is None and self._short.send(array, peer):
            return None
        return self._one_sided("send", array, peer, async_op, stream)

    def recv(self, array, peer: int, *, async_op: bool = False, stream=None) -> Work | None:
        """Receive rank `peer`'s `send` into `array`. Takes any dtype. C: ncclRecv."""
        if not async_op and stream is None and self._short.recv(array, peer):
            return None
        return self._one_sided("recv", array, peer, async_op, stream)

    def barrier(self) -> None:
        """Block until all ranks have called it and all operations before it are done. Not inside a group."""
        if open_groups and get_ident() in open_groups:
            raise InvalidUsage("barrier() can't stand in a group: call it after the `with` block", rank=self.rank)
        if self._on_host:
            self._alive("barrier")
            label = self.engine.library.label
            label("barrier")
            try:
                self._native.all_reduce(0, 0, 0, _UINT8, OPS["sum"], 0)
            finally:
                label()
            return
        closing.refuse_in_capture(self, "barrier")
        if self._checks:
            self._agree([row("barrier")])
        if self._token is None:
            self._token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        work = self.all_reduce(self._token, "max", async_op=True, algorithm="native")
        # The watchdog ends it at the limit, and names the ranks that have not come: it gets the time to do so.
        limit = None if self._timeout is None else self._timeout + _WATCHDOG_SECONDS
        if not self._lane.block(work._flight, limit):
            raise CollectiveTimeout(f"not all ranks came within {self._timeout} s", op="barrier", rank=self.rank)
        work.wait()

    def group(self) -> Group:
        """Make the calls inside a ``with`` block one operation, as several sends and receives must be.

        They are checked at once and issued when the block ends; where it raises, none is.
        C: ncclGroupStart, ncclGroupEnd.
        """
        self._alive("group")
        return Group(self)

    # ---- Other communicators, memory.

    def split(self, color: int | None, key: int | None = None) -> Communicator | None:
        """Make one communicator for each color, its ranks in the order of `key` (None: as in this one).

        All ranks call it; a color of None or -1 takes no part and gets None. C: ncclCommSplit (NCCL 2.18).
        """
        color = -1 if color is None else self._int(color, "color", -1, "split", 2**31)
        key = self.rank if key is None else self._int(key, "key", -(2**31), "split", 2**31)
        with self._guard():
            native = self._native.split(color, key)
        self._children += 1
        return None if native is None else self._child(native, f"split{self._children}/{color}")

    def shrink(self, exclude, *, abort: bool = False) -> Communicator:
        """Make a communicator without the ranks in `exclude`, which don't call it; the others all do.

        `abort`: end what is in flight first, as it must be where an excluded rank died. C: ncclCommShrink (NCCL 2.27).
        """
        excluded = sorted({parse_rank(r, self.size, "exclude", rank=self.rank, name="shrink") for r in exclude})
        if self.rank in excluded:
            raise self._wrong("shrink", f"rank {self.rank} is to be left out, so it must not call shrink")
        if abort and self._algorithms is not None:
            self._algorithms.abort()
        with self._guard():
            native = self._native.shrink(excluded, flags=SHRINK_ABORT if abort else 0)
        self._children += 1
        return self._child(native, f"shrink{self._children}")

    def empty(self, n: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor of `n` elements in memory that the engine can use with no staging copy; a local call.

        `dtype` None: torch's default. The memory is freed when the last tensor that views it is gone, also after
        `close()`. Its contents are undefined. On the host it is shared with the other ranks. A forked child (a
        DataLoader's worker) can't change what its parent has; it sees what the parent writes later in the pages that it
        has not written to itself, so it must not take it for a snapshot. C: ncclMemAlloc (NCCL 2.19).
        """
        self._alive("empty")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise self._wrong("empty", f"dtype must be a torch.dtype, not {dtype!r}")
        if str(dtype).startswith(("torch.q", "torch.bits")):
            raise self._wrong("empty", f"{dtype} needs more than memory: allocate its integers (torch.uint8, ...)")
        n = self._int(n, "n", 0, "empty")
        if n * dtype.itemsize >= 2**63:
            raise self._wrong("empty", f"{n} elements of {dtype} are more than an address space holds")
        return allocate(self.engine.library, self.device, n, dtype)

    def register(self, array) -> Registration:
        """Register an array's memory, so that the engine may use it with no staging copy; it is held alive until
        `deregister` or `close()`. A local call, and no other thread may write to the array meanwhile.

        On the host the allocation becomes shared memory at its address, where that is possible: the result's
        `zero_copy` tells. C: ncclCommRegister (NCCL 2.19).
        """
        place = self._read.place(array, "register", writes=True)
        with self._guard():
            handle = self._native.register(*whole_allocation(array, place.ptr, place.nbytes))
        shared = self.engine.library.memory_shared(place.ptr, place.nbytes) if self._on_host else None
        registration = Registration(array, handle, place.nbytes, shared)
        self._registered.add(registration)
        return registration

    def deregister(self, registration: Registration) -> None:
        """End a registration; nothing that uses the array may be in flight. C: ncclCommDeregister.

        On the host `InvalidUsage` is raised while asynchronous operations are in flight: the peers may be using the
        array's memory, which is this process's own again afterwards. On CUDA it waits for the GPU.
        """
        if registration not in self._registered:
            raise self._wrong("deregister", f"{registration!r} isn't one of this communicator's, or ended before")
        if registration.zero_copy and self._lane.busy():
            raise InvalidUsage(
                "operations are in flight, which may use the array: wait for them first",
                op="deregister", rank=self.rank,
            )  # fmt: skip
        closing.refuse_in_capture(self, "deregister")
        with self._guard():
            if not self._on_host:
                torch.cuda.synchronize(self.device)
            self._native.deregister(registration.handle)
        self._registered.discard(registration)

    # ---- The end.

    def abort(self) -> None:
        """End everything in flight on this rank, from any thread, and close: waits raise `Aborted`.

        The other ranks' operations with this one raise `RemoteError`. C: ncclCommAbort.
        """
        closing.abort(self)

    def close(self) -> None:
        """Wait for what is in flight, then free the communicator. Harmless when called again. C: ncclCommDestroy.

        Raises the error with which the watchdog has ended the communicator, if no call has raised it before.
        """
        closing.close(self)

    def _fail(self, error) -> None:
        closing.fail(self, error)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None and (self.closed or self._lane.busy() or (self._on_host and self._pending() is not None)):
            self.abort()  # what is in flight may never end
        else:
            self.close()

    # ---- Inside.

    def _pending(self):
        info = None if self.closed else self._native.pending()
        return self._algorithms.pending() if info is None and self._algorithms is not None else info

    def _child(self, native, name: str) -> Communicator:
        child = Communicator.__new__(Communicator)
        engine, peers = self.engine, None
        if isinstance(native, HostsComm):
            local, peers = (native.local_rank, native.local_size), native.peers
        elif self._on_host:  # its ranks share one machine, and maybe its parent's are on several
            local = native.rank, native.size
            engine = engine if native.library is engine.library else replace(engine, library=native.library)
        else:  # NCCL's keep the number that the launcher gave
            local = self.local_rank, self.local_size
        child._adopt(native, engine, self.device, *local, self._timeout, self._policy, peers)
        notes = notes_of(self)
        if notes is not None:
            watch(child, notes.under(name))
        return child

    def _current(self, stream) -> int:
        if self._on_host:
            if stream is not None:
                text = "the host engine takes no stream: use async_op=True for the communicator's own queue"
                raise InvalidArgument(text, rank=self.rank)
            return 0
        if stream is None:
            return cuda_current_raw_stream(self.device.index)
        if isinstance(stream, int) and not isinstance(stream, bool):
            self._foreign.add(stream)
            return stream
        handle = getattr(stream, "cuda_stream", None)  # torch's
        if handle is None:
            handle = getattr(stream, "ptr", None)  # CuPy's
            self._foreign.add(handle)
        if handle is None:
            text = f"stream must be a torch or CuPy stream or its address, not {stream!r}"
            raise InvalidArgument(text, rank=self.rank)
        return handle

    def _all_reduce_apart(self, out, array, op, async_op, algorithm, stream, share) -> Work | None:
        """Reduce an array into another one."""
        name = "all_reduce"
        to, of = self._pair(out, array, name)
        self._read.check_reducible(of, name)
        self._read.check_size(to, of, 1, name, "out", "the array")
        self._read.check_overlap(to, of, name, None, "leave out `out` for the form in place")
        if share is not None:
            return self._sharing(name, to, of, (out, array), op, share, async_op, algorithm, stream)
        if pick(self, name, algorithm, of.nbytes, op) != "native":  # ours work in place
            out[...] = array
            return self.all_reduce(out, op, async_op=async_op, algorithm=algorithm, stream=stream)
        code, scalar = self._op(op, of.code, name)
        steps = ((name, (of.ptr, to.ptr, of.count, of.code, code)),)
        described = self._checks and row(name, dtype=of.code, count=of.count, op=PREMUL if scalar else code)
        return self._launch(name, steps, (out, array), out, of.nbytes, described, async_op, stream, scalar)

    def _sharing(self, name, to: Place, of: Place, held, op, share, async_op, algorithm, stream) -> Work | None:
        """Carry out a reduction that adds to the caller's `share`."""
        if not self._on_host:
            raise InvalidUsage("share is of the host engine: leave it out here", op=name, rank=self.rank)
        if algorithm is not None and pick(self, name, algorithm, of.nbytes, op) != "native":
            text = f"share is of the native algorithm, not of {algorithm!r}: leave out one of the two"
            raise InvalidUsage(text, op=name, rank=self.rank)
        self._read.check_reducible(of, name)
        sums = self._read.stats_address(share, of, name)
        if to is not of:
            self._read.stats_address(share, to, name)
        code, scalar = self._op(op, of.code, name)
        steps = ((f"{name}_share", (of.ptr, to.ptr, to.count, to.code, code, sums)),)
        return self._launch(name, steps, (*held, share), held[0], of.nbytes, None, async_op, stream, scalar)

    def _op(self, op, dtype: int, name: str):
        code, scalar = parse_op(op, rank=self.rank, name=name)
        if scalar is None:
            return code, None
        return code, (check_premul_scalar(scalar, dtype, rank=self.rank, name=name), dtype)

    def _alive(self, name: str) -> None:
        if type(self._native) is Gone:
            self._native.refuse(name)

    def _use(self, policy: Policy) -> None:
        self._policy = policy
        self._picks = policy.picks(self.engine.name, self.size)

    def _rank(self, value, what: str, name: str) -> int:
        return parse_rank(value, self.size, what, rank=self.rank, name=name)

    def _int(self, value, what: str, low: int, name: str, end: int = 2**63) -> int:
        if isinstance(value, bool) or not hasattr(type(value), "__index__") or not low <= operator.index(value) < end:
            raise self._wrong(name, f"{what} must be an int from {low} to {end - 1}, not {value!r}")
        return operator.index(value)

    def _guard(self):
        """Make the communicator's device the current one, to which stream 0 belongs."""
        if self._on_host or torch.cuda.current_device() == self.device.index:
            return _NO_GUARD
        return torch.cuda.device(self.device)

    def _wrong(self, name: str, message: str) -> InvalidArgument:
        return InvalidArgument(message, op=name, rank=self.rank)

    def _pair(self, out, inp, name: str) -> tuple[Place, Place]:
        to = self._read.place(out, name, writes=True, what="out")
        of = self._read.place(inp, name, writes=False, what="inp")
        self._read.check_same_dtype(to, of, name)
        return to, of

    def _root_only(self, array, root: int, name: str, what: str, *, writes: bool) -> Place | None:
        if self.rank != root:
            if array is not None:
                raise self._wrong(name, f"only root (rank {root}) has {what}: pass None on the other ranks")
            return None
        if array is None:
            raise self._wrong(name, f"{what} is None, but this rank is the root and must give it")
        return self._read.place(array, name, writes=writes, what=what)

    def _splits(self, array, place: Place, sizes, what: str, which: str):
        """Give the units for each rank, and the elements of one row (None where there are no rows to tell)."""
        shape = tuple(array.shape)
        if not shape:
            raise self._wrong("all_to_all", f"{which} has no dimension to split: use a tensor of at least one")
        if sizes is None:
            if shape[0] % self.size:
                raise self._wrong("all_to_all", f"the {shape[0]} rows of {which} can't be shared evenly: pass {what}")
            sizes = [shape[0] // self.size] * self.size
        if isinstance(sizes, (str, bytes)) or not hasattr(type(sizes), "__iter__"):
            raise self._wrong("all_to_all", f"{what} must be a list of {self.size} ints, one a rank, not {sizes!r}")
        sizes = list(sizes)
        if len(sizes) != self.size:
            raise self._wrong("all_to_all", f"{what} must have {self.size} entries, one a rank, not {len(sizes)}")
        sizes = [self._int(size, f"each of {what}", 0, "all_to_all") for size in sizes]
        if sum(sizes) != shape[0]:
            raise self._wrong("all_to_all", f"{what} add up to {sum(sizes)}, but {which} has {shape[0]} rows")
        units = place.units // shape[0] if shape[0] else 0
        return [size * units for size in sizes], place.count // shape[0] if shape[0] else None

    def _one_sided(self, name: str, array, peer, async_op, stream):
        peer = self._rank(peer, "peer", name)
        place = self._read.place(array, name, writes=name == "recv")
        if peer == self.rank and get_ident() not in open_groups:
            raise InvalidUsage(
                f"a {name} with oneself needs its other half in the same `with comm.group():` block", op=name, rank=peer
            )
        steps = ((name, (place.ptr, place.units, place.code, peer)),)
        return self._launch(name, steps, (array,), array, place.nbytes, None, async_op, stream, label=place.label)

    def _issue(self, call: Call | None, steps, stream: int) -> None:
        """Issue a call on a stream; None: the one plain step that `steps` are."""
        if call is None:
            method, args = steps[0]
            getattr(self._native, method)(*args, stream)
        else:
            with self._guard():
                issue([call], [stream])

    def _agree(self, rows, grouped: bool = False) -> None:
        if self._checks and rows:
            with self._guard():
                agree(self._native, rows, device=self.device, stream=self._current(None), grouped=grouped)

    def _launch(self, name, steps, held, result, nbytes, described, async_op, stream, scalar=None, label=None):
        """Issue a call now, or put it into the open group or the lane."""
        group = open_groups.get(get_ident()) if open_groups else None
        current = self._current(stream)
        if group is not None or async_op:
            held = (*held, *map(memory_of, held))
        if group is not None:
            self._alive(name)
            if async_op and stream is not None:
                raise self._wrong(
                    name, "in a group, async_op=True takes the communicator's own stream: leave out stream"
                )
            work = Work(name, nbytes, result) if async_op else None
            return group.add(Call(self, name, steps, held, nbytes, described, scalar, current, work, label))
        if described:
            self._agree([described])
        call = (
            None
            if self._on_host and len(steps) == 1 and scalar is None and label is None
            else Call(self, name, steps, held, nbytes, described, scalar, label=label)
        )
        if not async_op:
            self._issue(call, steps, current)
            return None
        self._alive(name)  # before a queue is made
        work = Work(name, nbytes, result)
        target = self._lane.begin(None if stream is None else current)
        try:
            self._issue(call, steps, target)
        except BaseException:
            self._lane.cancel(name, held)
            raise
        self._lane.end(name, held, (work,))
        return work
