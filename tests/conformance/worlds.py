"""On which engines and with how many ranks the conformance suite runs, and what each needs in its environment."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks

__all__ = ["SMALL_CHUNK", "WORLDS", "check", "environment"]

SMALL_CHUNK = 4096  # bytes, so that a few thousand elements already take many rounds

WORLDS = [
    *[pytest.param("host", n, id=f"host-{n}") for n in (1, 2, 3, 4, 7)],
    pytest.param("nccl", 1, id="nccl-1", marks=pytest.mark.gpu),
    pytest.param("nccl", 2, id="nccl-2-on-one-gpu", marks=pytest.mark.gpu),
]


def environment(engine: str, chunk: int | None = SMALL_CHUNK) -> dict[str, str]:
    if engine == "host":
        return {} if chunk is None else {"COLLECTIVES_HOST_CHUNK": str(chunk)}
    # Several ranks on one GPU: experimental since NCCL 2.30. Few channels and no NVLS, or they wait for room for ever.
    # NCCL reads these once in the life of a process, so a world of one sets them as well.
    return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "NCCL_NVLS_ENABLE": "0"}


def version_and_function(ctx, name):
    return ctx.library.version, name is None or ctx.library.has(name)


def check(fn, engine: str, n: int, *args, timeout=100.0, chunk: int | None = SMALL_CHUNK, needs: str | None = None):
    """Run ``fn`` on n ranks; each returns a list of sentences about what is wrong, and all lists must be empty.

    ``needs``: a C function that an older NCCL may lack; the test is skipped there.
    """
    __tracebackhide__ = True
    if engine == "nccl":
        ((version, has),) = run_ranks(version_and_function, 1, needs, engine=engine, env=environment(engine))
        if n > 1 and version < 23000:
            pytest.skip(f"NCCL {version} refuses several ranks on one GPU; 2.30 and newer allow it")
        if not has:
            pytest.skip(f"NCCL {version} has no {needs}")
    results = run_ranks(fn, n, *args, engine=engine, env=environment(engine, chunk), timeout=timeout)
    found = [text for result in results for text in result]
    assert not found, "\n".join(found)
