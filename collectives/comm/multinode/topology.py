"""Which rank is on which machine, and how work is shared out over the ranks of several machines."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import socket
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from ...environment import read_label

__all__ = [
    "MOST_CARRIERS",
    "Layout",
    "grouped",
    "loops",
    "machine_number",
    "own_address",
    "route_to",
    "simulated",
    "this_machine",
]

MOST_CARRIERS = 32  # ranks of a machine that talk to the other machines: more streams than that fill no network
_ALIGNED = 16  # elements: pieces begin at a multiple of it


def simulated() -> str:
    """Give COLLECTIVES_HOST_ID, by which one machine can stand for several, or ""."""
    return read_label("COLLECTIVES_HOST_ID")


def this_machine() -> tuple[str, str, str]:
    """Give (host's name, boot id, network namespace). Two processes of which the last two agree share local sockets."""
    host = socket.gethostname()[:255]
    if simulated():
        return host, f"COLLECTIVES_HOST_ID={simulated()}", ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
        return host, boot_id, os.readlink("/proc/self/ns/net")
    except OSError:  # a sandbox with no such files: the host's name has to do
        return host, "", ""


def machine_number() -> int:
    """Give a number below 2**56 that is the same for the processes of one machine alone, to be compared over a wire."""
    host, boot_id, namespace = this_machine()
    return int.from_bytes(hashlib.sha256(f"{boot_id or host} {namespace}".encode()).digest()[:7], "big")


def route_to(host: str) -> tuple[str, str]:
    """Give (own address, that of ``host``) of the way to a host; empty ones where there is none."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host or socket.gethostname(), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # a datagram socket: nothing is sent
            probe.connect(there)
            return probe.getsockname()[0], there[0]
    except OSError:
        return "", ""


def loops(address: str) -> bool:
    """Tell whether an address is of this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address() -> str:
    """Give a name or address by which the job's other machines reach this one.

    It is the address from which this machine reaches MASTER_ADDR. Where that way doesn't leave this machine,
    MASTER_ADDR is a name of this one (Debian's /etc/hosts maps a machine's name to 127.0.1.1); without one, the host's
    name has to do.
    """
    master = os.environ.get("MASTER_ADDR", "").strip()
    own, _ = route_to(master) if master else ("", "")
    if own and not loops(own):
        return own
    return master or socket.gethostname()


def grouped(machines: Iterable[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Give the ranks of each machine, from what each rank's machine is; in the order of the machines' first ranks."""
    found: dict[Hashable, list[int]] = {}
    for rank, machine in enumerate(machines):
        found.setdefault(machine, []).append(rank)
    return tuple(map(tuple, found.values()))


@dataclass(frozen=True)
class Layout:
    """The places of a communicator's ranks, and who carries what between the machines.

    ``machines``: the ranks of each machine. Its first ``carriers`` ranks carry data to and from the other machines;
    carrier j talks to the carriers j of the others. There are as many on each machine as the smallest has ranks.
    """

    machines: tuple[tuple[int, ...], ...]
    rank: int

    def __post_init__(self):
        places = {rank: (m, i) for m, ranks in enumerate(self.machines) for i, rank in enumerate(ranks)}
        put = object.__setattr__
        put(self, "places", places)
        put(self, "machine", places[self.rank][0])
        put(self, "local", places[self.rank][1])
        put(self, "here", self.machines[self.machine])
        put(self, "carriers", min(MOST_CARRIERS, *map(len, self.machines)))
        put(self, "carries", self.local < self.carriers)
        put(self, "full", len(self.here) == self.carriers)
        # Each machine's ranks are `carriers` numbers in a row, so that whole blocks can be moved at once.
        rows = all(ranks == tuple(range(ranks[0], ranks[0] + self.carriers)) for ranks in self.machines)
        put(self, "in_rows", rows)

    @property
    def peers(self) -> list[tuple[int, int]]:
        """Give (machine, rank) of the other machines' carriers that this carrier talks to."""
        return [(m, ranks[self.local]) for m, ranks in enumerate(self.machines) if m != self.machine]

    def carried(self, machine: int, carrier: int | None = None) -> tuple[int, ...]:
        """Give the ranks of a machine for which a carrier (None: this one) carries data."""
        return self.machines[machine][self.local if carrier is None else carrier :: self.carriers]

    def carrier_of(self, rank: int) -> int:
        """Give the number of the carrier that carries for a rank; of its local ranks on this machine too."""
        return self.places[rank][1] % self.carriers

    def part(self, count: int, index: int, parts: int | None = None) -> tuple[int, int]:
        """Give (start, length) of one of ``parts`` parts (None: one a machine) of ``count`` elements."""
        parts = len(self.machines) if parts is None else parts
        bounds = [count if p == parts else count * p // parts // _ALIGNED * _ALIGNED for p in (index, index + 1)]
        return bounds[0], bounds[1] - bounds[0]

    def piece(self, count: int) -> int:
        """Give the elements of a carrier's piece; all are of one size, and what is left over is behind them."""
        return count // self.carriers // _ALIGNED * _ALIGNED
