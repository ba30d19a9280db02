"""Hook calls of compiled autograd: one operator that all-reduces one parameter's gradient when its
graph runs.

With ``torch._dynamo.config.optimize_ddp = "python_reducer"`` DDP has no buckets. It calls its hook
for each parameter whose gradient is there, with the pair (gradient, parameter). Compiled autograd
traces these calls into its graph, which can't hold a communicator. So the pair becomes one
operator, which the graph holds and which all-reduces the gradient when the graph is run. Without
compiled autograd the same operator runs at once.
"""

# No `from __future__ import annotations`: torch reads the operator's schema from the annotations.

import itertools
import weakref

import torch

from ..compression import plan_reduction
from ..errors import CollectivesError, InvalidArgument, InvalidUsage
from ..rendezvous.process_groups import drop_communicator, get_communicator
from .unused_states import forget

__all__ = ["reduce_tuple", "register_state"]

_numbers = itertools.count()
_states: weakref.WeakValueDictionary = weakref.WeakValueDictionary()  # number -> state

# Options that need all gradients of a backward, or their places in a bucket, and the reason.
_REFUSED = {
    "max_norm": "the norm of all gradients is known only after the last one, when the first are in use already",
    "check_finite": "the count covers all gradients, which never come together here",
    "optimizer": "its updates are sharded by bucket",
    "wire": "a compressed wire pays only for buckets, and keeps its residuals by their parameters",
}


def register_state(state) -> int:
    """Return a number by which a compiled graph's operator finds a hook's state, held weakly."""
    number = next(_numbers)
    _states[number] = state
    return number


def reduce_tuple(state, pair) -> None:
    """Average the gradient of a (gradient, parameter) pair over the state's ranks, in place.

    `state`: a `HookState` (its ``_number`` is from `register_state`). Each parameter has an
    all-reduce of its own, with no buckets and no overlap, so the call blocks on the host until the
    gradient is there. It can be traced; the graph then all-reduces when it runs. Raises
    `InvalidUsage` for a state whose options need the whole backward, with the reason.
    """
    _reduce_grad(pair[0], state._number)


@torch.library.custom_op("collectives::reduce_grad_", mutates_args=("grad",))
def _reduce_grad(grad: torch.Tensor, number: int) -> None:
    state = _states.get(number)
    if state is None:
        raise InvalidUsage(
            "this graph was compiled with a HookState that is gone: compile again (torch.compiler.reset())"
        )
    changed = state.options.changed()
    if state.optimizer is not None:
        changed["optimizer"] = state.optimizer
    for name, reason in _REFUSED.items():
        if name in changed:
            raise InvalidUsage(
                f"{name}={changed[name]!r} can't be used where DDP's hook is called for one parameter at a time "
                f'(optimize_ddp="python_reducer"): {reason}. Leave {name} out, or set '
                'torch._dynamo.config.optimize_ddp = "ddp_optimizer"'
            )
    if grad.layout is not torch.strided:
        raise InvalidArgument("a sparse gradient can't be averaged: build the embedding with sparse=False")
    # Gradients keep the strides of their parameters, which may be other than contiguous
    # (channels_last).
    dense = grad if grad.is_contiguous() else grad.contiguous()
    _all_reduce(state, torch.view_as_real(dense) if dense.is_complex() else dense)
    if dense is not grad:
        grad.copy_(dense)


@_reduce_grad.register_fake
def _(grad, number):
    return None


def _all_reduce(state, data: torch.Tensor) -> None:
    forget(state)
    comm, opened = state.comm, None
    try:
        if comm is None:
            comm = opened = get_communicator(state.get_process_group(), data.device)
        algorithm = state.compressor.choose_algorithm(comm)
        plan = plan_reduction(comm, state.pipeline.get_scaling(comm.size), data.dtype, algorithm)
        plan.before(data)
        comm.all_reduce(data, plan.op, async_op=True, algorithm=algorithm).wait()  # on CUDA the stream waits
        plan.after(data)
    except CollectivesError as error:
        if opened is not None and not isinstance(error, InvalidArgument):
            drop_communicator(opened)
        raise
