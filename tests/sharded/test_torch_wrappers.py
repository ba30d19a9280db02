"""torch's data parallelism around modules of ours, and ours around torch's; the order in which modules are sharded."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard  # bound before anything is sharded
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives.errors import InvalidUsage
from collectives.sharded import ShardedDataParallel, fully_shard
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.sharded.training import RULES, full, same, steps_of


def raised(call):
    try:
        call()
    except InvalidUsage as error:
        return str(error)
    return "nothing was raised"


TORCH = {
    "DistributedDataParallel": DistributedDataParallel, "FullyShardedDataParallel": lambda model:
    FullyShardedDataParallel(model, device_id=torch.device("cpu")), "fully_shard": torch_fully_shard,
    "ours": collectives.DistributedDataParallel, "a list": lambda model: torch_fully_shard([model[0], model[2]]),
}  # fmt: skip


@over_gloo
def around_ours(ctx):
    found = {}
    for name, wrap in TORCH.items():
        for whole in (True, False):
            model = make_model()
            fully_shard(model[0])
            if whole:
                fully_shard(model)
            found[name, whole] = raised(lambda wrap=wrap, model=model: wrap(model))
            # ... and the module is as it was
            plain = [each for each in model[1:].parameters()] if not whole else []
            steps_of(model, RULES["sgd"](model.parameters()), 2, ctx.rank)
            for each in plain:
                dist.broadcast(each.data, 0)
            if not whole and name == "fully_shard":
                fully_shard(model)  # nothing of torch's is left on it
    return found


def test_torch_around_ours(tmp_path):
    for found in run(around_ours, 2, str(tmp_path / "store")):
        for key, text in found.items():
            assert "was sharded by collectives.sharded" in text, (key, text)
        assert "0, a Linear, was sharded" in found["DistributedDataParallel", False]
        assert "fully_shard can't take this Sequential: it, a Sequential," in found["fully_shard", True]


def inside_ours(wrapped):
    model = nn.Sequential(nn.Linear(3, 3), wrapped)
    return raised(lambda: fully_shard(model)), raised(lambda: ShardedDataParallel(wrapped))


@over_gloo
def around_torch(ctx):
    wrapped = {
        "DistributedDataParallel": DistributedDataParallel(nn.Linear(3, 3)),
        "FullyShardedDataParallel": FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu")),
        "torch.distributed.fsdp.fully_shard": torch_fully_shard(nn.Linear(3, 3)),
    }
    found = {name: inside_ours(each) for name, each in wrapped.items()}
    inner = wrapped["torch.distributed.fsdp.fully_shard"]
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), inner), ignored_params=set(inner.parameters()))
    model(torch.ones(2, 3)).sum().backward()
    found["ignored"] = isinstance(model[1], FSDPModule) and all(param.grad is not None for param in model.parameters())
    return found


def test_ours_around_torch(tmp_path):
    for found in run(around_torch, 2, str(tmp_path / "store")):
        assert found.pop("ignored")
        for name, texts in found.items():
            assert all(f"under torch's {name}" in text for text in texts), (name, texts)
            assert "1 is under" in texts[0] and "it is under" in texts[1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        return self.out(self.inner(x))


@over_gloo
def outermost_first(ctx):
    torch.manual_seed(1)
    model, expected = Block(), None
    fully_shard(model)
    found = {
        "inner": raised(lambda: fully_shard(model.inner[0])), "fsdp1": raised(lambda: ShardedDataParallel(model.inner)),
        "holder": raised(lambda: fully_shard(nn.Sequential(nn.Linear(5, 12), model.inner))),
    }  # fmt: skip
    model.unshard()
    found["while unsharded"] = raised(lambda: fully_shard(model.inner[0]))
    model.reshard()
    steps_of(model, RULES["sgd"](model.parameters()), 2, ctx.rank)
    torch.manual_seed(1)
    right = Block()
    fully_shard(right.inner[0])
    fully_shard(right)
    steps_of(right, RULES["sgd"](right.parameters()), 2, ctx.rank)
    expected = same(full(model), full(right))
    with torch.device("meta"):
        meta = fully_shard(Block())
    meta.to_empty(device="cpu")  # whose shards are new objects
    found["meta"] = raised(lambda: fully_shard(meta.inner[0]))
    model(batch(0, ctx.rank)[0])
    return found, expected


def test_outermost_first_is_an_error(tmp_path):
    for found, differing in run(outermost_first, 2, str(tmp_path / "store")):
        assert not differing
        for case, text in found.items():
            assert "of a Block that was sharded before: inner modules are sharded first" in text, (case, text)
        assert "weight of this Linear is inner.0.weight of a Block" in found["inner"]
        assert "call fully_shard on this Linear, and then on the Block" in found["meta"]
