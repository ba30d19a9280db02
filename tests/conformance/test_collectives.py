"""Every collective with every type, operation and size, in place and out of place, on 1 to 7 ranks of both engines."""

from __future__ import annotations

import itertools

import pytest
import torch

from collectives.errors import InvalidArgument
from tests import oracle
from tests.conformance.cases import COLLECTIVES, REDUCTIONS, ROOTED, Case, run_cases, sizes
from tests.conformance.worlds import WORLDS, check
from tests.kernels.ways import ISAS
from tests.oracle import DTYPES
from tests.ranks import run_ranks

ALL_OPS = (*oracle.OPS, "premul")


def chunk_elements(ctx, dtype) -> int:
    nbytes = ctx.comm().chunk_bytes() if ctx.engine == "host" else 4096
    return nbytes // DTYPES[dtype].itemsize


def offset_of(index: int, dtype: str) -> int:
    """0, or some whole elements past a boundary of 64 bytes: every vector width gets to see unaligned data."""
    return (0, 1, 3)[index % 3] * DTYPES[dtype].itemsize


def usable_types(ctx) -> list[str]:
    """All, but for fp8 on GPUs before Hopper and NCCL before 2.24."""
    if ctx.engine == "nccl":
        import torch

        if ctx.library.version < 22400 or torch.cuda.get_device_capability(0) < (9, 0):
            return [name for name in DTYPES if not name.startswith("float8")]
    return list(DTYPES)


def all_cases(ctx, collective: str):
    """Types x operations x sizes x in place or not. Roots, offsets and NULLs go round as the cases go on.

    Two processes that share a GPU take turns on it, so there it is every fourth case.
    """
    ops = ALL_OPS if collective in REDUCTIONS else ("sum",)
    n = ctx.size
    inplace_forms = (False,) if collective == "all_to_all" and ctx.engine == "nccl" else (False, True)
    every = 4 if ctx.engine == "nccl" and n > 1 else 1
    for index, (dtype, op, inplace) in enumerate(itertools.product(usable_types(ctx), ops, inplace_forms)):
        for step, count in enumerate(sizes(n, chunk_elements(ctx, dtype))):
            k = index * 5 + step
            if k % every:
                continue
            yield Case(
                collective,
                dtype,
                count,
                op=op,
                root=k % n if collective in ROOTED else 0,
                inplace=inplace,
                offset=offset_of(k, dtype),
                null=k % 2 == 0,
            )


NEEDS = {"all_to_all": "ncclAlltoAll", "gather": "ncclGather", "scatter": "ncclScatter"}


def matrix(ctx, collective):
    return run_cases(ctx, all_cases(ctx, collective))


