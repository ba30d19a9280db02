"""The tuner: the fit, what is chosen, the file, and how the ranks come to choose alike."""

from __future__ import annotations

import importlib
import json
import os
import platform
from pathlib import Path

import pytest
import torch

import collectives
from collectives import tune as public
from collectives.comm.algorithms.policy import (
    AlphaBetaModel,
    Policy,
    best_algorithms,
    fit,
    look_up_choice,
    parse_algorithm,
)
from collectives.comm.algorithms.schedule import ALGORITHMS
from collectives.comm.algorithms.tune_file import read_tune_file, tune_file
from collectives.errors import InvalidArgument, InvalidUsage, Mismatch
from tests.ranks import RankFailure, run_ranks


def test_the_public_name_is_the_function():
    importlib.import_module("collectives.comm.algorithms.tune")  # the module of the same name
    assert callable(collectives.tune) and collectives.tune is public


def test_a_model_is_found_again():
    model = fit([(x, 5e-6 + 2e-10 * x) for x in (1 << 10, 1 << 14, 1 << 20, 1 << 26)])
    assert model.alpha == pytest.approx(5e-6) and model.beta == pytest.approx(2e-10) and model.residual < 1e-9
    assert model.predict(1000) == pytest.approx(5.2e-6)


def test_relative_errors_count_and_the_residual_is_theirs():
    """A huge size must not drown the small ones: of absolute errors, alpha would be anything."""
    times = [(1000, 10e-6), (2000, 11e-6), (4000, 9e-6), (1 << 20, 1e-3), (1 << 24, 17e-3), (1 << 28, 0.25)]
    model = fit(times)
    assert model.alpha == pytest.approx(9e-6, rel=0.2)
    wanted = sum(((model.predict(x) - t) / t) ** 2 for x, t in times) / len(times)
    assert 0.01 < model.residual < 0.2 and model.residual == pytest.approx(wanted**0.5)
    exact = [(x, model.predict(x)) for x in (10, 1000)]
    assert fit(exact).residual < 1e-9


@pytest.mark.parametrize("points", [[(1, 5.0), (1000, 4.0)], [(1000, 1e-9), (2000, 4e-9)], [(0, 1.0)], [(8, 2.0)] * 3])
def test_neither_number_is_negative(points):
    model = fit(points)
    assert model.alpha >= 0 and model.beta >= 0 and model.residual < 1


@pytest.mark.parametrize("points", [[], [(1, 0.0)], [(1, -1.0)]])
def test_a_fit_of_nothing(points):
    with pytest.raises(InvalidArgument, match="points"):
        fit(points)


SIZES = [1 << k for k in range(10, 27, 4)]


def test_the_faster_model_is_chosen_and_native_where_they_are_close():
    times = {"native": (1e-6, 2e-9), "ring": (50e-6, 1e-9), "direct": (1e-6, 1.95e-9)}
    models = {name: AlphaBetaModel(*each) for name, each in times.items()}
    limits, names = best_algorithms(models, SIZES)
    assert names == ["native", "ring"] and len(limits) == 1 and SIZES[1] < limits[0] < SIZES[-1]
    picks = {"all_reduce": (limits, names)}
    assert (
        look_up_choice(picks, "all_reduce", 0) == "native"
        and look_up_choice(picks, "all_reduce", limits[0]) == "native"
    )
    assert look_up_choice(picks, "all_reduce", limits[0] + 1) == "ring"
    models = {"ring": AlphaBetaModel(1.0, 0.0), "direct": AlphaBetaModel(0.0, 1.0)}
    assert best_algorithms(models, [1, 100])[1] == ["ring"]


def test_what_is_used():
    table = {2: {"all_reduce": ([100], ["native", "ring"])}}
    assert Policy(False, 1, {}, {}).choices_for("host", 4) is None  # nothing to look up on any call
    assert Policy(False, 1, {}, table).choices_for("host", 4) is None  # measured with another number of ranks
    assert Policy(False, 1, {"all_reduce": "ring"}, {}).choices_for("host", 1) is None
    picks = Policy(False, 1, {}, table).choices_for("host", 2)
    assert [look_up_choice(picks, "all_reduce", n) for n in (100, 101)] == ["native", "ring"]
    assert look_up_choice(picks, "all_gather", 1 << 30) == "native"
    fixed = Policy(False, 1, {"all_reduce": "direct"}, table).choices_for("host", 2)
    assert look_up_choice(fixed, "all_reduce", 101) == "direct"
    assert Policy(True, 1, {}, table).choices_for("host", 2) is None  # native reduces in rank order there
    ordered = Policy(True, 1, {}, table).choices_for("nccl", 2)
    assert [look_up_choice(ordered, op, 101) for op in ("all_reduce", "reduce_scatter", "all_gather")] == [
        "direct", "direct", "native",
    ]  # fmt: skip


