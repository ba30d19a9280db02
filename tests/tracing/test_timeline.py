"""Timelines: the trace's form and times, the table against numbers made by hand, ends on all ranks or on one."""

import json
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import collectives
from collectives import recorder as recorder_module
from collectives import timeline as start
from collectives.errors import InvalidArgument, InvalidUsage
from collectives.recorder import Recorder, recording
from collectives.tracing import session
from collectives.tracing.summary import format_report
from collectives.tracing.trace import chrome_trace_lines
from tests.ddp.training import over_gloo
from tests.ranks import run_ranks
from tests.tracing.records import MS, record

ROOT = Path(__file__).resolve().parent.parent.parent
NS = 1e-3  # us, the unit of a trace's times, which as doubles are no longer exact hours after the first event


def cells(text):
    """The table by column and rank."""
    head, *rows = [re for re in text.splitlines() if "  " in re]
    names = ["rank", "steps", "step ms", "communication ms", "exposed ms", "exposed", "last to come", "waits ms"]
    assert head.split() == " ".join(names).split()
    found = [dict(zip(names, row.replace(" of ", "/").split(), strict=True)) for row in rows]
    return {int(row["rank"]): row for row in found}


def spans(trace):
    """Events by (pid, name of the row), checked for what a viewer needs: each row has a name, and its events nest."""
    rows, found = {}, defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in rows
            rows[event["pid"], event["tid"]] = event["args"]["name"]
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            found[event["pid"], rows[event["pid"], event["tid"]]].append(event)
    for events in found.values():
        open_ends = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + NS:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + NS
            open_ends.append(end)
    return found


# Two ranks, three steps that end at 10, 30 and 50 ms: 20 ms a step. Rank 1 comes 2 ms later to 3 of the 4 collectives.
SLOW = [
    ("lane 0", "all_reduce 100 B", 15, 19), ("lane 1", "all_reduce 50 B", 17, 21),  # 6 ms in either
    ("lane 0", "quantize 100 B", 12, 15),
    ("hook", "bucket 0", 14, 16), ("wait", "backward", 15, 18),  # 4 ms in either
    ("lane 0", "all_reduce 100 B", 40, 44), ("lane 0", "all_reduce 100 B", 48, 56),  # 2 of 8 ms before the last end
    ("hook", "bucket 1", 40, 42),
]  # fmt: skip
QUICK = [
    ("lane 0", "all_reduce 100 B", 13, 19), ("lane 1", "all_reduce 50 B", 15, 21),
    ("lane 0", "all_reduce 100 B", 38, 44), ("lane 0", "all_reduce 100 B", 49, 56),
    ("lane 0", "broadcast 8 B", 49.5, 49.75),
    ("hook", "bucket 0", 13, 23),
]  # fmt: skip


def test_the_table_by_hand():
    text = format_report([record(0, QUICK, (10, 30, 50)), record(1, SLOW, (10, 30, 50), dropped=7)])
    found = cells(text)
    assert list(found) == [1, 0]  # the slowest first
    assert found[1] == {
        "rank": "1", "steps": "3", "step ms": "20.000", "communication ms": "6.000", "exposed ms": "3.000",
        "exposed": "15.0%", "last to come": "3/4", "waits ms": "0.250",
    }  # fmt: skip
    assert found[0] == {
        "rank": "0", "steps": "3", "step ms": "20.000", "communication ms": "7.500", "exposed ms": "5.000",
        "exposed": "25.0%", "last to come": "1/4", "waits ms": "1.500",
    }  # fmt: skip
    assert "1 collectives weren't recorded by all ranks" in text
    assert "Rank 1 dropped 7 events after its first 8." in text
    one = cells(format_report([record(4, SLOW, (10,))]))[4]  # from the beginning to the one end; nobody to wait for
    assert one["step ms"] == "10.000" and one["exposed ms"] == "0.000" and one["waits ms"] == "-"
    none = cells(format_report([record(0, SLOW)]))[0]  # the whole recording
    assert none["steps"] == "0" and none["step ms"] == "100.000" and none["exposed ms"] == "6.000"


