"""Modules from the meta device have the values of one process with the same seed, sharded by rows and by elements."""

import functools

import pytest
import torch
from torch import nn

from collectives.errors import InvalidUsage
from collectives.sharded import ModuleWrapPolicy, ShardedDataParallel, fully_shard, materialize
from tests.ddp.training import over_gloo, run

RESETS = {
    "Linear": lambda: nn.Linear(7, 9),
    "Bilinear": lambda: nn.Bilinear(3, 4, 5),
    "Embedding": lambda: nn.Embedding(11, 4, padding_idx=2),
    "EmbeddingBag": lambda: nn.EmbeddingBag(11, 4),
    "Conv1d": lambda: nn.Conv1d(4, 6, 3, groups=2),
    "Conv2d": lambda: nn.Conv2d(3, 5, (2, 3)),
    "Conv3d": lambda: nn.Conv3d(2, 3, 2),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(3, 5, 2),
    "LayerNorm": lambda: nn.LayerNorm((3, 5)),
    "RMSNorm": lambda: nn.RMSNorm(5),
    "GroupNorm": lambda: nn.GroupNorm(2, 6),
    "BatchNorm1d": lambda: nn.BatchNorm1d(5),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
    "PReLU": lambda: nn.PReLU(3),
    "RNN": lambda: nn.RNN(3, 5, 2),
    "LSTM": lambda: nn.LSTM(3, 5, 2, bidirectional=True),
    "LSTM projected": lambda: nn.LSTM(3, 5, proj_size=2),
    "GRUCell": lambda: nn.GRUCell(3, 5),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10]),
}
INITS = {
    "uniform_": nn.init.uniform_,
    "normal_": functools.partial(nn.init.normal_, std=0.1),
    "trunc_normal_": functools.partial(nn.init.trunc_normal_, std=0.5, a=-0.7, b=0.6),
    "constant_": functools.partial(nn.init.constant_, val=3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": functools.partial(nn.init.kaiming_uniform_, a=5**0.5),
    "kaiming_normal_": functools.partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
    "orthogonal_": nn.init.orthogonal_,
    "data.normal_": lambda weight: weight.data.normal_(0.0, 0.02),
    "data.uniform_, mul_": lambda weight: weight.data.uniform_(-1, 1).mul_(0.5),
    "a row": lambda weight: weight[1].zero_(),
    "index": lambda weight: weight.__setitem__(2, 0.5),
}


class Model(nn.Module):
    """With the methods of a Hugging Face model: `_init_weights` of each module, by `init_weights`."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(13, 6, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 6)) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.words.weight

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()

    def init_weights(self):
        self.apply(self._init_weights)


def on_meta(make, cut):
    """Return a model from the meta device, in one unit; `cut`: by rows, or by elements."""
    with torch.device("meta"):
        model = make()
    if cut == "blocks":
        for block in model.blocks:
            fully_shard(block)
    return fully_shard(model)


def initialised(make, init, seed=3):
    torch.manual_seed(seed)
    model = make()
    torch.manual_seed(seed)
    with torch.no_grad():
        init(model)
    return model


def differing(sharded, plain):
    whole = {name: param.full_tensor() for name, param in sharded.named_parameters(remove_duplicate=False)}
    whole |= dict(sharded.named_buffers())
    expected = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    assert whole.keys() == expected.keys()
    return [name for name, value in whole.items() if not torch.equal(value, expected[name])]


def reset_all(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def reset_own(model):
    """Reset the modules that hold parameters or buffers themselves."""
    for module in model.modules():
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            module.reset_parameters()


@over_gloo
def resets(ctx):
    found = {}
    for name, make in RESETS.items():
        model = on_meta(make, "one").to_empty(device="cpu")
        torch.manual_seed(3)
        reset_all(model)
        found[name] = differing(model, initialised(make, reset_all))
        torch.manual_seed(3)
        found[name, "materialize"] = differing(materialize(on_meta(make, "one")), initialised(make, reset_own))
    for name, init in INITS.items():
        for rows, columns in ((12, 4), (7, 5), (3, 101)):  # the first one is cut between rows, the last one inside of a row
            make = functools.partial(nn.Linear, columns, rows, bias=False)
            if name == "orthogonal_" and rows < columns:  # torch transposes the random numbers in place
                continue

            def of_weight(model, init=init):
                nn.init.ones_(model.weight)
                init(model.weight)

            model = on_meta(make, "one").to_empty(device="cpu")
            torch.manual_seed(3)
            with torch.no_grad():
                of_weight(model)
            found[name, rows] = differing(model, initialised(make, of_weight))
            if rows != 7 and model.weight.ragged.by_rows != (rows == 12):
                found[name, rows, "cut"] = [model.weight.placements]
    return found


def init_one(module):
    module.to_empty(device="cpu", recurse=False)
    Model._init_weights(None, module)


@over_gloo
def models(ctx):
    found = {}
    for cut in ("one", "blocks"):
        ways = {
            "init_weights": lambda model: model.to_empty(device="cpu").init_weights(),
            "apply": lambda model: model.to_empty(device="cpu").apply(model._init_weights),
            "module by module": lambda model: materialize(model, param_init_fn=init_one),
        }
        for way, init in ways.items():
            model = on_meta(Model, cut)
            torch.manual_seed(3)
            init(model)
            expected = initialised(Model, Model.init_weights)
            found[way, cut] = differing(model, expected)
            found[way, cut, "tied"] = [] if model.head.weight is model.words.weight else ["untied"]
            tokens = torch.arange(6) + ctx.rank

            def run_model(model, tokens=tokens):
                hidden = model.words(tokens)
                for block in model.blocks:
                    hidden = block(hidden)
                return model.head(model.norm(hidden)).sum()

            model.forward, expected.forward = (lambda m=each: run_model(m) for each in (model, expected))
            found[way, cut, "forward"] = [] if torch.equal(model(), expected()) else ["differs"]

    with torch.device("meta"):
        model = Model()
    torch.manual_seed(3)
    model = ShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), param_init_fn=init_one)
    found["param_init_fn", "tied"] = [] if model.head.weight is model.words.weight else ["untied"]
    every = [None] * ctx.size
    torch.distributed.all_gather_object(every, [p.full_tensor().sum().item() for p in model.parameters()])
    found["param_init_fn"] = [] if all(each == every[0] for each in every) else every
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5))
    model = ShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    expected = initialised(lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5)), reset_all)
    found["ShardedDataParallel"] = differing(model, expected)

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    with pytest.raises(InvalidUsage, match="Bare is on the meta device and has no reset_parameters"):
        materialize(on_meta(Bare, "one"))
    with pytest.raises(InvalidUsage, match="param_init_fn has left parameters or buffers of Linear on the meta device"):
        materialize(on_meta(lambda: nn.Linear(2, 2), "one"), param_init_fn=lambda each: None)
    with pytest.raises(InvalidUsage, match="is on the meta device"):
        on_meta(lambda: nn.Linear(2, 2), "one")(torch.ones(2))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("function", [resets, models])
def test_values_are_those_of_one_process(function, ranks, tmp_path):
    for rank, found in enumerate(run(function, ranks, str(tmp_path / "store"))):
        assert not {name: wrong for name, wrong in found.items() if wrong}, rank
