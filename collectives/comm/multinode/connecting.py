"""How the ranks of several nodes connect: one TCP connection between each two of them."""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import time
from dataclasses import dataclass, field

from ...errors import CollectivesError, CollectiveTimeout, RemoteError, TransportError
from ...json_records import parse_json
from ...secret import seal, unseal
from ..waiting import format_ranks
from .addresses import find_address
from .error_store import ErrorStore

__all__ = ["connect_ranks", "parse_listener"]

_PURPOSE = "to connect the machines"
_GREETING = struct.Struct(">8sII16s16s")  # magic, sender's rank, receiver's rank, the listener's token, a nonce
_MAGIC = b"COLLNODE"
_LOOK_S = 0.5  # between looks for why ranks don't come
_SPARE = 64  # connections of strangers that are kept while their greeting may come
# Ends a connection whose other node has lost its power, in about two minutes; where something was sent that it has not
# confirmed, the system's net.ipv4.tcp_retries2 does. TCP_USER_TIMEOUT would end that of a rank that is only stopped.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
# What accept() reports of the connection itself, which another one may follow: accept(2).
_GONE_AGAIN = {
    errno.EAGAIN, errno.ECONNABORTED, errno.ENETDOWN, errno.EPROTO, errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.ENONET,
    errno.EHOSTUNREACH, errno.EOPNOTSUPP, errno.ENETUNREACH, errno.ETIMEDOUT,
}  # fmt: skip
_ADVICE = "GLOO_SOCKET_IFNAME names the interface to use; the machines must reach each other on any TCP port"


def connect_ranks(store: ErrorStore, rank: int, size: int, seconds: float) -> dict[int, socket.socket]:
    """Connect this rank with all others of a communicator; return its sockets by rank, non-blocking.

    Blocks until all are connected, at most ``seconds``. Raises `CollectiveTimeout` past it,
    `TransportError` where a rank can't be reached, `RemoteError` where one has ended, and what
    `ErrorStore.check_ranks` raises.
    """
    opening = _Opening(store, rank, size, seconds)
    try:
        return opening.run()
    except CollectivesError:  # some are OSErrors
        raise
    except OSError as error:
        text = f"could not connect the machines: {error.strerror or error}. {_ADVICE}"
        raise TransportError(text, op="init", rank=rank) from error
    finally:
        opening.close()


def parse_listener(data: bytes, peer: int) -> tuple[str, int, bytes]:
    """Parse what a peer has set: the address and the port at which it listens, and its token.

    Raises `TransportError` for anything else.
    """
    try:
        address, port, token = parse_json(data)
        if not (isinstance(address, str) and address.isascii() and type(port) is int and 0 < port < 1 << 16):
            raise ValueError("no address and port")
        token = bytes.fromhex(token)
        if len(token) != 16:
            raise ValueError("no token")
    except (ValueError, TypeError) as error:
        text = f"rank {peer}'s record of where it listens can't be read: {data[:80]!r}"
        raise TransportError(text, op="init", peers=(peer,)) from error
    return address, port, token


@dataclass(eq=False)
class _Greeted:
    """A connection until the other side's greeting is there.

    ``peer``: the rank to which this one has connected, None where the other side has; ``token``,
    ``nonce``: what its greeting has to repeat, the nonce where this rank has connected.
    """

    socket: socket.socket
    peer: int | None
    token: bytes
    nonce: bytes = b""
    received: bytearray = field(default_factory=bytearray)


