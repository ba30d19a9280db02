"""Checkpoints that are written while the training goes on: whole or skipped, the newest kept, bit for bit on resume."""

import contextlib
import os
import resource
import shutil
import signal
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from collectives.errors import InvalidArgument, RemoteError
from collectives.sharded import Checkpointer, get_model_state_dict, load
from collectives.sharded.state import background_writer
from collectives.sharded.state.manifest import MANIFEST, check_files
from tests.ddp.training import over_gloo, run
from tests.ranks import Died, run_ranks
from tests.sharded.states import Net, differences, sharded, train
from tests.variables import variables


def new(comm):
    model = sharded(comm=comm)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def full(model):
    return get_model_state_dict(model, full_state_dict=True)


def saves(ctx, folder):
    """Training goes on while checkpoints are written; each has the state of its save, and two are kept."""
    model, optimizer = new(ctx.communicator())
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


def resumes(ctx, folder, steps=None):
    model, optimizer = new(ctx.communicator())
    train(model, optimizer)  # of other values, and with state in the optimizer
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = Checkpointer(folder).load_latest(model, optimizer)
        except InvalidArgument as error:
            return str(error)
    return found, full(model), [str(each.message) for each in caught]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    states, names = run_ranks(saves, 2, str(folder))[0]
    assert sorted(names) == ["step_000000003", "step_000000004"]
    return folder, states


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_resume_on_any_number_of_ranks(written, ranks):
    folder, states = written
    for found, state, warned in run_ranks(resumes, ranks, str(folder)):
        assert found.step == 4 and found.extra == {"step": 4} and not found.skipped and not warned
        assert not differences([state], [states[4]])


def test_other_readers_take_it(written):
    folder, states = written
    path = Checkpointer(folder).latest()
    state = {"model": dict(Net().state_dict())}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert not differences([state["model"]], [states[4]])
    model = Net()
    assert load(path, model) == {"step": 4} and not differences([dict(model.state_dict())], [states[4]])
    assert os.system(f"cd {path} && sha256sum --quiet -c checksums.sha256") == 0


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "flipped": (lambda path: flip(path / "__1_0.distcp"), "__1_0.distcp is damaged"),
    "flipped index": (lambda path: flip(path / ".metadata"), ".metadata is damaged"),
    "flipped manifest": (lambda path: flip(path / MANIFEST), "manifest|checksum|missing|bytes"),
    "truncated": (lambda path: os.truncate(path / "__0_0.distcp", 100), "has 100 bytes"),
    "torn manifest": (lambda path: os.truncate(path / MANIFEST, 100), "is damaged"),
    "missing": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "was never completed"),
    "empty": (lambda path: [each.unlink() for each in path.iterdir()], "was never completed"),
}


def test_damaged_checkpoints_are_found(written, tmp_path):
    for name, (damage, text) in DAMAGES.items():
        copy = shutil.copytree(written[0], tmp_path / name)
        damage(copy / "step_000000004")
        with pytest.raises(InvalidArgument, match=text):
            check_files(copy / "step_000000004", 4)
        assert Checkpointer(copy).latest() == copy / "step_000000003"


def test_resume_skips_damaged_checkpoints(written, tmp_path):
    copy = shutil.copytree(written[0], tmp_path / "copy")
    flip(copy / "step_000000004" / "__1_0.distcp")
    (first, state, warned), (second, _, silent) = run_ranks(resumes, 2, str(copy))
    assert first.step == second.step == 3 and first.skipped == second.skipped
    assert "__1_0.distcp is damaged" in first.skipped["step_000000004"]
    assert len(warned) == 1 and "step_000000004" in warned[0] and "is damaged" in warned[0] and not silent
    assert not differences([state], [written[1][3]])
    flip(copy / "step_000000003" / MANIFEST)
    for text in run_ranks(resumes, 2, str(copy)):
        assert "no checkpoint" in text and "step_000000004" in text and "step_000000003" in text


def test_a_secret_is_checked(written, tmp_path):
    with variables(COLLECTIVES_SECRET="another secret of 16 bytes"):
        with pytest.raises(InvalidArgument, match="without the job's COLLECTIVES_SECRET"):
            check_files(written[0] / "step_000000004", 4)
        model = Net()
        Checkpointer(tmp_path).save(1, model, block=True)
        check_files(tmp_path / "step_000000001", 1)
    with pytest.raises(InvalidArgument, match="COLLECTIVES_SECRET"):
        check_files(tmp_path / "step_000000001", 1)


# ---- Failures.


