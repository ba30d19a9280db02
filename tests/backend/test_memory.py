"""Memory that a process group of the backend allocates: of the engine, and kept for the next call."""

import torch
import torch.distributed as dist

from tests.backend.groups import over
from tests.ranks import run_ranks


@over("collectives")
def freed_memory_is_used_again(ctx):
    group = dist.group.WORLD
    group = group._get_backend(torch.device("cpu"))
    assert group.supports_tensor_alloc("cpu") and not group.supports_tensor_alloc("meta")
    comm = group.communicator(torch.device("cpu"))
    made = group.allocate_tensor(40_000, dtype=torch.float32, device="cpu")
    other = group.allocate_tensor(40_000, dtype=torch.float32, device="cpu")
    assert made.shape == (40_000,) and made.dtype is torch.float32
    registration = comm.register(made)
    assert registration.zero_copy  # memory of the engine, which every peer can map
    comm.deregister(registration)
    del registration
    address = made.data_ptr()
    assert address != other.data_ptr()
    view = made.view(100, 400)
    del made
    assert group.allocate_tensor(40_000, dtype=torch.float32, device="cpu").data_ptr() != address  # a view lives
    del view
    again = group.allocate_tensor(80_000, dtype=torch.bfloat16, device="cpu")
    assert again.data_ptr() == address
    again.fill_(ctx.rank + 1)
    dist.all_reduce(again)
    assert again.eq(sum(range(1, ctx.size + 1))).all()
    assert group.allocate_tensor(0, dtype=torch.int64, device="cpu").numel() == 0
    return True


def test_freed_memory_is_used_again(tmp_path):
    assert run_ranks(freed_memory_is_used_again, 2, tmp_path / "store") == [True, True]
