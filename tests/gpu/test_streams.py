"""On which stream a call goes: what the binding's short way reads through DLPack is torch's current stream."""

from __future__ import annotations

import torch

from tests.gpu.devices import everywhere, on


def streams_read(place):
    """Give pairs of what the binding reads and what torch says: on the default stream, beside it, in a capture."""
    reader = place.comm._reader.array_reader
    pairs = []

    def look():
        pairs.append((reader.current_stream(), place.current_stream()))

    look()
    sides = [place.new_stream() for _ in range(2)]
    for side in sides:
        with place.use(side):
            look()
            with place.use(sides[0]):
                look()
            look()
    look()
    tensor = place.full(1.0, 8)
    place.comm.all_reduce(tensor)
    place.synchronize()

    def step():
        look()
        tensor.add_(1)

    place.capture(step)()
    return pairs


@everywhere()
def test_the_short_way_reads_torchs_current_stream(device, ranks):
    for pairs in on(device, streams_read, ranks):
        assert len(pairs) == 9, pairs
        for read, current in pairs:
            assert read == current, pairs
        if device != "host":
            # torch has 32 streams and gives them in turn: the capture's may be one of the two.
            assert len({current for _, current in pairs}) >= 3, "default, two beside it, and the capture's"


def short_way(place):
    """A plain blocking call takes the short way: nothing of Python between the call and the library's function."""
    comm, tensor = place.comm, place.full(1.0, 8)
    assert type(tensor) is torch.Tensor
    side = place.new_stream()
    with place.use(side):
        assert comm._fast_path.all_reduce(tensor, "sum")
    place.join(side)
    return tensor


@everywhere()
def test_plain_calls_take_the_short_way(device, ranks):
    for tensor in on(device, short_way, ranks):
        assert tensor.unique().tolist() == [ranks]
