"""Fuzzing of files: of the flight recorder, checkpoints, traces."""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import collectives
from benchmarks.faults.fuzz import Target
from benchmarks.faults.fuzz_records import mutate_keyed
from benchmarks.faults.mutations import mutate, mutate_bytes, mutate_json
from collectives._nccl import FLIGHT_LAYOUT
from collectives.flight import analysis, picture, reading, report
from collectives.sharded.state import checkpoint_reader, checkpointer, manifest
from collectives.tracing import load as trace_load
from collectives.tracing import summary
from collectives.tracing.trace import chrome_trace_lines
from tests.variables import variables

__all__ = ["TARGETS"]


@contextmanager
def temporary_folder():
    """A folder in memory, where there is room."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


# ---- Flight recorder.


@contextmanager
def open_flight():
    with temporary_folder() as folder, variables(COLLECTIVES_FLIGHT_DIR=folder / "own", COLLECTIVES_FLIGHT_LINES=1):
        comm = collectives.init()
        x = torch.ones(16)
        for _ in range(5):
            comm.all_reduce(x)
            comm.broadcast(x, 0)
        (path,) = (folder / "own").glob("*.flight")
        own = path.read_bytes()
        failed = _with_part(own, "outcome", json.dumps({
            "state": "failed", "at": 5, "error": {"kind": "RemoteError", "text": "gone", "op": "barrier", "peers": [1]},
        }).encode())  # fmt: skip
        comm.close()
        place = folder / "read"
        place.mkdir()
        meta = json.loads(own[FLIGHT_LAYOUT["meta_offset"] + 4 :].partition(b"\0")[0])
        other = json.dumps({**meta, "rank": 1, "size": 2}).encode()
        (place / "other.flight").write_bytes(_with_part(own, "meta", other))

        def read(data: bytes) -> str | None:
            (place / "own.flight").write_bytes(data)
            rings, problems = reading.read_folder(place)
            if len(rings) + len(problems) != 2:
                return "a file is missing from what was read"
            findings = analysis.analyse(rings)
            report.format_findings(findings, rings).encode()
            json.dumps(report.describe_rings(rings)).encode()
            picture.draw(rings).encode()
            if problems:
                raise collectives.errors.InvalidArgument("\n".join(problems))
            return None

        yield [own, failed], read


def _with_part(data: bytes, part: str, text: bytes) -> bytes:
    at, room = FLIGHT_LAYOUT[f"{part}_offset"], FLIGHT_LAYOUT[f"{part}_bytes"]
    return data[:at] + (struct.pack("<I", len(text)) + text)[:room].ljust(room, b"\0") + data[at + room :]


def mutate_flight(draw: random.Random, corpus: Sequence[bytes]) -> bytes:
    """Mutate a part of a file that is used, in its place; now and then any part of it."""
    data = draw.choice(corpus)
    for _ in range(draw.choice([1, 1, 2])):
        how = draw.random()
        if how < 0.45:
            part = draw.choice(["meta", "outcome"])
            at = FLIGHT_LAYOUT[f"{part}_offset"]
            (length,) = struct.unpack_from("<I", data, at)
            text = data[at + 4 : at + 4 + length]
            changed = mutate_json(draw, text) if draw.random() < 0.8 else None
            data = _with_part(data, part, changed if changed is not None else mutate_bytes(draw, text))
        elif how < 0.9:
            first, last = 0, FLIGHT_LAYOUT["header_bytes"] + 12 * FLIGHT_LAYOUT["record_bytes"]
            first = draw.choice([0, FLIGHT_LAYOUT["header_bytes"]])
            last = draw.choice([first + FLIGHT_LAYOUT["record_bytes"], last])
            part_of = mutate_bytes(draw, data[first:last])[: last - first]
            data = data[:first] + part_of + data[first + len(part_of) :]
        else:
            return mutate_bytes(draw, data)
    return data


# ---- Checkpoints.


def _make_model(value: float) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


@contextmanager
def open_manifest():
    with temporary_folder() as folder:
        path = folder / manifest.name_of(7)
        path.mkdir()
        files = {}
        for name in (checkpoint_reader.METADATA, "__0_0.distcp"):
            (path / name).write_bytes(name.encode() * 3)
            files[name] = checkpoint_reader.sha256_of(path / name), 3 * len(name)
        manifest.write_manifest(path, 7, files)
        own = (path / manifest.MANIFEST).read_bytes()

        def read(data: bytes) -> str | None:
            (path / manifest.MANIFEST).write_bytes(data)
            manifest.check_files(path, 7)
            return None

        yield [own], read


@contextmanager
def open_checkpoint():
    with temporary_folder() as folder:
        whole = checkpointer.Checkpointer(folder / "whole")
        model = _make_model(3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        whole.save(1, model, optimizer, extra={"epoch": 1}, block=True)
        for param in model.parameters():
            param.data.fill_(4.0)
        whole.save(2, model, optimizer, extra={"epoch": 2}, block=True)
        path = whole.latest()
        names = sorted(each.name for each in path.iterdir())
        saved = {name: (path / name).read_bytes() for name in names}
        target = _make_model(0.0)
        others = torch.optim.SGD(target.parameters(), lr=0.5, momentum=0.9)

        def read(data: bytes) -> str | None:
            number = data[0] if data else 0
            name = names[number % len(names)]
            (path / name).write_bytes(data[1:])
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if number >= 128:  # the newest whole one; else this one, which may be no checkpoint
                        found = whole.load_latest(target, others)
                        step, extra = found.step, found.extra
                        expected = 2 if data[1:] == saved[name] or name not in (manifest.MANIFEST, *manifested) else 1
                        if step != expected and name != manifest.MANIFEST:
                            return f"step {step} is loaded"
                    else:
                        extra, step = collectives.sharded.state.checkpoint.load(path, target, others), 2
            finally:
                (path / name).write_bytes(saved[name])
            right = {1: 3.0, 2: 4.0}[step]
            if extra != {"epoch": step} or any((param != right).any() for param in target.parameters()):
                return f"what is loaded is not what was saved: {extra}"
            return None

        manifested = json.loads(saved[manifest.MANIFEST])["files"]
        late = (128 // len(names) + 1) * len(names)
        kinds = [bytes([number + base]) for base in (0, late) for number in range(len(names))]
        yield [kind + saved[names[kind[0] % len(names)]] for kind in kinds], read


# ---- Traces of a timeline.


@contextmanager
def open_trace():
    with temporary_folder() as folder:
        path = folder / "trace.json"
        about = {"program": "train.py", "collectives": "1", "torch": "2", "python": "3", "engine": "host"}
        records = [
            {
                "rank": rank, "size": 2, "host": "a", "node": "a", "offset": 10**18, "began": 10, "ended": 90_000,
                "dropped": 0, "marks": [40_000, 80_000], "about": about, "events": [
                    ("lane 1", f"all_reduce {64 << n} B", 100 * n + rank, 100 * n + 50, {"bytes": 64 << n, "bucket": n})
                    for n in range(8)
                ] + [("hook", "hook", 900, 990, {}), ("wait", "wait", 2000, 2100, {})],
            }
            for rank in range(2)
        ]  # fmt: skip
        own = "".join(chrome_trace_lines(records)).encode()

        def read(data: bytes) -> str | None:
            path.write_bytes(data)
            records = trace_load.load_traces([path])
            summary.format_report(records).encode()
            return None

        yield [own], read


TARGETS = [
    Target(
        "flight", open_flight,
        [
            reading.read_file, reading._text, reading._number, reading._read_json, reading._parse_outcome,
            reading._read_lines, reading._read_operations, report.describe_rings, report.format_findings,
        ],
        mutate=mutate_flight,
    ),
    Target("manifest", open_manifest, [manifest._read_manifest, manifest.check_files]),
    Target(
        "checkpoint", open_checkpoint,
        [
            checkpoint_reader.CheckpointReader, manifest._read_manifest, manifest.check_files,
            checkpointer.Checkpointer.load_latest,
        ],
        mutate=mutate_keyed,
    ),
    Target(
        "trace", open_trace,
        [trace_load.load_traces, trace_load._read_records, trace_load._check_record, summary.align_clocks],
        mutate=mutate,
    ),
]  # fmt: skip
