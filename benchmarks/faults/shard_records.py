"""What a training of a model in shards may do after deaths, found from the records of its processes.

They are those of tests/elastic/sharded_training.py, in the order in which they came: a refresh of a version
begins on a rank (``refresh``) and is done there (``refreshed``, with whose shards it has received, or
``failed``); a rank goes on from a version (``start``; commit 0: from the beginning); a checkpoint is begun and
is whole (``saves``, ``saved``); a rank ends by an ``error``. A version is named by its commit and the
generation of its ranks. Where all processes have died, or have ended by errors, generations count from 1 again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

__all__ = ["find_wrong_records"]


class _Key(NamedTuple):
    """Name of a version, in the order of time. `life`: how often all processes had died or ended before."""

    life: int
    generation: int
    commit: int


class _Versions:
    """The versions that records speak of, so far, and the processes that go on from some."""

    def __init__(self):
        self.life = 0
        self.sizes: dict[_Key, int] = {}
        self.holders: dict[_Key, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))  # processes, by rank
        self.done: dict[_Key, set[int]] = defaultdict(set)  # ranks
        self.starts: dict[_Key, dict[int, int]] = defaultdict(dict)  # processes by rank; commit 0
        self.knows: set[int] = set()  # processes that know of a version that is whole

    def add_refresh(self, record: dict) -> None:
        key, rank, pid = self._key(record), record["rank"], record["pid"]
        if record["what"] == "refresh":
            earlier = {each for each in self.sizes if each[:2] == key[:2] and each < key}
            self.knows |= {pid} if any(pid in self.holders[each][rank] for each in earlier) else set()
            self.sizes[key] = record["size"]
            self.holders[key][rank].add(pid)
            return
        for owner in record["owners"]:
            self.holders[key][owner].add(pid)
        if record["what"] == "refreshed":
            self.done[key].add(rank)

    def add_start(self, record: dict) -> list[str]:
        """Add a rank that goes on from a version; return what is wrong with that."""
        commit, generation = record["key"]
        before = self.starts[_Key(self.life, generation, 0)].get(record["rank"], record["pid"])
        later = any(each.generation > generation for each in self.starts if self.is_now(each))
        if generation == 1 and (later or before != record["pid"]):
            self.life += 1
        group = self.starts[_Key(self.life, generation, 0)]
        group[record["rank"]] = record["pid"]
        whole = self.newest_whole(generation)
        wrong, older = [], whole is not None and commit < whole.commit
        if older and len(group) == record["size"] and not self.find_gone(whole, set(group.values())):
            wrong.append(f"the ranks have all shards of {whole}, and go on from commit {commit}")
        if commit == 0 and record["pid"] in self.knows:
            wrong.append(f"process {record['pid']} knew of a whole version, and the training begins again")
        self.knows |= {record["pid"]} if commit else set()
        return wrong

    def newest_whole(self, generation: int | None = None) -> _Key | None:
        """Return the newest version, of generations before, of which all ranks have all copies, or had: a
        rank has begun with the next one.
        """
        keys = [each for each in self.sizes if self.is_now(each)]
        keys = [each for each in keys if generation is None or each.generation < generation]
        whole = [
            key for key in keys
            if len(self.done[key]) == self.sizes[key] or any(key[:2] == each[:2] and key < each for each in keys)
        ]  # fmt: skip
        return max(whole, default=None)

    def find_gone(self, key: _Key, processes: set[int]) -> list[int]:
        """Return the ranks whose shards of a version none of these processes has."""
        return [rank for rank in range(self.sizes[key]) if not self.holders[key][rank] & processes]

    def is_now(self, key: _Key) -> bool:
        """Whether a version is of processes since all had died last."""
        return key.life == self.life

    def _key(self, record: dict) -> _Key:
        commit, generation = record["key"]
        return _Key(self.life, generation, commit)


def find_wrong_records(records: list[dict]) -> list[str]:
    """Return what is wrong: ranks that went on from an older version than they had to, and errors that
    aren't true.
    """
    wrong, versions = [], _Versions()
    begun: set[int] = set()
    saved: set[int] = set()
    checked = False  # the errors since ranks went on last
    for number, record in enumerate(records):
        what = record["what"]
        if what in ("refresh", "refreshed", "failed"):
            versions.add_refresh(record)
        elif what == "start":
            checked = False
            wrong += versions.add_start(record)
        elif what == "saves":
            begun.add(record["step"])
            saved.discard(record["step"])  # it is replaced
        elif what == "saved":
            saved.add(record["step"])
        elif _is_of_missing(record) and not checked:
            checked = True
            errors = _errors_from(records, number)
            text = next((each["text"] for each in errors if "whole checkpoint is" in each["text"]), errors[0]["text"])
            wrong += check_missing(versions, errors) + check_checkpoint(text, begun, saved)
    return wrong


def _errors_from(records: list[dict], number: int) -> list[dict]:
    """Return the errors of missing shards from a place on until ranks go on again."""
    found = []
    for record in records[number:]:
        if record["what"] == "start":
            break
        found += [record] if record["what"] == "error" and _is_of_missing(record) else []
    return found


def _is_of_missing(record: dict) -> bool:
    return record["kind"] == "MissingShards" or "MissingShards:" in record["text"]


def check_missing(versions: _Versions, errors: list[dict]) -> list[str]:
    """Return what is wrong about the errors of ranks that don't have all shards."""
    text = next(each["text"] for each in errors if "of commit" in each["text"])
    wrong = [f"{each['kind']} in place of MissingShards: {each['text']}" for each in errors
             if each["kind"] != "MissingShards" and each["pid"] in versions.knows]  # fmt: skip
    living, whole = {each["pid"] for each in errors}, versions.newest_whole()
    if whole is None:
        return [*wrong, f"no version was whole yet: {text}"]
    if not versions.find_gone(whole, living):
        wrong.append(f"the ranks have all shards of {whole}: {text}")
    commit = int(re.search(r"of commit (\d+) the shards", text)[1])
    named = max((key for key in versions.sizes if versions.is_now(key) and key.commit == commit), default=None)
    peers = {tuple(each["peers"]) for each in errors if each["kind"] == "MissingShards"}
    if len(peers) != 1 or not all(peers):
        wrong.append(f"the ranks name {sorted(peers)}: {text}")
    elif named is not None and not set(*peers) <= set(versions.find_gone(named, living)):
        wrong.append(f"of {named} the shards of {versions.find_gone(named, living)} are gone: {text}")
    return wrong


def check_checkpoint(text: str, begun: set[int], saved: set[int]) -> list[str]:
    """Return what is wrong about the checkpoint that an error names."""
    found = re.search(r"the newest whole checkpoint is \S*step_(\d+)", text)
    if found is None:
        right = not saved and ("no checkpoint is whole" in text or not begun and "there is no Checkpointer" in text)
        return [] if right else [f"checkpoints of {sorted(saved)} are whole: {text}"]
    right = int(found[1]) in begun and int(found[1]) >= max(saved, default=0)
    return [] if right else [f"checkpoints of {sorted(saved)} are whole, of {sorted(begun)} begun: {text}"]
