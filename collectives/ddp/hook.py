"""Communication hooks for torch's DistributedDataParallel.

``ddp.register_comm_hook(None, collectives.fused_allreduce)`` averages each gradient bucket in place: one collective, no
pass of its own over the data. Where each rank has more cores than torch computes with, and on CUDA, the buckets are
reduced beside the backward; otherwise where the hook is called.
"""

# No `from __future__ import annotations`: torch compares a hook's annotations as objects.

import torch
import torch.distributed as dist

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..comm.liveness import announce
from ..comm.memory import mapped_apart
from ..compression.base import Bucket
from ..errors import CollectivesError, InvalidArgument, InvalidUsage
from ..gradients.compiled import reduce_tuple
from ..gradients.pipeline import Failed
from ..gradients.state import HookState, check_group
from ..gradients.streams import close_lanes
from ..rendezvous.process_groups import drop_communicator, get_communicator
from ..torch_compat import disable_dynamo
from ..torch_patches import ddps_of, when_registered
from .devices import check_device_ids, tell_devices

__all__ = ["DistributedDataParallel", "HookState", "fused_allreduce"]

_default_state = HookState()
_BUCKETS_MADE = 8  # forwards with autograd after which DDP's buckets are there, some of them under no_sync()


def fused_allreduce(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP gradient bucket over all ranks, in place: a hook for ``register_comm_hook``.

    `state`: a `HookState`, or None for the default group and the gradients as they are. Sums of fp16 and bf16 are taken
    in fp32 (host engine) and rounded once. Returns a future of the bucket's own buffer. On the host the last bucket of
    a backward blocks until all are done. The communicator is opened at the first bucket, which blocks until all ranks
    have come. Errors are raised here with their cause; torch's DDP object can't be used after one and must be built
    again.
    """
    if state is None:
        state = _default_state
    elif not isinstance(state, HookState):
        hint = ""
        if isinstance(state, dist.ProcessGroup):
            hint = ": use HookState(process_group=...)"
        elif isinstance(state, Communicator):
            hint = ": use HookState(comm=...)"
        raise InvalidArgument(f"the state of fused_allreduce must be None or a HookState, not {kind_of(state)}{hint}")
    if state.gather is not None:
        raise InvalidArgument(
            f"gather={state.gather!r} is how fully_shard's parameters travel, and DDP's don't: give its HookState none"
        )
    if state.units is not None:
        raise InvalidUsage("this HookState serves sharded modules: give the DDP object a state of its own")
    if isinstance(bucket, tuple):  # python_reducer: the gradient of one parameter, mostly while it is traced
        return reduce_tuple(state, bucket)
    if not isinstance(bucket, dist.GradBucket):
        raise InvalidArgument(f"fused_allreduce takes a torch.distributed.GradBucket, not {kind_of(bucket)}")
    return _reduce(state, bucket)


def _reduce(state: HookState, bucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    # By which names messages call parameters: those that the state saves, if it can be saved.
    names = None if state is _default_state else state.names
    ours = Bucket(buffer, bucket.parameters, None, bucket.index(), names)
    comm = state.comm
    try:
        if ours.index == 0 and comm is None and state.process_group is None:
            for ddp in ddps_of(ours.params[0])[-1:]:
                check_group(ddp)
        flat = ours.flat = _dense(buffer)
        if comm is None:
            comm = get_communicator(state.own_group(), buffer.device)
        if state.shares_memory and flat.is_cpu:
            state.see(comm, ours)
        return state.reduction.start(comm, ours, buffer, bucket.is_last())
    except CollectivesError as error:
        cause, failed = (error.error, error.bucket) if isinstance(error, Failed) else (error, ours)
        if comm is not None and not isinstance(cause, InvalidArgument):
            close_lanes(comm, abort=True)
            if state.comm is None:
                drop_communicator(comm)
        raise _explained(cause, failed) from cause
    except BaseException as error:
        # KeyboardInterrupt, MemoryError: the other ranks are further on or wait for this one, and a later backward's
        # buckets would meet theirs of this one. With the end of the communicator they get an error instead.
        if comm is not None:
            close_lanes(comm, abort=True)
            drop_communicator(comm)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"collectives: in gradient bucket {ours.index}, of {ours.describe()}")
        raise


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel, whose `register_comm_hook` also takes the hook alone and names its own group.

    So `fused_allreduce` averages over the right ranks also where the module was built over a subgroup. Gradients are
    views of DDP's buckets (``gradient_as_bucket_view``, True unless it is given), which saves two passes over them, and
    which the hook makes memory that the ranks share; as in torch, such a gradient can't be ``detach_()``-ed. So that
    they can be shared, the buckets are made apart from malloc's heap; see `memory.mapped_apart`. Raises
    `InvalidArgument` for `device_ids` that don't fit where the module's parameters are, with those that would.
    """

    def __init__(self, module, *arguments, gradient_as_bucket_view: bool = True, **options):
        check_device_ids(arguments[0] if arguments else options.get("device_ids"), module)
        super().__init__(module, *arguments, gradient_as_bucket_view=gradient_as_bucket_view, **options)
        self._forwards = 0

    @disable_dynamo(recursive=False)
    def forward(self, *inputs, **arguments):
        """Call the module, as torch's; an error from inputs on another device than the module's says so in a note."""
        try:
            return super().forward(*inputs, **arguments)
        except RuntimeError as error:
            if "device" in str(error) and hasattr(error, "add_note"):  # Python 3.11
                tell_devices(error, self.module, (*inputs, *arguments.values()))
            raise

    @disable_dynamo(recursive=False)
    def _pre_forward(self, *inputs, **arguments):
        if self._forwards < _BUCKETS_MADE and self.device_type == "cpu" and torch.is_grad_enabled():
            self._forwards += 1
            # DDP makes its buckets again in its second or third forward, and keeps those; here, so that they can be
            # shared. Not where ranks that have joined do so in an order of their own.
            if not (self._use_python_reducer or self._delay_all_reduce_all_params or self._join_config.enable):
                mapped_apart(self._make_buckets)
        return super()._pre_forward(*inputs, **arguments)

    def _make_buckets(self) -> None:
        if self.reducer._rebuild_buckets():
            self._has_rebuilt_buckets = True
            self._forwards = _BUCKETS_MADE

    def register_comm_hook(self, state, hook=None):
        """Register a communication hook, by ``(hook)`` or torch's ``(state, hook)``.

        With `fused_allreduce` a state of None, or one that names no ranks, gets this module's process group. Raises
        `InvalidArgument` for a state with other ranks than the module's.
        """
        if hook is None:
            if not callable(state):
                raise InvalidArgument(f"register_comm_hook takes (hook) or (state, hook); {kind_of(state)} is no hook")
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


def _registered(ddp, state, hook) -> None:
    """Take note of a DDP object's module when `fused_allreduce` is registered on it, and check its ranks."""
    if hook is not fused_allreduce:
        return
    announce()  # else the others could not see, before this rank's first gradients, that its process has ended
    if state is None:
        check_group(ddp)
    elif isinstance(state, HookState):
        if state.comm is None and state.process_group is None:
            check_group(ddp)
        state.register(ddp)


when_registered(_registered)


# ---- What a bucket holds.


def _dense(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.layout is not torch.strided:
        raise InvalidArgument(
            f"the gradients of this bucket are {str(buffer.layout).removeprefix('torch.')}: fused_allreduce averages "
            "dense ones; build the embedding with sparse=False"
        )
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def _explained(error: CollectivesError, bucket: Bucket) -> CollectivesError:
    """The same error with what it means for DDP."""
    return type(error)(
        f"{error.message} -- in gradient bucket {bucket.index}, of {bucket.describe()}. A DistributedDataParallel "
        "object can't go on after its hook has failed: mend the cause and build it again",
        code=error.code, op=error.op, rank=error.rank, peers=error.peers, seq=error.seq, nbytes=error.nbytes,
        detail=error.detail,
    )  # fmt: skip
