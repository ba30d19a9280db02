"""``collectives.auto``: what it registers and when, what it falls back to; gradients stay those of plain DDP."""

import contextlib
import gc
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.auto.check import count_different, error_bound
from collectives.auto.settings import read_settings
from collectives.errors import InvalidArgument, InvalidUsage, TransportError
from collectives.layout import WIRE_FORMATS
from tests.ddp.training import Branches, loss_of, make_model, over_gloo, run, wrap
from tests.launching import free_port

ROOT = Path(__file__).resolve().parents[2]

# ---- Settings and bounds, with no process.


def test_settings_come_from_variables():
    assert read_settings({}) == {}
    assert read_settings({"COLLECTIVES_AUTO": "0", "COLLECTIVES_WIRE": "bf16"}) is None
    assert read_settings({"COLLECTIVES_AUTO": "1", "COLLECTIVES_BLOCK": ""}) == {}


@pytest.mark.parametrize(
    "name, value",
    [("AUTO", "yes"), ("WIRE", "int9"), ("STREAMS", "0"), ("BLOCK", "200"), ("ERROR_FEEDBACK", "2")]
    + [("STOCHASTIC_ROUNDING", "on")],
)
def test_a_wrong_value_names_its_variable(name, value):
    with pytest.raises(InvalidArgument, match=f"COLLECTIVES_{name}.*{value}"):
        read_settings({f"COLLECTIVES_{name}": value})


def quantized(values, format):
    """Round to a wire format in fp64, in blocks of 256 with their own scales."""
    if format in ("fp16", "bf16"):
        return values.to(torch.float16 if format == "fp16" else torch.bfloat16).float()
    blocks = values.view(-1, 256).double()
    scale = (blocks.abs().amax(1, keepdim=True) / WIRE_FORMATS[format].limit).clamp_min(1e-30)
    if format == "int8":
        rounded = (blocks / scale).round()
    else:
        rounded = (blocks / scale).to(torch.float8_e4m3fn if "e4m3" in format else torch.float8_e5m2).double()
    return (rounded * scale).flatten().float()


@pytest.mark.parametrize("format", ["fp32", *WIRE_FORMATS])
def test_bounds_take_rounding_and_nothing_more(format):
    torch.manual_seed(1)
    gradients = [torch.randn(4096) * 10.0 ** torch.randint(-4, 3, (4096,)) for _ in range(3)]
    settings = {"wire": format}
    bound = sum(error_bound(gradient, settings, 3) for gradient in gradients) / 3
    reference = sum(gradient / 3 for gradient in gradients)
    if format == "fp32":
        ours = (gradients[2] + gradients[1] + gradients[0]) / 3
    else:
        ours = quantized(sum(quantized(gradient, format) for gradient in gradients) / 3, format)
    assert not torch.equal(ours, reference)
    assert count_different(ours, reference, bound, settings) == 0
    largest = reference.abs().argmax()
    ours[largest] *= {"fp32": 1 + 1e-5, "bf16": 1.03, "fp16": 1.003, "int8": 1.03}.get(format, 1.6)
    assert count_different(ours, reference, bound, settings) == 1
    ours[largest] = float("nan")
    assert count_different(ours, reference, bound, settings) == 1


def test_bounds_let_an_overflow_through_but_not_hide():
    gradient = torch.tensor([1.0, float("inf"), 2.0])
    bound = error_bound(gradient, {}, 2)
    assert count_different(gradient, gradient, bound, {}) == 0
    assert count_different(torch.tensor([1.0, 3.0, 2.0]), gradient, bound, {}) == 1


# ---- Models of one program, on two ranks.


