"""The page of a timeline as a file: what is in it, from which traces it is made, and what is left when it can't be."""

import base64
import datetime
import hashlib
import html.parser
import itertools
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import collectives
from collectives.bench.cases import OPS
from collectives.recorder import recording
from collectives.tracing import __main__ as command
from collectives.tracing.page import page_path, page_text
from collectives.tracing.summary import BUS_FACTORS, payload_of
from collectives.tracing.trace import chrome_trace_lines
from tests.ranks import Died, run_ranks
from tests.tracing.records import MS, record, training

PACKAGE = Path(collectives.__file__).parent / "tracing"


class Page(html.parser.HTMLParser):
    """A page as its elements: ``tags`` as (name, attributes), ``tables`` by id as rows of texts, ``scripts``."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tables, self.scripts, self.styles = [], {}, [], []
        self.text, self._table, self._inside, self._in_cell = "", None, None, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "table":
            self._table = self.tables[dict(attributes)["id"]] = []
        elif tag == "tr":
            self._table.append([])
        elif tag in ("td", "th"):
            self._table[-1].append("")
            self._in_cell = True
        elif tag in ("script", "style"):
            self._inside = {"script": self.scripts, "style": self.styles}[tag]
            self._inside.append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False
        self._inside = None if tag in ("script", "style") else self._inside

    def handle_data(self, data):
        if self._inside is not None:
            self._inside[-1] += data
        elif self._in_cell:
            self._table[-1][-1] += data
        else:
            self.text += data


def data_of(page):
    return json.loads(page.scripts[0])


def test_the_file_needs_nothing_else():
    page = Page(page_text(training()))
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["data:,"]
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import\(|@import|url\()", page.scripts[1] + page.styles[0])
    (policy,) = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    for kind, text in (("script", page.scripts[1]), ("style", page.styles[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert not [attributes for _, attributes in page.tags if "style" in attributes or "onclick" in attributes]


def test_the_tables_by_hand():
    """Three ranks, steps of 10 ms, 2 ms of each exposed; the last rank comes last."""
    page = Page(page_text(training()))
    head, *rows = page.tables["summary"]
    assert [row[0] for row in rows] == ["2 slowest", "1", "0"]
    first = dict(zip(head, rows[-1], strict=True))
    assert first["step"] == "10.000 ms" and first["exposed"] == "2.000 ms" and first["of the step"] == "20.0%"
    # From 2 to 8.5 ms rank 0 is always in a collective, blocked from 4, 6 and 8 ms on for 0.5 ms.
    assert first["communication"] == "6.500 ms" and first["overlapped"] == "76.9%"
    assert first["waits for others"] == "1.000 ms" and first["last to come"] == "0 of 12" and first["sent"] == "9 kB"
    # 3 MB in 2.5 ms, times 2 (n - 1) / n.
    assert first["busbw"] == "1.60 GB/s"
    head, *rows = page.tables["longest"]
    assert len(rows) == 12
    row = dict(zip(head, rows[0], strict=True))
    # Of bucket 1, from 4 to 6.5 ms on, the end of bucket 0 is blocked, too.
    assert row["exposed"] == "1.000 ms" and row["took"] == "2.500 ms" and row["size"] == "3 MB"
    assert row["dtype"] == "bfloat16" and row["waited"] == "1.000 ms for rank 2" and "weight" in row["parameters"]
    for text in ("train.py", "3 recorded, world size 3", "engine", "host"):
        assert text in page.text
    assert all(attributes.get("scope") for tag, attributes in page.tags if tag == "th")


def test_the_data_are_the_events():
    """The picture's columns, decoded here anew, are the records' events; a collective has one number on all ranks."""
    records = training()
    for number, each in enumerate(records):
        each["events"] = each["events"] + [("aside", "x", 5, 7, {"norm": float("inf"), "n": number})]
    data = data_of(Page(page_text(records)))
    numbers = {}
    for each, drawn in zip(records, data["ranks"], strict=True):
        found, exposed = [], list(itertools.accumulate(drawn["exposed"]))
        for lane in drawn["lanes"]:
            starts = itertools.accumulate(lane["start"])
            for start, length, name, details, group in zip(
                starts, *(lane[key] for key in ("length", "name", "details", "group")), strict=True
            ):
                found.append((data["names"][name][4], data["names"][name][0], start, start + length))
                if group >= 0:
                    numbers.setdefault(group, []).append((drawn["rank"], start))
                if data["names"][name][0] == "x":
                    assert data["details"][details] == {"norm": "inf", "n": drawn["rank"]}
        assert sorted(found) == sorted(event[:4] for event in each["events"])
        assert drawn["marks"] == each["marks"]
        assert (exposed[0], exposed[1]) == (4 * MS, round(4.5 * MS))
    assert len(numbers) == 12
    for members in numbers.values():
        (first, *_), times = zip(*members, strict=True)
        assert first == 0 and [when - times[0] for when in times] == [0, MS // 2, MS]


def test_names_cant_break_the_page():
    hostile = "</script><b id=x>&<!--@data@-->\u2028\ud800"
    records = [record(0, [("lane 0", "all_reduce 8 B", 1, 2, {"parameters": hostile}), (hostile, hostile, 1, 2),
                          ("hook", "b", 1, 2)], program=hostile)]  # fmt: skip
    records[0]["host"] = hostile
    text = page_text(records).encode(errors="backslashreplace").decode()
    page = Page(text)
    assert "b" not in {tag for tag, _ in page.tags} and len(page.scripts) == 2
    assert data_of(page)["ranks"][0]["host"] == hostile
    assert hostile[:20] in page.text and hostile[:20] in page.tables["longest"][1][-1]


def test_what_is_left_out_is_said():
    whole = page_text(training(steps=100))
    text = page_text(training(steps=100), limit=20_000)
    assert len(text) < len(whole) - 20_000
    data = data_of(Page(text))
    drawn = sum(len(lane["start"]) for rank in data["ranks"] for lane in rank["lanes"])
    (said,) = re.findall(r"The picture has the first (\d+) of 2100 events", text)
    # Events that start at the very time of the first one left out are left out, too.
    assert 0 < int(said) - drawn < 4 and drawn > 100 and "The picture has" not in whole
    assert Page(text).tables["summary"] == Page(whole).tables["summary"]


def test_large_recordings_stay_small():
    """8 ranks, 100 steps, 50 buckets, each with its hook."""
    assert len(page_text(training(ranks=8, steps=100, buckets=50))) < 8_000_000


def written(path, records):
    path.write_text("".join(chrome_trace_lines(records)))
    return str(path)


def test_the_command_makes_the_same_page(tmp_path, capsys):
    records = training()
    together = written(tmp_path / "trace.json", records)
    assert command.main([together]) == 0
    page = (tmp_path / "trace.html").read_text()
    assert page == page_text(records)
    said = capsys.readouterr().out
    assert "last to come" in said and said.endswith(f"page: {tmp_path / 'trace.html'}\n")
    # Each rank's own file, whose times count from its own first event, in any order.
    apart = [written(tmp_path / f"t.rank{each['rank']}.json", [each]) for each in reversed(records)]
    assert command.main([*apart, "-o", str(tmp_path / "all.html")]) == 0
    assert (tmp_path / "all.html").read_text() == page
    assert page_path(Path("a/run.1")) == Path("a/run.1.html") and page_path(Path("x.html")) == Path("x.html.html")


def test_partial_traces(tmp_path, capsys):
    """A rank that left nothing, and a file that ends in the middle of a line."""
    records = training()
    paths = [written(tmp_path / f"t.rank{rank}.json", [records[rank]]) for rank in (0, 2)]
    whole = Path(paths[1]).read_text()
    Path(paths[1]).write_text(whole[: len(whole) // 2])
    assert command.main([*paths, "-o", str(tmp_path / "all.html")]) == 0
    page = Page((tmp_path / "all.html").read_text())
    assert "Ranks recorded here: 2 of 3. Missing: 1." in page.text
    assert "t.rank2.json ends in the middle" in page.text and "ends in the middle" in capsys.readouterr().out
    assert "collectives weren't recorded by all ranks" in page.text
    ranks = data_of(page)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 2]
    assert 0 < sum(len(lane["start"]) for lane in ranks[1]["lanes"]) < len(records[2]["events"])
    # With nothing but a head, and with no events at all.
    assert "Missing: 0, 1." in Page(page_text([record(2, size=3)])).text


def test_what_the_command_refuses(tmp_path, capsys):
    one = written(tmp_path / "one.json", training()[:1])
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "bytes.json").write_bytes(b"\x1f\x8b\xff\x00")
    (tmp_path / "chrome.json").write_text('{"traceEvents": [{"ph": "i"}], "otherData": {"ranks": []}}')
    for name, wrong in (("step", ["3"]), ("step", "3"), ("step", True), ("step", 2**70), ("bytes", 1.5)):
        trace = json.loads(Path(one).read_text())
        next(event for event in trace["traceEvents"] if event["ph"] == "X" and event["args"])["args"][name] = wrong
        (tmp_path / "wrong.json").write_text(json.dumps(trace))
        assert command.main([str(tmp_path / "wrong.json")]) == 1
        assert "no trace of collectives.timeline" in capsys.readouterr().err, (name, wrong)
    (tmp_path / "list.json").write_text('{"traceEvents": [], "otherData": ["ranks"]}')
    cases = [
        (["none.json"], "No such file"), (["other.json"], "no trace of collectives.timeline"),
        *((name, "no trace of collectives.timeline") for name in (["text.json"], ["bytes.json"], ["chrome.json"],
                                                                  ["list.json"])),
        (["one.json", "one.json"], "both have rank 0"),
        (["one.json", "-o", "one.json"], "another name"), (["one.json", "-o", "none/page.html"], "No such file"),
    ]  # fmt: skip
    for words, message in cases:
        words = [str(tmp_path / word) if "." in word else word for word in words]
        assert command.main(words) == 1
        assert message in capsys.readouterr().err
    assert json.loads(Path(one).read_text())


def test_a_page_that_cant_be_written_is_a_warning(tmp_path):
    path = tmp_path / "trace.json"
    (tmp_path / "trace.html").mkdir()
    with pytest.warns(RuntimeWarning, match=r"can't be written.*the trace is in .*trace\.json"):
        collectives.timeline(path).stop()
    assert json.loads(path.read_text())["otherData"]["ranks"][0]["rank"] == 0
    assert sorted(os.listdir(tmp_path)) == ["trace.html", "trace.json"]
    with collectives.timeline(tmp_path / "alone.json", html=False):
        pass
    assert not (tmp_path / "alone.html").exists()
    with pytest.raises(collectives.errors.InvalidArgument, match="html"):
        collectives.timeline(path, html="page.html")


def loses_a_rank(ctx, folder):
    soon = datetime.timedelta(seconds=3)  # a survivor's process goes on, so that another one may wait for it
    dist.init_process_group("gloo", f"file://{folder}/store", rank=ctx.rank, world_size=ctx.size, timeout=soon)
    line = collectives.timeline(f"{folder}/trace.json")
    recording.active.add("lane 0", "all_reduce 4 B", line._began, line._began + 1000)
    dist.barrier()
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    with pytest.warns(RuntimeWarning, match="can't be brought together"), pytest.raises(RuntimeError):
        line.stop()
    dist.destroy_process_group()
    return line.stop()


def test_a_rank_that_died(tmp_path):
    """The others can't collect the records: each writes what it has, and the files make one page."""
    results = run_ranks(loses_a_rank, 3, str(tmp_path), deaths={1})
    assert isinstance(results[1], Died) and "last to come" in results[0]
    traces = sorted(tmp_path.glob("trace.rank*.json"))
    assert [path.name for path in traces] == ["trace.rank0.json", "trace.rank2.json"]
    assert command.main([*map(str, traces), "-o", str(tmp_path / "all.html")]) == 0
    assert "Missing: 1." in (tmp_path / "all.html").read_text()


