"""Memory of a communicator on every device: small tensors in shared blocks, windows, configs."""

from __future__ import annotations

import gc

import pytest
import torch

from collectives import CommConfig
from collectives.comm import gather_config
from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from tests.gpu.devices import check, everywhere, on


def small(place):
    """Small tensors are apart from each other, keep what is written, and give their memory to later ones."""
    comm = place.new_communicator()
    sizes = [1 + 37 * number % 5000 for number in range(100)]
    tensors = [comm.empty(size, torch.float32).fill_(number) for number, size in enumerate(sizes)]
    spans = sorted((each.data_ptr(), each.data_ptr() + 4 * each.numel()) for each in tensors)
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    assert all(begin % 256 == 0 for begin, _ in spans)
    for tensor in tensors[::10]:
        comm.all_reduce(tensor)
    found = [tensor.unique().tolist() for tensor in tensors]
    kept = tensors[50]
    del tensors, tensor
    gc.collect()
    again = [comm.empty(5000, torch.float32).fill_(-1.0) for _ in range(50)]
    assert kept.unique().tolist() == found[50]
    halves = [comm.empty(1 << 18, torch.float32).fill_(float(number)) for number in range(2)]  # of their own
    comm.close()
    return found, [each.sum() for each in (*again, *halves)], kept.clone()


@everywhere()
def test_small_tensors(device, ranks):
    check(device, small, ranks)


def allocations(place):
    from tests.streams.nccl import allocations

    comm = place.new_communicator()
    before = len(allocations)
    tensors = [comm.empty(1000, torch.float32) for _ in range(100)]
    shared = len(allocations) - before
    del tensors
    gc.collect()
    tensors = [comm.empty(1000, torch.float32) for _ in range(100)]
    again = len(allocations) - before
    del tensors
    comm.empty(10, window=True), comm.empty(1 << 20, torch.uint8)
    own = len(allocations) - before - again
    comm.close()
    return shared, again, own


@everywhere(devices=["simulated"], ranks=(1,))
def test_small_tensors_share_allocations(device, ranks):
    for shared, again, own in on(device, allocations, ranks):
        assert shared <= 1 and again <= 2 and own == 2  # earlier tests may have left a block


def windows(place):
    """All-gathers in place in a window, also by a communicator whose gathers take no SMs, and what is refused."""
    comm = place.new_communicator()
    size, rank, n = comm.size, comm.rank, 5000
    config = gather_config(comm.engine.library)
    assert config in (None, CommConfig(cta_policy="zero"))
    gathers = comm.split(0, config=config) if config is not None else comm.split(0)
    whole = comm.empty(size * n, torch.float32, window=True)
    registrations = [each.register_window(whole) for each in (comm, gathers)]
    found = []
    for each in (comm, gathers):
        whole.fill_(-1.0)
        whole[rank * n : (rank + 1) * n] = float(rank + 1)
        each.all_gather(whole, whole[rank * n : (rank + 1) * n])
        found.append(whole.clone())
        whole.fill_(-1.0)
        each.all_gather(whole, place.full(rank + 2.0, n), async_op=True).wait()  # from memory that is none
        found.append(whole.clone())
        each.all_reduce(whole)
        found.append(whole.clone())
    with pytest.raises(InvalidArgument, match="registered with this communicator already"):
        comm.register_window(whole)
    for other in (comm.empty(n), place.full(0.0, n)):
        with pytest.raises(InvalidArgument, match="window=True"):
            comm.register_window(other)
    with pytest.raises(InvalidUsage, match="in a group"), comm.group():
        comm.register_window(comm.empty(4, window=True))
    if size > 1:
        with pytest.raises(Mismatch, match="the ranks' windows differ"):
            comm.register_window(comm.empty(10 + rank, window=True))
    comm.deregister(registrations[0])
    with pytest.raises(InvalidArgument, match="ended before"):
        comm.deregister(registrations[0])
    comm.deregister(comm.register_window(whole))
    comm.register_window(whole)  # ended by close(), which the memory outlives
    del whole
    gathers.close()
    comm.close()
    with pytest.raises(InvalidUsage, match="closed"):
        comm.register_window(place.full(0.0, n))
    aborted = place.new_communicator()
    aborted.register_window(aborted.empty(10, window=True))
    aborted.abort()
    has_windows = not place.is_host and comm.engine.library.has("ncclCommWindowRegister")
    return found, [each.kind for each in registrations], has_windows


@everywhere()
def test_windows(device, ranks):
    for found, kinds, has_windows in on(device, windows, ranks):
        assert kinds == ["window" if has_windows else "buffer"] * 2
        assert has_windows or device != "simulated"
        in_place = torch.arange(1.0, ranks + 1).repeat_interleave(5000)
        for number in range(0, len(found), 3):
            torch.testing.assert_close(found[number], in_place)
            torch.testing.assert_close(found[number + 1], in_place + 1)
            torch.testing.assert_close(found[number + 2], (in_place + 1) * ranks)


CONFIGS = {
    "one CTA": CommConfig(max_ctas=1),
    "at least four": CommConfig(min_ctas=4),
    "no cluster": CommConfig(cga_cluster_size=0),
    "shared": CommConfig(split_share=True, shrink_share=True),
    "named": CommConfig(comm_name="all ranks", traffic_class=0),
    "efficiency": CommConfig(cta_policy="efficiency", nvls_ctas=4),
    "zero": CommConfig(cta_policy="zero"),
    "graphs": CommConfig(graph_usage_mode=1, nvlink_centric_sched=False, n_channels_per_net_peer=2),
}


def reduced(place, name):
    try:
        comm = place.new_communicator(config=CONFIGS[name])
    except InvalidArgument as error:
        assert "needs NCCL" in error.message
        return None
    tensor = place.random(10_000)
    comm.all_reduce(tensor)
    child = comm.split(0)
    assert child.config == comm.config == CONFIGS[name]
    child.all_reduce(tensor)
    child.close()
    comm.close()
    return tensor


@everywhere(CONFIGS, everyday=["zero"])
def test_configs(device, ranks, case):
    for host, found in zip(on("host", reduced, ranks, case), on(device, reduced, ranks, case), strict=True):
        if found is None:
            pytest.skip("the library is older than these fields")
        torch.testing.assert_close(found, host, rtol=0, atol=0)
