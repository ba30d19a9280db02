"""The cost model: its formulas beside a simulation of each message, its fit, and its output."""

import dataclasses
import itertools
import json
import random

import pytest

from benchmarks.scaling.__main__ import main
from benchmarks.scaling.measurements import cores_of, points_of
from benchmarks.scaling.model import ALGORITHMS, OPS, Cost, Network, Point, busbw_factor, fit, predict
from benchmarks.scaling.nccl_estimates import nccl_estimates
from benchmarks.scaling.predictions import NETWORKS, best, crossovers
from benchmarks.scaling.units import parse_size
from collectives.errors import InvalidArgument, InvalidUsage
from tests.ranks import run_ranks

MODELLED = [(op, name) for op in OPS for name in ALGORITHMS if name != "binomial" or op == "all_reduce"]
ONE_NODE = Network("one node", Cost(3e-6, 1e-10, 4e-11), start_s=5e-6)
TWO_LEVELS = Network(
    "two levels", Cost(3e-6, 1e-10, 4e-11, 1e-7, 1e-7), Cost(9e-6, 6e-10, 0.0, 5e-7, 1e-6), ranks_per_node=4, rails=2,
    start_s=5e-6, max_chunks=16,
)  # fmt: skip


def simulated_ring(op, ranks, nbytes, intra, inter, local, slices):
    """Send every slice of every piece: one at a time on each link, one at a time through each
    rank's reduction.
    """
    rounds = ranks - 1
    hops = 2 * rounds if op == "all_reduce" else rounds
    size = nbytes / ranks / slices
    link_free, unit_free = [0.0] * ranks, [0.0] * ranks
    ready = {(rank, slice_): 0.0 for rank in range(ranks) for slice_ in range(slices)}
    last = 0.0
    for hop in range(hops):
        arrived = {}
        for rank, slice_ in itertools.product(range(ranks), range(slices)):
            right = (rank + 1) % ranks
            cost = intra if rank // local == right // local else inter
            start = max(link_free[rank], ready[rank, slice_])
            link_free[rank] = start + cost.gap_s + size * cost.beta_s_per_byte
            arrived[right, slice_] = start + cost.alpha_s + size * cost.beta_s_per_byte
        for (rank, slice_), at in sorted(arrived.items(), key=lambda pair: pair[1]):
            if op != "all_gather" and hop < rounds:
                at = unit_free[rank] = max(at, unit_free[rank]) + size * intra.gamma_s_per_byte
            arrived[rank, slice_] = at
            last = max(last, at)
        ready = arrived
    return last


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
@pytest.mark.parametrize("nbytes", [0, 1 << 12, 1 << 20, 1 << 26])
def test_ring_is_what_its_messages_take(op, ranks, nbytes):
    intra = Cost(3e-6, 1e-10, 4e-11)
    expected = simulated_ring(op, ranks, nbytes, intra, intra, ranks, 1)
    assert predict(op, "ring", ranks, nbytes, Network("", intra)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks, local", [(8, 8), (8, 4), (12, 2), (6, 1), (24, 8)])
@pytest.mark.parametrize("nbytes", [1 << 10, 1 << 18, 1 << 22, 1 << 28])
def test_ring_in_slices_over_two_levels(op, ranks, local, nbytes):
    """Within 6%: the formula is the longer of two paths, the messages may mix them."""
    intra, inter = Cost(3e-6, 1e-10, 4e-11, 1e-7), Cost(9e-6, 3e-10, 0.0, 5e-7)
    network = Network("", intra, inter, ranks_per_node=local, max_chunks=16)
    expected = min(simulated_ring(op, ranks, nbytes, intra, inter, local, slices) for slices in (1, 2, 4, 8, 16))
    assert predict(op, "ring", ranks, nbytes, network) == pytest.approx(expected, rel=0.06)


def test_formulas_of_the_papers():
    """Hockney's terms for 8 ranks, written out."""
    alpha, beta, gamma, size = 1e-6, 1e-9, 1e-10, 8e6
    network = Network("", Cost(alpha, beta, gamma))

    def time(op, algorithm):
        return predict(op, algorithm, 8, int(size), network)

    assert time("all_reduce", "ring") == pytest.approx(14 * alpha + 14 / 8 * size * beta + 7 / 8 * size * gamma)
    assert time("all_reduce", "direct") == pytest.approx(2 * alpha + 14 / 8 * size * beta + 7 / 8 * size * gamma)
    assert time("all_reduce", "binomial") == pytest.approx(6 * alpha + 6 * size * beta + 3 * size * gamma)
    assert time("reduce_scatter", "tree") == pytest.approx(3 * alpha + 7 / 8 * size * (beta + gamma))
    assert time("all_gather", "tree") == pytest.approx(3 * alpha + 7 / 8 * size * beta)


def test_the_double_tree_reaches_twice_the_data():
    """Full bandwidth (Sanders et al.): large arrays cost 2 S beta, however many ranks; small ones a
    logarithm.
    """
    network = Network("", Cost(1e-6, 1e-10, gap_s=1e-7), max_chunks=4096)
    assert predict("all_reduce", "tree", 1024, 1 << 34, network) == pytest.approx(2 * (1 << 34) * 1e-10, rel=0.02)
    assert predict("all_reduce", "tree", 1024, 8, network) == pytest.approx(20e-6, rel=0.01)
    assert predict("all_reduce", "ring", 1024, 8, network) == pytest.approx(2046e-6, rel=0.01)


@pytest.mark.parametrize("op, algorithm", MODELLED)
def test_more_bytes_and_more_ranks_take_longer(op, algorithm):
    for network in (ONE_NODE, TWO_LEVELS, *NETWORKS["dgx-h100"]):
        by_size = [predict(op, algorithm, 16, 1 << bits, network) for bits in range(0, 34)]
        assert by_size == sorted(by_size) and by_size[0] > network.start_s
        by_ranks = [predict(op, algorithm, ranks, 1 << 20, network) for ranks in (16, 64, 256, 1024, 4096)]
        assert by_ranks == sorted(by_ranks)
        assert predict(op, algorithm, 1, 1 << 20, network) == network.start_s


@pytest.mark.parametrize("op", OPS)
def test_hierarchical_in_one_node_is_the_ring(op):
    for nbytes, network in itertools.product((0, 1000, 1 << 26), (ONE_NODE, TWO_LEVELS)):
        ring = predict(op, "ring", 4, nbytes, network)
        assert predict(op, "hierarchical", 4, nbytes, network) == ring
        assert predict(op, "hierarchical_tree", 4, nbytes, network) == ring


def test_hierarchical_with_one_rank_a_node_is_the_algorithm_between_nodes():
    network = dataclasses.replace(TWO_LEVELS, ranks_per_node=1, rails=1, intra=TWO_LEVELS.inter)
    for op, nbytes in itertools.product(OPS, (1000, 1 << 26)):
        assert predict(op, "hierarchical", 8, nbytes, network) == predict(op, "ring", 8, nbytes, network)
        assert predict(op, "hierarchical_tree", 8, nbytes, network) == predict(op, "tree", 8, nbytes, network)


@pytest.mark.parametrize("inter_beta", [1e-12, 1e-9])
def test_hierarchical_overlaps_its_stages(inter_beta):
    """A large array takes as long as the busier level: inside of a node, or between nodes."""
    network = Network("", Cost(1e-6, 1e-10), Cost(1e-6, inter_beta), ranks_per_node=4, max_chunks=4096)
    nbytes = 1 << 34
    inside, between = 2 * 3 / 4 * nbytes * 1e-10, 2 * 7 / 8 * nbytes / 4 * inter_beta
    expected = pytest.approx(max(inside, between), rel=0.01)
    assert predict("all_reduce", "hierarchical", 32, nbytes, network) == expected


def test_chunks_only_help():
    whole = dataclasses.replace(TWO_LEVELS, max_chunks=1)
    for (op, name), nbytes in itertools.product(MODELLED, (1 << 10, 1 << 28)):
        assert predict(op, name, 16, nbytes, TWO_LEVELS) <= predict(op, name, 16, nbytes, whole)
    cut, uncut = (predict("all_reduce", "tree", 16, 1 << 28, network) for network in (TWO_LEVELS, whole))
    assert cut < 0.7 * uncut


def test_ranks_beyond_the_cores_take_turns():
    crowded = dataclasses.replace(ONE_NODE, cores=2)
    assert predict("all_reduce", "native", 2, 1 << 20, crowded) == predict("all_reduce", "native", 2, 1 << 20, ONE_NODE)
    six = predict("all_reduce", "native", 6, 1 << 20, ONE_NODE)
    assert predict("all_reduce", "native", 6, 1 << 20, crowded) == pytest.approx(3 * six)


@pytest.mark.parametrize(
    "arguments",
    [
        ("reduce", "ring", 2, 8),
        ("all_reduce", "star", 2, 8),
        ("all_reduce", "ring", 0, 8),
        ("all_reduce", "ring", 2, -1),
        ("all_reduce", "ring", 6, 8),
        ("all_gather", "binomial", 2, 8),
    ],
)
def test_what_the_model_does_not_have_is_refused(arguments):
    with pytest.raises(InvalidArgument):
        predict(*arguments, TWO_LEVELS)
    with pytest.raises(InvalidArgument, match="no link between nodes"):
        predict("all_reduce", "ring", 8, 8, dataclasses.replace(TWO_LEVELS, inter=None))


# ---- Fit.


def points_from(network, algorithms, noise=0.0, ops=OPS, ranks=(2, 3, 4, 8)):
    random_ = random.Random(7)
    return [
        Point(op, name, n, 1 << bits, predict(op, name, n, 1 << bits, network) * (1 + random_.uniform(-noise, noise)))
        for op in ops for name in algorithms for n in ranks for bits in range(10, 29, 3)
    ]  # fmt: skip


@pytest.mark.parametrize("cores", [None, 2])
@pytest.mark.parametrize("algorithms", [("ring",), ("native",), ("direct",), ("ring", "direct", "tree")])
def test_fit_finds_the_costs_again(algorithms, cores):
    network = dataclasses.replace(ONE_NODE, cores=cores)
    found = fit(points_from(network, algorithms), cores=cores)
    cost, true = found.network.intra, ONE_NODE.intra
    assert found.rms < 1e-6 and found.largest < 1e-6 and found.points == 3 * len(algorithms) * 28
    assert cost.beta_s_per_byte == pytest.approx(true.beta_s_per_byte, rel=1e-3)
    assert cost.gamma_s_per_byte == pytest.approx(true.gamma_s_per_byte, rel=1e-3)
    if len(algorithms) == 1 and algorithms[0] in ("native", "direct"):  # one or two phases, whatever the ranks
        assert found.predict("all_reduce", algorithms[0], 64, 8) == pytest.approx(
            predict("all_reduce", algorithms[0], 64, 8, network)
        )
    else:
        assert cost.alpha_s == pytest.approx(true.alpha_s, rel=1e-3)
        assert found.network.start_s == pytest.approx(ONE_NODE.start_s, rel=1e-3)


def test_fit_counts_small_sizes_and_states_its_error():
    """With 20% of noise at every size no size is off by much more, and the error stated is the one
    that is there.
    """
    points = points_from(ONE_NODE, ("ring",), noise=0.2)
    found = fit(points)
    errors = [found.predict(p.op, p.algorithm, p.ranks, p.nbytes) / p.seconds - 1 for p in points]
    assert found.largest == pytest.approx(max(map(abs, errors))) and found.largest < 0.35
    assert found.rms == pytest.approx((sum(error**2 for error in errors) / len(errors)) ** 0.5)
    assert 0.05 < found.rms < 0.2
    assert found.network.intra.alpha_s == pytest.approx(ONE_NODE.intra.alpha_s, rel=0.25)


def test_fit_leaves_out_what_the_points_can_not_tell():
    found = fit(points_from(ONE_NODE, ("ring",), ops=("all_reduce",), ranks=(4,)))
    assert found.rms < 1e-6 and len(found.left_out) == 2  # start or alpha, beta or gamma
    gather = fit(points_from(ONE_NODE, ("ring",), ops=("all_gather",)))
    assert "gamma_s_per_byte" in gather.left_out and gather.rms < 1e-6
    falling = fit([Point("all_reduce", "ring", 2, 1 << bits, 1e-3 / (bits + 1)) for bits in range(20)])
    assert falling.network.intra.beta_s_per_byte == 0 and falling.largest > 0.3  # never a cost below 0


@pytest.mark.parametrize("points", [[], [Point("all_reduce", "ring", 2, 8, 0.0)]])
def test_fit_needs_points(points):
    with pytest.raises(InvalidArgument, match="points"):
        fit(points)


# ---- What is printed.


def rows(network=ONE_NODE, **more):
    return [
        {"op": p.op, "engine": "host", "algorithm": p.algorithm, "ranks": p.ranks, "bytes": p.nbytes, "cores": 2,
         "time_us": p.seconds * 1e6, "wrong": 0, **more}
        for p in points_from(dataclasses.replace(network, cores=2), ("native", "ring"))
    ]  # fmt: skip


@pytest.mark.parametrize("lines", [False, True])
def test_main_prints_predictions_and_the_fit(tmp_path, capsys, lines):
    measured, out = tmp_path / "rows.json", tmp_path / "out.json"
    text = [json.dumps(row) for row in rows() + [{**rows()[0], "op": "broadcast"}]]
    measured.write_text("\n".join(text) if lines else f'{{"machine": "x", "rows": [{", ".join(text)}]}}')
    words = [
        "--ranks",
        "8,1024",
        "--sizes",
        "1K,1G",
        "--measured",
        str(measured),
        "--json",
        str(out),
        "--cache",
        "32M",
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "Fit of host, native, all sizes: 84 points, 2 cores" in printed and "rms 0%" in printed
    assert "ncclGroupSimulateEnd" in printed and "https://github.com/NVIDIA/nccl" in printed
    result = json.loads(out.read_text())
    parts = {(one["algorithm"], one["part"]): one["points"] for one in result["fits"]}
    assert {algorithm for algorithm, _ in parts} == {"native", "ring"}
    assert parts["ring", "all sizes"] == 84 == parts["ring", "in cache"] + parts["ring", "past cache"]
    wins = {(row["ranks"], row["bytes"]): row["algorithm"] for row in result["predictions"] if row["wins"]}
    assert wins[8, 1 << 30] in ("ring", "hierarchical", "hierarchical_tree") and wins[1024, 1 << 10] == "tree"
    for row in result["predictions"]:
        assert row["busbw_gbs"] == pytest.approx(
            row["bytes"] / row["time_us"] / 1e3 * busbw_factor(row["op"], row["ranks"])
        )
        assert row["busbw_gbs"] <= 380  # the links' own


def test_crossovers_are_where_the_times_cross():
    networks = NETWORKS["dgx-h100"]
    found = crossovers("all_reduce", 1024, networks)
    assert found[0] == (8, "tree") and len(found) > 1
    for (_, before), (size, after) in itertools.pairwise(found):
        times = [best("all_reduce", name, 1024, size, networks)[0] for name in (before, after)]
        assert times[1] < times[0]


@pytest.mark.parametrize("spoilt", [{"wrong": 3}, {"time_us": None}, {"bytes": "many"}])
def test_rows_that_mean_nothing_are_refused(spoilt):
    with pytest.raises(InvalidArgument, match="row"):
        points_of([*rows(), {**rows()[0], **spoilt}])


def test_cores_come_from_the_rows():
    assert cores_of([{"cores": 2}, {}], {}) == 2 and cores_of([], {"machine": {"cores": 4}}) == 4
    with pytest.raises(InvalidArgument, match="fit each"):
        cores_of([{"cores": 2}, {"cores": 4}], {})


@pytest.mark.parametrize("text, nbytes", [("8", 8), ("64K", 65536), ("3m", 3 << 20), ("1G", 1 << 30)])
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes
    with pytest.raises(InvalidArgument, match="no size"):
        parse_size(text + "x")


def refused_estimate(ctx):
    comm = ctx.communicator()
    for op in OPS:
        with pytest.raises(InvalidUsage, match="no model of its own speed"):
            nccl_estimates(comm, op, [1024])
    import torch

    tensor = torch.full((4,), ctx.rank + 1.0)
    comm.all_reduce(tensor)  # the group was left
    return tensor.tolist()


def test_an_engine_without_estimates_says_so():
    assert run_ranks(refused_estimate, 2) == [[3.0] * 4] * 2


def estimate(ctx):
    return nccl_estimates(ctx.communicator(), "all_reduce", [1 << 10, 1 << 28])


@pytest.mark.gpu
def test_nccl_estimates_more_time_for_more_bytes():
    """A world of one: NCCL may have no estimate for it, but what it has grows."""
    (found,) = run_ranks(estimate, 1, engine="nccl", timeout=120, fresh=True)
    assert set(found) == {1 << 10, 1 << 28}
    if None not in found.values():
        assert 0 <= found[1 << 10] <= found[1 << 28] < 1.0
