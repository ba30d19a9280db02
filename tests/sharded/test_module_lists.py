"""fully_shard([a, b]): several modules as one unit, with FSDP2's rules, bit for bit as DDP."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import collectives
from collectives.errors import InvalidArgument, InvalidUsage
from collectives.sharded import (
    MixedPrecisionPolicy,
    ShardedDataParallel,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    memory_plan,
    save,
    set_optimizer_state_dict,
)
from tests.ddp.training import over_gloo, run
from tests.sharded.training import RULES, full, same

WORDS, WIDTH = 29, 12


class Model(nn.Module):
    """An embedding and a head with one weight, a norm, and blocks between them."""

    def __init__(self, *, tied=True, recompute=None, chunks=1):
        super().__init__()
        torch.manual_seed(8)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute = recompute
        self.chunks = chunks

    def forward(self, tokens, head=True):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + (block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute))
        x = self.norm(x)
        return torch.cat([self.head(part) for part in x.chunk(self.chunks)]) if head else x


def grouped(model, **how):
    modules = [model.norm, model.embed, model.head]
    assert fully_shard(modules, **how) is modules
    returned = fully_shard((model.blocks[0], model.blocks[2]), **how)
    assert isinstance(returned, tuple) and returned[1] is model.blocks[2]
    return fully_shard(model, **how)


def tokens(rank, number):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(0, WORDS, (8,), generator=generator)


def loss_of(model, rank, number):
    batch = tokens(rank, number)
    return nn.functional.cross_entropy(model(batch).float(), batch.roll(1))


def train(model, rank, steps=4, micro=1, rule="adamw"):
    optimizer = RULES[rule](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = part == micro - 1
            else:
                model.set_requires_gradient_sync(part == micro - 1)
            loss_of(model, rank, 10 * step + part).backward()
        optimizer.step()
    return optimizer


def by_ddp(rank, micro=1, **how):
    model = Model(**how)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, collectives.fused_allreduce)
    train(ddp, rank, micro=micro)
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def prefetching(model):
    order = [model, model.embed, model.blocks[0]]
    for first, second in zip(order, order[1:], strict=False):
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])


@over_gloo
def train_all(ctx):
    found = {}
    for tied in (True, False):
        for micro in (1, 2):
            expected = by_ddp(ctx.rank, micro, tied=tied)
            for recompute in (None, False, True):
                for how in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}):
                    if how.get("reshard_after_forward") == 2 and ctx.size % 2:
                        continue
                    if recompute is not None and (how or micro > 1):
                        continue
                    model = grouped(Model(tied=tied, recompute=recompute), **how)
                    if micro == 1 and recompute is None:
                        prefetching(model)
                    train(model, ctx.rank, micro=micro)
                    found[(tied, micro, recompute, *how.values())] = same(full(model), expected)
    expected = by_ddp(ctx.rank, chunks=2)  # a module that runs twice, after the other ones
    model = grouped(Model(chunks=2))
    train(model, ctx.rank)
    ours = full(model)
    found["twice"] = [name for name in expected if not torch.allclose(ours[name], expected[name], atol=1e-6)]
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    low = [grouped(Model(), mp_policy=policy), fully_shard(Model(), mp_policy=policy)]
    for model in low:
        train(model, ctx.rank)
    found["bf16"] = [
        name for name, value in full(low[0]).items() if not torch.allclose(value, full(low[1])[name], atol=2e-2)
    ]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_bit_for_bit(ranks, tmp_path):
    for found in run(train_all, ranks, str(tmp_path / "store")):
        assert not {key: value for key, value in found.items() if value}


@over_gloo
def gathering(ctx):
    """When the unit is gathered and resharded: the shapes that its modules hold, and the all-gathers."""
    model = grouped(Model(tied=False))
    unit = model.norm._unit
    found = {"one unit": unit is model.embed._unit is model.head._unit}
    seen = []

    def watch(module, *_):
        seen.append((type(module).__name__, unit.is_unsharded_registered))

    model.blocks[1].register_forward_pre_hook(watch)
    batch = tokens(ctx.rank, 0)
    with torch.no_grad():
        model(batch)
        model.eval()(batch, head=False)
    found["between"] = seen == [("Sequential", True)] * 2
    found["after"] = not unit.is_unsharded_registered and not unit.module_group.left
    model.train()
    out = model(batch, head=False)  # head doesn't run: the end of the outermost forward reshards
    found["partly"] = not unit.is_unsharded_registered
    loss = sum(nn.functional.cross_entropy(model.head(part), part.new_zeros(len(part)).long()) for part in out.chunk(2))
    loss.backward()  # standalone calls in chunks, as in FSDP2
    plain = Model(tied=False)
    for rank in range(ctx.size):
        out = plain(tokens(rank, 0), head=False)
        zeros = torch.zeros(4, dtype=torch.long)
        (sum(nn.functional.cross_entropy(plain.head(part), zeros) for part in out.chunk(2)) / ctx.size).backward()
    with ShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    theirs = {name: param.grad for name, param in plain.named_parameters()}
    found["chunks"] = all(torch.allclose(grads[name], grad, atol=1e-6) for name, grad in theirs.items())
    model.head.zero_grad()
    found["zero_grad"] = [param.grad is None for each in (model.head, model.norm) for param in each.parameters()]
    for _ in range(2):
        try:
            model(batch.float())  # an exception in the embedding
        except RuntimeError:
            pass
    model(batch).sum().backward()
    model.embed.unshard()
    found["unshard"] = model.head.weight.shape == (WORDS, WIDTH)
    model.head.reshard()
    found["reshard"] = not unit.is_unsharded_registered
    return found


def test_when_it_is_gathered(tmp_path):
    for found in run(gathering, 2, str(tmp_path / "store")):
        assert found.pop("zero_grad") == [True, True, False, False]
        assert all(found.values()), found


@over_gloo
def states(ctx, folder):
    found = {}
    for tied in (True, False):
        model = grouped(Model(tied=tied))
        optimizer = train(model, ctx.rank)
        plain = Model(tied=tied)
        plain.load_state_dict(model.state_dict())  # the unsharded module's names
        found["full", tied] = same(full(model), dict(plain.named_parameters()))
        other = Model(tied=tied)
        for param in other.parameters():
            nn.init.zeros_(param)
        other = grouped(other)
        other.load_state_dict(plain.state_dict())
        found["loaded", tied] = same(full(other), full(model))
        state = get_model_state_dict(model)
        found["keys", tied] = sorted(state.keys() ^ plain.state_dict().keys())
        state = get_optimizer_state_dict(model, optimizer, full_state_dict=True)
        names = [name for name, _ in plain.named_parameters()]
        found["names", tied] = sorted(set(names) ^ set(state["state"]))
        second = RULES["adamw"](other.parameters())
        set_optimizer_state_dict(other, second, state)
        path = f"{folder}/{tied}"
        save(path, model, optimizer)
        third = grouped(Model(tied=tied))
        fourth = RULES["adamw"](third.parameters())
        load(path, third, fourth)
        for each, its in ((model, optimizer), (other, second), (third, fourth)):
            its.zero_grad()
            loss_of(each, ctx.rank, 77).backward()
            its.step()
        found["went on", tied] = same(full(other), full(model)) + same(full(third), full(model))
        with torch.device("meta"):
            meta = grouped(Model(tied=tied))
        meta.load_state_dict(plain.state_dict())
        found["meta", tied] = same(full(meta), dict(plain.named_parameters()))
        with torch.device("meta"):
            meta = grouped(Model(tied=tied))
        missing = {name: value for name, value in plain.state_dict().items() if name != "norm.bias"}
        try:
            meta.load_state_dict(missing, strict=False)
            found["missing", tied] = "nothing was raised"
        except InvalidUsage as error:
            found["missing", tied] = [] if "norm.bias" in str(error) or "0.bias" in str(error) else str(error)
        with torch.device("meta"):
            meta = grouped(Model(tied=tied))
        meta.to_empty(device="cpu")
        meta.load_state_dict(plain.state_dict())
        found["to_empty", tied] = same(full(meta), dict(plain.named_parameters()))
    return found


def test_state_dicts(tmp_path):
    for found in run(states, 2, str(tmp_path / "store"), str(tmp_path)):
        assert not {key: value for key, value in found.items() if value}


def raised(call):
    try:
        call()
    except (InvalidArgument, InvalidUsage) as error:
        return str(error)
    return "nothing was raised"


@over_gloo
def checks(ctx):
    model = Model(tied=False)
    sharded = Model(tied=False)
    fully_shard(sharded.norm)
    tied = Model()
    found = {
        "an empty list": raised(lambda: fully_shard([])), "int": raised(lambda: fully_shard([model.norm, 3])),
        "LayerNorm is in the list twice": raised(lambda: fully_shard([model.norm, model.norm])),
        "ModuleList has no forward": raised(lambda: fully_shard([model.norm, model.blocks])),
        "this LayerNorm is sharded already": raised(lambda: fully_shard([sharded.norm, sharded.head])),
    }  # fmt: skip
    fully_shard([tied.head, tied.norm])
    found["tied to 0.weight of [Linear, LayerNorm]"] = raised(lambda: fully_shard(tied))
    nested = Model(tied=False)
    fully_shard([nested.blocks[0], nested.blocks[0][0]])  # the inner one is of the outer one, as in FSDP2
    single = len({id(each._unit) for each in nested.modules() if hasattr(each, "_unit")}) == 1
    grouped(model)
    model.norm.register_parameter("scale", nn.Parameter(torch.ones(3)))
    found["scale of this LayerNorm was added"] = raised(lambda: model(tokens(ctx.rank, 0)))
    return found, single, not hasattr(nested.blocks[0][0], "_unit")


def test_checks(tmp_path):
    for found, *others in run(checks, 2, str(tmp_path / "store")):
        assert all(others)
        for text, message in found.items():
            assert text in message, (text, message)


@over_gloo
def plans(ctx):
    sharded = grouped(Model(tied=False))
    planned = Model(tied=False)
    units = [[planned.norm, planned.embed, planned.head], [planned.blocks[0], planned.blocks[2]]]
    return memory_plan(sharded, ctx.size, "adamw"), memory_plan(planned, ctx.size, "adamw", units=units, overlap=False)


def test_memory_plan(tmp_path):
    for ours, given in run(plans, 2, str(tmp_path / "store")):
        assert ours == given
        assert [count for _, count, _ in ours.units] == [156, 749, 312]