def fails(ctx, folder, rank):
    """One rank can't write: all ranks raise in the next call, nothing is left, and later ones are written."""
    model, optimizer = new(ctx.communicator())
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
    left = os.listdir(folder)
    checkpointer.save(3, model, optimizer, block=True)
    return raised, left, sorted(os.listdir(folder))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk(tmp_path, rank):
    found = run_ranks(fails, 2, str(tmp_path), rank)
    for at, (raised, left, after) in enumerate(found):
        assert raised[:2] == [None, None] and left == ["step_000000001"], (raised, left)
        kind, text = raised[2]
        assert (kind == "RemoteError") == (at != rank) and (at == rank or f"rank {rank} could not write" in text), found
        assert after == ["step_000000001", "step_000000003"]


def dies(ctx, folder, place):
    """A rank is killed at a place of the writing."""
    model, optimizer = new(ctx.communicator())
    checkpointer = Checkpointer(folder)
    train(model, optimizer)
    checkpointer.save(1, model, optimizer, block=True)
    train(model, optimizer)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    if ctx.rank == 0:
        if place == "write":
            background_writer.DeferredWriter.write = die
        else:
            setattr(background_writer, place, die)
    with contextlib.suppress(RemoteError):
        checkpointer.save(2, model, optimizer, block=True)
    return os.listdir(folder)


@pytest.mark.parametrize("place", ["write", "sha256_of", "write_manifest"])
def test_a_rank_that_is_killed_while_it_writes(tmp_path, place):
    found = run_ranks(dies, 2, str(tmp_path), place, deaths=[0], fresh=True)
    assert found[0] == Died(signal=9, exitcode=0)
    assert sorted(os.listdir(tmp_path)) == ["step_000000001", "step_000000002.partial"]
    resumed = run_ranks(resumes, 1, str(tmp_path))[0]
    assert resumed[0].step == 1
    Checkpointer(tmp_path).save(5, Net(), block=True)  # removes what the killed one has left
    assert sorted(os.listdir(tmp_path)) == ["step_000000001", "step_000000005"]


# ---- Other ranks than before, as in an elastic job.


def change(ctx, folder, survives):
    """Ranks 0 and 1 save, then ranks 0 to 2 do, over a new communicator; one of the first may not write its part."""
    everyone = ctx.communicator()
    first = everyone.split(0 if ctx.rank < 2 else 1)
    checkpointer = Checkpointer(folder)
    if ctx.rank == 1 and not survives:  # as if it had died: rank 0 is never to hear of its part
        write = background_writer.BackgroundWriter._write
        background_writer.BackgroundWriter._write = lambda self: None if self.step == 1 else write(self)
    if ctx.rank < 2:
        model, optimizer = new(first)
        train(model, optimizer)
        checkpointer.save(1, model, optimizer)
    first.close()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = new(everyone)
        train(model, optimizer)
        checkpointer.save(2, model, optimizer)
        checkpointer.wait()
    return sorted(os.listdir(folder)), [str(each.message) for each in caught]


@pytest.mark.parametrize("survives", [True, False])
def test_ranks_that_change(tmp_path, survives):
    found = run_ranks(change, 3, str(tmp_path), survives, fresh=True)
    names, said = zip(*found, strict=True)
    assert names[0] == ["step_000000001", "step_000000002"][not survives :]
    assert said[1:] == ([], []) and len(said[0]) == (not survives)
    if not survives:
        assert "step_000000001 was not written: other ranks have not written their parts" in said[0][0]
    assert run_ranks(resumes, 2, str(tmp_path))[0][0].step == 2


# ---- Plain modules.


@over_gloo
def with_ddp(ctx):
    torch.manual_seed(1)
    folder = os.environ["CHECKPOINTS"]
    ddp = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    train(ddp, optimizer)
    checkpointer = Checkpointer(folder)
    checkpointer.save(7, ddp, optimizer, extra="extra", block=True)
    before = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, optimizer)
    torch.distributed.barrier()
    found = checkpointer.load_latest(ddp, optimizer)
    return {"loaded": differences([dict(ddp.module.state_dict())], [before]), "step": found.step - 7, "path": found[3]}


def test_ddp(tmp_path):
    for found in run(with_ddp, 2, str(tmp_path / "store"), env={"CHECKPOINTS": str(tmp_path / "checkpoints")}):
        assert not any(found.values()), found


def test_arguments(tmp_path):
    with pytest.raises(InvalidArgument, match="keep"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(InvalidArgument, match="step"):
        Checkpointer(tmp_path).save(-1, Net())
