"""Executor of the ring and direct algorithms, by send, receive and reduction kernels.

An algorithm uses the engine's binding (send, recv, groups, all_gather) and `kernel_of`'s kernels;
it never uses a transport. On the host the transfers go over a communicator of their own, which the
first call makes by `split`, since the steps of one call must not mix with the calls before and
after it; each call begins with a comparison of the ranks' calls. On CUDA they are queued on two
streams, one for transfers and one for kernels. Nothing waits on the host, and after the first call
of a kind nothing is allocated, so that the call can be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import torch

from ..._nccl import DTYPES
from ...arrays import ITEMSIZE, Buffer
from ...cuda_state import is_capturing, new_comm_stream, stream_from_address
from ...errors import Aborted, CollectivesError, InternalError, InvalidArgument, InvalidUsage
from ..arguments import stream_handle
from ..fingerprint import PREMUL, check_calls, fingerprint_of
from ..group import make_copies
from ..memory import storage_of
from ..work import Work
from .call_check import CallCheck
from .plan import CallKey, ExecutionPlan, PlanCache, issue_transfers, round_to_dtype

__all__ = ["AlgorithmExecutor", "run_algorithm"]

_INT64 = DTYPES["int64"]


class AlgorithmExecutor:
    """Executor of one communicator's algorithms, with their plans, scratch memory and streams.

    `chunk`: bytes of one message, the same on all ranks. It is created at the first call that uses
    an algorithm other than native.
    """

    def __init__(self, comm, chunk: int):
        self._comm = comm
        self._native = None if comm._on_host else comm._native  # carries out the steps
        self._failure: CollectivesError | None = None
        self._closed = False
        self._plans = PlanCache(comm.rank, comm.size, comm.device, chunk)
        self._captured_plans: list[ExecutionPlan] = []  # a CUDA graph reads their memory
        self._streams = None
        self._lock = threading.RLock()
        self._execution_lock = threading.RLock()  # held while a call on the host executes its steps: calls share memory

    def run(
        self, name: str, algorithm: str, dst: Buffer, src: Buffer, held: tuple, code: int, scalar, async_op: bool,
        stream, copies=(),
    ) -> Work | None:  # fmt: skip
        """Carry out one validated call; it blocks on the host and not on CUDA.

        `dst`, `src`: the output and the input, the same for an all-reduce; `held`: the arrays, the
        output first; `code`: of the op; `scalar`: (value, dtype code) of a premultiplied sum, or
        None; `stream`: the caller's, or None; `copies`: see `make_copies`.
        """
        comm = self._comm
        gathers = name == "all_gather"
        key = CallKey(
            name, algorithm, src.units if gathers else dst.count, dst.code, 0 if gathers else code,
            scalar is not None, gathers and src.ptr == dst.part(comm.rank, comm.size),
        )  # fmt: skip
        if not comm._on_host and not gathers and (dst.ptr | src.ptr) % ITEMSIZE[dst.code]:
            raise InvalidArgument(
                f"algorithm {algorithm!r} needs arrays that begin at a multiple of their elements' "
                f"{ITEMSIZE[dst.code]} bytes: copy them, or use algorithm='native'",
                op=name, rank=comm.rank,
            )  # fmt: skip
        factor = None if scalar is None else round_to_dtype(*scalar)
        label = f"{name} by {algorithm}"
        op = -1 if gathers else PREMUL if scalar else code
        fingerprint = fingerprint_of(label, dtype=src.tag, count=key.count, op=op)
        check_calls(comm, [fingerprint])
        handle = stream_handle(comm, stream)
        if self._native is None:
            self._open_native(label, fingerprint)
        if not async_op:
            if copies:
                make_copies(comm, copies, handle)
            if not comm._on_host:
                self._run_on_streams(key, src.ptr, dst.ptr, factor, handle)
                return None
            call_check = CallCheck(comm, label, fingerprint)
            call_check.exchange(0)
            self._execute_steps(call_check, key, src.ptr, dst.ptr, factor)
            return None
        work = Work(name, max(dst.nbytes, src.nbytes), held[0])
        held = (*held, *map(storage_of, held), *copies)
        queue = comm._queue
        handle = queue.begin(name, None if stream is None else handle)
        try:
            if copies:
                make_copies(comm, copies, handle)
            if comm._on_host:
                call_check = CallCheck(comm, label, fingerprint)
                final_error = self._enqueue(queue, handle, call_check, key, src.ptr, dst.ptr, factor)
            else:
                final_error = None
                self._run_on_streams(key, src.ptr, dst.ptr, factor, handle)
        except BaseException:
            queue.cancel(label, held)
            raise
        queue.end(label, held, (work,), final_error)
        return work

    def _get_plan(self, key: CallKey, capturing: bool = False) -> ExecutionPlan:
        if capturing and key not in self._plans:
            raise InvalidUsage(
                "a call of this kind was not made before, and its memory can't be allocated while a CUDA graph is "
                "captured: make the same call once before the capture",
                op=key.name, rank=self._comm.rank,
            )  # fmt: skip
        return self._plans.get(key)

    # ---- On the host.

    def _open_native(self, label: str, fingerprint) -> None:
        """Make the communicator of the steps. Blocks until all ranks have made their first call.

        They compare it before, so that a rank that makes another one leaves the communicator as it
        is.
        """
        comm = self._comm
        with self._execution_lock:
            if self._native is not None:
                return
            call_check = CallCheck(comm, label, fingerprint)
            call_check.exchange(0)
            call_check.verify()
            native = comm._native.split(0, comm.rank)
            with self._lock:
                self._native = native
                closed = self._closed
        if closed:
            native.abort()
            raise Aborted("the communicator was aborted", op=label, rank=comm.rank)

    def _execute_steps(self, call_check: CallCheck, key: CallKey, inp: int, out: int, factor) -> None:
        """Execute the steps of a call in this thread, one call at a time.

        Its fingerprints were exchanged before.
        """
        call_check.verify()
        with self._execution_lock:
            self._run_plan(call_check, key, inp, out, factor)

    def _run_plan(self, call_check: CallCheck, key: CallKey, inp: int, out: int, factor) -> None:
        label = call_check.label
        if self._failure is not None:
            raise InvalidUsage(
                f"the algorithms of this communicator are out of use since an earlier call failed: {self._failure}",
                op=label, rank=self._comm.rank, peers=self._failure.peers,
            )  # fmt: skip
        try:
            native = self._native
            native.set_timeout(self._comm.timeout)
            plan = self._get_plan(key)
            if key.name == "all_gather" or not (inp | out) % ITEMSIZE[key.code]:
                plan.run(native, inp, out, factor)
            else:
                self._run_on_aligned_copy(plan, native, key, inp, out, factor)
        except BaseException as error:
            self._fail(error, label)
            raise

    def _run_on_aligned_copy(self, plan: ExecutionPlan, native, key: CallKey, inp: int, out: int, factor) -> None:
        """Run a plan on copies of arrays that aren't aligned, as the kernels need.

        This is no error: the other ranks don't know of it, and they already wait for this rank's
        steps.
        """
        nbytes = key.count * ITEMSIZE[key.code]
        scatters = key.name == "reduce_scatter"
        copy = torch.empty(nbytes * (self._comm.size if scatters else 1), dtype=torch.uint8, device="cpu")
        begin = copy.data_ptr()
        result = begin + nbytes * self._comm.rank if scatters else begin
        ctypes.memmove(begin, inp, copy.numel())
        plan.run(native, begin, result, factor)
        ctypes.memmove(out, result, nbytes)

    def _enqueue(self, queue, handle: int, call_check: CallCheck, key, inp, out, factor) -> Callable:
        """Put a call into the communicator's queue; return a function that returns its steps' error."""
        comm = self._comm
        outcome: list[CollectivesError] = []
        call_check.exchange(handle)
        native_queue = queue._native
        ticket = native_queue.record()

        def steps():
            try:
                native_queue.done(ticket)  # raises the error of the exchange
                self._execute_steps(call_check, key, inp, out, factor)
            except CollectivesError as error:
                outcome.append(error)
            except BaseException as error:
                outcome.append(InternalError(f"{type(error).__name__}: {error}", op=call_check.label, rank=comm.rank))
                outcome[0].__cause__ = error

        try:
            native_queue.call(steps)
        finally:
            # An empty message to oneself: the calls that come after this one wait for its last
            # step.
            issue_transfers(
                comm._native, (("send", 0, 0, 0, _INT64, comm.rank), ("recv", 0, 0, 0, _INT64, comm.rank)), (0,),
                handle,
            )  # fmt: skip
        return lambda: outcome[0] if outcome else None

    def _fail(self, error: BaseException, label: str) -> None:
        """Record a failed step's error, and abort: the peers wait for steps that won't come."""
        if isinstance(error, CollectivesError):
            error.op = label
            self._failure = error
        else:
            self._failure = InternalError(f"{type(error).__name__}: {error}", op=label, rank=self._comm.rank)
        self.abort(closing=False)

    # ---- On CUDA.

    def _run_on_streams(self, key: CallKey, inp: int, out: int, factor, handle: int) -> None:
        comm = self._comm
        with self._lock, comm._device_guard():
            if self._streams is None:
                self._streams = new_comm_stream(comm.device), new_comm_stream(comm.device)
            transfers, kernels = self._streams
            outer = stream_from_address(handle, comm.device)
            capturing = is_capturing(outer)
            with torch.cuda.stream(kernels):  # a plan's memory belongs to this stream, and is freed in its order
                plan = self._get_plan(key, capturing)
            if capturing and plan not in self._captured_plans:
                self._captured_plans.append(plan)
            plan.run_on_streams(comm._native, inp, out, factor, outer, transfers, kernels, own_memory=capturing)

    # ---- The end.

    def pending(self):
        """Return what a step waits for now, or None."""
        native = self._native
        return native.pending() if self._comm._on_host and native is not None and native.handle else None

    def abort(self, closing: bool = True) -> None:
        """Abort the steps in progress, from any thread.

        Called before the communicator's queue is drained.
        """
        with self._lock:
            self._closed = self._closed or closing
            native = self._native
        if self._comm._on_host and native is not None and native.handle:
            native.abort()

    def close(self) -> None:
        """Free everything; nothing may be in flight."""
        with self._lock:
            self._closed = True
            native = self._native
        if self._comm._on_host and native is not None and native.handle:
            native.destroy()
        self._plans.clear()
        self._captured_plans.clear()


def run_algorithm(
    comm, algorithm: str, name: str, dst: Buffer, src: Buffer, held: tuple, code: int, scalar, async_op: bool, stream,
    copies=(),
) -> Work | None:
    """Carry out a communicator's validated call by the ring or direct algorithm.

    The arguments are those of `AlgorithmExecutor.run`.
    """
    comm._check_open(name)
    if comm._algorithms is None:
        comm._algorithms = AlgorithmExecutor(comm, comm._chunk)
    return comm._algorithms.run(name, algorithm, dst, src, held, code, scalar, async_op, stream, copies)
