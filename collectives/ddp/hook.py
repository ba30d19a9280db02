"""fused_allreduce: the communication hook for torch's DistributedDataParallel.

``ddp.register_comm_hook(None, collectives.fused_allreduce)`` averages each gradient bucket in
place: one collective, and no extra pass over the data. On CUDA, and where each rank has more cores
than torch computes with, the buckets are reduced while the backward runs; otherwise the hook
reduces them in its call.
"""

# No `from __future__ import annotations`: torch compares a hook's annotations as objects.

import torch
import torch.distributed as dist

from ..arrays import kind_of
from ..comm.communicator import Communicator
from ..comm.liveness import publish_process
from ..compression import Bucket
from ..errors import CollectivesError, InvalidArgument, InvalidUsage
from ..gradients.compilation import compile_gradient_kernels
from ..gradients.compiled import reduce_tuple
from ..gradients.ddp_checks import check_group
from ..gradients.ddp_reducer import BucketError
from ..gradients.state import HookState
from ..gradients.step_count import count_steps
from ..gradients.streams import close_comm_streams
from ..gradients.unused_states import forget
from ..rendezvous.process_groups import drop_communicator, get_communicator
from ..torch_compat import untraced
from ..torch_patches import find_hooked_ddps, observe_comm_hooks
from .zero_copy import rebuild_in_shareable_memory

__all__ = ["HookState", "fused_allreduce"]

_default_state = HookState()
forget(_default_state)


def fused_allreduce(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP gradient bucket over all ranks, in place: a hook for ``register_comm_hook``.

    Sums of fp16 and bf16 are taken in fp32 (host engine) and rounded once. On the host the last
    bucket of a backward blocks until all are done. The communicator is opened at the first bucket,
    which blocks until all ranks have come. Errors are raised here with their cause; torch's DDP
    object can't be used after one and must be built again.

    Args:
        state: A `HookState`, or None for the default group without compression.
        bucket: The bucket, from DDP.

    Returns:
        A future of the bucket's own buffer.
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
    if state.options.gather is not None:
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


@untraced
def _reduce(state: HookState, bucket) -> torch.futures.Future[torch.Tensor]:
    buffer, index = bucket.buffer(), bucket.index()
    comm, fast_path, ours = state.comm, state.fast_path, None
    try:
        if fast_path.is_open:
            comm = fast_path.comm  # before the checks: Ctrl-C in them must end it, too
            if fast_path.takes(state, bucket, index, buffer):
                return fast_path.reduce(state, bucket, index)
            comm = state.comm
        ours = _describe(state, bucket, buffer, index)
        if ours.index == 0 and comm is None and state.process_group is None:
            for ddp in find_hooked_ddps(ours.params[0])[-1:]:
                check_group(ddp)
        if buffer.layout is not torch.strided or buffer.is_complex():
            ours.flat = _flatten_dense(buffer)
        if comm is None:
            device = buffer.device
            comm = state.reducer.find_communicator(device) if ours.index else None
            if comm is None:
                comm = get_communicator(state.get_process_group(), device)
        if state.shares_memory:
            state.share_memory(comm, ours)
        last = bucket.is_last()
        future = state.reducer.reduce_bucket(comm, ours, buffer, last)
        fast_path.remember(state, ours, buffer, future, last)
        return future
    except CollectivesError as error:
        fast_path.close(failed=True)
        ours = ours or _describe(state, bucket, buffer, index)
        cause, failed = (error.error, error.bucket) if isinstance(error, BucketError) else (error, ours)
        if comm is not None and not isinstance(cause, InvalidArgument):
            close_comm_streams(comm, abort=True)
            if state.comm is None:
                drop_communicator(comm)
        raise _explain(cause, failed) from cause
    except BaseException as error:
        # KeyboardInterrupt, MemoryError: the other ranks are further on or wait for this one. A
        # later backward's buckets would be matched with theirs of this one. The end of the
        # communicator gives them an error instead.
        fast_path.close(failed=True)
        ours = ours or _describe(state, bucket, buffer, index)
        if comm is not None:
            close_comm_streams(comm, abort=True)
            drop_communicator(comm)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"collectives: in gradient bucket {ours.index}, of {ours.describe()}")
        raise


def _describe(state: HookState, bucket, buffer: torch.Tensor, index: int) -> Bucket:
    # Messages use the names by which the state is saved, if it can be saved.
    names = None if state is _default_state else state.parameter_names
    return Bucket(buffer, bucket.parameters, None, index, names)


def _on_register(ddp, state, hook) -> None:
    """Register a DDP object's module with the state when `fused_allreduce` is registered on it.

    Also checks the ranks of the module.
    """
    if hook is not fused_allreduce:
        return
    rebuild_in_shareable_memory(ddp, not isinstance(state, HookState) or state.shares_memory)
    param = next(iter(ddp.parameters()))
    has_hook = ddp in find_hooked_ddps(param)  # and torch refuses this one
    count_steps(ddp.parameters(), None if has_hook else ddp)
    publish_process()  # so that the others notice the end of this process before its first gradients, too
    if state is None:
        check_group(ddp)
        compile_gradient_kernels(ddp.parameters(), options=_default_state.options)
    elif isinstance(state, HookState):
        if state.comm is None and state.process_group is None:
            check_group(ddp)
        state.register(ddp)


observe_comm_hooks(_on_register)


def _flatten_dense(buffer: torch.Tensor) -> torch.Tensor:
    """Return a bucket's buffer as real numbers; raise `InvalidArgument` for a sparse one."""
    if buffer.layout is not torch.strided:
        raise InvalidArgument(
            f"the gradients of this bucket are {str(buffer.layout).removeprefix('torch.')}: fused_allreduce averages "
            "dense ones; build the embedding with sparse=False"
        )
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def _explain(error: CollectivesError, bucket: Bucket) -> CollectivesError:
    """Return the same error with its bucket and its consequence for DDP in the text."""
    return error.with_addition(
        f" -- in gradient bucket {bucket.index}, of {bucket.describe()}. A DistributedDataParallel object can't go on "
        "after its hook has failed: mend the cause and build it again"
    )
