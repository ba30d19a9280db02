"""The kernels of every instruction set that this machine has: the same bits as the oracle's, and so as each other's."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from collectives.errors import InvalidArgument
from tests import oracle
from tests.conformance.cases import REDUCTIONS, Case, run_cases
from tests.oracle import DTYPES
from tests.ranks import run_ranks

NEEDS = {
    "baseline": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
}


def flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def reductions(ctx):
    combined = itertools.product(REDUCTIONS, DTYPES, (*oracle.OPS, "premul"), (1, 1100))
    return run_cases(ctx, [Case(name, dtype, count, op=op) for name, dtype, op, count in combined])


@pytest.mark.parametrize("name", NEEDS)
def test_every_set_gives_the_oracle_s_bits(name):
    if not NEEDS[name] <= flags():
        pytest.skip(f"this processor has no {name}")
    results = run_ranks(reductions, 3, env={"COLLECTIVES_ISA": name}, timeout=100)
    assert [text for result in results for text in result] == []


def refused(ctx):
    with pytest.raises(InvalidArgument, match=r"COLLECTIVES_ISA=sse9: this machine has baseline"):
        ctx.comm()
    return True


def test_a_set_that_is_not_there_is_refused():
    assert run_ranks(refused, 1, env={"COLLECTIVES_ISA": "sse9"}) == [True]


def refused_chunk(ctx):
    with pytest.raises(InvalidArgument, match=r"COLLECTIVES_HOST_CHUNK=256k: must be a number of bytes"):
        ctx.comm()
    return True


def test_a_chunk_that_is_no_number_is_refused():
    assert run_ranks(refused_chunk, 1, env={"COLLECTIVES_HOST_CHUNK": "256k"}) == [True]
