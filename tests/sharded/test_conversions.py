"""Conversions that are refused leave a module as it was; those that aren't, convert all of it."""

import functools

import torch
from torch import nn

from collectives.errors import InvalidArgument
from collectives.sharded import fully_shard
from tests.ddp.training import batch, over_gloo, run
from tests.sharded.training import RULES, full, same


class Net(nn.Module):
    """Plain modules, buffers and an LSTM before, between and behind the units."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))
        self.unit = nn.Linear(8, 8)
        self.rnn = nn.LSTM(8, 8)
        self.other = nn.Linear(8, 5)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.other(self.rnn(self.unit(self.first(x)).unsqueeze(0))[0].squeeze(0)) * self.scale[0]


def plain_root():
    model = Net()
    fully_shard(model.unit), fully_shard(model.other)
    return model


def sharded_root():
    return fully_shard(plain_root())


def inner_first():
    """All but the last are converted before the one that refuses."""
    model = Net()
    for each in (model.first, model.rnn, model.unit, model.other):
        fully_shard(each)
    return fully_shard(model)


def with_setting(switch, convert):
    """Return a conversion while one of torch's settings is on."""

    def call(model):
        switch(True)
        try:
            convert(model)
        finally:
            switch(False)

    return call


swapping = functools.partial(with_setting, torch.__future__.set_swap_module_params_on_conversion)
replacing = functools.partial(with_setting, torch.__future__.set_overwrite_module_params_on_conversion)


def at_last(model):
    """Of all tensors only the last unit's are made double."""
    wanted = {id(each) for param in model.other.parameters() for each in (param, param.grad)}
    model._apply(lambda tensor: tensor.double() if id(tensor) in wanted else tensor.clone())


CONVERSIONS = {
    "half": lambda model: model.half(), "bf16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(), "at last": at_last,
    "replacing": replacing(lambda model: model.double()),
    "replacing, at last": replacing(at_last), "by a unit": lambda model: model.unit.half(),
}  # fmt: skip


def held(model):
    """Return what a model holds: objects, addresses, dtypes and values."""
    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.data_ptr(), tensor.grad.dtype)
        values = tensor.detach().clone(), None if grad is None else tensor.grad.clone()
        found[name] = (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, grad), values
    return found


def equal(first, second):
    """Return the names whose tensors differ."""
    assert first.keys() == second.keys()
    return [name for name, (form, values) in first.items() if form != second[name][0] or not all(
        a is b or torch.equal(a, b) for a, b in zip(values, second[name][1], strict=True))]  # fmt: skip


def step(model, optimizer, rank, number):
    x, y = batch(number, rank)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


@over_gloo
def convert_all(ctx):
    found = {}
    for make in (plain_root, sharded_root, inner_first):
        model, untouched = make(), make()
        optimizers = [RULES["adamw"](each.parameters()) for each in (model, untouched)]
        for number, (name, convert) in enumerate(CONVERSIONS.items()):
            step(model, optimizers[0], ctx.rank, number)
            step(untouched, optimizers[1], ctx.rank, number)
            before = held(model)
            try:
                convert(model)
            except InvalidArgument as error:
                found[make.__name__, name] = [] if "after it was sharded as torch.float32" in str(error) else str(error)
            else:
                found[make.__name__, name] = "was not refused"
            found[make.__name__, name, "changed"] = equal(before, held(model))
        for number in range(2):
            step(model, optimizers[0], ctx.rank, 10 + number)
            step(untouched, optimizers[1], ctx.rank, 10 + number)
        for call in (lambda each: each.float(), lambda each: each.to("cpu")):
            call(model)  # and what changes nothing is no error
        found[make.__name__, "training"] = same(full(model), full(untouched))
    return found


def test_refused_conversions_change_nothing(tmp_path):
    for found in run(convert_all, 2, str(tmp_path / "store")):
        assert not {key: value for key, value in found.items() if value}


@over_gloo
def swap(ctx):
    model = inner_first()
    before = {name: (value.dtype, value.clone()) for name, value in model.state_dict().items()}
    try:
        swapping(lambda each: each.double())(model)
    except (InvalidArgument, RuntimeError) as error:
        message = str(error)
    after = model.state_dict()
    kinds = all(after[name].dtype is kind for name, (kind, _) in before.items())
    same_values = kinds and all(torch.equal(after[name], value) for name, (_, value) in before.items())
    model(batch(0, ctx.rank)[0]).sum().backward()
    return message, same_values


def test_refused_conversions_by_swapped_tensors(tmp_path):
    for message, same_values in run(swap, 2, str(tmp_path / "store")):
        assert message and same_values