class Lines(logging.Handler):
    """The log of ``collectives.auto``."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logger = logging.getLogger("collectives.auto")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")

    def take(self):
        lines, self.lines = self.lines, []
        return lines


def trained(ctx, ddp, whole, steps=14, accumulate=1, solo=False, each=None):
    """Train DDP and, on this rank alone, a model with all ranks' batches; give how far apart they end."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, whole)]
    for step in range(steps):
        if each is not None:
            each(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(accumulate):
            ddp.module.step = whole.step = step  # what Branches goes by
            with ddp.no_sync() if part < accumulate - 1 else contextlib.nullcontext():
                (loss_of(ddp, step * accumulate + part, ctx.rank) / accumulate).backward()
            for rank in range(ctx.size):
                whole.step = step
                (loss_of(whole, step * accumulate + part, rank) / accumulate / ctx.size).backward()
        if solo and ctx.rank == 0:
            loss_of(ddp, step, 0)  # a forward that the others don't run, with no backward
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(ddp.parameters(), whole.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def medians(plain, ours):
    """Time that was measured, as this rank has it."""
    return mock.patch("collectives.auto.model.Model._median", lambda self, kind: plain if kind == "plain" else ours)


class Program:
    """Models of one program on this rank: ``found`` has how far each ended from plain DDP, and its log, by name."""

    def __init__(self, ctx):
        self.ctx, self.log, self.found = ctx, Lines(), {}

    def scenario(self, name, options=None, module=make_model, **how):
        ddp = wrap(module(), "plain", **(options or {}))
        self.found[name] = [trained(self.ctx, ddp, module(), **how), self.log.take()]
        return ddp


def chosen_by_time(program):
    """The faster way stays, by times that are made up."""
    with medians((2.0, 1.0)[program.ctx.rank], (1.0, 1.5)[program.ctx.rank]):  # 2 and 1.5 on the slower rank
        group = dist.new_group([0, 1])
        program.scenario("ours", {"process_group": group}, solo=True)
        program.scenario("views", {"gradient_as_bucket_view": True}, accumulate=2, steps=13)
        program.scenario("static", {"static_graph": True})
        program.scenario("unused", {"find_unused_parameters": True}, module=Branches)
    with medians(1.0, 1.01):
        program.scenario("margin")
    with medians(1.0, 1.1):
        program.scenario("plain")


def measured(program):
    """Times that are measured, and what a saved model holds."""
    from collectives.auto import model

    times = []
    decide = model.Model._decide

    def look(self, device):
        times.extend(self._median(kind) for kind in ("plain", "ours"))
        times.append(len(self._times["plain"]))
        decide(self, device)

    with mock.patch.object(model.Model, "_decide", look):
        ddp = program.scenario("measured")
    program.found["times"] = times
    saved = io.BytesIO()
    torch.save(ddp, saved)
    program.found["saved"] = b"collectives" not in saved.getvalue()


def failing(program):
    """A hook that gives other values, one that raises, and no engine."""
    from collectives.auto import trial

    ctx, real = program.ctx, trial.fused_allreduce

    def differs_on_rank_1(state, bucket):
        future = real(state, bucket)
        if bucket.is_last() and ctx.rank == 1:
            bucket.buffer()[0] += 0.01
        return future

    def raises_on_rank_0(state, bucket):
        if bucket.index() == 1 and ctx.rank == 0:
            raise TransportError("the cable is out")
        return real(state, bucket)

    for name, wrong in (("differs", differs_on_rank_1), ("raises", raises_on_rank_0)):
        with mock.patch.object(trial, "fused_allreduce", wrong):
            program.scenario(name)
    with mock.patch("collectives.auto.model.get_engine", mock.Mock(side_effect=InvalidUsage("none here"))):
        program.scenario("no engine")


def left_alone(program):
    """Models with a hook of the user's own, and models that are to be left alone."""
    import collectives.auto

    ctx, log, found = program.ctx, program.log, program.found
    calls = []

    def users_hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(state)
        work = dist.all_reduce(bucket.buffer().div_(ctx.size), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    for name, at in (("user's first", 0), ("user's early", 3), ("user's late", 10)):
        ddp = wrap(make_model(), "plain")
        register = lambda step, at=at, ddp=ddp: step == at and ddp.register_comm_hook("mine", users_hook)  # noqa: E731
        calls.clear()
        found[name] = [trained(ctx, ddp, make_model(), each=register), log.take(), len(calls), set(calls)]
        with pytest.raises(RuntimeError, match="can only be called once"):
            ddp.register_comm_hook(None, users_hook)

    for name, at in (("asked first", 0), ("asked early", 3)):
        ddp = wrap(make_model(), "plain")
        ask = lambda step, at=at, ddp=ddp: step == at and collectives.auto.leave_alone(ddp)  # noqa: E731
        found[name] = [trained(ctx, ddp, make_model(), each=ask), log.take()]
        ddp.register_comm_hook("mine", users_hook)  # there was none


def skewed(program):
    """A rank that has counted another number of backwards."""

    with mock.patch.dict(os.environ, COLLECTIVES_AUTO_TIMEOUT="1"):
        ddp = wrap(make_model(), "plain")
        ddp(torch.zeros(1, 12))  # observed from now on
        sys.modules["collectives.auto.install"]._models[ddp]._backwards += program.ctx.rank  # one has counted wrong
        program.found["skewed"] = [trained(program.ctx, ddp, make_model()), program.log.take()]


def joined_and_sparse(program):
    """DDP's join, and sparse gradients."""
    import collectives.auto

    ddp = program.scenario("joined")
    with pytest.raises(InvalidUsage, match="registered its hook"):
        collectives.auto.leave_alone(ddp)
    with ddp.join():
        for step in range(1 + program.ctx.rank):
            ddp.zero_grad()
            loss_of(ddp, step, program.ctx.rank).backward()
    with pytest.raises(InvalidUsage, match="COLLECTIVES_AUTO=0"):
        ddp.join(divide_by_initial_world_size=False).__enter__()
    ddp = wrap(nn.Embedding(4, 3, sparse=True), "plain")
    ddp(torch.zeros(1, dtype=torch.long))
    program.found["sparse"] = program.log.take()


@over_gloo
def whole_program(ctx):
    import collectives.auto  # noqa: F401
    from collectives.auto import model

    program = Program(ctx)
    model._WARMUP, model._TIMED = 2, 3
    for part in (chosen_by_time, measured, failing, left_alone, skewed, joined_and_sparse):
        part(program)
    gc.collect()
    return program.found


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return run(whole_program, 2, tmp_path_factory.mktemp("auto") / "store", fresh=True, timeout=240)


ALL = ["ours", "views", "static", "unused", "margin", "plain", "measured", "differs", "raises", "no engine", "skewed"]
ALL += ["user's first", "user's early", "user's late", "joined", "asked early"]


@pytest.mark.parametrize("name", ALL)
def test_the_model_is_that_of_plain_ddp(program, name):
    for found in program:
        assert found[name][0] < 2e-6
    assert len(program[0][name][1]) == 1  # one line


@pytest.mark.parametrize(
    "name, text",
    [
        ("ours", "2e+03 ms a backward with plain DDP, 1.5e+03 ms with fused_allreduce (1.33 times as fast): fused_a"),
        ("views", "(1.33 times as fast): fused_allreduce stays"),
        ("static", "fused_allreduce stays"),
        ("unused", "fused_allreduce stays"),
        ("margin", "fused_allreduce stays"),
        ("plain", "1e+03 ms a backward with plain DDP, 1.1e+03 ms with fused_allreduce: plain DDP stays"),
        ("measured", "ms with fused_allreduce"),
        ("user's first", "left alone: it has a hook of its own"),
        ("user's early", "left alone: it has a hook of its own"),
        ("asked early", "left alone: leave_alone() was called"),
    ],
)
def test_rank_0_logs_the_outcome(program, name, text):
    (line,) = program[0][name][1]
    assert line.startswith("INFO DistributedDataParallel(") and text in line
    assert program[1][name][1] == []


@pytest.mark.parametrize(
    "name, texts",
    [
        ("differs", ("(on another rank)", "(1 of its values differ from plain DDP's by more than rounding)")),
        ("raises", ("(TransportError: the cable is out)", "RemoteError")),
        ("no engine", ("left alone: rank 0: InvalidUsage: none here", None)),
        ("skewed", ("left alone: not all ranks came to the same step: rank", None)),
    ],
)
def test_what_goes_wrong_is_warned_of_and_plain_ddp_stays(program, name, texts):
    for found, text in zip(program, texts, strict=True):
        if text is None:
            assert found[name][1] == []
        elif text == "RemoteError":  # rank 1 may have been in the same bucket, or not yet
            assert all(text in line for line in found[name][1])
        else:
            (line,) = found[name][1]
            assert line.startswith("WARNING") and text in line


def test_backwards_are_timed(program):
    for found in program:
        plain, ours, count = found["times"]
        assert 0 < plain < 10 and 0 < ours < 10 and count == 5


def test_a_hook_of_the_user_wins(program):
    for found in program:
        buckets = found["user's late"][2] / 4
        assert buckets == int(buckets) > 1
        assert found["user's early"][2] == 11 * buckets
        assert found["user's first"][2] == 13 * buckets + 1  # the first backward's bucket, before they are rebuilt
        assert all(found[name][3] == {"mine"} for name in ("user's first", "user's early", "user's late"))
    assert "takes the place of ours" in program[0]["user's late"][1][0]


def test_a_model_that_is_to_be_left_alone_is_never_observed(program):
    for found in program:
        assert found["asked first"][0] < 2e-6 and found["asked first"][1] == []


def test_a_saved_model_has_no_trace_of_it(program):
    assert program[0]["saved"] and program[1]["saved"]


def test_sparse_gradients_are_left_alone(program):
    assert "left alone: it has sparse gradients" in program[0]["sparse"][0]


# ---- python -m collectives.auto


SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(30):
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
gradient = model.module.weight.grad.unique().tolist()
print(__name__, sys.argv, sys.path[0] == os.path.dirname(__file__), gradient, flush=True)
del model
dist.barrier()
dist.destroy_process_group()
def fail():
    raise ZeroDivisionError("on purpose")
fail()
"""


def auto(*words, **variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    words = [sys.executable, "-m", "collectives.auto", *words]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_program_is_run_as_python_runs_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [auto(str(script), "--flag", "7", RANK=str(rank), **where) for rank in range(2)]
    usage, wrong = auto(), auto(str(script), COLLECTIVES_WIRE="int3")
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=240)
        out = "".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]"))  # torch 2.8 prints there
        assert out == f"__main__ {[str(script), '--flag', '7']} True [2.0]\n"
        assert process.returncode == 1
        trace = [line.removeprefix(f"[rank{rank}]: ") for line in err[err.index("Traceback") :].splitlines()]
        assert trace[1].startswith(f'  File "{script}", line ') and "runpy" not in err
        assert trace[-1] == "ZeroDivisionError: on purpose"
        assert ("collectives.auto: DistributedDataParallel(Linear): " in err) == (rank == 0)
    out, err = usage.communicate(timeout=240)
    assert usage.returncode == 2 and err.startswith("usage: python -m collectives.auto SCRIPT")
    out, err = wrong.communicate(timeout=240)
    assert wrong.returncode == 1 and "InvalidArgument: COLLECTIVES_WIRE: wire must be one of" in err


# ---- Ranks without it, and processes that the program starts.

STARTER = """
import gc, os, subprocess, sys
if os.environ["RANK"] == "0":
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1", **{OTHER}})
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(1)
for kwargs in ({}, {"init_sync": False}):
    model = DistributedDataParallel(torch.nn.Linear(8, 8), **kwargs)
    for _ in range(40):
        model(torch.ones(2, 8)).sum().backward()
    del model
gc.collect()
print("rank", dist.get_rank(), "collectives.auto" in sys.modules, "hidden" in os.environ, flush=True)
dist.barrier()
dist.destroy_process_group()
if os.environ["RANK"] == "0":
    sys.exit(other.wait())
"""


def started(tmp_path, other, **variables):
    script = tmp_path / "starter.py"
    script.write_text(STARTER.replace("{OTHER}", repr(other)))
    (tmp_path / "sitecustomize.py").write_text('import os\nos.environ["hidden"] = "1"\n')
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    process = auto(str(script), "--flag", **{**where, "PYTHONPATH": path, **variables})
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return sorted(line for line in out.splitlines() if line.startswith("rank")), err


def test_processes_that_the_program_starts_have_it_too(tmp_path):
    out, err = started(tmp_path, {})
    assert out == ["rank 0 True True", "rank 1 True True"]
    assert "without collectives.auto" not in err and err.count("with fused_allreduce") == 2


def test_a_rank_without_it_is_named_and_plain_ddp_stays(tmp_path):
    out, err = started(tmp_path, {"COLLECTIVES_AUTO_CHILDREN": "elsewhere"})
    assert out == ["rank 0 True True", "rank 1 False True"]
    assert err.count("left alone: rank 1 built this object without collectives.auto: import it in") == 2


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_a_wrong_time_limit_names_its_variable(value):
    with pytest.raises(InvalidArgument, match=f"COLLECTIVES_AUTO_TIMEOUT.*{value}"):
        read_settings({"COLLECTIVES_AUTO_TIMEOUT": value})
