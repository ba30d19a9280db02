"""Checkpoints that are written while the training goes on: whole or skipped, the newest kept, bit for bit on resume."""

import os
import random
import resource
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from collectives.errors import InvalidArgument
from collectives.sharded import checkpointer as module
from collectives.sharded import get_model_state_dict, get_optimizer_state_dict
from collectives.sharded.checkpointer import MANIFEST, Checkpointer, load
from tests.ddp.training import over_gloo, run
from tests.ranks import RankFailure, run_ranks
from tests.sharded.states import Net, differences, full_state_dict, one_thread, sharded, train
from tests.variables import variables


def new(seed=3):
    model = sharded(seed)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def full(model):
    return dict(full_state_dict(model))


@over_gloo
def saves(ctx, folder):
    """Training goes on while checkpoints are written; each has the state of its save, and two are kept."""
    model, optimizer = new()
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.load_latest(model, optimizer) is None and checkpointer.latest() is None
    states = {}
    for step in range(1, 5):
        train(model, optimizer)
        checkpointer.save(step, model, optimizer, extra={"step": step})
        states[step] = full(model)
        train(model, optimizer)
    checkpointer.wait()
    train(model, optimizer, 2)
    return states, os.listdir(folder)


@over_gloo
def resumes(ctx, folder):
    model, optimizer = new()
    train(model, optimizer)  # of other values, and with state in the optimizer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = Checkpointer(folder).load_latest(model, optimizer)
        except InvalidArgument as error:
            return str(error)
    return found, full(model), [str(each.message) for each in caught if "resuming" in str(each.message)]


def resume(tmp_path, folder, ranks=2):
    store = tmp_path / f"store {time.monotonic_ns()}"
    return run(resumes, ranks, str(store), str(folder))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    states, names = run(saves, 2, str(folder.with_name("store")), str(folder))[0]
    assert sorted(names) == ["step_000000003", "step_000000004"]
    return folder, states


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resume_on_any_number_of_ranks(written, tmp_path, ranks):
    folder, states = written
    for found, state, warned in resume(tmp_path, folder, ranks):
        assert found.step == 4 and found.extra == {"step": 4} and not found.skipped and not warned
        assert not differences(state, states[4])


def test_other_readers_take_it(written):
    folder, states = written
    path = Checkpointer(folder).latest()
    state = {"model": dict(Net().state_dict())}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert not differences(state["model"], states[4])
    model = Net()
    assert load(path, model) == {"step": 4} and not differences(dict(model.state_dict()), states[4])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "flipped": (lambda path: flip(path / "__1_0.distcp"), "__1_0.distcp is damaged"),
    "flipped index": (lambda path: flip(path / ".metadata"), ".metadata is damaged"),
    "truncated": (lambda path: os.truncate(path / "__0_0.distcp", 100), "has 100 bytes"),
    "torn manifest": (lambda path: os.truncate(path / MANIFEST, 100), "is damaged"),
    "missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "another step's": (lambda path: shutil.copy(path.with_name("step_000000003") / MANIFEST, path), "another"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "was never completed"),
    "empty": (lambda path: [each.unlink() for each in path.iterdir()], "was never completed"),
}


def test_damaged_checkpoints_are_skipped_and_named(written, tmp_path):
    for name, (damage, text) in DAMAGES.items():
        copy = shutil.copytree(written[0], tmp_path / name)
        damage(copy / "step_000000004")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = Checkpointer(copy).load_latest(Net())
        assert found.step == 3 and text in found.skipped["step_000000004"], (name, found)
        assert any("step_000000004" in str(each.message) for each in caught)
        assert Checkpointer(copy).latest() == copy / "step_000000003"


def test_ranks_skip_together(written, tmp_path):
    copy = shutil.copytree(written[0], tmp_path / "copy")
    flip(copy / "step_000000004" / "__1_0.distcp")
    (first, state, warned), (second, _, silent) = resume(tmp_path, copy)
    assert first.step == second.step == 3 and first.skipped == second.skipped
    assert len(warned) == 1 and "step_000000004" in warned[0] and "is damaged" in warned[0] and not silent
    assert not differences(state, written[1][3])
    flip(copy / "step_000000003" / "__0_0.distcp")
    for text in resume(tmp_path, copy):
        assert "no checkpoint" in text and "step_000000004" in text and "step_000000003" in text


def test_a_secret_is_checked(written, tmp_path):
    model = Net()
    with variables(COLLECTIVES_SECRET="another secret of 16 bytes"):
        with pytest.raises(InvalidArgument, match="without the job's COLLECTIVES_SECRET"):
            Checkpointer(written[0]).load_latest(model)
        Checkpointer(tmp_path / "run").save(1, model, block=True)
        assert Checkpointer(tmp_path / "run").load_latest(model).step == 1
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "torchs", no_dist=True)
        with pytest.raises(InvalidArgument, match="no manifest.json"):
            load(tmp_path / "torchs", model)
    with pytest.raises(InvalidArgument, match="with a COLLECTIVES_SECRET"):
        Checkpointer(tmp_path / "run").load_latest(model)


