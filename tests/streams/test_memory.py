"""Memory of a communicator on the simulated GPU: dropped while a stream uses it, and windows that are wrong."""

from __future__ import annotations

import gc

import pytest
import torch

from collectives.errors import CudaError
from tests.ranks import run_ranks
from tests.streams.checker import checker
from tests.streams.running import expect
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation


def dropped_memory(ctx):
    """A tensor of `empty` that is dropped in a step, even while a stream uses it, has nobody wait."""
    comm = ctx.new_communicator()

    def allocated(nbytes):
        return sum(block.kind == "nccl" and block.nbytes == nbytes for block in checker.blocks.values())

    tensor, side = comm.empty(300_001, torch.float32), torch.cuda.Stream()
    tensor.fill_(1.0)
    comm.all_reduce(tensor)
    side.wait_stream(torch.cuda.current_stream())
    with steps(ctx):
        with torch.cuda.stream(side):
            tensor.mul_(2)
        del tensor
        gc.collect()
    assert allocated(1200004) == 1
    other = comm.empty(300_003, torch.float32)  # it waits
    checker.flush()
    assert (allocated(1200004), allocated(1200012)) == (0, 1)
    with steps(ctx):
        other.fill_(1.0)
        del other
    comm.close()
    checker.flush()
    assert allocated(1200012) == 0


def test_dropped_memory():
    run_ranks(dropped_memory, 2, device="simulated")


def wrong_windows(ctx):
    """What the checker says of windows: freed memory, sizes that differ, and a communicator that ends first."""
    comm = ctx.new_communicator()
    library, native = comm.engine.library, comm._native
    with pytest.raises(CudaError):  # memory that is none of ncclMemAlloc's
        native.window_register(torch.ones(1024, device=ctx.device).data_ptr(), 4096, 1)
    address = library.mem_alloc(8192)
    window = native.window_register(address, 4096 * (1 + ctx.rank), 1)
    expect("window", "different sizes")
    native.window_deregister(window)
    window = native.window_register(address, 8192, 1)
    library.mem_free(address)
    expect("window", "is freed", "registered as a window")
    native.window_deregister(window)
    tensor = comm.empty(4, window=True)
    comm.register_window(tensor)
    comm._registrations.clear()
    comm.close()
    expect("window", "a communicator is destroyed")


def test_wrong_windows():
    run_ranks(wrong_windows, 2, device="simulated")
