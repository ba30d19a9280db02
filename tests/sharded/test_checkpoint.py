"""Checkpoints of n ranks, loaded by m, or unsharded, and the reverse; damaged ones are refused by name."""

import contextlib
import os
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict as torchs_get
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as torchs_set
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

import collectives
from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage, RemoteError
from collectives.sharded import MixedPrecisionPolicy, fully_shard
from collectives.sharded.state.checkpoint import load, save
from collectives.sharded.state.checkpoint_writer import CHECKSUMS
from collectives.sharded.state.model import get_model_state_dict
from collectives.sharded.state.optimizer import get_optimizer_state_dict
from collectives.sharded.state.shard_tensor import boxes
from tests.ddp.training import over_gloo, run
from tests.ranks import run_ranks
from tests.sharded.states import Net, differences, optimizer_of, sharded, train

RULES = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    "our sgd": lambda params: collectives.optim.SGD(params, 0.1, momentum=0.9),
}


def states(model, optimizer):
    """Return full state dicts, of a sharded model or of an unsharded one."""
    if hasattr(model, "unshard"):
        return [
            get_model_state_dict(model, full_state_dict=True),
            get_optimizer_state_dict(model, optimizer, full_state_dict=True),
        ]
    return [dict(model.state_dict()), torchs_get(model, optimizer)]


def write(ctx, folder):
    """Without torch.distributed: its communicator is all that there is."""
    comm = ctx.communicator()
    found = {}
    for rule in RULES:
        model = sharded(comm=comm)
        optimizer = optimizer_of(RULES[rule], model)
        train(model, optimizer)
        save(f"{folder}/{rule}", model, optimizer, extra={"epoch": 7, 3: {"any": torch.ones(2)}})
        found[rule] = states(model, optimizer)
    with pytest.raises(InvalidUsage, match="exists"):
        save(f"{folder}/{rule}", model, optimizer)
    save(f"{folder}/{rule}", model, optimizer, overwrite=True, extra={"epoch": 7, 3: {"any": torch.ones(2)}})
    assert not differences([dict(model.state_dict())], found[rule][:1])
    return found, sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/{rule}"))


def read(ctx, folder, others, expected):
    """Load each checkpoint and compare; then train on, as an unsharded model does."""
    comm = ctx.communicator()
    expected = pickle.loads(expected)
    for at in (*(f"{folder}/{rule}" for rule in RULES), *others):
        rule, ours = os.path.basename(at), at.startswith(folder)
        # From the meta device, and over other values, of which nothing may remain.
        model = sharded(seed=5, comm=comm, device="meta" if ours else None)
        if ours:
            with pytest.raises(InvalidUsage, match="table is on the meta"):
                load(at, model)
            model.table = torch.arange(3.0)
        optimizer = optimizer_of(RULES[rule], model)
        if not ours:
            train(model, optimizer, 1)
        extra = load(at, model, optimizer)
        assert extra is None or (extra["epoch"] == 7 and torch.equal(extra[3]["any"], torch.ones(2))), extra
        assert (extra is None) == (not ours)
        for each in ("loaded", "trained"):
            found = differences(states(model, optimizer), expected[rule][each])
            assert not found, (at, each, found)
            train(model, optimizer, 1)


