"""``collectives.auto``: on which DDP objects it registers the hook, on all ranks or on none, and what it says."""

import contextlib
import gc
import io
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives.auto import read_settings
from collectives.ddp import fitness
from collectives.errors import EngineUnavailable, InvalidArgument, InvalidUsage
from tests.ddp.training import Branches, loss_of, make_model, over_gloo, run, wrap
from tests.launching import clean_environment, free_port
from tests.programs import run_forked

ROOT = Path(__file__).resolve().parents[2]


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


def hook_of(ddp) -> str:
    return ddp._get_ddp_logging_data().get("comm_hook") or ""


def users_hook(group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Program:
    """Models of one program on this rank: ``found`` has how far each ended from plain DDP, its hook, and its log."""

    def __init__(self, ctx):
        self.ctx, self.log, self.found = ctx, Lines(), {}

    def train(self, name, options=None, module=make_model, prepare=None, steps=4, accumulate=1, around=None):
        """Train a DDP model and, on this rank alone, one with all ranks' batches."""
        ctx = self.ctx
        ddp, alone = wrap(module(), "plain", **(options or {})), module()
        if prepare is not None:
            prepare(ddp)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, alone)]
        with around(ddp) if around is not None else contextlib.nullcontext():
            for step in range(steps):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for part in range(accumulate):
                    number = step * accumulate + part
                    ddp.module.step = alone.step = step  # what Branches goes by
                    with ddp.no_sync() if part < accumulate - 1 else contextlib.nullcontext():
                        (loss_of(ddp, number, ctx.rank) / accumulate).backward()
                    for rank in range(ctx.size):
                        alone.step = step
                        (loss_of(alone, number, rank) / accumulate / ctx.size).backward()
                for optimizer in optimizers:
                    optimizer.step()
        pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
        apart = max((a - b).abs().max().item() for a, b in pairs)
        self.found[name] = apart, hook_of(ddp), self.log.take()
        return ddp


def registered(program):
    """Objects of several kinds, all with the hook."""
    program.train("plain")
    program.train("subgroup", {"process_group": dist.new_group([0, 1])})
    program.train("views", {"gradient_as_bucket_view": True}, accumulate=2)
    program.train("static", {"static_graph": True})
    program.train("unused", {"find_unused_parameters": True}, module=Branches)
    program.train("joined", around=lambda ddp: ddp.join())
    program.train("solo", prepare=lambda ddp: program.ctx.rank == 0 and loss_of(ddp, 0, 0))  # a forward of one rank's


def left_alone(program):
    """Objects on which it isn't registered, where all ranks or one of them have a reason."""
    import collectives.auto

    rank = program.ctx.rank
    register = lambda ddp: ddp.register_comm_hook(dist.group.WORLD, users_hook)  # noqa: E731
    program.train("user's hook", prepare=register)
    program.train("user's hook on rank 1", prepare=lambda ddp: rank == 1 and register(ddp))
    program.train("user's hook on rank 0", prepare=lambda ddp: rank == 0 and register(ddp))
    program.train("asked", prepare=collectives.auto.leave_alone)
    program.train("asked on rank 1", prepare=lambda ddp: rank == 1 and collectives.auto.leave_alone(ddp))
    program.train("divided", around=lambda ddp: ddp.join(divide_by_initial_world_size=False))
    with mock.patch.object(fitness, "get_engine", mock.Mock(side_effect=EngineUnavailable("none"))):
        program.train("no engine")
    with mock.patch.dict(collectives.auto._settings, {"wire": "bf16"} if rank == 1 else {}):
        program.train("settings")
    with mock.patch.object(collectives.auto, "_SLOW_S", 1.0):
        program.train("late", prepare=lambda ddp: rank == 1 and time.sleep(2.5))
    for name, module, options in (
        ("sparse", nn.Embedding(4, 3, sparse=True), {}),
        ("mixed", nn.Linear(4, 3), {"mixed_precision": mixed_precision()}),
    ):
        try:
            ddp = wrap(module, "plain", **options)
        except torch.AcceleratorError:  # torch 2.8 of CUDA where there is no GPU
            continue
        with contextlib.suppress(RuntimeError):  # mixed precision needs CUDA
            ddp(torch.zeros(1, 4, dtype=torch.long if name == "sparse" else None))
        program.found[name] = 0, "", program.log.take()


def mixed_precision():
    from torch.nn.parallel.distributed import _MixedPrecision

    return _MixedPrecision(param_dtype=torch.bfloat16)


