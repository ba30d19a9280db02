"""Fuzzing (benchmarks/faults/fuzz.py): some inputs of each target, and all that have once gone wrong."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.faults import fuzz, fuzz_host
from benchmarks.faults.fuzz_targets import TARGETS

DEEP = b"[" * 100_000
# What these have found, by what reads it. Most were another exception than one of ours; "sealed" had none.
ONCE_WRONG = {
    "heads": [bytes(8) + b"[" + bytes(55), bytes([5]) + bytes(7) + bytes([1]) + bytes(22) + b"\1\0\0\0\0" + bytes(27)],
    "processes": [b"%node||5", b"%node|\xc2\xb2|1", b"%node|99999999999|1"],
    "errors": [DEEP, b'{"kind": "RemoteError", "text": "", "peers": [], "op": 3}',
               b'{"kind": "RemoteError", "text": "", "peers": [Infinity], "op": null}'],
    "status": [b"f" + DEEP, b'f{"text": "", "rank": 1, "peers": 5}', b"p[[], 3]"],
    "addresses": [b"5", b"[1, 2]", DEEP], "listeners": [b"5", b'["a", 1, 5]', DEEP],
    "verdicts": [b"b5", b'b["", "", 5]', b"a[]", b"a" + DEEP],
    "rendezvous": [b"cx", b"c" + b"9" * 40, b'e{"kind": "RemoteError", "text": "", "peers": [Infinity]}'],
    "rounds": [b"4[0, 2]", b"4[4, 2]", b"4[0, 0, 2]", b"4" + DEEP, b"5x", b"6" + b"9" * 40, b"5" + b"9" * 9,
               b'1{"process": "\\ud800"}'],
    "requests": [
        b"l" + bytes(4) + (3 << 28).to_bytes(4, "little") + bytes(1016), b"l" + bytes(8) + b"\xff" * 8 + bytes(1008),
        b"l" + bytes(8) + b"\1\0\0\0\x40\0\0\0" + bytes(1008),
        b"p" + bytes(1024) + b'[[["a", "", ["bool"], [], "cpu", "", 1, 1, 0, ""]], null]',
        b"p" + bytes(1024) + b'[[["a", "", ["bool"], [[-1]], "cpu", "", 1, 1, Infinity, ""]], null]',
    ],
    "board": [b"l" + b"\x6e" * 256, b"f" + b"\xff" * 256],
    "manifest": [
        b'{"step": 7, "files": {".metadata": ["", Infinity]}}', DEEP,
        b'{"step": 7, "files": {".metadata": ["", 1], "%s": ["", 1]}}' % (b"x" * 300),
    ],
    "trace": [DEEP, b'{"traceEvents": [], "otherData": {"ranks": [{"rank": []}]}}'],
}  # fmt: skip


def run(name: str, seed: int, inputs: int) -> None:
    row = fuzz.run_inputs(TARGETS[name], seed, inputs)
    assert row["wrong"] == []


@pytest.mark.parametrize("name", TARGETS)
def test_some_inputs(name):
    run(name, 7, 40 if name in ("flight", "checkpoint") else 150)


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_has_once_gone_wrong(name):
    from collectives.comm.liveness import this_process

    node = this_process().rpartition("|")[0].rpartition("|")[0].encode()
    outcome = fuzz.Outcome()
    with TARGETS[name].open() as (_, reader):
        for data in ONCE_WRONG[name]:
            fuzz.check_input(TARGETS[name], reader, data.replace(b"%node", node), outcome)
    assert outcome.wrong == {}


def test_a_flight_file_says_nothing_to_a_terminal():
    """Names in a file may hold what a terminal takes for commands, or no encoding takes."""
    from benchmarks.faults.fuzz_files import _with_part
    from collectives._nccl import FLIGHT_LAYOUT

    target = TARGETS["flight"]
    outcome = fuzz.Outcome()
    with target.open() as (corpus, reader):
        meta = json.loads(corpus[0][FLIGHT_LAYOUT["meta_offset"] + 4 :].partition(b"\0")[0])
        data = _with_part(corpus[0], "meta", json.dumps({**meta, "host": "\x1b[2J\ud800"}).encode())
        fuzz.check_input(target, reader, data, outcome, valid=True)
    assert outcome.wrong == {}


def test_a_defect_is_noticed():
    """The reader of this target raises what is no error of ours, reads a wrong value, or refuses a valid input."""
    def read(data):
        return {b"v": "a wrong value", b"r": None}.get(data) if data != b"e" else [][1]

    outcome = fuzz.Outcome()
    for data in (b"e", b"v", b"r"):
        fuzz.check_input(TARGETS["heads"], read, data, outcome)
    assert sorted(row[1].partition(":")[0] for row in outcome.wrong.values()) == ["IndexError", "a wrong value"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs(name):
    row = fuzz.run_trial(20_000, name, 10_000 if name in ("flight", "checkpoint") else 100_000)
    assert row["wrong"] == []


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", fuzz_host.TARGETS)
def test_the_host_engine(name):
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    row = fuzz_host.run_trial(20_000, name, 100_000 if name in ("message", "admit") else 10_000)
    assert row["wrong"] == []
