"""Alpha-beta-gamma cost model of ring, direct, tree and hierarchical collectives, and its fit.

A message of m bytes takes ``alpha + m * beta``, and reducing m bytes takes ``m * gamma`` (Hockney,
"The communication challenge for MPP", Parallel Computing 20, 1994). A rank sends and receives one
message at a time, both at once. The latency alpha doesn't keep the link busy, a gap does (LogGP:
Alexandrov et al., SPAA 1995). Numbers of steps and bytes:

- ring, recursive halving and doubling, binomial tree: Thakur, Rabenseifner, Gropp, "Optimization of
  collective communication operations in MPICH", IJHPCA 19, 2005;
- tree: the double binary tree of Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth
  broadcast, reduction and scan", Parallel Computing 35, 2009, where each of two trees carries half
  of the data;
- which latencies add up over two levels (nodes, and ranks in a node): NCCL's tuning model,
  src/graph/tuning.cc
  (https://github.com/NVIDIA/nccl/blob/b6475625fbcaa2c3c0e50eed2fa1255d7514d4a2/src/graph/tuning.cc).

All times are in seconds, all sizes in bytes. ``nbytes`` is S of nccl-tests: the whole array, so the
input of a reduce-scatter and the output of an all-gather.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.errors import InvalidArgument

__all__ = [
    "ALGORITHMS",
    "OPS",
    "Cost",
    "Fit",
    "Network",
    "Point",
    "busbw_factor",
    "fit",
    "predict",
]

OPS = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = ("native", "ring", "direct", "tree", "binomial", "hierarchical", "hierarchical_tree")


@dataclass(frozen=True)
class Cost:
    """What one link and one rank take.

    `alpha_s`: seconds from the start of a send to the arrival of its first byte. `beta_s_per_byte`:
    seconds that a byte keeps a link busy, in each direction. `gamma_s_per_byte`: seconds to reduce
    one received byte into an array. `gap_s`: seconds that each message keeps its sender busy, apart
    from its bytes. `branch_s`: what a step takes beyond `alpha_s` where a rank has two children.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    gap_s: float = 0.0
    branch_s: float = 0.0


@dataclass(frozen=True)
class Network:
    """Nodes of `ranks_per_node` ranks each, and their links.

    `intra`: between ranks of a node, each with a port of its own. `inter`: between nodes, None
    where there is one node only; one of `rails` equal ports of a node. A ring or tree over all
    ranks runs `rails` times, each with its own port and its part of the data; in direct and
    hierarchical every rank uses one port. `start_s`: what every call takes. `cores`: ranks beyond
    them take turns, so that everything takes ranks / cores times as long. `max_chunks`: into how
    many chunks an algorithm may cut its data to overlap their transfers and reductions.
    """

    name: str
    intra: Cost
    inter: Cost | None = None
    ranks_per_node: int | None = None
    rails: int = 1
    start_s: float = 0.0
    cores: int | None = None
    max_chunks: int = 1
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Point:
    """One measured time: `seconds` for `op` by `algorithm` over `ranks` ranks and `nbytes`
    bytes.
    """

    op: str
    algorithm: str
    ranks: int
    nbytes: int
    seconds: float


def busbw_factor(op: str, ranks: int) -> float:
    """Return busbw / algbw: what the busiest link carries of S (nccl-tests, doc/PERFORMANCE.md)."""
    return (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)


# ---- Algorithms. Each returns the stages of one chunk of `size` bytes as a _Pipe.


@dataclass(frozen=True)
class _Pipe:
    """How chunks of one size go through an algorithm.

    `first`: the time of a chunk alone. `spacing`: how long after one the next may follow. `busy`:
    how long a chunk keeps the busiest link or rank occupied, all its visits together. `tail`: from
    there to the end.
    """

    first: float
    spacing: float
    busy: float
    tail: float = 0.0

    def time(self, chunks: int) -> float:
        return max(self.first + (chunks - 1) * self.spacing, chunks * self.busy + self.tail)


@dataclass(frozen=True)
class _Placement:
    """Placement of ranks on a network, and the costs of flat algorithms that all ports of a node
    share.
    """

    op: str
    ranks: int
    local: int
    nodes: int
    intra: Cost
    inter: Cost
    rails: int

    @property
    def gamma(self) -> float:
        return 0.0 if self.op == "all_gather" else self.intra.gamma_s_per_byte

    @property
    def flat_beta(self) -> float:
        """Seconds a byte of the slowest link of a ring or tree over all ranks."""
        if self.nodes == 1:
            return self.intra.beta_s_per_byte
        shared = self.inter.beta_s_per_byte / self.rails
        return shared if self.local == 1 else max(self.intra.beta_s_per_byte, shared)

    @property
    def gap(self) -> float:
        return self.intra.gap_s if self.nodes == 1 else max(self.intra.gap_s, self.inter.gap_s)