def test_several_nodes_are_aligned():
    """Rank 1's node counts from 5 s later, as its wall clock shows; rank 2 is on it, too, and keeps its place."""
    late = 5000  # ms
    everyone = [
        record(0, [("lane 0", "all_reduce 1 B", 10, 12)], offset=7),
        record(1, [("lane 0", "all_reduce 1 B", 5011, 5013)], node="n", offset=7 - late * MS, began=late),
        record(2, [("lane 0", "all_reduce 1 B", 5014, 5016)], node="n", offset=8 - late * MS, began=late),
    ]
    text = format_report(everyone)
    assert [cells(text)[rank]["waits ms"] for rank in range(3)] == ["4.000", "3.000", "0.000"]
    assert "as right as their wall clocks" in text
    trace = json.loads("".join(chrome_trace_lines(everyone)))
    assert "wall clocks" in trace["otherData"]["clock"]
    found = spans(trace)
    assert [found[rank, "lane 0"][0]["ts"] for rank in range(3)] == [10_000, 11_000, 14_000]


def test_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    with start(path) as line:
        recorder = recording.active
        zero = line._began
        recorder.add("lane 10", "all_reduce 4 B", zero + 3000, zero + 5000, bucket=2, norm=math.inf, shape=(2, 3))
        recorder.add("lane 2", "all_gather 4 B", zero + 1000, zero + 4000)
        recorder.add("lane 2", "quantize 4 B", zero + 2000, zero + 3000)  # inside the one before
        recorder.add("lane 2", "all_gather 8 B", zero + 3500, zero + 6000)  # overlaps it
        recorder.add("hook", "bucket 2", zero, zero)
        recorder.step()
        assert "This rank alone" in line.report() and "1 steps, 5 events" in repr(line)
    assert recording.active is None
    trace = json.loads(path.read_text())
    found = spans(trace)
    assert [row for _, row in found] == ["steps", "hook", "lane 2", "lane 2 (2)", "lane 10"]
    assert [(e["name"], e["ts"], e["dur"]) for e in found[0, "lane 2"]] == [
        ("all_gather 4 B", 1, 3),
        ("quantize 4 B", 2, 1),
    ]
    assert found[0, "lane 10"][0]["args"] == {"bucket": 2, "norm": "inf", "shape": [2, 3]}
    assert found[0, "steps"][0]["name"] == "step 1"
    assert line.stop() == line.report() and "rank" in line.report()
    assert sorted(os.listdir(tmp_path)) == ["trace.json"]


def test_steps_end_it_and_events_have_a_limit(tmp_path):
    path = tmp_path / "trace.json"
    with mock.patch.object(session, "Recorder", lambda **kw: Recorder(3, **kw)):
        line = collectives.timeline(str(path), steps=2)
    recorder = recording.active
    now = time.perf_counter_ns()
    for number in range(5):
        recorder.add("lane 0", f"all_reduce {number} B", now + number, now + number + 1)
    recorder.step()
    assert recording.active is recorder and not path.exists()
    recorder.step()
    assert recording.active is None and "dropped 2 events after its first 3" in line.report()
    trace = json.loads(path.read_text())
    assert trace["otherData"]["dropped events"] == {"0": 2}
    assert len(spans(trace)[0, "lane 0"]) == 3


def test_what_is_refused(tmp_path):
    for steps in (0, True, 1.5):
        with pytest.raises(InvalidArgument, match="steps"):
            start(steps=steps)
    for path in (tmp_path, tmp_path / "none" / "trace.json", 5):
        with pytest.raises(InvalidArgument, match="path|folder"):
            start(path)
    assert recording.active is None
    folder = tmp_path / "removed"
    folder.mkdir()
    line = start(folder / "trace.json")
    with pytest.raises(InvalidUsage, match="another timeline"):
        start()
    with pytest.raises(InvalidArgument, match="before its start"):
        recording.active.add("hook", "bucket 0", 5, 4)
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        line.stop()
    assert recording.active is None and "steps" in line.stop()
    assert "steps" in start().stop()  # no file


class FakeEvent:
    """A CUDA event on a device whose clock runs 1 in 1,000 fast; the times between two are a float32."""

    device = torch.device("cuda", 0)

    def __init__(self, host_ms):
        self.ms = host_ms * 1.001 + 12345

    def synchronize(self):
        self.seen = True

    def elapsed_time(self, other):
        import numpy as np

        return float(np.float32(other.ms - self.ms))