@pytest.mark.parametrize(("engine", "n"), WORLDS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_matrix(collective, engine, n):
    check(matrix, engine, n, collective, needs=NEEDS.get(collective))


def default_chunk(ctx):
    chunk = ctx.comm().chunk_bytes() // 4 if ctx.engine == "host" else 1 << 18
    counts = [n_elements for n_elements in (1, 1000, chunk - 1, chunk, chunk + 1, 2 * chunk + 77)]
    cases = [
        Case(
            collective,
            "float32",
            count if collective in ("all_reduce", "reduce", "broadcast") else count // ctx.size + 1,
            op="avg",
            root=ctx.size - 1,
            inplace=inplace,
        )
        for collective in COLLECTIVES
        for count in counts
        for inplace in (False, True)
        if not (inplace and collective == "all_to_all")
    ]
    return run_cases(ctx, cases)


@pytest.mark.parametrize(("engine", "n"), WORLDS)
def test_default_chunk(engine, n):
    check(default_chunk, engine, n, chunk=None, needs="ncclGather")


def past_the_caches(ctx):
    """From 4 MiB a rank on, results are written past the caches, by stores that want whole lines."""
    nbytes = 4 << 20
    cases = [
        Case(name, dtype, (nbytes // DTYPES[dtype].itemsize) // (ctx.size if pieces else 1) + 13, root=ctx.size - 1,
             inplace=inplace, offset=offset * DTYPES[dtype].itemsize)
        for name in COLLECTIVES
        for pieces in [name in ("all_gather", "gather", "all_to_all")]
        for dtype, inplace, offset in (("float32", False, 1), ("int8", name != "all_to_all", 3))
    ]  # fmt: skip
    return run_cases(ctx, cases)


# Read by the kernel (process_vm_readv) where that is allowed, staged where one rank may not.
@pytest.mark.parametrize(
    ("n", "reads"),
    [(2, "all"), (3, "all but one"), pytest.param(3, "all", marks=pytest.mark.thorough)],
)
def test_past_the_caches(n, reads):
    forbidden = {"all": 0, "all but one": 1}[reads]
    same = {"COLLECTIVES_TEST_READS": reads}  # a communicator of its own on all ranks
    envs = [{**same, "COLLECTIVES_CMA": "0"} if rank >= n - forbidden else same for rank in range(n)]
    found = run_ranks(past_the_caches, n, env=envs)
    assert not any(found), found


def all_to_all_in_place(ctx):
    """The C API takes it, staged whatever the size and the memory."""
    found = run_cases(
        ctx,
        [
            Case("all_to_all", dtype, count, inplace=True)
            for dtype in ("int8", "float32")
            for count in (100, 300_001, 1 << 20)
        ],
    )
    comm = ctx.communicator()
    for make in (comm.empty, torch.empty):
        array = make(ctx.size * 100_000)
        for step in range(8):
            array.view(ctx.size, -1)[:] = (torch.arange(ctx.size) + 10 * ctx.rank + 100 * step)[:, None]
            comm._native.all_to_all(array.data_ptr(), array.data_ptr(), 100_000, 7)
            want = (10 * torch.arange(ctx.size) + ctx.rank + 100 * step)[:, None].expand(-1, 100_000)
            found += [] if torch.equal(array.view(ctx.size, -1), want.float()) else [f"{make}, step {step}"]
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_all_to_all_in_place(n):
    assert not any(found := run_ranks(all_to_all_in_place, n)), found


def factors_over_one_rank(ctx):
    """Before NCCL 2.29.7 its kernel for one rank leaves out the last elements of some counts."""
    counts = (1, 31, 4097, 8195, 16 << 10, (16 << 10) + 1, 65_539, 131_073, 262_145, 262_160, 262_175, 1_000_003)
    cases = [
        Case(collective, dtype, count, op=op, inplace=inplace)
        for collective in REDUCTIONS
        for dtype in ("int8", "float16", "float32", "float64")
        for count in counts
        for op in ("avg", "premul")
        for inplace in (False, True)
    ]
    found = run_cases(ctx, cases)
    if ctx.engine == "nccl":
        with pytest.raises(InvalidArgument, match="float8 over one rank"):
            ctx.comm().create_premul_sum(0.5, DTYPES["float8e4m3"].code)
    return found


@pytest.mark.parametrize("engine", ["host", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_factors_over_one_rank(engine):
    check(factors_over_one_rank, engine, 1, chunk=None)


def odd_addresses(ctx):
    """Addresses that are no multiple of the element: NumPy's frombuffer makes such arrays."""
    cases = [
        Case(collective, dtype, count, op=op, offset=offset, root=ctx.size - 1, inplace=inplace)
        for collective in COLLECTIVES
        for dtype in ("float16", "float32", "int64", "float64")
        for op in (("sum", "avg", "premul") if collective in REDUCTIONS else ("sum",))
        for offset in (1, 3)
        for count in (33, 1201)
        for inplace in (False, True)
    ]
    return run_cases(ctx, cases)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_addresses_that_are_no_multiple_of_the_element(n):
    check(odd_addresses, "host", n)


def reductions(ctx):
    combined = itertools.product(REDUCTIONS, DTYPES, ALL_OPS, (1, 1100))
    return run_cases(ctx, [Case(name, dtype, count, op=op) for name, dtype, op, count in combined])


@pytest.mark.parametrize("name", ISAS)
def test_every_instruction_set_gives_the_oracle_s_bits(name):
    results = run_ranks(reductions, 3, env={"COLLECTIVES_ISA": name}, timeout=100)
    assert [text for result in results for text in result] == []