def _ring(place: _Placement, size: float) -> _Pipe:
    """Every rank passes segments of size / ranks on to its right neighbour."""
    n, intra, inter = place.ranks, place.intra, place.inter
    rounds = 2 if place.op == "all_reduce" else 1
    hops = rounds * (n - 1)
    # A segment travels all round the ring `rounds` times, less `rounds` hops next to each other.
    if place.nodes == 1:
        outer = 0
    elif place.local == 1:
        outer = hops
    else:
        outer = rounds * place.nodes - (1 if place.local == 2 and rounds == 2 else 0)
    segment = size / n
    inner_s = intra.alpha_s + segment * intra.beta_s_per_byte
    outer_s = inter.alpha_s + segment * inter.beta_s_per_byte / place.rails
    first = (hops - outer) * inner_s + outer * outer_s + (n - 1) * segment * place.gamma
    spacing = max(place.gap + segment * place.flat_beta, segment * place.gamma)
    busy = (n - 1) * spacing + (rounds - 1) * (n - 1) * (place.gap + segment * place.flat_beta)
    return _Pipe(first, spacing, busy, inter.alpha_s if outer else intra.alpha_s)


def _direct(place: _Placement, size: float) -> _Pipe:
    """Every rank sends each other rank its segment; one reduction; the results go the same way."""
    n, intra, inter = place.ranks, place.intra, place.inter
    segment = size / n
    inside = (place.local - 1) * (intra.gap_s + segment * intra.beta_s_per_byte)
    outside = (n - place.local) * (inter.gap_s + segment * inter.beta_s_per_byte)
    busy = max(inside, outside)
    phase = max(intra.alpha_s + inside if place.local > 1 else 0.0, inter.alpha_s + outside if place.nodes > 1 else 0.0)
    reduce = (n - 1) * segment * place.gamma
    rounds = 2 if place.op == "all_reduce" else 1
    spacing = max(rounds * busy, reduce)
    return _Pipe(rounds * phase + reduce, spacing, spacing)


def _tree(place: _Placement, size: float) -> _Pipe:
    """All-reduce: up and down two binary trees.

    Else recursive halving or doubling, within the node first.
    """
    intra, inter = place.intra, place.inter
    inner, outer = _levels(place.local), _levels(place.nodes)
    if place.op != "all_reduce":
        part = size / place.local
        inside = (size - part) * intra.beta_s_per_byte
        outside = (part - part / place.nodes) * inter.beta_s_per_byte
        reduce = (size - part / place.nodes) * place.gamma
        first = inner * intra.alpha_s + outer * inter.alpha_s + inside + outside + reduce
        busy = max(inner * intra.gap_s + inside, outer * inter.gap_s + outside, reduce)
        return _Pipe(first, busy, busy)
    half = size / 2  # of each chunk, one half goes through each tree
    one = min(2, place.ranks - 1)  # children of a rank
    up = one * half * (place.flat_beta + place.gamma)
    down = one * half * place.flat_beta
    first = (
        2 * inner * (intra.alpha_s + intra.branch_s)
        + 2 * outer * (inter.alpha_s + inter.branch_s)
        + (inner + outer) * (up + down)
    )
    # Inside of one tree and a leaf of the other: one message up and two down, and one up. Two
    # ranks: one up, one down.
    busy = max(2 * one * (place.gap + half * place.flat_beta), one * half * place.gamma)
    return _Pipe(first, busy, busy)


def _binomial(place: _Placement, size: float) -> _Pipe:
    """All-reduce: reduce to rank 0 and broadcast, whole chunks along a binomial tree."""
    if place.op != "all_reduce":
        raise InvalidArgument(f"the binomial tree is modelled for all_reduce only, not {place.op}")
    intra, inter = place.intra, place.inter
    inner, outer = _levels(place.local), _levels(place.nodes)
    first = 2 * (
        inner * (intra.alpha_s + size * intra.beta_s_per_byte) + outer * (inter.alpha_s + size * inter.beta_s_per_byte)
    )
    first += (inner + outer) * size * place.gamma
    return _Pipe(first, first, first)


def _hierarchical(place: _Placement, size: float, between=_ring) -> _Pipe:
    """Reduce-scatter in the node by a ring, `between` the nodes with equal local ranks, all-gather
    in the node.
    """
    if place.nodes == 1:
        return _ring(place, size)
    gamma = place.intra.gamma_s_per_byte
    node = dataclasses.replace(place, ranks=place.local, nodes=1)
    link = dataclasses.replace(place.inter, gamma_s_per_byte=gamma)
    outer = between(_Placement(place.op, place.nodes, 1, place.nodes, link, link, 1), size / place.local)
    if place.local == 1:
        return outer
    ops = ("reduce_scatter", "all_gather") if place.op == "all_reduce" else (place.op,)
    stages = [_ring(dataclasses.replace(node, op=op), size) for op in ops]
    busy = max(sum(stage.busy for stage in stages), outer.busy)
    return _Pipe(sum(stage.first for stage in stages) + outer.first, busy, busy)


def _hierarchical_tree(place: _Placement, size: float) -> _Pipe:
    return _hierarchical(place, size, _tree)


_PIPES = {
    "native": _direct,  # the host engine: each rank reduces one segment of all arrays, then all gather
    "ring": _ring,
    "direct": _direct,
    "tree": _tree,
    "binomial": _binomial,
    "hierarchical": _hierarchical,
    "hierarchical_tree": _hierarchical_tree,
}


