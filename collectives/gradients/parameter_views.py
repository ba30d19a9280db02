"""Parameters as views of their bucket's memory, so that an all-gather of the bucket is in place.

Otherwise a bucket's gather packs this rank's shard into a buffer and unpacks what the other ranks
own: with n ranks 4/n bytes and 4 (n-1)/n bytes of memory traffic for a bf16 parameter, 4 together.
A view costs neither, and lets NCCL gather in registered memory. A kernel that writes its results
into the buffer as well would save 2/n of the 4, and would have to copy there what a skipped step
leaves as it is; so there is none.

`move_into_bucket` changes ``param.data``: the parameter stays the same object with the same values,
shape and strides. This can't be the default. What holds the old memory loses the parameter: another
tensor that shares it (a tied ``.data``, a detached copy, a NumPy array) is found by the storage's
count of users, and the bucket is left as it is; a raw address is not found. CUDA graphs that were
captured before (``make_graphed_callables``) have such addresses. An optimizer, an EMA or
`torch.compile` holds the parameter and not its memory.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import torch

from ..comm.mem_pool import use_mem_pool
from ..errors import TransportError
from ..torch_compat import is_traceable_wrapper_subclass, storage_use_count

__all__ = ["find_in_place", "move_into_bucket"]

_ALIGNMENT = 16  # bytes: of the views, as kernels that load vectors and compiled code expect


def find_in_place(params, offsets, numel: int) -> torch.Tensor | None:
    """Return the first `numel` elements of a bucket as one tensor, if its parameters lie there as
    the bucket has them, one behind the other in one allocation; else None.
    """
    first, itemsize = params[0], params[0].element_size()
    base, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for param, offset in zip(params, offsets, strict=True):
        if offset >= numel:
            break
        if not param.numel():
            continue
        if param.data_ptr() != base + offset * itemsize or param.untyped_storage().data_ptr() != storage:
            return None
    return first.detach().as_strided((numel,), (1,))


def move_into_bucket(comm, params, offsets, numel: int, optimized: Iterable[torch.Tensor]) -> tuple[int, str] | None:
    """Make a bucket's parameters views of one new allocation of `numel` elements.

    A local call, on torch's current stream. On CUDA the memory is of a `mem_pool`, which NCCL can
    register; on the host it is ``comm.empty``'s, which the ranks share. `optimized`: all parameters
    that may lie in an allocation together. Returns None, or, where nothing was changed, the index
    of a parameter and why it must stay.
    """
    obstacle = _find_obstacle(params, offsets, optimized)
    if obstacle is not None:
        return obstacle
    first = params[0]
    if first.is_cuda:
        with use_mem_pool(first.device):
            flat = torch.empty(numel, dtype=first.dtype, device=first.device)
    else:
        try:
            flat = comm.empty(numel, first.dtype)
        except TransportError as error:  # the node has no memory left; other ranks may go on in place
            return 0, f"finds no room in shared memory ({error})"
    views = [
        flat.as_strided(param.size(), param.stride(), offset) for param, offset in zip(params, offsets, strict=True)
    ]
    torch._foreach_copy_(views, [param.detach() for param in params])
    for param, view in zip(params, views, strict=True):
        param.data = view
    return None


def _find_obstacle(params, offsets, optimized) -> tuple[int, str] | None:
    # A storage's users are the tensors that view it, and the object that asks.
    tensors = collections.Counter(param.untyped_storage().data_ptr() for param in {*optimized, *params})
    for at, (param, offset) in enumerate(zip(params, offsets, strict=True)):
        if offset * param.element_size() % _ALIGNMENT:
            reason = f"would begin at byte {offset * param.element_size()}, which is no multiple of {_ALIGNMENT}"
        elif param.is_inference() or is_traceable_wrapper_subclass(param):
            reason = "has memory of its own kind (an inference tensor, or a tensor subclass)"
        elif param.is_cpu and param.is_shared():
            reason = "is shared with other processes"
        elif storage_use_count(param) > 1 + tensors[param.untyped_storage().data_ptr()]:
            reason = "shares its memory with another tensor, which would keep the old values"
        else:
            continue
        return at, reason
    return None
