"""Reading of flight recorder files, every field of which is checked: a file may be of any content."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

from .._nccl import DTYPES, FLIGHT_BYTES, FLIGHT_LAYOUT, FLIGHT_OPS
from ..comm.liveness import has_ended, this_process
from ..errors import InvalidArgument
from ..json_records import parse_json

__all__ = ["Operation", "RingFile", "read_file", "read_folder"]

_HEADER = struct.Struct("<8sIIIIQQqII")  # collFlightHeader_t
_RECORD = struct.Struct("<QqqqQQIiHBBhBx")  # collFlightRecord_t
_BLOCKING, _COLLECTIVE = 1, 2
_DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
_MAX_RANKS = 1 << 20
_ERROR = ("kind", "text", "op")


@dataclass(frozen=True)
class Operation:
    """One operation of a rank.

    Attributes:
        number: Its number among all operations of its communicator on this rank.
        sequence: Its number among the collectives, which is the same on all ranks.
        name: The operation, such as "all_reduce".
        count: The number of elements, as in NCCL's call.
        dtype: The dtype of the elements.
        peer: The root or the peer; None where there is none.
        collective: Whether it is a collective.
        stream: The stream that orders it.
        submitted: When it was submitted, in ns of the node's monotonic clock.
        started: When it has started; None where it has not, or that isn't known.
        ended: When it has ended; None where it has not, or that isn't known.
        completed: Whether it is known to have ended.
        code: NCCL's result code of its end.
        line: The line of the program; "" where it wasn't recorded.
        tag: The name of the communicator's tag; "" where it had none.
    """

    number: int
    sequence: int
    name: str
    count: int
    dtype: str
    peer: int | None
    collective: bool
    stream: int
    submitted: int
    started: int | None
    ended: int | None
    completed: bool
    code: int
    line: str
    tag: str = ""

    @property
    def pending(self) -> bool:
        """Whether the operation is not known to have ended."""
        return not self.completed

    @property
    def call(self) -> tuple:
        """What must be the same on all ranks of a collective."""
        return self.name, self.count, self.dtype, self.peer, self.tag

    def describe(self) -> str:
        """Return the call in words."""
        peer = "" if self.peer is None else f", {'root' if self.collective else 'peer'} {self.peer}"
        tag = f" for {self.tag}" if self.tag else ""
        return f"{self.name} of {self.count} {self.dtype}{peer}{tag}" + (f" at {self.line}" if self.line else "")


@dataclass(frozen=True)
class RingFile:
    """One rank's ring of one communicator, as its file has it.

    Attributes:
        path: The file.
        name: The communicator's name.
        rank: The rank that wrote the ring.
        size: The number of ranks.
        pid: The rank's process id.
        process: The process, as the recorder identifies it.
        host: The name of the node.
        node: The number of the node; None where it isn't known.
        device: The communicator's device.
        engine: The communicator's engine.
        clock: What to add to a time of the monotonic clock for the time of day, in ns.
        state: "open", "closed", "aborted" or "failed".
        state_at: When, in ns of the monotonic clock.
        error: The error that has ended the communicator, else the first one; None where there was
            none. A dict with ``kind``, ``text``, ``op``, ``peers`` and ``at``, as `state_at`.
        issued: The number of operations so far.
        operations: The last of them, in order.
    """

    path: Path
    name: str
    rank: int
    size: int
    pid: int
    process: str
    host: str
    node: int | None
    device: str
    engine: str
    clock: int
    state: str
    state_at: int
    error: dict | None
    issued: int
    operations: list[Operation] = field(repr=False)

    @property
    def ended_process(self) -> bool:
        """Whether the process is known, on this machine, to have ended."""
        return has_ended(self.local_process)

    @property
    def local_process(self) -> str:
        """The process as `liveness` names it here: nodes by COLLECTIVES_HOST_ID may be this one."""
        node, _, rest = self.process.partition("|")
        if node.startswith("COLLECTIVES_HOST_ID=") and self.host == socket.gethostname():
            node = this_process().partition("|")[0]
        return f"{node}|{rest}"

    @property
    def last_at(self) -> int:
        """The last moment at which the rank has written something, in ns of the time of day."""
        times = [self.state_at] + [t for op in self.operations[-64:] for t in (op.submitted, op.started, op.ended) if t]
        return max(times) + self.clock

    @property
    def last_collective(self) -> Operation | None:
        """The newest collective."""
        return next((op for op in reversed(self.operations) if op.collective), None)


def read_folder(folder: str | os.PathLike) -> tuple[list[RingFile], list[str]]:
    """Read all ``*.flight`` files of a folder and of those in it.

    Args:
        folder: The folder.

    Returns:
        The rings by name and rank, and a line for each file that can't be read.

    Raises:
        InvalidArgument: Where there is no such folder or no file in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InvalidArgument(f"{folder}: no such folder")
    paths = sorted(folder.rglob("*.flight"))
    if not paths:
        raise InvalidArgument(
            f"{folder}: no *.flight files. Ranks write them with COLLECTIVES_FLIGHT_DIR, and remove them when they end "
            "in good order"
        )
    rings, problems = [], []
    for path in paths:
        try:
            rings.append(read_file(path))
        except (OSError, InvalidArgument) as error:
            problems.append(str(error))
    return sorted(rings, key=lambda ring: (ring.name, ring.rank, ring.state_at)), problems


