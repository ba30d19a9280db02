"""The sizes, factors and rounding of the benchmark, as nccl-tests has them; no process."""

import torch

from collectives.bench.buffers import count_wrong, pattern_tensor
from collectives.bench.cases import OPS, PERIOD, REDOPS, TYPES, Case


def test_counts_and_sizes_are_nccl_tests():
    case = Case.of(OPS["all_gather"], TYPES["float32"], "sum", 0, 1000, 3)
    assert (case.count, case.nbytes, case.redop, case.root) == (80, 960, None, -1)  # parts of 16 bytes
    case = Case.of(OPS["all_reduce"], TYPES["float16"], "sum", 0, 1001, 3)
    assert (case.count, case.nbytes, case.redop, case.root) == (500, 1000, "sum", -1)
    assert Case.of(OPS["scatter"], TYPES["int8"], "sum", 2, 8, 3).count == 2


def test_busbw_factors_are_nccl_tests():
    factors = {name: op.busbw(4) for name, op in OPS.items()}
    shares = dict.fromkeys(["reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"], 0.75)
    assert factors == {"all_reduce": 1.5, "broadcast": 1.0, "reduce": 1.0, "sendrecv": 1.0} | shares


def test_every_ranks_part_counts_and_no_sum_is_rounded():
    for ranks in (1, 3, 20):
        for kind in TYPES.values():
            for redop in REDOPS:
                case = Case.of(OPS["all_reduce"], kind, redop, 0, 2 * PERIOD * 8 + 5, ranks)
                for values in (*case.inputs(), *(each.values for each in case.expected(0) if redop != "avg")):
                    exact = pattern_tensor(values, kind.dtype).to(torch.float64).numpy()
                    assert (exact == values).all(), (case, "is rounded")
                assert redop not in ("sum", "mulsum") or case.inputs().any(1).all()


def test_nccl_s_average_may_be_rounded():
    values = torch.arange(PERIOD, dtype=torch.float32)
    assert count_wrong(values * (1 + 2**-23), values, inexact=True) == 0
    assert count_wrong(values * (1 + 2**-20), values, inexact=True) == PERIOD - 1
    assert count_wrong(torch.full((PERIOD,), float("nan")), values, inexact=True) == PERIOD
