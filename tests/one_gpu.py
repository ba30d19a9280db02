"""Several ranks on one GPU: the environment that makes NCCL take them, by its version."""

from __future__ import annotations

import functools
import os

import pytest

__all__ = ["SECONDS", "environment", "start_env"]

SECONDS = 120  # limit of a call on a GPU: ranks that find too few resources beside each other wait for ever

_SETTING_SINCE = 23000  # NCCL_MULTI_RANK_GPU_ENABLE
_HOSTID_SINCE = 22800  # tried with none that is older


def environment(rank: int, ranks: int, version: int) -> dict[str, str]:
    """Return the variables with which rank `rank` of `ranks` must start to share the first GPU, for a version of NCCL.

    Experimental in NCCL since 2.30: few channels and no NVLS, or the ranks wait for room for ever. Before, NCCL refuses
    a GPU that two ranks of one host share, but takes ranks with different NCCL_HOSTID for different hosts, which are
    connected by sockets. `InvalidArgument` for what is older than 2.28.
    """
    from collectives.errors import InvalidArgument

    first = {"CUDA_VISIBLE_DEVICES": first_visible()}
    if ranks == 1:
        return first
    # Older versions don't read it; `collectives.init` refuses ranks that share a GPU without it.
    shared = {**first, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    if version >= _SETTING_SINCE:
        return {**shared, "NCCL_NVLS_ENABLE": "0"}
    if version < _HOSTID_SINCE:
        raise InvalidArgument(f"NCCL {version} refuses several ranks on one GPU: it takes 2.28 or newer")
    apart = {"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    return {**shared, **apart}


def first_visible() -> str:
    """Return the first GPU that this process may use, as CUDA_VISIBLE_DEVICES names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


@functools.cache
def start_env(ranks: int) -> list[dict[str, str]]:
    """Return `run_ranks`' ``start_env`` for so many ranks on one GPU; skips the test where this NCCL can't do it."""
    from collectives.comm.engine import get_engine
    from collectives.errors import InvalidArgument

    version = get_engine("nccl").library.version
    try:
        return [environment(rank, ranks, version) for rank in range(ranks)]
    except InvalidArgument as error:
        pytest.skip(error.message)