def test_the_variable():
    assert parse_algorithm("") == {}
    assert parse_algorithm("ring") == dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), "ring")
    assert parse_algorithm(" all_reduce:ring, all_gather : direct ,") == {"all_reduce": "ring", "all_gather": "direct"}
    for text in ("rings", "broadcast:ring", "all_reduce:", "ring:all_reduce"):
        with pytest.raises(InvalidArgument, match="COLLECTIVES_ALGORITHM"):
            parse_algorithm(text)


def test_where_the_file_lies(monkeypatch, tmp_path):
    monkeypatch.delenv("COLLECTIVES_TUNE_FILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune_file() == tmp_path / "collectives" / "tune.json"
    monkeypatch.setenv("COLLECTIVES_TUNE_FILE", str(tmp_path / "mine.json"))
    assert tune_file() == tmp_path / "mine.json"
    assert read_tune_file(tune_file()) == []


def entry(machine=None, ranks=2, choices=None, **more):
    choices = {"all_reduce": [[1000], ["native", "ring"]]} if choices is None else choices
    return {
        "machine": machine or platform.node(), "engine": "host", "device": "cpu", "ranks": ranks, "choices": choices,
        **more,
    }  # fmt: skip


def written(path, *entries):
    path.write_text(json.dumps({"format": 1, "entries": entries}))
    return path


BROKEN = [
    b"",
    b"{}",
    b"[1, 2]",
    b"\xff\xfe",
    b'{"format": 2, "entries": []}',
    b'{"format": 1, "entries": [{}]}',
    json.dumps({"format": 1, "entries": [entry(choices={"all_reduce": [[1000], ["native"]]})]}).encode(),
    json.dumps({"format": 1, "entries": [entry(choices={"all_reduce": [[], ["tree"]]})]}).encode(),
    json.dumps({"format": 1, "entries": [entry(choices={"all_reduce": [[5, 3], ["ring"] * 3]})]}).encode(),
    json.dumps({"format": 1, "entries": [entry(choices={"broadcast": [[], ["ring"]]})]}).encode(),
    json.dumps({"format": 1, "entries": [entry(ranks="2")]}).encode(),
]


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_says_how_to_mend_it(tmp_path, content):
    path = tmp_path / "tune.json"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"delete it and run collectives\.tune\(\) again") as caught:
        read_tune_file(path)
    assert str(path) in str(caught.value)


def used(ctx, variables, count=1000):
    """What a new communicator picks, and which steps its calls take."""
    from collectives.comm.algorithms.plan import ExecutionPlan

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    calls = []
    real = ExecutionPlan.run
    ExecutionPlan.run = lambda plan, *args: (calls.append(len(plan._tasks)), real(plan, *args))[1]
    try:
        with ctx.new_communicator() as comm:
            x = torch.ones(count)
            comm.all_reduce(x)
            with comm.group():
                comm.all_reduce(x)  # native, as all groups
            comm.all_reduce(x[:10], algorithm=None)
            comm.barrier()
            sub = comm.split(comm.rank % 2)
            assert sub._choices is None  # of other ranks
            sub.close()
            return comm._choices, comm._policy.chunk, len(calls), x[20].item()
    finally:
        ExecutionPlan.run = real
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def read_by_rank_0(ctx, path):
    """Only rank 0 has the file and the variable; the others take what it says."""
    return used(ctx, {"COLLECTIVES_TUNE_FILE": path if not ctx.rank else "/nowhere", "COLLECTIVES_CHUNK": "4096"})


def test_all_ranks_choose_as_rank_0_does(tmp_path):
    path = written(tmp_path / "tune.json", entry("elsewhere", choices={"all_reduce": [[], ["direct"]]}), entry())
    for picks, chunk, calls, value in run_ranks(read_by_rank_0, 2, str(path)):
        assert picks["all_reduce"] == ([1000], ["native", "ring"]) and chunk == 4096
        assert calls == 1 and value == 4.0  # 4,000 bytes by a ring; the group and 40 bytes by native


def fixed_by_variable(ctx):
    variables = {"COLLECTIVES_ALGORITHM": "direct"} if not ctx.rank else {}
    return used(ctx, {**variables, "COLLECTIVES_TUNE_FILE": "/nowhere"})


def test_the_variable_decides():
    for picks, _, calls, value in run_ranks(fixed_by_variable, 2):
        assert picks["all_gather"] == ([], ["direct"]) and calls == 2 and value == 4.0


def foreign(ctx, path):
    return used(ctx, {"COLLECTIVES_TUNE_FILE": path})


def test_what_other_machines_measured_is_ignored(tmp_path):
    path = written(tmp_path / "tune.json", entry("elsewhere"), entry(ranks=3), {**entry(), "engine": "nccl"})
    for picks, chunk, calls, _ in run_ranks(foreign, 2, str(path)):
        assert picks is None and chunk == 256 << 10 and calls == 0