@over_gloo
def write_by_torch(ctx, folder):
    """Load what torch's FSDP2 saves; save and load our shards by torch's own functions."""
    model = Plain()
    torchs_fully_shard(model.inner)
    torchs_fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    dcp.save({"app": {"model": model.state_dict(), "optim": torchs_get(model, optimizer)}}, checkpoint_id=folder)
    full = {name: value.full_tensor() for name, value in model.state_dict().items()}
    ours = Plain(1)
    fully_shard(ours.inner, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(ours)
    mine = torch.optim.AdamW(ours.parameters(), 0.5)
    assert load(folder, ours, mine) is None
    assert not differences(get_model_state_dict(ours, full_state_dict=True), full)
    assert mine.param_groups[0]["lr"] == 0.01
    got = get_optimizer_state_dict(ours, mine, full_state_dict=True)["state"]
    for name, state in torchs_get(model, optimizer)["state"].items():
        assert torch.equal(got[name]["exp_avg"], state["exp_avg"].full_tensor()), name
    # Torch's own functions over shards, in place.
    shards = {"model": get_model_state_dict(ours), "optim": get_optimizer_state_dict(ours, mine)}
    dcp.save(shards, checkpoint_id=f"{folder}_shards")
    nn.init.zeros_(ours.inner.weight)
    dcp.load({"model": get_model_state_dict(ours)}, checkpoint_id=f"{folder}_shards")
    assert not differences(get_model_state_dict(ours, full_state_dict=True), full)


class Plain(nn.Module):
    def __init__(self, seed=2):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(6, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(self.inner(x))


@contextlib.contextmanager
def one_thread():
    """Compute as the ranks do, whose sums are of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_n_ranks_to_m_and_unsharded(tmp_path):
    folder, other = tmp_path / "ours", tmp_path / "torchs"
    (written, names, files), *rest = run(write, 3, str(folder))
    assert names == sorted(RULES)
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", CHECKSUMS]
    assert not differences([found for found, *_ in rest], [written, written])
    expected = {}
    for rule in RULES:
        # Into an unsharded model: by torch alone, and by ours in one process.
        model, alone = Net(9), Net(9)
        optimizer, other_one = optimizer_of(RULES[rule], model), optimizer_of(RULES[rule], alone)
        template = {"model": model.state_dict(), "optimizer": torchs_get(model, optimizer)}
        dcp.load(template, checkpoint_id=folder / rule, no_dist=True)
        torchs_set(model, optimizer, template["optimizer"])
        assert not differences(states(model, optimizer), written[rule])
        assert load(folder / rule, alone, other_one)["epoch"] == 7
        assert not differences(states(alone, other_one), written[rule])
        dcp.save(template, checkpoint_id=other / "names" / rule, no_dist=True)
        dcp.save({"net": model.state_dict(), "o": optimizer.state_dict()},
                 checkpoint_id=other / "numbers" / rule, no_dist=True)  # fmt: skip
        with one_thread():
            train(model, optimizer, 1)
        expected[rule] = {"loaded": written[rule], "trained": states(model, optimizer)}
    others = [str(other / how / rule) for how in ("names", "numbers") for rule in RULES]
    for ranks in (2, 1):
        run(read, ranks, str(folder), others, pickle.dumps(expected))


def test_torchs_own(tmp_path):
    run(write_by_torch, 2, str(tmp_path / "store"), str(tmp_path / "fsdp2"))


def full_disk(*_args):
    raise OSError("no space left on device")


def refusals(ctx, folder):
    """Each raises on all ranks, and leaves the model as it was."""
    comm = ctx.communicator()
    model = sharded(comm=comm)
    good = f"{folder}/good"
    save(good, model)
    errors = {}

    def refused(name, at=None, model=model, **how):
        with pytest.raises(CollectivesError) as caught:
            load(at or f"{folder}/{name}", model, **how)
        errors[name] = type(caught.value).__name__, str(caught.value)

    def damaged(name, damage):
        if ctx.rank == 0:
            shutil.copytree(good, f"{folder}/{name}")
            damage(f"{folder}/{name}")
        ctx.barrier()
        refused(name)

    def flip(file, at):
        with open(file, "r+b") as stream:
            stream.seek(at)
            byte = stream.read(1)[0]
            stream.seek(at)
            stream.write(bytes([byte ^ 1]))

    refused("nothing")
    damaged("flipped", lambda at: flip(f"{at}/__1_0.distcp", 700))
    damaged("short", lambda at: os.truncate(f"{at}/__0_0.distcp", 900))
    damaged("missing", lambda at: os.unlink(f"{at}/__1_0.distcp"))
    damaged("index", lambda at: os.truncate(f"{at}/.metadata", 200))
    damaged("no index", lambda at: os.unlink(f"{at}/.metadata"))
    damaged("sums", lambda at: os.truncate(f"{at}/{CHECKSUMS}", 80))
    if ctx.rank == 0:
        os.mkdir(f"{folder}/killed.partial")
    ctx.barrier()
    refused("killed")
    refused("optimizer", good, optimizers=torch.optim.SGD(model.parameters(), 0.1))
    other = Net()
    other.net[2] = nn.Linear(5, 7, bias=False)
    other.net[0] = nn.Linear(7, 6)
    other.more = nn.Parameter(torch.ones(2))
    fully_shard(other, comm=comm)
    refused("other", good, model=other)
    refused("ranks", good if ctx.rank else f"{folder}/flipped")
    assert not differences(model.state_dict(), Net().state_dict())
    # A rank that fails: nothing is there, and what was before stays.
    model.seen.fill_(1)
    for name in ("good", "new"):
        with pytest.raises((RemoteError, TypeError), match="pickle"):
            save(f"{folder}/{name}", model, extra=(each for each in ()), overwrite=True)
    for step, what in (("prepare_local_plan", "plan its part"), ("write_data", "write its part")):
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 1:
                patch.setattr(dcp.FileSystemWriter, step, full_disk)
            error = (OSError, "no space") if ctx.rank == 1 else (RemoteError, f"rank 1 could not {what}.*no space")
            with pytest.raises(error[0], match=error[1]):
                save(f"{folder}/new", model)
    assert not os.path.exists(f"{folder}/new") and not os.path.exists(f"{folder}/new.partial")
    load(good, model)
    assert not model.seen.any()
    return errors


def test_refused(tmp_path):
    wanted = {
        "nothing": "is not there", "flipped": "__1_0.distcp is damaged", "short": "and must have",
        "missing": "__1_0.distcp is missing", "index": ".metadata is damaged", "no index": "has no .metadata",
        "sums": "is damaged: it has no .metadata", "killed": "killed.partial", "optimizer": "has no optimizer state",
        "other": "another model: it has no more; the model has no net.2.bias; net.0.weight is [5, 7] there and [6, 7]",
        "ranks": "don't make the same call",
    }  # fmt: skip
    for errors in run(refusals, 2, str(tmp_path)):
        assert errors.keys() == wanted.keys()
        for name, (kind, text) in errors.items():
            assert kind == ("InvalidUsage" if name == "ranks" else InvalidArgument.__name__), (name, kind, text)
            assert wanted[name] in text, (name, text)


def leave(ctx, folder):
    """A rank dies while the others write."""
    comm = ctx.communicator()
    model = sharded(comm=comm)
    save(f"{folder}/before", model)
    if ctx.rank == 1:
        dcp.FileSystemWriter.write_data = lambda *_: os._exit(3)
    with pytest.raises(RemoteError):
        save(f"{folder}/after", model)
    return os.listdir(folder)


def test_a_rank_dies(tmp_path):
    found, _ = run_ranks(leave, 2, str(tmp_path), deaths=(1,), fresh=True)
    assert found == ["before"]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (), (3, 1, 2), (2, 2, 2, 2)])
def test_boxes(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = boxes(shape, start, stop)
            assert len(found) <= max(1, 2 * len(shape) - 1)
            parts = [whole[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))] for at, sizes in found]
            assert [e for part in parts for e in part.reshape(-1).tolist()] == list(range(start, stop))


def test_save_needs_units_among_ranks(tmp_path):
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # DCP's, that this is one process
        save(tmp_path / "alone", model)
        assert load(tmp_path / "alone", model) is None
    assert not dist.is_initialized()