def test_bus_factors_are_the_benchmarks():
    for name, operation in OPS.items():
        if name != "sendrecv":
            assert [BUS_FACTORS[name](n) for n in (2, 3, 8)] == [operation.busbw(n) for n in (2, 3, 8)]
    assert payload_of("reduce_scatter 64 B, step, all_gather", 4) == ("reduce_scatter", 64, 1.5)
    assert payload_of("quantize 64 B", 4) == ("quantize", None, None) and payload_of("barrier", 2)[1] is None


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    parts = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_colours_can_be_told_apart():
    """Contrast as WCAG 2 defines it: 4.5 for text, 3 for bars and lines on their ground; in both schemes."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", (PACKAGE / "page.css").read_text(), re.DOTALL)
    )
    bars = ["blocked", "all_reduce", "reduce_scatter", "all_gather", "collective", "other"]
    texts = [(text, ground) for text in ("text", "soft", "accent") for ground in ("page", "panel", "zebra")]
    texts += [("tag-text", "tag"), ("page", "text"), ("panel", "same"), *(("on-bar", bar) for bar in bars)]
    for scheme in (light, dark):
        pairs = [(pair, 4.5) for pair in texts] + [((bar, "panel"), 3) for bar in (*bars, "same", "late")]
        for (over, under), least in pairs:
            low, high = sorted(luminance(scheme[name]) for name in (over, under))
            assert (high + 0.05) / (low + 0.05) >= least, (over, under, scheme[over], scheme[under])