def read_file(path: str | os.PathLike) -> RingFile:
    """Read one file. Raises `InvalidArgument` where its content is none of a flight recorder."""
    path = Path(path)
    with open(path, "rb") as file:
        data = file.read(FLIGHT_BYTES + 1)
    if len(data) != FLIGHT_BYTES:
        raise InvalidArgument(f"{path}: {len(data)} bytes, and a flight recorder's file has {FLIGHT_BYTES}")
    magic, header, record, capacity, lines, issued, completed, _, _, used = _HEADER.unpack_from(data)
    layout = FLIGHT_LAYOUT
    known = (layout["header_bytes"], layout["record_bytes"], layout["capacity"], layout["lines"])
    if magic != b"COLLFLT1" or (header, record, capacity, lines) != known:
        raise InvalidArgument(f"{path}: no flight recorder's file of this version")
    meta, outcome = _read_json(data, "meta", path), _read_json(data, "outcome", path)
    try:
        facts = {
            "name": _text(meta["name"]), "rank": _number(meta["rank"], 0, _MAX_RANKS),
            "size": _number(meta["size"], 1, _MAX_RANKS), "pid": _number(meta["pid"], 0, 2**31),
            "process": _text(meta["process"]), "host": _text(meta["host"]), "device": _text(meta["device"]),
            "node": None if meta["node"] is None else _number(meta["node"], 0, _MAX_RANKS),
            "engine": _text(meta["engine"]), "clock": _number(meta["clock"], -(2**63), 2**63),
        }  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}: its head can't be used ({error})") from error
    state, at, error = _parse_outcome(outcome)
    names = _read_lines(data, min(used, layout["lines"]))
    operations = _read_operations(data, issued, completed, names)
    return RingFile(path, state=state, state_at=at, error=error, issued=issued, operations=operations, **facts)


def _text(value) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError(f"{value!r:.80}")
    return _printable(value)


def _printable(text: str) -> str:
    """Replace what a terminal or an encoding may not take, such as escape sequences."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "\ufffd" for each in text)


def _number(value, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
        raise ValueError(f"{value!r:.80}")
    return value


def _read_json(data: bytes, part: str, path: Path) -> dict:
    offset, room = FLIGHT_LAYOUT[f"{part}_offset"], FLIGHT_LAYOUT[f"{part}_bytes"] - 4
    (length,) = struct.unpack_from("<I", data, offset)
    if not length and part == "outcome":  # it is being written
        return {}
    try:
        value = parse_json(data[offset + 4 : offset + 4 + min(length, room)])
    except ValueError as error:
        raise InvalidArgument(f"{path}: its {part} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path}: its {part} is no object")
    return value


def _parse_outcome(outcome: dict) -> tuple[str, int, dict | None]:
    state = outcome.get("state")
    at = outcome.get("at")
    error = outcome.get("error")
    if isinstance(error, dict):
        peers = error.get("peers")
        peers = [peer for peer in peers if type(peer) is int] if isinstance(peers, list) else []
        error = {
            **{part: _printable(value[:1000]) if isinstance(value := error.get(part), str) else "" for part in _ERROR},
            "peers": peers, "at": _time(error.get("at")),
        }  # fmt: skip
    else:
        error = None
    return state if state in ("open", "closed", "aborted", "failed") else "open", _time(at), error


def _time(value) -> int:
    return value if type(value) is int and 0 <= value < 2**63 else 0


def _read_lines(data: bytes, count: int) -> list[str]:
    size = FLIGHT_LAYOUT["line_bytes"]
    start = FLIGHT_LAYOUT["header_bytes"] + FLIGHT_LAYOUT["capacity"] * FLIGHT_LAYOUT["record_bytes"]
    places = (data[start + number * size : start + (number + 1) * size] for number in range(count))
    return [place.partition(b"\0")[0].decode("utf-8", "replace") for place in places]


def _read_operations(data: bytes, issued: int, completed: int, lines: list[str]) -> list[Operation]:
    """Return the operations whose records are whole, in order."""
    header, capacity = FLIGHT_LAYOUT["header_bytes"], FLIGHT_LAYOUT["capacity"]
    found = []
    for place in range(capacity):
        fields = _RECORD.unpack_from(data, header + place * _RECORD.size)
        number, submitted, started, ended, count, stream, sequence, peer, line, op, dtype, code, flags = fields
        if not 0 < number <= issued or (number - 1) % capacity != place or number + capacity <= issued:
            continue
        if op >= len(FLIGHT_OPS) or min(submitted, started, ended) < 0:
            continue
        if not started and flags & _BLOCKING:
            started = submitted
        place_of_line, _, tag = lines[line - 1].partition("\t") if 0 < line <= len(lines) else ("", "", "")
        found.append(
            Operation(
                number, sequence, FLIGHT_OPS[op], count, _DTYPE_NAMES.get(dtype, f"type {dtype}"),
                None if peer < 0 else peer, bool(flags & _COLLECTIVE), stream, submitted, started or None,
                ended or None, bool(ended) or number <= completed, code, _printable(place_of_line), _printable(tag),
            )
        )  # fmt: skip
    return sorted(found, key=lambda operation: operation.number)
