"""Fuzzing of what is read from others (tests/faults/fuzz.py): some inputs of each target, and what once went wrong."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack

import pytest

from collectives._nccl import FLIGHT_LAYOUT
from collectives.comm.liveness import this_process
from collectives.errors import TransportError
from tests.faults import fuzz, fuzz_host
from tests.faults.fuzz_targets import TARGETS, with_part

DEEP = b"[" * 100_000
# What these have found, by what reads it. Most were another exception than one of ours.
ONCE_WRONG = {
    "heads": [bytes(8) + b"[" + bytes(55), bytes([5]) + bytes(7) + bytes([1]) + bytes(22) + b"\1\0\0\0\0" + bytes(27)],
    "records": [
        b"o%node||5", b"o%node|\xc2\xb2|1", b"o%node|99999999999|1",
        b"f" + DEEP, b'f{"text": "", "rank": 1, "peers": 5}', b"p[[], 3]",
        b"a5", b"a[1, 2]", b"a" + DEEP, b"l5", b'l["a", 1, 5]', b"l" + DEEP,
    ],
    "rendezvous": [b"cx", b"c" + b"9" * 40, b'e{"kind": "RemoteError", "text": "", "peers": [Infinity]}'],
    "rounds": [b"\4[0, 2]", b"\4[4, 2]", b"\4[0, 0, 2]", b"\4" + DEEP, b"\5x", b"\6" + b"9" * 40, b"\5" + b"9" * 9,
               b'\1{"process": "\\ud800"}'],
    "requests": [
        b"l" + bytes(4) + (3 << 28).to_bytes(4, "little") + bytes(1016), b"l" + bytes(8) + b"\xff" * 8 + bytes(1008),
        b"l" + bytes(8) + b"\1\0\0\0\x40\0\0\0" + bytes(1008),
        b"p" + bytes(1024) + b'[[["a", "", ["bool"], [], "cpu", "", 1, 1, 0, ""]], null]',
        b"p" + bytes(1024) + b'[[["a", "", ["bool"], [[-1]], "cpu", "", 1, 1, Infinity, ""]], null]',
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_some_inputs(name):
    assert fuzz.run_inputs(TARGETS[name], 7, 40 if name in ("flight", "checkpoint") else 150)["wrong"] == []


@pytest.mark.parametrize("name", ONCE_WRONG)
def test_what_has_once_gone_wrong(name):
    node = this_process().rpartition("|")[0].rpartition("|")[0].encode()
    with ExitStack() as stack:
        _, reader = TARGETS[name].open(stack)
        for data in ONCE_WRONG[name]:
            assert fuzz.check_input(TARGETS[name], reader, data.replace(b"%node", node))[1] is None, data


def test_a_flight_file_says_nothing_to_a_terminal():
    """Names in a file may hold what a terminal takes for commands, or no encoding takes."""
    with ExitStack() as stack:
        corpus, reader = TARGETS["flight"].open(stack)
        meta = json.loads(corpus[0][FLIGHT_LAYOUT["meta_offset"] + 4 :].partition(b"\0")[0])
        data = with_part(corpus[0], "meta", json.dumps({**meta, "host": "\x1b[2J\ud800"}).encode())
        assert fuzz.check_input(TARGETS["flight"], reader, data, valid=True) == (True, None)


def test_a_defect_is_noticed():
    """The reader raises what is no error of ours, reads a wrong value, or refuses a valid input."""
    def read(data):
        if data == b"refused":
            raise TransportError("not this one")
        return {b"wrong": "a wrong value", b"read": None}[data]

    found = {
        data: fuzz.check_input(TARGETS["heads"], read, data, valid=True)[1]
        for data in (b"read", b"wrong", b"refused", b"unknown")
    }
    assert found.pop(b"read") is None and found.pop(b"wrong") == "a wrong value"
    assert [text.partition(" ")[0] for text in found.values()] == ["a", "KeyError"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs(name):
    assert fuzz.run_trial(20_000, name, 10_000 if name in ("flight", "checkpoint") else 100_000)["wrong"] == []


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", fuzz_host.TARGETS)
def test_the_host_engine(name):
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    assert fuzz_host.run_trial(20_000, name, 100_000 if name in ("message", "admit") else 10_000)["wrong"] == []