def test_the_only_checkpoint_is_there_while_it_is_replaced(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path, keep=1)
    model = Net()
    checkpointer.save(1, model, block=True)
    whole = []

    def watched(change):
        def look(*args, **options):
            whole.append(checkpointer.latest())
            return change(*args, **options)

        return look

    monkeypatch.setattr(Path, "rename", watched(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", watched(shutil.rmtree))
    model.small.data.zero_()
    checkpointer.save(1, model, block=True)
    assert len(whole) > 2 and None not in whole
    assert [each.name for each in tmp_path.iterdir()] == ["step_000000001"]
    assert not load(checkpointer.latest(), again := Net()) and not again.small.any()


# ---- Failures.


@over_gloo
def fails(ctx, folder, rank):
    """One rank can't write: all ranks raise in the next call, nothing is left, and later ones are written."""
    model, optimizer = new()
    checkpointer = Checkpointer(folder)
    train(model, optimizer)
    checkpointer.save(1, model, optimizer, block=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))  # as a full disk: the write fails
    raised = []
    try:
        begin = lambda: checkpointer.save(2, model, optimizer)  # noqa: E731
        for call in (begin, lambda: train(model, optimizer), checkpointer.wait):
            try:
                call()
                raised.append(None)
            except (OSError, RuntimeError) as error:
                raised.append((type(error).__name__, str(error)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    dist.barrier()
    left = os.listdir(folder)
    checkpointer.save(3, model, optimizer, block=True)
    return raised, left, sorted(os.listdir(folder))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk(tmp_path, rank):
    found = run(fails, 2, str(tmp_path / "store"), str(tmp_path / "run"), rank)
    for at, (raised, left, after) in enumerate(found):
        assert raised[:2] == [None, None] and left == ["step_000000001"], (raised, left)
        kind, text = raised[2]
        assert (kind == "RemoteError") == (at != rank) and (at == rank or f"rank {rank} could not write" in text), found
        assert after == ["step_000000001", "step_000000003"]


@over_gloo
def dies(ctx, folder, victim, place):
    """A rank is killed at a place of the writing, or after some milliseconds of saves; the other one sees it."""
    model, optimizer = new()
    checkpointer = Checkpointer(folder, keep=2)
    train(model, optimizer)
    checkpointer.save(1, model, optimizer, block=True)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if ctx.rank == victim:
        if isinstance(place, float):
            timer = threading.Timer(place, die)
            timer.daemon = True
            timer.start()
        else:
            setattr(module, place, die)
    for step in range(2, 200):
        train(model, optimizer, 1)
        checkpointer.save(step, model, optimizer, extra=step)
    return "survived"


def killed(tmp_path, victim, place):
    """Run `dies`; return the folder and the step that a new job resumes from, with the state of that step."""
    folder = tmp_path / f"run {victim} {place}"
    store = str(tmp_path / f"store {victim} {place}")
    with pytest.raises(RankFailure) as caught:  # the other rank raises
        run_ranks(dies, 2, store, str(folder), victim, place, fresh=True, timeout=60)
    assert "RemoteError" in str(caught.value) and "not done after" not in str(caught.value)
    (found, state, warned), _ = resume(tmp_path, folder)
    assert not found.skipped and not warned
    assert found.extra == (found.step if found.step > 1 else None)
    alone = Net()
    with one_thread():
        train(alone, torch.optim.AdamW(alone.parameters(), 0.01), 2 + found.step)
    assert not differences(state, dict(alone.state_dict()))
    return folder, found.step


@pytest.mark.parametrize("place", ["_sha256_of", "_write_file", "_flush_folder"])
def test_a_rank_that_is_killed_while_it_writes(tmp_path, place):
    folder, step = killed(tmp_path, 0, place)
    assert step == 1
    assert sorted(os.listdir(folder)) == ["step_000000001", "step_000000002.partial"]
    Checkpointer(folder).save(5, Net(), block=True)  # removes what the killed one has left
    assert sorted(os.listdir(folder)) == ["step_000000001", "step_000000005"]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_kills_at_random_moments(tmp_path, seed):
    moment = random.Random(seed)
    killed(tmp_path, moment.randrange(2), moment.uniform(0, 1.5))


# ---- torch's own background writes, and plain modules.


@over_gloo
def trains_through_saves(ctx, folder, steps):
    """torch saves in the background while the training goes on: each save has the values of its moment."""
    model, optimizer = new()
    saved = []
    for step in range(steps):
        train(model, optimizer, 1)
        if step % 20 == 0:
            state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            pending = dcp.async_save(state, checkpoint_id=f"{folder}/{step}")
            whole = get_optimizer_state_dict(model, optimizer, full_state_dict=True)
            saved.append((pending, f"{folder}/{step}", [full(model), whole]))
            for pending, path, _ in saved[:-2]:
                pending.result()
                shutil.rmtree(path, ignore_errors=True)
            saved = saved[-2:]
    state = full(model)
    for pending, path, expected in saved:
        pending.result()
        dist.barrier()
        load(path, model, optimizer)
        found = [full(model), get_optimizer_state_dict(model, optimizer, full_state_dict=True)]
        assert not differences(found, expected), path
    return state


@pytest.mark.parametrize("steps", [60, pytest.param(1500, marks=pytest.mark.thorough)])
def test_torchs_async_save(tmp_path, steps):
    found = run(trains_through_saves, 2, str(tmp_path / "store"), str(tmp_path / "run"), steps, timeout=500)
    alone = Net()
    with one_thread():
        train(alone, torch.optim.AdamW(alone.parameters(), 0.01), steps)
    for state in found:
        assert not differences(state, dict(alone.state_dict()))


@over_gloo
def with_ddp(ctx, folder):
    torch.manual_seed(1)
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    train(ddp, optimizer)
    checkpointer = Checkpointer(folder)
    checkpointer.save(7, ddp, optimizer, extra="extra", block=True)
    before = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, optimizer)
    found = checkpointer.load_latest(ddp, optimizer)
    return differences(dict(ddp.module.state_dict()), before), found.step, found.extra


def test_ddp(tmp_path):
    assert run(with_ddp, 2, str(tmp_path / "store"), str(tmp_path / "run")) == [([], 7, "extra")] * 2


def test_arguments(tmp_path):
    with pytest.raises(InvalidArgument, match="keep"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(InvalidArgument, match="step"):
        Checkpointer(tmp_path).save(-1, Net())