def afterwards(program):
    """What comes after the hook was registered."""
    import collectives.auto

    ddp = program.train("saved")
    with pytest.raises(InvalidUsage, match="registered fused_allreduce"):
        collectives.auto.leave_alone(ddp)
    with pytest.raises(InvalidUsage, match="register yours before the first forward"):
        ddp.register_comm_hook(dist.group.WORLD, users_hook)
    saved = io.BytesIO()
    torch.save(ddp, saved)
    saved.seek(0)
    program.found["loaded"] = list(torch.load(saved, weights_only=False).state_dict()) == list(ddp.state_dict())


@over_gloo
def whole_program(ctx):
    import collectives.auto  # noqa: F401

    program = Program(ctx)
    for part in (registered, left_alone, afterwards):
        part(program)
    gc.collect()
    return program.found


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return run(whole_program, 2, tmp_path_factory.mktemp("auto") / "store", fresh=True, timeout=240)


@pytest.mark.parametrize("name", ["plain", "subgroup", "views", "static", "unused", "joined", "solo", "saved"])
def test_the_hook_is_registered_and_gives_the_gradients_of_plain_ddp(program, name):
    for rank, found in enumerate(program):
        apart, hook, log = found[name]
        assert apart < 2e-6 and hook == "fused_allreduce"
        kind = "Branches" if name == "unused" else "Sequential"
        assert log == [f"INFO DistributedDataParallel({kind}): fused_allreduce on 2 ranks"] * (rank == 0)


@pytest.mark.parametrize(
    "name, hooks, levels, text",
    [
        ("user's hook", ("users_hook", "users_hook"), ("INFO", None), "left alone: it has a hook of its own"),
        ("user's hook on rank 1", ("", "users_hook"), ("WARNING", None), "rank 1: it has a hook of its own"),
        ("user's hook on rank 0", ("users_hook", ""), ("INFO", "WARNING"), "it has a hook of its own"),
        ("asked", ("", ""), ("INFO", None), "left alone: leave_alone() was called"),
        ("asked on rank 1", ("", ""), ("WARNING", None), "left alone: rank 1: leave_alone() was called"),
        ("divided", ("", ""), ("INFO", None), "join() divides by the ranks that are left"),
        ("no engine", ("", ""), ("INFO", None), "left alone: EngineUnavailable: none"),
        ("settings", ("", ""), ("WARNING", None), "settings or models differ (wire: absent on rank 0; 'bf16' on rank"),
        ("late", ("", ""), ("WARNING", None), "rank 1 of 2 did not come within 1 s to the first forward of this model"),
        ("sparse", ("", ""), ("INFO", None), "left alone: it has sparse gradients"),
        ("mixed", ("", ""), ("INFO", None), "left alone: mixed_precision registers a hook of its own"),
    ],
)
def test_a_model_is_left_alone_on_all_ranks(program, name, hooks, levels, text):
    if name == "mixed" and name not in program[0]:
        pytest.skip("torch makes no DistributedDataParallel with mixed_precision here")
    for found, expected, level in zip(program, hooks, levels, strict=True):
        apart, hook, log = found[name]
        assert hook == expected
        if name != "divided":  # by the number of ranks that are left: the same while none has joined
            assert apart < 2e-6
        if level is None:
            assert log == []
        else:
            (line,) = log
            assert line.startswith(f"{level} DistributedDataParallel(") and text in line


def test_a_model_with_the_hook_can_be_saved(program):
    assert program[0]["loaded"] and program[1]["loaded"]


# ---- Programs.

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group(os.environ.get("BACKEND", "gloo"))
for number in range(2):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(3):
        model.zero_grad()
        model(torch.ones(2, 8) * (1 + dist.get_rank())).sum().backward()
    gradient = model.module.weight.grad.unique().tolist()
    hook = model._get_ddp_logging_data().get("comm_hook")
    print(__name__, sys.argv[1:], sys.path[0] == os.path.dirname(__file__), gradient, hook, flush=True)
    del model
dist.barrier()
dist.destroy_process_group()
def fail():
    raise ZeroDivisionError("on purpose")
if "--fail" in sys.argv:
    fail()
"""


def run_ranks_of(words, *, ranks=2, **variables):
    """Run a command on ranks with these variables, of which some are pairs; give their finished processes."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": 2}

    def run_rank(rank):
        own = {name: value if isinstance(value, str) else value[rank] for name, value in variables.items()}
        return run_forked(list(map(str, words)), clean_environment(RANK=rank, **place, **own), 240)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run_rank, range(ranks)))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("backend", ["gloo", "collectives"])
