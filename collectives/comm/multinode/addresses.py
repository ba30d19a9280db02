"""Addresses at which the ranks of several nodes reach each other."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import struct

from ...errors import TransportError
from ...json_records import parse_json
from .error_store import ErrorStore
from .topology import find_route, is_loopback

__all__ = ["find_address", "parse_addresses"]

_SIOCGIFADDR = 0x8915


def find_address(error_store: ErrorStore, rank: int, size: int, deadline: float) -> str:
    """Return the address at which peers reach this rank; "" where that isn't known.

    It is the first address of the interface that GLOO_SOCKET_IFNAME names, else the one from which
    this rank reaches the store. On the store's own node that may be a loopback address, even where
    MASTER_ADDR is the node's name (Debian's /etc/hosts maps that to 127.0.1.1). There it is the
    address at which the other nodes have reached the store. Blocks until all ranks have set theirs.
    """
    own, there = find_route(error_store.host)
    error_store.set(f"address/{rank}", json.dumps([own, there]))
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if interface:
        return _address_of(interface)
    if own and not is_loopback(own):
        return own
    for peer in range(size):
        theirs, seen = parse_addresses(error_store.get(f"address/{peer}", deadline, peer), peer)
        if theirs and not is_loopback(theirs) and seen and not is_loopback(seen):
            return seen
    return own


def parse_addresses(data: bytes, peer: int) -> tuple[str, str]:
    """Parse what a peer has set: its own address, and the store's as it reaches that; "" for none.

    Raises `TransportError` for anything else.
    """
    try:
        own, seen = (each or "" for each in parse_json(data))
        if not (isinstance(own, str) and isinstance(seen, str) and f"{own}{seen}".isascii()):
            raise ValueError("no addresses")
    except (ValueError, TypeError) as error:
        text = f"rank {peer}'s record of its address can't be read: {data[:80]!r}"
        raise TransportError(text, op="init", peers=(peer,)) from error
    return own, seen


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, else an IPv6 address of it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntop(socket.AF_INET, found[20:24])
    except OSError as error:
        try:
            with open("/proc/net/if_inet6", encoding="ascii") as file:
                rows = [line.split() for line in file]
        except OSError:
            rows = []
        for digits, _, _, scope, _, name in rows:
            if name == interface:
                address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
                return f"{address}%{interface}" if scope == "20" else address  # of a link alone
        text = f"GLOO_SOCKET_IFNAME={interface}: the interface has no address: {error.strerror}"
        raise TransportError(text, op="init") from error
