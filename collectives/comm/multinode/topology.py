"""Topology of a communicator: which rank is on which node, and which ranks are leaders.

It also identifies this node and finds the address at which other nodes reach it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Hashable, Iterable

from ...environment import read_label

__all__ = [
    "MAX_LEADERS",
    "Topology",
    "find_own_address",
    "find_route",
    "get_host_hash",
    "group_ranks_by_node",
    "identify_node",
    "is_loopback",
    "read_host_id",
]

MAX_LEADERS = 32  # leaders of a node: more streams than that fill no network
_ALIGNED = 16  # elements: chunks and shards begin at a multiple of it


def read_host_id() -> str:
    """Return COLLECTIVES_HOST_ID, or "" where it isn't set.

    With it one node can stand for several.
    """
    return read_label("COLLECTIVES_HOST_ID")


def identify_node() -> tuple[str, str, str]:
    """Return (host name, boot id, network namespace) of this node.

    Two processes with the same boot id and namespace share local sockets.
    """
    host = socket.gethostname()[:255]
    if read_host_id():
        return host, f"COLLECTIVES_HOST_ID={read_host_id()}", ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return host, boot_id, os.readlink("/proc/self/ns/net")
    except OSError:  # a sandbox without these files: the host name has to do
        return host, "", ""


def get_host_hash() -> int:
    """Return a number below 2**56 that only processes of one node share, to compare over a wire."""
    host, boot_id, namespace = identify_node()
    return int.from_bytes(hashlib.sha256(f"{boot_id or host} {namespace}".encode()).digest()[:7], "big")


def find_route(host: str) -> tuple[str, str]:
    """Return (own address, address of ``host``) of the route to a host; empty strings for none."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host or socket.gethostname(), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # a datagram socket: nothing is sent
            probe.connect(there)
            return probe.getsockname()[0], there[0]
    except OSError:
        return "", ""


def is_loopback(address: str) -> bool:
    """Return whether only this node can use an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def find_own_address(master: str = "") -> str:
    """Return a name or address at which the job's other nodes reach this one.

    It is the address from which this node reaches ``master``, "" for MASTER_ADDR. If that route
    doesn't leave the node, ``master`` is a name of this node (Debian's /etc/hosts maps a host's own
    name to 127.0.1.1) and is returned itself. Without a MASTER_ADDR the host name has to do.
    """
    master = master or os.environ.get("MASTER_ADDR", "").strip()
    own, _ = find_route(master) if master else ("", "")
    if own and not is_loopback(own):
        return own
    return master or socket.gethostname()


def group_ranks_by_node(nodes: Iterable[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, in the order of the nodes' first ranks.

    ``nodes``: the node of each rank.
    """
    found: dict[Hashable, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return tuple(map(tuple, found.values()))


class Topology:
    """Which rank of a communicator is on which node, and which ranks are leaders.

    ``nodes``: the ranks of each node. The first ``num_leaders`` ranks of a node are its leaders:
    they exchange data with other nodes. Leader j exchanges data with the leaders j of the other
    nodes. All nodes have the same number of leaders: the number of ranks on the smallest node, at
    most `MAX_LEADERS`.

    Derived: ``locations`` maps a rank to (node, local rank); ``node``, ``local_rank`` and
    ``is_leader`` are this rank's; ``local_ranks``: the ranks of this node; ``all_leaders``: whether
    all of them are leaders; ``is_contiguous``: whether each node's ranks are ``num_leaders``
    consecutive numbers.
    """

    def __init__(self, nodes: tuple[tuple[int, ...], ...], rank: int):
        self.nodes, self.rank = nodes, rank
        self.locations = {each: (node, i) for node, ranks in enumerate(nodes) for i, each in enumerate(ranks)}
        self.node, self.local_rank = self.locations[rank]
        self.local_ranks = nodes[self.node]
        self.num_leaders = min(MAX_LEADERS, *map(len, nodes))
        self.is_leader = self.local_rank < self.num_leaders
        self.all_leaders = len(self.local_ranks) == self.num_leaders
        # Whole blocks can be moved at once where this holds.
        self.is_contiguous = all(ranks == tuple(range(ranks[0], ranks[0] + self.num_leaders)) for ranks in nodes)

    def ranks_of_leader(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node whose data this leader, or the one there, sends and receives."""
        return self.nodes[node][self.local_rank :: self.num_leaders]

    def leader_of(self, rank: int) -> int:
        """Return the local rank of the leader that sends and receives a rank's data."""
        return self.locations[rank][1] % self.num_leaders

    def chunk(self, count: int, node: int) -> tuple[int, int]:
        """Return (start, length) of a node's chunk of ``count`` elements; a node has one chunk."""
        nodes = len(self.nodes)
        bounds = [count if p == nodes else count * p // nodes // _ALIGNED * _ALIGNED for p in (node, node + 1)]
        return bounds[0], bounds[1] - bounds[0]

    def shard_numel(self, count: int) -> int:
        """Return the elements of a leader's shard of ``count`` elements, without the rest."""
        return count // self.num_leaders // _ALIGNED * _ALIGNED

    def shard(self, count: int, leader: int) -> tuple[int, int]:
        """Return (start, length) of a leader's shard of ``count`` elements.

        All shards have one size but the last one, which has the rest of the elements, too.
        """
        numel = self.shard_numel(count)
        return leader * numel, count - leader * numel if leader == self.num_leaders - 1 else numel