def _levels(count: int) -> int:
    """Return the depth of a tree over `count`: the logarithm, rounded up."""
    return (count - 1).bit_length()


def predict(op: str, algorithm: str, ranks: int, nbytes: int, network: Network) -> float:
    """Predict the time of one call in seconds, with the number of chunks that is best up to
    `network.max_chunks`.

    `op`: of `OPS`; `algorithm`: of `ALGORITHMS`; `nbytes`: the whole array. More ranks than fit on
    one node must fill all nodes evenly. Raises `InvalidArgument` for what the model doesn't have.
    """
    if op not in OPS:
        raise InvalidArgument(f"op must be one of {', '.join(OPS)}, not {op!r}")
    if algorithm not in _PIPES:
        raise InvalidArgument(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if ranks < 1 or nbytes < 0:
        raise InvalidArgument(f"ranks must be at least 1 and nbytes at least 0, not {ranks} and {nbytes}")
    local = ranks if network.ranks_per_node is None else min(ranks, network.ranks_per_node)
    if ranks % local:
        raise InvalidArgument(f"{ranks} ranks don't fill nodes of {local} evenly")
    nodes = ranks // local
    if nodes > 1 and network.inter is None:
        raise InvalidArgument(f"{ranks} ranks need {nodes} nodes, and {network.name} has no link between nodes")
    crowd = 1.0 if network.cores is None else max(1.0, ranks / network.cores)
    if ranks == 1:
        return network.start_s
    place = _Placement(
        op, ranks, local, nodes, network.intra, network.inter or network.intra, min(network.rails, local)
    )
    best = math.inf
    chunks = 1
    while chunks <= network.max_chunks:
        best = min(best, _PIPES[algorithm](place, nbytes / chunks).time(chunks))
        chunks *= 2
    return crowd * (network.start_s + best)


# ---- Fit.

_PARAMETERS = ("start_s", "alpha_s", "beta_s_per_byte", "gamma_s_per_byte")


@dataclass(frozen=True)
class Fit:
    """A network whose costs were fitted to measured points, and how far it is from them.

    `rms` and `largest`: of (predicted - measured) / measured over the `points` points. `left_out`:
    parameters that the points can't tell from the others, or whose best value is 0.
    """

    network: Network
    rms: float
    largest: float
    points: int
    left_out: tuple[str, ...] = ()

    def predict(self, op: str, algorithm: str, ranks: int, nbytes: int) -> float:
        """Predict a time in seconds with the fitted costs."""
        return predict(op, algorithm, ranks, nbytes, self.network)


def _network(values: Sequence[float], name: str, cores: int | None) -> Network:
    start, alpha, beta, gamma = values
    return Network(name, Cost(alpha, beta, gamma), start_s=start, cores=cores)


def fit(points: Iterable[Point], *, cores: int | None = None, name: str = "measured") -> Fit:
    """Fit start, alpha, beta and gamma of one node to measured points by least squares.

    What is minimised is the sum of squares of the relative errors, so that microseconds count as
    much as seconds. No parameter gets below 0. The points may be of several ops, ranks and
    algorithms; one alone can't tell beta from gamma, and one number of ranks can't tell start from
    alpha: what isn't needed is left out. Raises `InvalidArgument` without points, or for times that
    aren't above 0.
    """
    points = list(points)
    if not points or not all(point.seconds > 0 and math.isfinite(point.seconds) for point in points):
        raise InvalidArgument("a fit needs points, and times above 0 s")
    # The model is linear in its parameters where nothing is cut into chunks: a column is the time
    # with one of them 1.
    units = [_network(row, name, cores) for row in np.eye(len(_PARAMETERS))]
    columns = np.array([[predict(p.op, p.algorithm, p.ranks, p.nbytes, unit) for unit in units] for p in points])
    measured = np.array([point.seconds for point in points])
    scaled = columns / measured[:, None]
    best, values = math.inf, np.zeros(len(_PARAMETERS))
    # Four parameters have 15 subsets: trying all is the simplest exact way to keep them from
    # getting below 0.
    for count in range(1, len(_PARAMETERS) + 1):
        for chosen in itertools.combinations(range(len(_PARAMETERS)), count):
            part = scaled[:, chosen]
            norms = np.linalg.norm(part, axis=0)
            if not norms.all() or np.linalg.matrix_rank(part / norms, tol=1e-6) < count:
                continue
            found = np.linalg.lstsq(part / norms, np.ones(len(points)), rcond=None)[0] / norms
            error = float(np.sum((part @ found - 1) ** 2))
            if (found >= 0).all() and error < best - 1e-9:
                best, values = error, np.zeros(len(_PARAMETERS))
                values[list(chosen)] = found
    errors = scaled @ values - 1
    left_out = tuple(name for name, value in zip(_PARAMETERS, values, strict=True) if value == 0)
    return Fit(
        _network([float(value) for value in values], name, cores),
        float(np.sqrt(np.mean(errors**2))),
        float(np.abs(errors).max()),
        len(points),
        left_out,
    )
