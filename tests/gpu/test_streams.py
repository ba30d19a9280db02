"""On which stream a call goes: what the binding's short way reads through DLPack is torch's current stream.

And the priority of the streams that communicate.
"""

from __future__ import annotations

import torch

from collectives.gradients.streams import CommStream
from collectives.sharded.streams import on_side_stream
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


def priorities(place):
    """Give the priorities of the streams on which the package communicates, and of the one that computes."""
    comm, tensor = place.new_communicator(), place.full(1.0, 64)
    comm.all_reduce(tensor, async_op=True).wait()
    comm.all_reduce(tensor, algorithm="ring")
    streams = [comm._queue._side_stream, *comm._algorithms._streams, CommStream(comm, "lane 0").stream]
    with on_side_stream(place.device, "store"):
        streams.append(torch.cuda.current_stream())
    found = [stream.priority for stream in streams], torch.cuda.current_stream().priority
    comm.close()
    return found


@everywhere(devices=("simulated", "cuda"))
def test_streams_that_communicate_have_a_high_priority(device, ranks):
    for communicating, computing in on(device, priorities, ranks):
        assert computing == 0 and len(communicating) == 5
        assert all(priority < computing for priority in communicating)
