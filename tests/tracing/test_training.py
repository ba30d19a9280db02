"""The trace and the report of real training: the rows' contents, on all ranks."""

import json

import pytest

import collectives
from collectives import HookState, optim
from tests.ddp.training import buckets_of, loss_of, make_model, over_gloo, run, wrap

STEPS = 4


@over_gloo
def recorded(ctx, path, options):
    """Train, recording; give the report, the buckets of a step, and the parameters' names."""
    model = make_model()
    if options.pop("inside", False):
        options["optimizer"] = optim.SGD(model.parameters(), lr=0.1)
    ddp = wrap(model, "torch", HookState(**options))
    for step in range(2):  # DDP makes its buckets anew
        loss_of(ddp, step, ctx.rank).backward()
    with collectives.timeline(path) as timeline:
        for step in range(STEPS):
            loss_of(ddp, step, ctx.rank).backward()
    return timeline.report(), buckets_of(ddp), [name for name, _ in model.named_parameters()]


def rows_of(path):
    """Events by (rank, row)."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], rows[event["pid"], event["tid"]]), []).append(event)
    return found


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"streams": 2}, "all_reduce"),
        ({"wire": "int8", "error_feedback": True, "max_norm": 1.0}, "all_reduce"),
        ({"inside": True}, "reduce_scatter"),
    ],
    ids=["streams", "int8", "optimizer"],
)
def test_a_trace_of_training(tmp_path, options, first):
    path = tmp_path / "trace.json"
    found = run(recorded, 2, tmp_path / "store", path, options, env={"COLLECTIVES_OVERLAP": "1"})
    report, buckets, names = found[0]
    assert report == found[1][0]
    rows = rows_of(path)
    streams = options.get("streams", 1)
    for rank in range(2):
        held = {row for each, row in rows if each == rank}
        assert held - {"wait"} == {"steps", "hook", *(f"lane {number}" for number in range(streams))}
        assert len(rows[rank, "hook"]) == STEPS * buckets
        sent = [event for number in range(streams) for event in rows[rank, f"lane {number}"]]
        assert len(sent) == STEPS * buckets
        assert all(event["name"].split()[0] == first and event["args"]["bytes"] > 0 for event in sent)
        recorded_names = [name for event in sent for name in event["args"]["parameters"].split(", ")]
        assert sorted(recorded_names) == sorted(names * STEPS)
    table = report.splitlines()[1:]
    assert len(table) == 2
    for line in table:
        _, steps, step, communication, exposed, _, last, _ = line.replace(" of ", "/").split()
        assert steps == str(STEPS) and last.endswith(f"/{STEPS * buckets}")
        assert 0 < float(communication) <= float(step) and 0 < float(exposed) <= float(step)


def with_buckets(ctx, path):
    model = make_model()
    buckets = collectives.GradientBuckets(model.named_parameters(), comm=ctx.communicator(), overlap=False)
    with collectives.timeline(path):
        loss_of(model, 0, ctx.rank).backward()
        buckets.all_reduce()
    buckets.close()


def test_a_trace_of_gradient_buckets(tmp_path):
    run(with_buckets, 1, tmp_path / "trace.json")
    rows = rows_of(tmp_path / "trace.json")
    assert len(rows[0, "hook"]) == 1 and "6.bias" in rows[0, "lane 0"][0]["args"]["parameters"]
