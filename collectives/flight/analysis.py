"""Analysis of a job's flight recorder files: who died, who was late, who did not come, who called
something else, who is slow.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..comm.liveness import this_process
from ..comm.waiting import format_ranks
from .reading import Operation, RingFile

__all__ = ["Finding", "analyse"]

_SLOW_SHARE = 0.8  # of the latest operations to which a slow rank comes last
_SLOW_FLOOR_NS = 1_000_000
_SLOW_WINDOW = 24  # operations
_SLOW_LEAST = 8
_SLOW_GAP = 3
_STOPPED = "T"
_OF_ABSENCE = ("RemoteError", "CollectiveTimeout")  # errors that name ranks which did not come
_NAMELESS = (*_OF_ABSENCE, "TransportError")  # errors that may follow from another rank's end and name nobody


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong.

    Attributes:
        kind: "died", "late", "missing", "different", "error", "stopped", "slow", "apart" or "no
            file"; "unclear", of a rank that died, was late, or was ended when others had failed; or
            "ended", of a rank that is not the cause.
        communicator: The communicator's name.
        ranks: The ranks that it is about, by that communicator's numbers.
        text: The finding in words.
        at: When, in ns of the time of day; None where that isn't known.
        facts: Further values, for programs.
    """

    kind: str
    communicator: str
    ranks: tuple[int, ...]
    text: str
    at: int | None = None
    facts: dict = field(default_factory=dict)


def analyse(rings: Iterable[RingFile]) -> list[Finding]:
    """Return what the rings say went wrong, the likely causes first.

    Args:
        rings: The rings of all ranks, as `read_folder` returns them.
    """
    groups: dict[str, dict[int, RingFile]] = defaultdict(dict)
    for ring in rings:  # of two files of one rank the later one counts
        groups[ring.name][ring.rank] = ring
    findings = []
    for name, by_rank in sorted(groups.items()):
        findings += _analyse_comm(name, by_rank)
    order = ["died", "stopped", "different", "late", "unclear", "missing", "error", "no file", "slow", "apart", "ended"]
    return sorted(findings, key=lambda found: (order.index(found.kind), found.at or 2**63))


