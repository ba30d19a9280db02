"""Checkpoints of n ranks, loaded by m, or unsharded, and the reverse; damaged ones are refused by name."""

import copy
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

import collectives
from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage, RemoteError
from collectives.sharded import fully_shard, get_model_state_dict, get_optimizer_state_dict
from collectives.sharded.checkpointer import MANIFEST, load, save
from collectives.sharded.placement import RaggedShard
from tests.ddp.training import over_gloo, run
from tests.ranks import run_ranks
from tests.sharded.states import Net, differences, full_state_dict, one_thread, optimizer_of, sharded, train

RULES = {
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, foreach=False),
    "nadam": lambda params: torch.optim.NAdam(params, 0.01),
    "our sgd": lambda params: collectives.optim.SGD(params, 0.1, momentum=0.9),
}
EXTRA = {"epoch": 7, 3: {"any": torch.ones(2)}}


def states(model, optimizer):
    """Return full state dicts, of a sharded model or of an unsharded one."""
    if hasattr(model, "_sharded_unit"):
        return [dict(full_state_dict(model)), get_optimizer_state_dict(model, optimizer, full_state_dict=True)]
    return [dict(model.state_dict()), torchs.get_optimizer_state_dict(model, optimizer)]


@over_gloo
def write(ctx, folder):
    found = {}
    for rule in RULES:
        model = sharded()
        optimizer = optimizer_of(RULES[rule], model)
        train(model, optimizer)
        model.seen.fill_(ctx.rank)
        save(f"{folder}/{rule}", model, optimizer, extra=EXTRA if ctx.rank == 0 else "another rank's")
        model.seen.fill_(0)
        found[rule] = states(model, optimizer)
    with pytest.raises(InvalidUsage, match="exists"):
        save(f"{folder}/{rule}", model, optimizer)
    save(f"{folder}/{rule}", model, optimizer, overwrite=True, extra=EXTRA)
    assert not differences([dict(full_state_dict(model))], found[rule][:1])
    fresh = sharded(4)
    save(f"{folder}/fresh", fresh, torch.optim.AdamW(fresh.parameters(), 0.25))
    return found, sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/{rule}"))


