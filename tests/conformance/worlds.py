"""On which engines and with how many ranks the conformance suite runs, and what each needs in its environment."""

from __future__ import annotations

import pytest

from tests import one_gpu
from tests.ranks import run_ranks

__all__ = ["ALGORITHMS", "SMALL_CHUNK", "WORLDS", "check", "environment"]

ALGORITHMS = ("ring", "direct")
SMALL_CHUNK = 4096  # bytes, so that a few thousand elements already take many rounds

WORLDS = [
    *[pytest.param("host", n, id=f"host-{n}") for n in (1, 2, 3)],
    *[pytest.param("host", n, id=f"host-{n}", marks=pytest.mark.thorough) for n in (4, 7)],
    pytest.param("nccl", 1, id="nccl-1", marks=pytest.mark.gpu),
    pytest.param("nccl", 2, id="nccl-2-on-one-gpu", marks=pytest.mark.gpu),
]


def environment(engine: str, chunk: int | None = SMALL_CHUNK) -> dict[str, str]:
    if engine == "host":
        return {} if chunk is None else {"COLLECTIVES_HOST_CHUNK": str(chunk)}
    return {}


def version_and_function(ctx, name):
    return ctx.library.version, name is None or ctx.library.has(name)


def check(fn, engine: str, n: int, *args, timeout=100.0, chunk: int | None = SMALL_CHUNK, needs: str | None = None):
    """Run ``fn`` on n ranks; each returns a list of sentences about what is wrong, and all lists must be empty.

    ``needs``: a C function that an older NCCL may lack; the test is skipped there.
    """
    __tracebackhide__ = True
    options = {}
    if engine == "nccl":
        options = {"start_env": one_gpu.start_env(n)}
        ((version, has), *_) = run_ranks(version_and_function, n, needs, engine=engine, **options)
        if not has:
            pytest.skip(f"NCCL {version} has no {needs}")
    results = run_ranks(fn, n, *args, engine=engine, env=environment(engine, chunk), timeout=timeout, **options)
    found = [text for result in results for text in result]
    assert not found, "\n".join(found)
