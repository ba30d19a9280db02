"""The command that reads traces: its table, the picture's bars, one trace of several, missing ranks, refusals."""

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import collectives
from collectives.errors import InvalidArgument, InvalidUsage
from collectives.recorder import recording
from collectives.tracing import __main__ as command
from collectives.tracing.picture import draw_picture
from collectives.tracing.trace import chrome_trace_lines
from tests.ranks import Died, run_ranks
from tests.tracing.records import record, training

pytest.importorskip("matplotlib")


def bars_of(figure):
    """The bars of each row by its name, as (start, end) in ms, in order."""
    found = {}
    for collection in figure.axes[0].collections:
        if collection.get_gid():
            boxes = [path.get_extents() for path in collection.get_paths()]
            found[collection.get_gid()] = [(round(box.x0, 6), round(box.x1, 6)) for box in boxes]
    return found


def test_the_bars_of_a_picture():
    """Two steps of 10 ms, from 19.75 ms on: three buckets a step, blocked for 0.5 ms each and at the end."""
    figure = draw_picture(training(), steps=2)
    bars = bars_of(figure)
    for rank in range(3):
        # Bucket b of a step comes at 2 + 2 b + rank / 2 ms and ends at 4.5 + 2 b ms.
        late = rank / 2 - 19.75
        assert bars[f"rank {rank}, lane 0"] == [
            (begin + late, end - 19.75) for begin, end in ((22, 24.5), (26, 28.5), (32, 34.5), (36, 38.5))
        ]
        assert bars[f"rank {rank}, lane 1"] == [(begin + late, begin + 2.5 - 19.75) for begin in (24, 34)]
        # The last rank comes at 1 ms, and waits for nobody.
        assert bars[f"rank {rank}, lane 1, waits"] == [(begin + late, begin + 1 - 19.75) for begin in (24, 34)]
        blocked = [(24, 24.5), (26, 26.5), (28, 28.5), (29, 29.5), (34, 34.5), (36, 36.5), (38, 38.5), (39, 39.5)]
        assert bars[f"rank {rank}, exposed"] == [(begin - 19.75, end - 19.75) for begin, end in blocked]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()][:4] == [
        "rank 0   program", "stream 0", "stream 1", "rank 1   program",
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts].count("20% exposed") == 3
    assert "steps 3 to 4 of 4" in axes.get_title(loc="left")
    assert len(bars_of(draw_picture(training(), steps=100))["rank 2, lane 0"]) == 8


def test_records_without_steps_or_buckets():
    """Rows of other names, no backward, no event at all; names that matplotlib must not take for formulas."""
    hostile = "$\\frac{1$ <b>"
    horovod = record(0, [("horovod", hostile, 1, 2), ("horovod", "b", 5, 7)], program=hostile)
    bars = bars_of(draw_picture([horovod, record(1)]))
    assert bars["rank 0, horovod"] == [(1, 2), (5, 7)] and "rank 1, horovod" not in bars
    figure = draw_picture([horovod])
    figure.canvas.draw()
    assert hostile in figure.axes[0].get_title(loc="left")


def test_of_many_ranks_the_first_are_drawn():
    figure = draw_picture(training(ranks=66, steps=2, buckets=1), steps=1)
    assert "rank 63, exposed" in bars_of(figure) and "rank 64, exposed" not in bars_of(figure)
    assert "first 64 of 66 ranks" in figure.axes[0].get_title(loc="left")


def written(path, records):
    path.write_text("".join(chrome_trace_lines(records)))
    return str(path)


def test_the_command(tmp_path, capsys):
    records = training()
    together = written(tmp_path / "trace.json", records)
    picture = tmp_path / "trace.png"
    assert command.main([together, "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    table, said = capsys.readouterr().out.split("written: ")
    assert "last to come" in table and said == f"{picture}\n"
    # Each rank's own file, whose times count from its own first event, in any order.
    apart = [written(tmp_path / f"t.rank{each['rank']}.json", [each]) for each in reversed(records)]
    assert command.main(apart) == 0
    assert capsys.readouterr().out == table
    assert command.main([*apart, "-o", str(tmp_path / "all.json")]) == 0
    assert (tmp_path / "all.json").read_text() == Path(together).read_text()


def test_missing_ranks_are_named(tmp_path, capsys):
    paths = [written(tmp_path / f"t.rank{rank}.json", [training()[rank]]) for rank in (0, 2)]
    assert command.main(paths) == 0
    assert "Ranks recorded here: 2 of 3. Missing: 1." in capsys.readouterr().out
    assert "Missing: 0, 1." in draw_picture([record(2, size=3)]).axes[0].get_title(loc="left")


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    trace = written(tmp_path / "trace.json", training())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidUsage, match="pip install matplotlib"):
        draw_picture(training())
    assert command.main([trace, "-o", str(tmp_path / "trace.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert command.main([trace]) == 0


def test_what_the_command_refuses(tmp_path, capsys):
    one = written(tmp_path / "one.json", training()[:1])
    whole = Path(one).read_text()
    (tmp_path / "half.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "bytes.json").write_bytes(b"\x1f\x8b\xff\x00")
    (tmp_path / "chrome.json").write_text('{"traceEvents": [{"ph": "i"}], "otherData": {"ranks": []}}')
    (tmp_path / "list.json").write_text('{"traceEvents": [], "otherData": ["ranks"]}')
    wrong_values = [("step", ["3"]), ("step", "3"), ("step", True), ("step", 2**70), ("bytes", 1.5), ("bucket", "x")]
    for name, wrong in wrong_values:
        trace = json.loads(whole)
        next(event for event in trace["traceEvents"] if event["ph"] == "X" and event["args"])["args"][name] = wrong
        (tmp_path / "wrong.json").write_text(json.dumps(trace))
        assert command.main([str(tmp_path / "wrong.json")]) == 1
        assert "no trace of collectives.timeline" in capsys.readouterr().err, (name, wrong)
    others = ("half.json", "other.json", "text.json", "bytes.json", "chrome.json", "list.json")
    cases = [
        (["none.json"], "No such file"), *(([name], "no trace of collectives.timeline") for name in others),
        (["one.json", "one.json"], "both have rank 0"),
        (["one.json", "-o", "one.json"], "another name"), (["one.json", "-o", "none/trace.png"], "No such file"),
        (["one.json", "-o", "trace.html"], "must end in .png"),
        (["one.json", "-o", "trace.png", "--steps", "0"], "1 step or more"),
    ]  # fmt: skip
    for words, message in cases:
        words = [str(tmp_path / word) if "." in word else word for word in words]
        assert command.main(words) == 1
        assert message in capsys.readouterr().err
    assert Path(one).read_text() == whole
    written(tmp_path / "larger.json", [record(1, size=5)])
    assert command.main([one, str(tmp_path / "larger.json")]) == 1 and "one run" in capsys.readouterr().err
    with pytest.raises(InvalidArgument):
        draw_picture(training(), steps=0)


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


def test_a_rank_that_died(tmp_path, capsys):
    """The others can't collect the records: each writes what it has, and the files make one picture."""
    results = run_ranks(loses_a_rank, 3, str(tmp_path), deaths={1})
    assert isinstance(results[1], Died) and "last to come" in results[0]
    traces = sorted(tmp_path.glob("trace.rank*.json"))
    assert [path.name for path in traces] == ["trace.rank0.json", "trace.rank2.json"]
    assert command.main([*map(str, traces), "-o", str(tmp_path / "all.png")]) == 0
    assert "Missing: 1." in capsys.readouterr().out and (tmp_path / "all.png").exists()