def test_cuda_events_are_put_on_the_hosts_clock():
    """An hour of events of 10 us, one a second: a float32 of the whole hour couldn't resolve these."""
    anchors = iter([(FakeEvent(0), 0), (FakeEvent(3_600_001), 3_600_001 * MS), (FakeEvent(3_600_002), 3_600_002 * MS)])
    recorder = Recorder()
    with mock.patch.object(recorder_module, "_anchor", lambda device: next(anchors)):
        for second in range(3600):
            at = 1000 * second - 0.5  # the first one was under way before the anchor
            recorder.add_cuda("lane 0", "all_reduce 1 B", FakeEvent(at), FakeEvent(at + 0.01), bucket=second)
        recorder.resolve()
        assert len(recorder.events) == 3600
        for row, _, begin, end, args in recorder.events:
            assert row == "lane 0" and abs(begin - (1000 * args["bucket"] - 0.5) * MS) < 2000
            assert abs(end - begin - 10_000) < 100
        recorder.add_cuda("lane 0", "all_reduce 1 B", FakeEvent(3_600_001.5), FakeEvent(3_600_001.75))
        recorder.resolve()  # from the newer anchor
        assert abs(recorder.events[-1][2] - 3_600_001.5 * MS) < 2000


@over_gloo
def two_ranks(ctx, folder):
    place = f"{folder}/trace.json"
    with start(place) as line:
        for step in range(3):
            ctx.barrier()
            begin = line._began + step * 50_000
            recording.active.add("hook", f"bucket {ctx.rank}", begin, begin + 1000, parameters=["a.weight"])
            recording.active.add("lane 0", "all_reduce 4 B", begin + 500 * ctx.rank, begin + 4000)
            recording.active.step()
    texts = ctx.exchange(line.report())
    assert texts[0] == texts[1] and set(cells(texts[0])) == {0, 1} and "of 3" in texts[0]
    with open(place) as file:
        trace = json.load(file)
    assert set(spans(trace)) == {(rank, row) for rank in range(2) for row in ("steps", "hook", "lane 0")}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == ["rank 0", "rank 1"]

    # A file that can't be written is an error on every rank.
    removed = f"{folder}/removed"
    os.makedirs(removed, exist_ok=True)
    line = start(f"{removed}/trace.json")
    ctx.barrier()
    if ctx.rank == 0:
        os.rmdir(removed)
    with pytest.raises(FileNotFoundError):
        line.stop()

    # After an error no rank waits for the others; nor when the group is destroyed.
    if ctx.rank == 1:
        with pytest.raises(ZeroDivisionError), start(f"{folder}/failed.json") as line:
            raise ZeroDivisionError
        with open(f"{folder}/failed.rank1.json") as file:
            json.load(file)
    line = start(f"{folder}/later.json")
    dist.barrier()
    return line


def and_then_alone(ctx, store, folder):
    two_ranks(ctx, store, folder).stop()
    return sorted(os.listdir(folder)) if ctx.exchange(None) and ctx.rank == 0 else None


def test_ranks_end_it_together(tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    names, _ = run_ranks(and_then_alone, 2, str(tmp_path / "store"), str(folder))
    assert names == ["failed.rank1.json", "later.rank0.json", "later.rank1.json", "trace.json"]
    (process,) = {e["pid"] for e in json.loads((folder / "later.rank1.json").read_text())["traceEvents"]}
    assert process == 1


# A process of its own, with stand-ins for the package and torch: importing those would take longer than all the rest.
ALONE = """
import os, sys, types
for name in ("collectives", "torch", "torch.distributed"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["collectives"].__path__ = ["collectives"]
sys.modules["torch"].distributed = sys.modules["torch.distributed"]
sys.modules["torch.distributed"].is_available = lambda: False
from collectives.tracing import recording
recording.active.step()
if os.fork():
    os.wait()
"""


def test_the_environment_and_the_end_of_the_interpreter(tmp_path):
    """Written at exit, for a rank that recorded something; a forked child's end writes nothing."""
    env = {"COLLECTIVES_TIMELINE": str(tmp_path / "t.json"), "RANK": "1", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=ROOT, env=os.environ | env, check=True, timeout=60, capture_output=True,
        text=True,
    )  # fmt: skip
    trace = tmp_path / "t.rank1.json"
    assert done.stderr == f"collectives.timeline: {trace}\n"
    assert sorted(os.listdir(tmp_path)) == ["t.rank1.json"]
    trace = json.loads((tmp_path / "t.rank1.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {1}
    # A launcher has the variable, too, but nothing to write.
    session._start(tmp_path / "none.json", None, skip_empty=True)
    session._at_exit()
    assert recording.active is None and len(os.listdir(tmp_path)) == 1
