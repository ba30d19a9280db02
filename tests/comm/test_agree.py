"""Values that the ranks exchange, and the check that all have the same, over each kind of communicator."""

from __future__ import annotations

import contextlib
import math
import os
from unittest import mock

import pytest

from collectives.comm import agree
from collectives.comm.agree import ComparedValue, all_gather_bytes, all_gather_object, verify_same
from collectives.errors import InvalidArgument, Mismatch, TransportError
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation

KINDS = [
    *[pytest.param("host", ranks, id=f"host-{ranks}") for ranks in (1, 2, 3)],
    pytest.param("several nodes", 3, id="several-nodes"),
    pytest.param("simulated", 2, id="simulated-gpu", marks=needs_simulation),
]


def run(program, kind, ranks):
    device = {"device": "simulated"} if kind == "simulated" else {}
    return run_ranks(program, ranks, kind, **device)


@contextlib.contextmanager
def opened(ctx, kind):
    with joined(ctx, "aab") if kind == "several nodes" else ctx.new_communicator() as comm:
        yield comm


def exchange(ctx, kind):
    """Values of all types and sizes: in one all-gather, in two, and with the broadcast of one rank's."""
    with opened(ctx, kind) as comm:
        size, rank = comm.size, comm.rank
        value = {"rank": rank, "list": [None, True, 1.5, "ä\0\n", 2**70], "tuple": (rank, ())}
        expected = [{**value, "rank": r, "tuple": [r, []]} for r in range(size)]
        assert all_gather_object(comm, value) == expected
        assert all_gather_object(comm, None) == [None] * size
        nothing, infinite = all_gather_object(comm, [math.nan, -math.inf])[-1]
        assert math.isnan(nothing) and infinite == -math.inf
        calls = []
        for name in ("all_gather", "broadcast"):
            real = getattr(type(comm), name)
            mock.patch.object(
                comm, name, lambda *a, real=real, name=name, **k: calls.append(name) or real(comm, *a, **k), create=True
            ).start()
        try:
            for lengths, used in (
                ([0] * size, ["all_gather"]),
                ([248] * size, ["all_gather"]),
                ([1000 * (r == size - 1) for r in range(size)], ["all_gather", "broadcast"]),
                ([249 + 1000 * r for r in range(size)], ["all_gather", "all_gather"] if size > 1 else None),
                ([100_000, 0, 300][:size] + [0] * (size - 3), None),
            ):
                calls.clear()
                assert len(all_gather_bytes(comm, os.urandom(lengths[rank]))[rank]) == lengths[rank]
                parts = all_gather_bytes(comm, bytes([rank + 1]) * lengths[rank])
                assert parts == [bytes([r + 1]) * lengths[r] for r in range(size)]
                assert used is None or calls == ([] if size == 1 else used * 2)
        finally:
            mock.patch.stopall()
        with pytest.raises(InvalidArgument, match="JSON"):
            all_gather_object(comm, object())
        with (
            mock.patch.object(agree.json, "dumps", lambda value: "[" * 20_000 if rank == size - 1 else "1"),
            pytest.raises(TransportError, match=f"rank {size - 1} has sent can't be read") as caught,
        ):
            all_gather_object(comm, 1)
        assert caught.value.peers == (size - 1,)
        return expected == all_gather_object(comm, value)  # it stays usable


@pytest.mark.parametrize("kind, ranks", KINDS)
def test_values_of_any_size_arrive_on_all_ranks(kind, ranks):
    assert run(exchange, kind, ranks) == [True] * ranks


def compare(ctx, kind):
    """What differs is named on all ranks, with the ranks that have it."""
    with opened(ctx, kind) as comm:
        size, rank = comm.size, comm.rank
        odd = rank == 1
        verify_same(comm, "they differ", {"a": 1, "b": (2.0, "x")})
        verify_same(comm, "they differ", ComparedValue([("a", 1), ("a", 2)]))
        texts = []

        def differ(value, **options):
            with pytest.raises(Mismatch) as caught:
                verify_same(comm, "they differ", value, "make them alike", op="compare", **options)
            first = [1] if not odd else [r for r in range(size) if r != 1]
            assert caught.value.peers == tuple(first) and caught.value.op == "compare" and caught.value.rank == rank
            texts.append(caught.value.message)

        differ({"same": 1, "wire": "int8" if odd else "fp32", **({} if odd else {"cap": 3})})
        differ([0, 1] if odd else [0, 1, 2])
        differ(ComparedValue([("a", 1), ("b", 2)][:: -1 if odd else 1]))
        differ(ComparedValue([("a", 1)] * (1 + odd)))
        differ("." * 500 + str(rank == 1) + "." * 500)
        differ({f"entry {number}": odd for number in range(20)})
        differ({"entry 3": odd}, labels={"entry 3": "the weight"})
        with pytest.raises(Mismatch, match=r"0 on rank 70; 1 on ranks? 71") as caught:
            verify_same(comm, "they differ", min(rank, 1), ranks=[70, 71, 72][:size])
        assert caught.value.rank == 70 + rank
        return texts


@pytest.mark.parametrize("kind, ranks", KINDS[1:])
def test_a_difference_is_named_on_all_ranks(kind, ranks):
    texts, *others = run(compare, kind, ranks)
    assert all(other == texts for other in others)
    most = "rank 0" if ranks == 2 else "ranks 0, 2"
    assert texts[0] == (
        f"they differ (wire: 'fp32' on {most}; 'int8' on rank 1 | cap: 3 on {most}; absent on rank 1): make them alike"
    )
    assert texts[1] == f"they differ ([0, 1, 2] on {most}; [0, 1] on rank 1): make them alike"
    order = "the order, from number {} on, or how often a name is there: {} on " + most + "; {} on rank 1"
    assert order.format(0, "a", "b") in texts[2] and order.format(1, "nothing", "a") in texts[3]
    assert f"False{'.' * 75}... on {most}; ..." in texts[4] and len(texts[4]) < 400
    assert "entry 7: " in texts[5] and "entry 8" not in texts[5] and "| and 12 more): make" in texts[5]
    assert texts[6].startswith(f"they differ (the weight: False on {most}; True on rank 1)")