@over_gloo
def read(ctx, folder, others, expected):
    """Load each checkpoint and compare; then train on, as an unsharded model does."""
    expected = pickle.loads(expected)
    for at in (*(f"{folder}/{rule}" for rule in RULES), *others):
        rule, ours = os.path.basename(at), at.startswith(folder)
        model = sharded(seed=5)
        optimizer = optimizer_of(RULES[rule], model)
        if not ours:  # over other values, of which nothing may remain
            train(model, optimizer, 1)
        extra = load(at, model, optimizer)
        assert (extra is None) == (not ours)
        assert extra is None or (extra["epoch"] == 7 and torch.equal(extra[3]["any"], torch.ones(2))), extra
        for each in ("loaded", "trained"):
            found = differences(states(model, optimizer), expected[rule][each])
            assert not found, (at, each, found)
            train(model, optimizer, 1)
    model = sharded(seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    load(f"{folder}/fresh", model, optimizer)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.25
    assert not differences(dict(full_state_dict(model)), dict(Net(4).state_dict()))


class Plain(nn.Module):
    def __init__(self, seed=2):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(6, 5)
        self.outer = nn.Linear(5, 3)

    def forward(self, x):
        return self.outer(self.inner(x))


@over_gloo
def torchs_own(ctx, folder):
    """Load what torch's FSDP2 saves; save and load our shards by torch's own functions, in the background, too."""
    model = Plain()
    mesh = init_device_mesh("cpu", (ctx.size,))
    torchs_fully_shard(model.inner, mesh=mesh)
    torchs_fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    theirs = {"model": model.state_dict(), "optim": torchs.get_optimizer_state_dict(model, optimizer)}
    dcp.save({"app": theirs}, checkpoint_id=folder)
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    ours = Plain(1)
    fully_shard(ours.inner, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    own = torch.optim.AdamW(ours.parameters(), 0.5)
    assert load(folder, ours, own) is None
    assert not differences(get_model_state_dict(ours, full_state_dict=True), whole)
    assert own.param_groups[0]["lr"] == 0.01
    state = get_optimizer_state_dict(ours, own, full_state_dict=True)["state"]
    for name, entries in theirs["optim"]["state"].items():
        assert torch.equal(state[name]["exp_avg"], entries["exp_avg"].full_tensor()), name
    for at, functions in {"torchs": torchs, "ours": collectives.sharded}.items():
        shards = {
            "model": functions.get_model_state_dict(ours), "optim": functions.get_optimizer_state_dict(ours, own),
        }  # fmt: skip
        dcp.async_save(shards, checkpoint_id=f"{folder}_{at}").result()
        nn.init.zeros_(ours.inner.weight)
        again = Plain(9)
        fully_shard(again, mesh=mesh)
        other = torch.optim.AdamW(again.parameters(), 0.5)
        loaded = {
            "model": functions.get_model_state_dict(again), "optim": functions.get_optimizer_state_dict(again, other),
        }  # fmt: skip
        dcp.load(loaded, checkpoint_id=f"{folder}_{at}")
        functions.set_model_state_dict(again, loaded["model"])
        functions.set_optimizer_state_dict(again, other, loaded["optim"])
        assert not differences(get_model_state_dict(again, full_state_dict=True), whole)
        assert not differences(get_optimizer_state_dict(again, other, full_state_dict=True)["state"], state)
        set_back = copy.deepcopy(whole)
        ours.load_state_dict(set_back)


def test_n_ranks_to_m_and_unsharded(tmp_path):
    folder, other = tmp_path / "ours", tmp_path / "torchs"
    (written, names, files), *rest = run(write, 3, str(tmp_path / "store"), str(folder))
    assert names == sorted([*RULES, "fresh"])
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", MANIFEST]
    assert not differences([found for found, *_ in rest], [written, written])
    expected = {}
    for rule in RULES:
        # Into an unsharded model: by torch alone, and by ours in one process.
        model, alone = Net(9), Net(9)
        optimizer, other_one = optimizer_of(RULES[rule], model), optimizer_of(RULES[rule], alone)
        template = {"model": model.state_dict(), "optimizer": torchs.get_optimizer_state_dict(model, optimizer)}
        dcp.load(template, checkpoint_id=folder / rule, no_dist=True)
        torchs.set_optimizer_state_dict(model, optimizer, template["optimizer"])
        assert not differences(states(model, optimizer), written[rule])
        assert load(folder / rule, alone, other_one)["epoch"] == 7
        assert not differences(states(alone, other_one), written[rule])
        dcp.save(template, checkpoint_id=other / "names" / rule, no_dist=True)
        numbers = {"net": model.state_dict(), "o": optimizer.state_dict()}
        dcp.save(numbers, checkpoint_id=other / "numbers" / rule, no_dist=True)
        with one_thread():
            train(model, optimizer, 1)
        expected[rule] = {"loaded": written[rule], "trained": states(model, optimizer)}
    others = [str(other / how / rule) for how in ("names", "numbers") for rule in RULES]
    for ranks in (2, 1):
        run(read, ranks, str(tmp_path / f"store{ranks}"), str(folder), others, pickle.dumps(expected))


def test_torchs_own(tmp_path):
    run(torchs_own, 2, str(tmp_path / "store"), str(tmp_path / "fsdp2"))


def full_disk(*_args):
    raise OSError("no space left on device")


@over_gloo
def refusals(ctx, folder):
    """Each raises on all ranks, and leaves the model as it was."""
    model = sharded()
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
        dist.barrier()
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
    damaged("manifest", lambda at: os.truncate(f"{at}/{MANIFEST}", 80))
    refused("optimizer", good, optimizers=torch.optim.SGD(model.parameters(), 0.1))
    other = Net()
    other.net[2] = nn.Linear(5, 7, bias=False)
    other.net[0] = nn.Linear(7, 6)
    other.more = nn.Parameter(torch.ones(2))
    fully_shard(other, mesh=init_device_mesh("cpu", (ctx.size,)))
    refused("other", good, model=other)
    # State of optimizers of another model: the model stays, too.
    adamw = torch.optim.AdamW(model.conv.parameters(), 0.1)
    nn.init.ones_(model.emb.weight)
    save(f"{folder}/part", model, adamw)
    model.load_state_dict(Net().state_dict())
    refused("part", optimizers=torch.optim.AdamW(model.parameters(), 0.1))
    assert not differences(dict(full_state_dict(model)), dict(Net().state_dict()))
    # A rank that fails: nothing is there, and what was before stays.
    model.seen.fill_(1)
    for name in ("good", "new"):
        with pytest.raises((RemoteError, TypeError), match="pickle"):
            save(f"{folder}/{name}", model, extra=(each for each in ()), overwrite=True)
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setattr(dcp.FileSystemWriter, "write_data", full_disk)
        error = (OSError, "no space") if ctx.rank == 1 else (RemoteError, "rank 1 could not write.*no space")
        with pytest.raises(error[0], match=error[1]):
            save(f"{folder}/new", model)
    dist.barrier()
    assert not os.path.exists(f"{folder}/new") and not os.path.exists(f"{folder}/new.partial")
    load(good, model)
    assert not model.seen.any()
    return errors


def test_refused(tmp_path):
    wanted = {
        "nothing": "no checkpoint", "flipped": "__1_0.distcp is damaged", "short": "and must have",
        "missing": "__1_0.distcp is missing", "index": ".metadata has 200 bytes", "no index": ".metadata is missing",
        "manifest": "manifest.json is damaged", "optimizer": "has no optimizer state", "part": "state has no scale",
        "other": "another model: it has no more; the model has no net.2.bias; net.0.weight is [5, 7] there",
    }  # fmt: skip
    for errors in run(refusals, 2, str(tmp_path / "store"), str(tmp_path)):
        assert errors.keys() == wanted.keys()
        for name, (kind, text) in errors.items():
            assert kind == InvalidArgument.__name__ and wanted[name] in text, (name, kind, text)


def leaves(ctx, store, folder):
    """A rank ends while the other one saves."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=ctx.rank, world_size=ctx.size)
    model = sharded()
    save(f"{folder}/before", model)
    if ctx.rank == 1:
        os._exit(3)
    with pytest.raises(RemoteError, match="could not write .*after, since other ranks have ended"):
        save(f"{folder}/after", model)
    return os.listdir(folder)


def test_a_rank_ends(tmp_path):
    found, _ = run_ranks(leaves, 2, str(tmp_path / "store"), str(tmp_path / "run"), deaths=(1,), fresh=True)
    assert found == ["before"]


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (), (3, 1, 2), (2, 2, 2, 2)])
def test_boxes(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            placement = RaggedShard((0, start, stop, whole.numel()), by_rows=False)
            boxes = list(placement.boxes(whole.shape, 1))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            parts = [whole[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] for at, size, _ in boxes]
            assert [e for part in parts for e in part.reshape(-1).tolist()] == list(range(start, stop))
            assert [e for *_, span in boxes for e in range(span.start, span.stop)] == list(range(stop - start))