class _Opening:
    """The state while a rank connects: it listens, connects to all lower ranks, and accepts the others.

    The side that connects greets first, with the token that the listener has put into the store, and
    the listener answers with the nonce of that greeting. Both greetings are sealed with the job's
    secret, where there is one. A connection with another greeting is closed.
    """

    def __init__(self, store: ErrorStore, rank: int, size: int, seconds: float):
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._deadline = time.monotonic() + seconds
        self._look_at = time.monotonic() + _LOOK_S
        self._token = os.urandom(16)
        self._length = len(seal(bytes(_GREETING.size), _PURPOSE))
        self._sockets: dict[int, socket.socket] = {}
        self._greeted: dict[int, _Greeted] = {}  # by file descriptor
        self._listener: socket.socket | None = None
        self._done = False

    def run(self) -> dict[int, socket.socket]:
        address = find_address(self._store, self._rank, self._size, self._deadline)
        self._listener = _listen(address, self._size)
        name, port = self._listener.getsockname()[:2]
        record = json.dumps([address if "%" in address else name, port, self._token.hex()])
        self._store.set(f"listens/{self._rank}", record)
        for peer in range(self._rank):
            self._connect(peer, *parse_listener(self._store.get(f"listens/{peer}", self._deadline, peer), peer))
        while len(self._sockets) < self._size - 1:
            self._take_greetings()
        self._done = True
        return self._sockets

    def close(self) -> None:
        """Close the listener, and what has not become a connection of the communicator."""
        open_ones = [] if self._done else list(self._sockets.values())
        listener = [] if self._listener is None else [self._listener]
        for each in (*listener, *open_ones, *(greeted.socket for greeted in self._greeted.values())):
            each.close()

    def _connect(self, peer: int, address: str, port: int, token: bytes) -> None:
        """Connect to a rank that listens, and greet it."""
        try:
            family, kind, protocol, _, there = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            connection = socket.socket(family, kind, protocol)
            greeted = self._greeted[connection.fileno()] = _Greeted(connection, peer, token, os.urandom(16))
            _set_options(connection)
            try:
                connection.connect(there)
            except BlockingIOError:
                while not self._poll([connection.fileno()], select.POLLOUT):
                    pass
                if code := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code)) from None
            self._greet(connection, peer, token, greeted.nonce)
        except CollectivesError:
            raise
        except OSError as error:
            raise TransportError(
                f"could not connect to rank {peer} at {address} port {port}: {error.strerror or error}. {_ADVICE}",
                op="init", rank=self._rank, peers=(peer,),
            ) from error  # fmt: skip

    def _greet(self, connection: socket.socket, peer: int, token: bytes, nonce: bytes) -> None:
        greeting = seal(_GREETING.pack(_MAGIC, self._rank, peer, token, nonce), _PURPOSE)
        if connection.send(greeting, socket.MSG_NOSIGNAL) != len(greeting):  # the first bytes of a connection fit
            raise OSError("its first bytes could not be sent")

    def _take_greetings(self) -> None:
        """Wait a short time for connections and greetings, and take those that are there."""
        for descriptor, _ in self._poll([self._listener.fileno(), *self._greeted], select.POLLIN):
            if descriptor == self._listener.fileno():
                self._accept()
            elif (greeted := self._greeted.get(descriptor)) is not None:  # else `_accept` has just closed it
                self._read(greeted)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _GONE_AGAIN:
                return
            raise
        _set_options(connection)
        self._greeted[connection.fileno()] = _Greeted(connection, None, self._token)
        strangers = [fd for fd, greeted in self._greeted.items() if greeted.peer is None]
        if len(strangers) > self._size + _SPARE:
            self._greeted.pop(strangers[0]).socket.close()

    def _read(self, greeted: _Greeted) -> None:
        """Read of a greeting what is there; a whole one makes the connection the communicator's."""
        try:
            data = greeted.socket.recv(self._length - len(greeted.received))
            greeted.received += data
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(greeted, error.strerror)
            return
        if not data:
            self._drop(greeted, "it was closed")
        elif len(greeted.received) == self._length:
            self._finish(greeted)

    def _finish(self, greeted: _Greeted) -> None:
        try:
            fields = _GREETING.unpack(unseal(bytes(greeted.received), _PURPOSE))
        except (TransportError, struct.error) as error:
            self._drop(greeted, str(error))
            return
        magic, peer, receiver, token, nonce = fields
        expected = peer == greeted.peer if greeted.peer is not None else self._rank < peer < self._size
        if greeted.peer is not None:
            expected = expected and nonce == greeted.nonce
        if (magic, receiver, token) != (_MAGIC, self._rank, greeted.token) or not expected or peer in self._sockets:
            self._drop(greeted, "its greeting is another one")
            return
        if greeted.peer is None:
            try:
                self._greet(greeted.socket, peer, token, nonce)
            except OSError as error:
                greeted.peer = peer
                self._drop(greeted, error.strerror or str(error))
        del self._greeted[greeted.socket.fileno()]
        self._sockets[peer] = greeted.socket

    def _drop(self, greeted: _Greeted, reason: str) -> None:
        """Close a connection that can't be used. Raises where it is known whose it is."""
        if greeted.peer is not None:
            text = f"rank {greeted.peer} died or left while the machines were connected: its connection was lost"
            raise RemoteError(
                f"{text} ({reason})", op="init", rank=self._rank, peers=(greeted.peer,), detail=reason
            )
        del self._greeted[greeted.socket.fileno()]
        greeted.socket.close()

    def _poll(self, descriptors: list[int], events: int) -> list[tuple[int, int]]:
        """Wait a short time for an event. Raises past the deadline, and why ranks don't come.

        It looks for that now and then even where there are events: strangers may cause them.
        """
        poll = select.poll()
        for each in descriptors:
            poll.register(each, events)
        found = poll.poll(1000.0 * _LOOK_S)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_S
            self._store.check_ranks()
            if time.monotonic() >= self._deadline:
                raise self._timed_out()
        return found

    def _timed_out(self) -> CollectivesError:
        missing = self._store.find_missing([f"listens/{peer}" for peer in range(self._size)])
        if 0 < len(missing) < self._size:  # all: the store can't be reached
            return CollectiveTimeout(
                f"{format_ranks(missing)} of {self._size} did not come within {self._seconds:g} s {_PURPOSE}",
                op="init", rank=self._rank, peers=missing,
            )  # fmt: skip
        unconnected = [peer for peer in range(self._size) if peer != self._rank and peer not in self._sockets]
        return CollectiveTimeout(
            f"the machines of this rank and of {format_ranks(unconnected)} were not connected within {self._seconds:g} "
            "s: is a firewall between them, or does GLOO_SOCKET_IFNAME have to name the network interface?",
            op="init", rank=self._rank, peers=() if missing else unconnected,
        )  # fmt: skip


def _listen(address: str, size: int) -> socket.socket:
    """Return a non-blocking listener at a port that the system chooses.

    ``address``: of this node, "" for that of its host name.
    """
    address = address or socket.gethostname()
    try:
        family, kind, protocol, _, here = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise TransportError(f"can't use address {address}: {error.strerror}. {_ADVICE}", op="init") from error
    try:
        listener.setblocking(False)
        listener.bind(here)
        listener.listen(size + _SPARE)
    except OSError as error:
        listener.close()
        raise TransportError(f"can't listen at {address}: {error.strerror}. {_ADVICE}", op="init") from error
    return listener


def _set_options(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
