"""Communication hooks for torch's DistributedDataParallel.

``ddp.register_comm_hook(None, collectives.fused_allreduce)`` averages each gradient bucket in place: one collective, no
pass of its own over the data. On the host the buckets of a backward go to the communicator's queue and overlap with it;
the last one is waited for, since the hook runs on the thread that computes. On CUDA they go to a side stream.
"""

# No `from __future__ import annotations`: torch compares a hook's annotations as objects.

import torch
import torch.distributed as dist

from .communicator import Communicator
from .compiled import enroll, reduce_tuple
from .errors import CollectivesError, InvalidArgument, InvalidUsage
from .memory import ReturningBuffers
from .torch_groups import communicator_over, drop

__all__ = ["DistributedDataParallel", "HookState", "fused_allreduce"]


class HookState:
    """The state of `fused_allreduce`: which ranks average, and how.

    `comm`: a `Communicator` to use; or `process_group`: a torch process group over whose ranks one is opened at first
    use; with neither, the default group. A gradient bucket doesn't tell its group: where torch's DDP was built over a
    subgroup, it must be named here (`collectives.DistributedDataParallel` names its own); otherwise the gradients of
    all ranks would be averaged. `average`: divide by the number of ranks, in fp32 and inside the reduction; False
    leaves the sum. `zero_copy`: on the host, make large buckets shared memory at their addresses once DDP keeps them,
    so that they are averaged with no staging copy, where malloc has given them mappings of their own (the state's repr
    tells; it depends on their size, 32 MiB being enough, and on what was freed before). A child that is forked then
    can't change them, and is not to read them: it may see what the parent writes later. Picklable: communicator and
    group are left out and opened again at first use. One state may serve several DDP modules of the same group.
    """

    def __init__(
        self, comm: Communicator | None = None, *, process_group=None, average: bool = True, zero_copy: bool = True
    ):
        if comm is not None and not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm must be a collectives.Communicator or None, not {_kind(comm)}")
        if comm is not None and process_group is not None:
            raise InvalidArgument("comm and process_group both say which ranks average: give one of them")
        for name, value in (("average", average), ("zero_copy", zero_copy)):
            if not isinstance(value, bool):
                raise InvalidArgument(f"{name} must be True or False, not {value!r}")
        self.comm = comm
        self.average = average
        self.zero_copy = zero_copy
        self._returning = ReturningBuffers()
        self._number = enroll(self)
        self._group = None
        self._pickled_size = None
        self._flying = []  # (work, future, bucket) of the backward under way; host only
        if process_group is not None:
            self.process_group = process_group

    @property
    def process_group(self):
        """The process group whose ranks average; None: the default group, or `comm`'s ranks."""
        return self._group

    @process_group.setter
    def process_group(self, group):
        if not isinstance(group, dist.ProcessGroup):
            raise InvalidArgument(f"process_group must be a torch.distributed.ProcessGroup, not {_kind(group)}")
        if self.comm is not None:
            raise InvalidArgument("this state has a communicator, which says which ranks average")
        self._group = group
        self._pickled_size = None

    def __getstate__(self):
        size = self._pickled_size
        if self.comm is not None:
            size = self.comm.size
        elif self._group is not None and self._group is not dist.group.WORLD:
            size = self._group.size()
        return {"average": self.average, "zero_copy": self.zero_copy, "size": size}

    def __setstate__(self, state):
        self.__init__(average=state["average"], zero_copy=state["zero_copy"])
        self._pickled_size = state["size"]

    def __repr__(self):
        over = self.comm if self.comm is not None else self._group
        shared = self._returning.told() if self.zero_copy else "off"
        return f"HookState({'default group' if over is None else over}, average={self.average}, zero_copy: {shared})"

    # ---- One bucket.

    def _reduce(self, bucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        owned = None
        try:
            if self._flying and bucket.index() == 0:
                self._settle()  # an earlier backward was interrupted, or two modules' backwards interleave
            data = _dense(buffer)
            comm = self.comm
            if comm is None:
                comm = owned = communicator_over(self.own_group(), buffer.device)
            return self._start(comm, data, buffer, bucket)
        except CollectivesError as error:
            cause, failed = error, bucket
            try:
                self._settle()
            except _Failed as earlier:  # what is raised is the first thing that went wrong
                cause, failed = earlier.error, earlier.bucket
            if owned is not None and not isinstance(cause, InvalidArgument):
                drop(owned)
            raise _explained(cause, failed) from cause

    def _start(self, comm, data, buffer, bucket):
        op = "avg" if self.average else "sum"
        if data.is_cuda:
            work = comm.all_reduce(data, op, async_op=True)
            future = work.future(buffer)
            if bucket.is_last():
                # DDP may now all-reduce its map of unused parameters on the process group's own communicator: two with
                # no order between them can deadlock.
                comm._lane.join()
            return future
        if self.zero_copy:
            if bucket.index() == 0:
                self._returning.begin()
            self._returning.see(comm, data, bucket.parameters()[0])
        future = torch.futures.Future()
        if not bucket.is_last():
            self._flying.append((comm.all_reduce(data, op, async_op=True), future, bucket))
            return future
        comm.all_reduce(data, op)  # after all that is queued
        self._settle()
        future.set_result(buffer)
        return future

    def _settle(self) -> None:
        """Wait for the queued buckets and fulfil their futures; raise the first failure."""
        flying, self._flying = self._flying, []
        first = None
        for work, future, bucket in flying:
            try:
                work.wait()
            except CollectivesError as error:
                future.set_exception(error)
                first = first or _Failed(error, bucket)
            else:
                future.set_result(bucket.buffer())
        if first is not None:
            raise first

    def own_group(self):
        if self._group is not None:
            return self._group
        if not dist.is_initialized():
            raise InvalidUsage(
                "the hook's communicator is opened over torch.distributed's default group, which isn't initialised: "
                "call torch.distributed.init_process_group(), or give HookState a comm or process_group"
            )
        world = dist.group.WORLD
        if self._pickled_size not in (None, world.size()):
            raise InvalidUsage(
                f"this HookState was pickled with a group of {self._pickled_size} ranks and the default group has "
                f"{world.size()}: set its process_group"
            )
        return world


class _Failed(CollectivesError):
    """A queued bucket's error on its way out of `_settle`."""

    def __init__(self, error, bucket):
        super().__init__(str(error))
        self.error = error
        self.bucket = bucket


_default_state = HookState()


def fused_allreduce(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP gradient bucket over all ranks, in place: a hook for ``register_comm_hook``.

    `state`: a `HookState`, or None for the default group. Sums of fp16 and bf16 are taken in fp32 (host engine) and
    rounded once. Returns a future of the bucket's own buffer. On the host the last bucket of a backward blocks until
    all are done. The communicator is opened at the first bucket, which blocks until all ranks have come. Errors are
    raised here with their cause; torch's DDP object can't be used after one and must be built again.
    """
    if state is None:
        state = _default_state
    elif not isinstance(state, HookState):
        hint = ""
        if isinstance(state, dist.ProcessGroup):
            hint = ": use HookState(process_group=...)"
        elif isinstance(state, Communicator):
            hint = ": use HookState(comm=...)"
        raise InvalidArgument(f"the state of fused_allreduce must be None or a HookState, not {_kind(state)}{hint}")
    if isinstance(bucket, tuple):  # python_reducer: the gradient of one parameter, mostly while it is traced
        return reduce_tuple(state, bucket)
    if not isinstance(bucket, dist.GradBucket):
        raise InvalidArgument(f"fused_allreduce takes a torch.distributed.GradBucket, not {_kind(bucket)}")
    return state._reduce(bucket)


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, whose `register_comm_hook` also takes the hook alone and names its own group.

    So `fused_allreduce` averages over the right ranks also where the module was built over a subgroup.
    """

    def register_comm_hook(self, state, hook=None):
        """Register a communication hook, by ``(hook)`` or torch's ``(state, hook)``.

        With `fused_allreduce` a state of None, or one that names no ranks, gets this module's process group. Raises
        `InvalidArgument` for a state with other ranks than the module's.
        """
        if hook is None:
            if not callable(state):
                raise InvalidArgument(f"register_comm_hook takes (hook) or (state, hook); {_kind(state)} is no hook")
            state, hook = None, state
        if hook is fused_allreduce:
            if state is None:
                state = HookState(process_group=self.process_group)
            elif isinstance(state, HookState):
                self._name_ranks(state)
        super().register_comm_hook(state, hook)

    def _name_ranks(self, state: HookState) -> None:
        group = self.process_group
        if state.comm is not None:
            if (state.comm.rank, state.comm.size) != (group.rank(), group.size()):
                raise InvalidArgument(
                    f"the state's communicator is rank {state.comm.rank} of {state.comm.size}, this module's process "
                    f"group rank {group.rank()} of {group.size()}"
                )
        elif state.process_group is None:
            state.process_group = group
        elif state.process_group is not group:
            raise InvalidArgument("the state names another process group than this module's: use a state of its own")


# ---- What a bucket holds.


def _dense(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.layout is not torch.strided:
        raise InvalidArgument(
            f"the gradients of this bucket are {str(buffer.layout).removeprefix('torch.')}: fused_allreduce averages "
            "dense ones; build the embedding with sparse=False"
        )
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _explained(error: CollectivesError, bucket) -> CollectivesError:
    """The same error with what it means for DDP."""
    shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
    shown = ", ".join(map(str, shapes[:8])) + (f" and {len(shapes) - 8} more" if len(shapes) > 8 else "")
    return type(error)(
        f"{error.message} -- in gradient bucket {bucket.index()}, of parameters with shapes {shown}. A "
        "DistributedDataParallel object can't go on after its hook has failed: mend the cause and build it again",
        code=error.code, op=error.op, rank=error.rank, peers=error.peers, seq=error.seq, nbytes=error.nbytes,
        detail=error.detail,
    )  # fmt: skip


def _kind(thing) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")
