"""Predicted times of collectives on NVLink and InfiniBand networks, whose figures are public."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .model import Cost, Network, busbw_factor, predict

__all__ = ["NETWORKS", "best", "crossovers", "predictions"]

# NVIDIA's own constants, by protocol:
# https://github.com/NVIDIA/nccl/blob/1fc949c50bbd7e31fb27343def456d8d48993a90/
# src/tuning/cost_model.cc (baseLatencies, hwLatencies of NVLINK and NET for Ring; Tree less Ring
# for a branch; llMaxBws of an Intel host) and src/graph/tuning.cc at b6475625 (LL128 carries 0.92
# of a link; posting to the network takes 1 us a message on an Intel host, three times that with
# Simple; 0.4 us for each further peer over NVLink).
_SOURCES = (
    "https://github.com/NVIDIA/nccl/blob/1fc949c50bbd7e31fb27343def456d8d48993a90/src/tuning/cost_model.cc: latencies "
    "(us, LL / LL128 / Simple): start 6.6 / 14.0 / 8.4; NVLink 0.6 / 1.9 / 3.4; network 2.7 / 4.0 / 14.0, in trees 5.0 "
    "/ 8.5 / 14.0; LL at most 87.7 GB/s in a node, 20.4 between nodes",
    "https://github.com/NVIDIA/nccl/blob/b6475625fbcaa2c3c0e50eed2fa1255d7514d4a2/src/graph/tuning.cc: LL128 carries "
    "0.92 of a link; a message costs its sender 1 us to the network (Intel host; 3 with Simple), 0.4 us over NVLink",
    "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/NVIDIA/systems/"
    "H200-SXM-141GBx8_TRT_MaxQ.json: 8 GPUs a node, NVLink 4 at 900 GB/s in both directions together (450 each way), "
    "400 Gb/s InfiniBand",
)
_ACHIEVED = (
    "https://github.com/NVIDIA/nccl/issues/1264: 380 GB/s of the 450 reached between two H100s",
    "https://github.com/NVIDIA/nccl-tests/issues/290: 46 to 48 GB/s of a 400 Gb/s port's 50, says NVIDIA",
)
_HBM = 3.35e12  # bytes/s of an H100's memory, NVIDIA's data sheet; a reduction reads two bytes and writes one


def _dgx(name: str, nvlink: float, port: float, sources: tuple[str, ...]) -> tuple[Network, ...]:
    """Return one network for each of NCCL's protocols.

    `nvlink`, `port`: bytes/s each way of a GPU and of a NIC.
    """
    gamma = 3 / _HBM
    ll_ports = min(port * 8 / 2, 20.4e9) / 8  # half of what LL carries are flags
    rows = (
        ("ll", 6.6e-6, Cost(0.6e-6, 1 / min(nvlink / 2, 87.7e9), gamma, 0.4e-6), (2.7e-6, ll_ports, 1e-6, 2.3e-6)),
        ("ll128", 14e-6, Cost(1.9e-6, 1 / (0.92 * nvlink), gamma, 0.4e-6), (4e-6, 0.92 * port, 1e-6, 4.5e-6)),
        ("simple", 8.4e-6, Cost(3.4e-6, 1 / nvlink, gamma, 0.4e-6, 0.6e-6), (14e-6, port, 3e-6, 0.0)),
    )
    return tuple(
        Network(
            f"{name} ({protocol})", intra, Cost(alpha, 1 / rate, gamma, gap, branch),
            ranks_per_node=8, rails=8, start_s=start, max_chunks=256, sources=sources,
        )
        for protocol, start, intra, (alpha, rate, gap, branch) in rows
    )  # fmt: skip


NETWORKS = {
    "dgx-h100": _dgx("dgx-h100", 380e9, 47e9, _SOURCES + _ACHIEVED),
    "dgx-h100-peak": _dgx("dgx-h100-peak", 450e9, 50e9, _SOURCES),
}

# The binomial tree is there to be compared with in docs/scaling.md; it never wins but at the
# smallest sizes.
_SHOWN = ("ring", "direct", "tree", "hierarchical", "hierarchical_tree")


def best(op: str, algorithm: str, ranks: int, nbytes: int, networks: Sequence[Network]) -> tuple[float, Network]:
    """Return the least time in seconds over `networks` (NCCL's protocols, say), and the network
    that has it.
    """
    return min(
        ((predict(op, algorithm, ranks, nbytes, network), network) for network in networks), key=lambda pair: pair[0]
    )


def predictions(op: str, ranks: int, nbytes: int, networks: Sequence[Network], algorithms=_SHOWN) -> list[dict]:
    """Return one row an algorithm, with the fields of the bench's rows.

    The fastest has ``"wins": True``.
    """
    found = {algorithm: best(op, algorithm, ranks, nbytes, networks) for algorithm in algorithms}
    least = min(seconds for seconds, _ in found.values())
    rows = []
    for algorithm, (seconds, network) in found.items():
        rate = nbytes / seconds / 1e9 if seconds else math.inf
        rows.append(
            {
                "op": op, "algorithm": algorithm, "ranks": ranks, "bytes": nbytes, "network": network.name,
                "time_us": seconds * 1e6, "algbw_gbs": rate, "busbw_gbs": rate * busbw_factor(op, ranks),
                "wins": seconds == least,
            }
        )  # fmt: skip
    return rows


def crossovers(
    op: str, ranks: int, networks: Sequence[Network], algorithms=_SHOWN, smallest: int = 8, largest: int = 1 << 34
) -> list[tuple[int, str]]:
    """Return (bytes, algorithm): the fastest algorithm from that size on.

    Sizes are tried in steps of a factor 2 ** (1/8).
    One follows another only where it is faster by more than 2%: less is within any model's error.
    """
    found: list[tuple[int, str]] = []
    steps = int(8 * math.log2(largest / smallest)) + 1
    for step in range(steps):
        nbytes = round(smallest * 2 ** (step / 8))
        times = {name: best(op, name, ranks, nbytes, networks)[0] for name in algorithms}
        name = min(times, key=times.get)
        if not found or times[name] < 0.98 * times[found[-1][1]]:
            found.append((nbytes, name))
    return found
