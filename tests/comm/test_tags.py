"""Tags of a communicator's calls: compared on the host engine, named in errors and by the flight recorder."""

import pytest
import torch

from collectives import errors
from collectives.comm import make_tag
from collectives.flight import read_folder
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.variables import variables

NAMES = ("unit blocks.0 (Block)", "unit blocks.1 (Block)")


def error_of(call, error=errors.Mismatch):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value), caught.value.tag


def in_different_units(ctx):
    comm = ctx.communicator()
    names = NAMES if ctx.rank == 0 else NAMES[::-1]  # made in another order
    tags = {name: make_tag(name) for name in names}
    found = []
    for count in (4, 100_000):  # the engine's short path, and the other one
        out, own = torch.zeros(2 * count), torch.ones(count)
        calls = {
            "all_gather": lambda: comm.all_gather(out, own),  # noqa: B023
            "reduce_scatter": lambda: comm.reduce_scatter(own, out),  # noqa: B023
            "all_reduce": lambda: comm.all_reduce(own),  # noqa: B023
            "queued all_gather": lambda: comm.all_gather(out, own, async_op=True).wait(),  # noqa: B023
            "queued all_reduce": lambda: comm.all_reduce(own, async_op=True).wait(),  # noqa: B023
        }
        for call in calls.values():
            comm.tag = tags[NAMES[ctx.rank]]
            found.append(error_of(call))
            comm.tag = tags[NAMES[0]]
            call()
            comm.tag = 0
            call()
        comm.all_gather(out, torch.full_like(own, ctx.rank))  # the communicator goes on
        assert out.tolist() == [0.0] * count + [1.0] * count
    return found


def test_ranks_in_different_units_get_both_names():
    for rank, found in enumerate(run_ranks(in_different_units, 2)):
        for text, tag in found:
            assert all(name in text for name in NAMES), text
            assert f"rank {1 - rank}: " in text and tag == NAMES[rank]
            assert f" of {NAMES[rank]} [rank {rank}]" in text


def against_no_tag(ctx):
    comm = ctx.communicator()
    comm.tag = make_tag("a wrapper of the user's") if ctx.rank else 0
    found, _ = error_of(lambda: comm.all_reduce(torch.ones(3)))
    comm.tag = 12345 if ctx.rank else 0  # a number without a name
    unnamed, _ = error_of(lambda: comm.all_reduce(torch.ones(3)))
    comm.tag = make_tag(f"only rank {ctx.rank} has this")
    other, _ = error_of(lambda: comm.all_reduce(torch.ones(3)))
    comm.tag = 0
    return found, unnamed, other


def test_tags_without_a_name_are_shown_as_numbers():
    named, unnamed, other = run_ranks(against_no_tag, 2)[1]
    assert "rank 1: ncclAllReduce of a wrapper of the user's count=3" in named
    assert "rank 0: ncclAllReduce count=3" in named
    assert "rank 1: ncclAllReduce of tag 12345 count=3" in unnamed
    assert "rank 0: ncclAllReduce of tag " in other and "ncclAllReduce of only rank 1 has this" in other


def lone_call(ctx, folder, machines):
    with variables(COLLECTIVES_FLIGHT_DIR=folder), joined(ctx, machines, timeout=1.0) as comm:
        comm.all_reduce(torch.ones(5))
        found = None
        if ctx.rank == 0:
            comm.tag = make_tag(NAMES[1])
            found = error_of(lambda: comm.all_reduce(torch.ones(7)), errors.CollectiveTimeout)
        ctx.barrier()
        comm.abort()
    return found


@pytest.mark.parametrize("machines", ["aa", "ab"], ids=["one node", "two nodes"])
def test_time_limit_and_flight_recorder_name_the_tag(tmp_path, machines):
    text, tag = run_ranks(lone_call, 2, str(tmp_path), machines)[0]
    assert tag == NAMES[1] and f"all_reduce of {NAMES[1]} [rank 0]" in text
    (ring,) = [ring for ring in read_folder(tmp_path)[0] if ring.rank == 0]
    assert [op.tag for op in ring.operations[-2:]] == ["", NAMES[1]]
    assert f" for {NAMES[1]}" in ring.operations[-1].describe()