def broken_at_rank_0(ctx, path):
    with pytest.raises(InvalidArgument, match="delete it and run") as caught:
        used(ctx, {"COLLECTIVES_TUNE_FILE": path if not ctx.rank else "/nowhere"})
    assert path in str(caught.value) and caught.value.rank == ctx.rank
    with pytest.raises(InvalidUsage, match="forbids"):
        os.environ["COLLECTIVES_ALGORITHM"] = "ring"
        try:
            ctx.new_communicator(deterministic=True)
        finally:
            del os.environ["COLLECTIVES_ALGORITHM"]
    with pytest.raises(Mismatch, match="deterministic") as caught:
        ctx.new_communicator(deterministic=ctx.rank == 1)
    return caught.value.peers


def test_what_is_wrong_at_rank_0_is_raised_on_all_ranks(tmp_path):
    path = tmp_path / "tune.json"
    path.write_text("{")
    assert run_ranks(broken_at_rank_0, 3, str(path)) == [(1,), (0, 2), (1,)]


def measured(ctx, path):
    os.environ["COLLECTIVES_TUNE_FILE"] = path if not ctx.rank else f"{path}/not/mine"
    try:
        with ctx.new_communicator() as comm:
            sizes = [1 << 8, 1 << 12, 1 << 15]
            default = collectives.tune(comm, ops=["all_gather"], sizes=sizes, seconds=0.001, write=False)
            assert list(default["ops"]["all_gather"]) == ["native"] and comm._algorithms is None
            assert default["choices"] == {"all_gather": [[], ["native"]]}
            table = collectives.tune(
                comm, ops=["all_reduce", "all_gather"], sizes=sizes, algorithms=ALGORITHMS, seconds=0.005
            )
            with pytest.raises(InvalidArgument, match="sizes"):
                collectives.tune(comm, sizes=[5])
            with pytest.raises(InvalidArgument, match="ops"):
                collectives.tune(comm, ops=["broadcast"])
            with pytest.raises(InvalidArgument, match="algorithms"):
                collectives.tune(comm, algorithms=["tree"])
            used_now = comm._choices
        os.environ["COLLECTIVES_TUNE_FILE"] = f"{path}/below/a/file"
        with ctx.new_communicator() as comm, pytest.raises(InvalidArgument, match="could not write"):
            collectives.tune(comm, ops=["all_gather"], sizes=sizes, algorithms=["native"], seconds=0.001)
        return table, used_now
    finally:
        del os.environ["COLLECTIVES_TUNE_FILE"]


def test_a_measurement(tmp_path):
    path = written(tmp_path / "tune.json", entry("elsewhere", note="stays"), entry(note="goes"))
    (table, used_now), *others = run_ranks(measured, 2, str(path))
    assert all(other[0]["choices"] == table["choices"] for other in others)
    assert all(other[0]["ops"] == table["ops"] for other in others)
    content = json.loads(path.read_text())
    assert [each["machine"] for each in content["entries"]] == ["elsewhere", platform.node()]
    assert content["entries"][0]["note"] == "stays" and content["entries"][1] == table
    assert table["ranks"] == 2 and table["engine"] == "host" and table["version"] and table["torch"]
    for op in ("all_reduce", "all_gather"):
        for name in ("native", "ring", "direct"):
            row = table["ops"][op][name]
            assert len(row["times_us"]) == 3 and min(row["times_us"]) > 0
            assert row["alpha_us"] >= 0 and row["beta_us_per_mib"] >= 0 and row["residual"] >= 0
    wanted = Policy(False, 1, {}, {2: {op: tuple(each) for op, each in table["choices"].items()}}).choices_for(
        "host", 2
    )
    assert used_now == wanted
    assert os.listdir(tmp_path) == ["tune.json"]  # nothing is left beside it


def test_the_simulated_failure_is_seen():
    """`used` raises on a rank what the test must see."""
    with pytest.raises(RankFailure):
        run_ranks(foreign, 1, 5)


def test_a_user_without_a_home_has_no_file(monkeypatch):
    monkeypatch.delenv("COLLECTIVES_TUNE_FILE", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # what it does where there is none
    assert read_tune_file(tune_file()) == []


def test_a_default_file_that_may_not_be_read_is_none(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.delenv("COLLECTIVES_TUNE_FILE", raising=False)
    assert read_tune_file(tune_file()) == []
    monkeypatch.setenv("COLLECTIVES_TUNE_FILE", str(tmp_path / "x"))
    with pytest.raises(InvalidArgument, match="can't be read"):
        read_tune_file(tune_file())


def test_a_file_of_nothing_but_brackets(tmp_path):
    (tmp_path / "x").write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match="is no result"):
        read_tune_file(tmp_path / "x")


def test_what_tune_refuses():
    with collectives.init() as comm:
        for wrong in ({"dtype": "float32"}, {"ops": None}, {"ops": [[]]}, {"sizes": 5}, {"algorithms": [{}]}):
            with pytest.raises(InvalidArgument, match=next(iter(wrong))):
                collectives.tune(comm, write=False, **wrong)


def test_others_may_read_the_file_as_the_umask_says(tmp_path, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_TUNE_FILE", str(tmp_path / "x"))
    before = os.umask(0o022)
    try:
        with collectives.init() as comm:
            collectives.tune(comm, ops=["all_gather"], sizes=[64, 128], seconds=0.001)
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
