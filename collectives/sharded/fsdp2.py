"""The collectives of torch's own FSDP2, by this package: for modules of ``torch.distributed.fsdp.fully_shard``.

::

    fully_shard(module)
    module.set_custom_all_gather(fsdp2.AllGather())
    module.set_custom_reduce_scatter(fsdp2.ReduceScatter())

FSDP2 allocates a buffer, fills its part, makes the call, copies the result out, and drops the
buffer; it never resizes one. On the host these buffers are shared memory that the peers read in
place. They come from a `SharedMemoryPool`, so their pages are mapped once and not in every step.
"""

from __future__ import annotations

import math
import weakref

import torch

from ..backend.work import BackendWork
from ..comm.communicator import Communicator
from ..comm.shared_memory_pool import SharedMemoryPool
from ..errors import CollectivesError, EngineUnavailable, InvalidArgument, InvalidUsage
from ..rendezvous.process_groups import drop_communicator, get_communicator
from ..torch_compat import fsdp_collectives

_protocol = fsdp_collectives()

__all__ = ["AllGather", "ReduceScatter"]

# A smaller buffer shares malloc's pages, and its staging copy stays in the cache.
_MIN_POOLED_BYTES = 64 << 10
# torch's interfaces, where it has them. Without them the classes below raise when they are made.
_AllGatherBase = getattr(_protocol, "AllGather", object)
_ReduceScatterBase = getattr(_protocol, "ReduceScatter", object)


# The pool that all objects of this module share; it ends with the last of them.
_shared: weakref.WeakValueDictionary[str, SharedMemoryPool] = weakref.WeakValueDictionary()


class _Collective:
    """Base of `AllGather` and `ReduceScatter`: the communicator, the buffers, and errors that say
    what to do.
    """

    def __init__(self, comm: Communicator | None = None):
        if _protocol is None:
            raise EngineUnavailable(
                f"torch {torch.__version__} has no set_custom_all_gather and set_custom_reduce_scatter "
                "(torch.distributed.fsdp.FSDPModule): they came with torch 2.9"
            )
        if comm is not None and not isinstance(comm, Communicator):
            raise InvalidArgument(f"comm must be a collectives.Communicator or None, not {type(comm).__name__}")
        self._user_comm = comm
        self._comm = comm  # the communicator that was used last; None before the first call
        self._pool = _shared.setdefault("host", SharedMemoryPool())

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor of a shape; on the host, after the first call, of memory
        that the peers can read.
        """
        n = math.prod(size)
        if not self._uses_pool(n, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)
        return self._pool.allocate(self._comm, n, dtype).view(*size)

    def _uses_pool(self, n: int, dtype: torch.dtype, device: torch.device) -> bool:
        # On CUDA torch's own allocator knows the streams, and can reuse the memory.
        comm = self._comm
        return comm is not None and not comm.closed and device.type == "cpu" and n * dtype.itemsize >= _MIN_POOLED_BYTES

    def _run(self, name: str, out: torch.Tensor, inp: torch.Tensor, group, *op, async_op: bool):
        owned = None
        try:
            if self._user_comm is None:
                self._comm = owned = get_communicator(group, out.device)
            elif (self._user_comm.rank, self._user_comm.size) != (group.rank(), group.size()):
                rank, size = self._user_comm.rank, self._user_comm.size
                raise InvalidUsage(
                    f"the communicator given to fsdp2 is rank {rank} of {size}, and FSDP2 "
                    f"shards over a group in which this is rank {group.rank()} of {group.size()}: leave comm out, or "
                    "give one of the group's ranks in its order",
                    op=name, rank=rank,
                )  # fmt: skip
            work = getattr(self._comm, name)(out, inp, *op, async_op=async_op)
        except CollectivesError as error:
            if owned is not None and not isinstance(error, InvalidArgument):
                drop_communicator(owned)
                self._comm = None
            raise
        return None if work is None else BackendWork([work], [out])

    def __repr__(self):
        over = "the module's group" if self._user_comm is None else self._user_comm
        return f"<fsdp2.{type(self).__name__} over {over}>"


class AllGather(_Collective, _AllGatherBase):
    """Gather FSDP2's parameters: for ``module.set_custom_all_gather`` of a `fully_shard` module.

    `comm`: a `Communicator` of the ranks that the module is sharded over, in the order of their
    group; None: one is opened over the module's own group at the first call, which blocks until all
    its ranks have come. One object may serve several modules. Takes any dtype. On the host a call
    blocks; with FSDP2's ``async_op`` (``module.unshard(async_op=True)``) it runs in the
    communicator's queue. On CUDA it is ordered on the stream that FSDP2 has made the current one.
    Host buffers are kept for the next step, at most as many bytes as were in use at one time, until
    the last `AllGather` and `ReduceScatter` are gone. Raises `EngineUnavailable` where torch has no
    such interface, `InvalidUsage` for a communicator of other ranks, and what
    `Communicator.all_gather` raises.
    """

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False):
        """Gather every rank's `input_tensor` into `output_tensor`; `async_op`: return a Work of
        torch's.
        """
        return self._run("all_gather", output_tensor, input_tensor, group, async_op=async_op)


class ReduceScatter(_Collective, _ReduceScatterBase):
    """Reduce FSDP2's gradients: for ``module.set_custom_reduce_scatter`` of a `fully_shard` module.

    `comm` and buffers as in `AllGather`. Takes the operations that FSDP2 asks for: the average, the
    sum, and the sum premultiplied by a factor (``set_gradient_divide_factor``). On the host fp16
    and bf16 are summed in fp32 in rank order and rounded once. The reduction over the replicas of a
    two-dimensional mesh (HSDP) stays torch's. Raises `InvalidArgument` for another operation or a
    dtype that can't be reduced, and as `AllGather` does.
    """

    def __init__(self, comm: Communicator | None = None):
        super().__init__(comm)
        self._output = None  # elements of the output whose input was allocated

    def _uses_pool(self, n, dtype, device):
        # Peers read only the input. The output becomes gradients, which live until the next step,
        # and would keep a block of the pool until then.
        if self._output == n:
            self._output = None
            return False
        self._output = None if self._comm is None else n // self._comm.size
        return super()._uses_pool(n, dtype, device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False):
        """Reduce `input_tensor`, part r into rank r's `output_tensor`; `async_op`: return torch's
        Work.
        """
        self._output = None
        return self._run("reduce_scatter", output_tensor, input_tensor, group, op, async_op=async_op)