def _analyse_comm(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    ends = _find_ends(name, rings)
    gone = {rank for found in ends if found.kind in ("died", "ended") for rank in found.ranks}
    return [
        *ends,
        *_find_stopped(name, rings),
        *_find_different_calls(name, rings),
        *_find_missing(name, rings, gone),
        *_find_errors(name, rings),
        *_find_absent_files(name, rings),
        *_find_slow_rank(name, rings),
        *_find_distance(name, rings),
    ]


def _after(ring: RingFile) -> str:
    """Return a rank's last operation in words."""
    last = ring.operations[-1] if ring.operations else None
    if last is None:
        return "before its first operation"
    where = f"number {last.number} ({last.describe()})"
    return f"in operation {where}" if last.pending else f"after operation {where}"


@dataclass(frozen=True)
class _Accusation:
    """The first error in which a rank names another one: `at` in ns of the time of day, `by` whose it is."""

    at: int
    by: int
    kind: str
    op: str


def _find_accusations(failed: dict[int, RingFile]) -> dict[int, _Accusation]:
    """Return the first accusation of each rank that an error of another one names as absent."""
    found: dict[int, _Accusation] = {}
    for by, ring in failed.items():
        for peer in ring.error["peers"] if ring.error["kind"] in _OF_ABSENCE else ():
            one = _Accusation(ring.error["at"] + ring.clock, by, ring.error["kind"], ring.error["op"])
            if peer != by and (peer not in found or one.at < found[peer].at):
                found[peer] = one
    return found


def _has_gone_on(ring: RingFile) -> bool:
    """Return whether operations have gone well after a rank's error, which its program has caught."""
    return any(op.submitted > ring.error["at"] and op.completed and not op.code for op in ring.operations)


def _find_nameless(failed: dict[int, RingFile]) -> dict[int, RingFile]:
    """Return the ranks whose errors follow from another rank's and don't say whose; none where any error
    says more. NCCL's own errors are such.
    """
    nameless = {
        rank: ring for rank, ring in failed.items() if ring.error["kind"] in _NAMELESS and not ring.error["peers"]
    }
    return nameless if len(nameless) == len(failed) else {}


def _every_end_is_known(rings: dict[int, RingFile], failed: dict[int, RingFile]) -> bool:
    """Return whether this machine would know of the end of every rank that has got no error."""
    size = max(ring.size for ring in rings.values())
    return len(rings) == size and all(_is_of_this_node(ring) for rank, ring in rings.items() if rank not in failed)


def _find_ends(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    """Return what ended the processes of ranks that have not closed the communicator.

    A rank that has got `CollectiveTimeout` was waiting for one that lived: a launcher ends it later,
    and it was late. Where ranks have failed that wait for nobody's end, a launcher has ended the
    others, too, and these are not the cause. Where no error says which rank was missing, it is one of
    those, and which one is not known. The remaining ones have died, in the order of their ends. An error
    that a program has caught, and gone on, is none of these.
    """
    caught = {rank for rank, ring in rings.items() if ring.error is not None and _has_gone_on(ring)}
    failed = {rank: ring for rank, ring in rings.items() if ring.error is not None and rank not in caught}
    accusations, nameless = _find_accusations(failed), _find_nameless(failed)
    ended = {rank: ring for rank, ring in rings.items() if ring.state == "open" and ring.ended_process}
    ended = {rank: ring for rank, ring in ended.items() if rank not in failed}
    late = {rank for rank in ended if rank in accusations and accusations[rank].kind == "CollectiveTimeout"}
    after = {rank for rank in ended if failed and rank not in accusations}
    is_remote = any(ring.error["kind"] == "RemoteError" for ring in nameless.values())
    if len(after) == 1 and is_remote and _every_end_is_known(rings, failed):
        after = set()  # nobody else can have died
    found, dead = [], []
    for rank, ring in ended.items():
        who = f"rank {rank} (process {ring.pid} on {ring.host})"
        facts = {"pid": ring.pid, "host": ring.host}
        if rank in late:
            first = accusations[rank]
            lived = ring.engine != "nccl" or ring.host == rings[first.by].host
            text = (
                f"{who} was {'late' if lived else 'late, or had died,'} {_after(ring)}: rank {first.by} got "
                f"CollectiveTimeout in {first.op}, which it did not come to"
                + ("; its process lived then, and was ended later" if lived else "; its process has ended")
            )
            found.append(Finding("late", name, (rank,), text, first.at, facts))
        elif rank in after and nameless:
            by, other = next(iter(nameless.items()))
            text = (
                f"{who} died or was late, or was ended when others had failed, {_after(ring)}: rank {by}'s "
                f"{other.error['kind']} doesn't say which rank was missing"
            )
            found.append(Finding("unclear", name, (rank,), text, ring.last_at, facts))
        elif rank in after:
            text = f"{who} was ended {_after(ring)}, when others had failed: no rank's error names it"
            found.append(Finding("ended", name, (rank,), text, ring.last_at, facts))
        else:
            text = f"{who} died {_after(ring)}"
            if rank in accusations:
                seconds = max(0, accusations[rank].at - ring.last_at) / 1e9
                text += f"; another rank noticed {seconds:.2f} s after its last sign"
            dead.append(Finding("died", name, (rank,), text, ring.last_at, facts))
    dead.sort(key=lambda each: each.at)
    if len(dead) > 1:
        dead[0] = replace(dead[0], text=dead[0].text + "; it was the first")
    return dead + found


def _find_stopped(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    found = []
    for rank, ring in rings.items():
        if ring.state != "open" or not ring.process or ring.ended_process:
            continue
        if _process_state(ring.pid) == _STOPPED and _is_of_this_node(ring):
            how = "is stopped (SIGSTOP, Ctrl-Z, a debugger)"
            text = f"rank {rank} (process {ring.pid} on {ring.host}) {how} {_after(ring)}"
            found.append(Finding("stopped", name, (rank,), text, ring.last_at))
    return found


def _is_of_this_node(ring: RingFile) -> bool:
    return ring.local_process.split("|")[:2] == this_process().split("|")[:2]


def _process_state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _collectives(ring: RingFile) -> dict[int, Operation]:
    return {op.sequence: op for op in ring.operations if op.collective}


def _find_different_calls(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    """Return the first collective whose calls differ between the ranks."""
    by_rank = {rank: _collectives(ring) for rank, ring in rings.items()}
    for sequence in sorted(set().union(*by_rank.values())):
        calls = {rank: ops[sequence] for rank, ops in by_rank.items() if sequence in ops}
        kinds = Counter(op.call for op in calls.values())
        if len(kinds) < 2:
            continue
        (usual, _), *_ = kinds.most_common(1)
        others = {rank: op for rank, op in calls.items() if op.call != usual}
        normal = next(rank for rank, op in calls.items() if op.call == usual)
        parts = [f"rank {rank} called {op.describe()}" for rank, op in list(others.items())[:8]]
        like = [rank for rank in calls if rank not in others]
        text = (
            f"collective number {sequence} is not the same on all ranks: {'; '.join(parts)}; "
            f"{format_ranks(like)} called {calls[normal].describe()}"
        )
        at = min(op.submitted + rings[rank].clock for rank, op in others.items())
        return [Finding("different", name, tuple(others), text, at, {"sequence": sequence})]
    return []


def _find_missing(name: str, rings: dict[int, RingFile], gone: set[int]) -> list[Finding]:
    """Return the ranks that never came to the newest collective that others wait in."""
    newest = {rank: ring.last_collective for rank, ring in rings.items()}
    waiting = {
        rank: op for rank, op in newest.items() if op is not None and (op.pending or (op.code and rings[rank].error))
    }
    if not waiting:
        return []
    sequence = max(op.sequence for op in waiting.values())
    behind = [rank for rank, op in newest.items() if (op.sequence if op else 0) < sequence and rank not in gone]
    if not behind:
        return []
    waiters = [rank for rank, op in waiting.items() if op.sequence == sequence]
    parts = [f"rank {rank} is {_after(rings[rank])}" for rank in behind[:8]]
    text = (
        f"{format_ranks(behind)} never came to collective number {sequence} ({waiting[waiters[0]].describe()}), in "
        f"which {format_ranks(waiters)} waited: {'; '.join(parts)}"
    )
    at = min(waiting[rank].submitted + rings[rank].clock for rank in waiters)
    return [Finding("missing", name, tuple(behind), text, at, {"sequence": sequence})]


def _find_errors(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    found = []
    for rank, ring in rings.items():
        if ring.error is not None:
            text = f"rank {rank} got {ring.error['kind']}: {ring.error['text']}"
            text += " (its program has caught it, and gone on)" if _has_gone_on(ring) else ""
            found.append(Finding("error", name, (rank,), text, ring.error["at"] + ring.clock, {"error": ring.error}))
    return found


def _find_absent_files(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    size = max(ring.size for ring in rings.values())
    absent = [rank for rank in range(size) if rank not in rings] if size <= 4096 else []
    failed = any(ring.state != "closed" for ring in rings.values())
    if not absent or not failed:
        return []
    text = f"{format_ranks(absent)} left no file: ended in good order, or on a node whose folder isn't here"
    return [Finding("no file", name, tuple(absent), text)]


def _find_slow_rank(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    """Return the rank that comes last to most of the latest collectives, by a margin that counts."""
    if len(rings) < 2:
        return []
    by_rank = {rank: _collectives(ring) for rank, ring in rings.items()}
    common = sorted(set.intersection(*(set(ops) for ops in by_rank.values())))[-1024:]
    rows = []  # (sequence, rank that came last, ns after the one before it, when)
    for sequence in common:
        arrivals = sorted((ops[sequence].submitted + rings[rank].clock, rank) for rank, ops in by_rank.items())
        rows.append((sequence, arrivals[-1][1], arrivals[-1][0] - arrivals[-2][0], arrivals[-1][0]))
    window = rows[-_SLOW_WINDOW:]
    if len(window) < _SLOW_LEAST:
        return []
    (rank, times), *_ = Counter(row[1] for row in window).most_common(1)
    late = statistics.median(row[2] for row in window if row[1] == rank)
    if times < _SLOW_SHARE * len(window) or late < _SLOW_FLOOR_NS:
        return []
    since, others = window[-1], 0
    for row in reversed(rows):  # now and then another rank is later still
        slow = row[1] == rank and row[2] >= late / 4
        others = 0 if slow else others + 1
        if others > _SLOW_GAP:
            break
        since = row if slow else since
    text = (
        f"rank {rank} is slow since collective number {since[0]}: it came last to {times} of the last {len(window)}, "
        f"by {late / 1e6:.1f} ms (median)"
    )
    return [Finding("slow", name, (rank,), text, since[3], {"sequence": since[0], "median_ns": late})]


def _find_distance(name: str, rings: dict[int, RingFile]) -> list[Finding]:
    numbers = {rank: (ring.last_collective.sequence if ring.last_collective else 0) for rank, ring in rings.items()}
    low, high = min(numbers.values()), max(numbers.values())
    if high - low < 1 or all(ring.state == "closed" for ring in rings.values()):
        return []
    ahead = [rank for rank, number in numbers.items() if number == high]
    behind = [rank for rank, number in numbers.items() if number == low]
    text = (
        f"the ranks are {high - low} collectives apart: {format_ranks(ahead)} at number {high}, {format_ranks(behind)} "
        f"at number {low}"
    )
    return [Finding("apart", name, tuple(behind), text, None, {"low": low, "high": high})]
