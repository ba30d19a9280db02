"""The data of the benchmark, its expected results and its count of wrong elements; no process."""

import numpy as np
import pytest
import torch

from collectives.bench.buffers import count_wrong, pattern_tensor
from collectives.bench.cases import OPS, PERIOD, REDOPS, TYPES, Case

REDUCE = {
    "sum": lambda a: a.sum(0),
    "prod": lambda a: a.prod(0),
    "max": lambda a: a.max(0),
    "min": lambda a: a.min(0),
    "avg": lambda a: a.sum(0) / len(a),
    "mulsum": lambda a: (2 * a).sum(0),
}


def result(case, inputs, rank):
    """What the operation gives a rank, by its definition, from all ranks' whole inputs (float64)."""
    n, count, name = case.ranks, case.count, case.op.name
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        whole = REDUCE[case.redop](np.stack(inputs))
        if name == "reduce_scatter":
            return whole[rank * count : (rank + 1) * count]
        return whole if name == "all_reduce" or rank == case.root else None
    if name in ("all_gather", "gather"):
        return np.concatenate(inputs) if name == "all_gather" or rank == case.root else None
    if name == "all_to_all":
        return np.concatenate([each[rank * count : (rank + 1) * count] for each in inputs])
    if name == "broadcast":
        return inputs[case.root]
    if name == "scatter":
        return inputs[case.root][rank * count : (rank + 1) * count]
    return inputs[(rank - 1) % n]


def cases(ranks, nbytes):
    for op in OPS.values():
        for kind in TYPES.values():
            for redop in REDOPS if op.reduces else [None]:
                yield Case.of(op, kind, redop, ranks - 1, nbytes, ranks)


@pytest.mark.parametrize("ranks", [1, 3, 20])
def test_expected_results_are_the_definition_s_and_exact_in_the_dtype(ranks):
    for case in cases(ranks, 2 * PERIOD * 8 + 5):
        patterns = case.inputs()
        length = case.count * (ranks if case.op.name in ("reduce_scatter", "all_to_all", "scatter") else 1)
        inputs = [np.resize(pattern, length).astype(np.float64) for pattern in patterns]
        for pattern in patterns:
            exact = pattern_tensor(pattern, case.kind.dtype).to(torch.float64).numpy()
            assert np.array_equal(exact, pattern), (case, "the input is rounded")
        for rank in {0, ranks - 1}:
            wanted, segments = result(case, inputs, rank), case.expected(rank)
            assert (wanted is None) == (segments == [])
            got = [np.resize(s.values, s.length) for s in sorted(segments, key=lambda s: s.start)]
            assert wanted is None or np.array_equal(np.concatenate(got), wanted), (case, rank)
            for segment in segments:
                exact = pattern_tensor(segment.values, case.kind.dtype).to(torch.float64).numpy()
                few = case.redop in ("avg",) and ranks * 1 > case.kind.exact  # the sum of ones may then pass `exact`
                assert few or np.array_equal(exact, segment.values), (case, "the result is rounded")
        if case.redop in ("sum", "mulsum"):
            assert REDUCE[case.redop](patterns).max() <= case.kind.exact  # so every partial sum is exact, too
            assert len(np.unique(patterns)) > 1 and patterns.any(1).all()  # every rank's part counts


def test_counts_and_sizes_are_nccl_tests():
    case = Case.of(OPS["all_gather"], TYPES["float32"], "sum", 0, 1000, 3)
    assert (case.count, case.nbytes, case.redop, case.root) == (80, 960, None, -1)  # parts of 16 bytes
    case = Case.of(OPS["all_reduce"], TYPES["float16"], "sum", 0, 1001, 3)
    assert (case.count, case.nbytes, case.redop, case.root) == (500, 1000, "sum", -1)
    assert Case.of(OPS["scatter"], TYPES["int8"], "sum", 2, 8, 3).count == 2


def test_nccl_s_average_may_be_rounded():
    values = torch.arange(PERIOD, dtype=torch.float32)
    assert count_wrong(values * (1 + 2**-23), values, inexact=True) == 0
    assert count_wrong(values * (1 + 2**-20), values, inexact=True) == PERIOD - 1
    assert count_wrong(torch.full((PERIOD,), float("nan")), values, inexact=True) == PERIOD