def test_a_program_is_run_as_python_runs_it(script, backend):
    words = ("-m", "collectives.auto", script, "--fail", "7")
    for rank, done in enumerate(run_ranks_of(words, BACKEND=backend)):
        lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # torch 2.8 prints there
        assert lines == ["__main__ ['--fail', '7'] True [3.0] fused_allreduce"] * 2
        err = done.stderr
        trace = [line.removeprefix(f"[rank{rank}]: ") for line in err[err.index("Traceback") :].splitlines()]
        assert done.returncode == 1 and trace[-1] == "ZeroDivisionError: on purpose"
        assert trace[1].startswith(f'  File "{script}", line ') and "runpy" not in err
        assert err.count("collectives.auto: DistributedDataParallel(Linear): fused_allreduce on 2") == 2 * (rank == 0)


def test_what_the_command_refuses():
    (usage,) = run_ranks_of(["-m", "collectives.auto"], ranks=1)
    assert usage.returncode == 2 and usage.stderr.startswith("usage: python -m collectives.auto SCRIPT")
    (wrong,) = run_ranks_of(["-m", "collectives.auto", "x.py"], ranks=1, COLLECTIVES_WIRE="int9")
    assert wrong.returncode == 1 and "InvalidArgument: COLLECTIVES_WIRE=int9: wire must be one of" in wrong.stderr


def test_settings_come_from_variables():
    assert read_settings({}) == {}
    assert read_settings({"COLLECTIVES_AUTO": "0", "COLLECTIVES_WIRE": "bf16"}) is None
    given = {"COLLECTIVES_AUTO": "1", "COLLECTIVES_WIRE": "int8", "COLLECTIVES_BLOCK": "128", "COLLECTIVES_STREAMS": ""}
    assert read_settings(given) == {"wire": "int8", "block": 128}
    for name, value in (("AUTO", "yes"), ("WIRE", "int9"), ("STREAMS", "0"), ("BLOCK", "200")):
        with pytest.raises(InvalidArgument, match=f"COLLECTIVES_{name}.*{value}"):
            read_settings({f"COLLECTIVES_{name}": value})


def test_a_rank_without_it_is_named_within_seconds_and_plain_ddp_stays(script):
    with ThreadPoolExecutor(2) as pool:  # each job waits for seconds
        words = ("-m", "collectives.auto", script)
        jobs = list(pool.map(lambda on: run_ranks_of(words, COLLECTIVES_AUTO=on), (("0", "1"), ("1", "0"))))
    for other, ranks in enumerate(jobs):
        for rank, done in enumerate(ranks):
            lines = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
            assert done.returncode == 0 and lines == ["__main__ [] True [3.0] None"] * 2
            text = f"left alone: rank {other} built this model without collectives.auto, or with COLLECTIVES_AUTO=0: "
            assert done.stderr.count(text) == 2 * (rank != other)


# ---- Programs that start the other ranks themselves.

STARTERS = {
    "subprocess": """
import subprocess
if os.environ["RANK"] == "0":
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"})
train(int(os.environ["RANK"]))
if os.environ["RANK"] == "0":
    sys.exit(other.wait())
""",
    "spawn": """
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
""",
}
TRAIN = """
import os, sys
import torch, torch.distributed as dist
def train(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8), init_sync=False)
    for step in range(3):
        model(torch.ones(2, 8)).sum().backward()
    hook = model._get_ddp_logging_data().get("comm_hook")
    os.write(1, f"rank {rank} {hook} {'hidden' in os.environ}\\n".encode())
    del model
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("starter", STARTERS)
def test_processes_that_the_program_starts_have_it_too(tmp_path, starter):
    script = tmp_path / "starter.py"
    script.write_text(TRAIN + STARTERS[starter])
    (tmp_path / "sitecustomize.py").write_text('import os\nos.environ["hidden"] = "1"\n')
    # The program itself is forked; those that it starts have its sitecustomize, too.
    env = clean_environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = run_forked(["-m", "collectives.auto", str(script)], {**env, "PYTHONPATH": path}, 240)
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank 0 fused_allreduce {starter == 'spawn'}", "rank 1 fused_allreduce True"]
    assert done.stderr.count("fused_allreduce on 2 ranks") == 1
