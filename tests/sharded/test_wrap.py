"""Wrap policies: the same units as torch's FSDP1 makes, and what is no policy."""

import copy
import importlib
from functools import partial

import pytest
import torch.distributed.fsdp.wrap as theirs
from torch import nn

import collectives.sharded
from collectives.errors import InvalidArgument

ours = importlib.import_module("collectives.sharded.wrap")  # the package's own `wrap` is the function


class Mark(nn.Module):
    """Stands for FSDP1's wrapper in torch's own code."""

    made: list = []

    def __init__(self, module, **settings):
        super().__init__()
        self.module = module
        Mark.made.append((module.name, settings))


class Shared(nn.Module):
    """Stands in two places; torch's functions would wrap it twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.first = nn.Sequential(self.inner, nn.Linear(5, 6))
        self.second = nn.Sequential(nn.ReLU(), self.inner)


def named(model):
    """Give every module the name by which it is found, so that a copy has it too."""
    for name, module in model.named_modules():
        module.name = name
    return model


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.ModuleDict(
        {"table": nn.Embedding(30, 8), "layers": nn.TransformerEncoder(layer, 2), "out": nn.Linear(8, 30)}
    )


def tree():
    return nn.Sequential(
        nn.Linear(3, 4),
        nn.ModuleList([nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2)), nn.Linear(9, 9)]),
        nn.Sequential(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)), nn.Linear(6, 6, bias=False)),
        nn.MultiheadAttention(8, 2),
    )


POLICIES = {
    "always": lambda of: of.always_wrap_policy,
    "lambda": lambda of: partial(of.lambda_auto_wrap_policy, lambda_fn=lambda module: hasattr(module, "bias")),
    "transformer": lambda of: partial(
        of.transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer, nn.Sequential}
    ),
    "module": lambda of: of.ModuleWrapPolicy({nn.Linear, nn.Sequential}),
    "custom": lambda of: of.CustomPolicy(lambda module: {"depth": 1} if isinstance(module, nn.Linear) else False),
    "or": lambda of: partial(
        of._or_policy,
        policies=[of.ModuleWrapPolicy([nn.Linear]), partial(of.size_based_auto_wrap_policy, min_num_params=150)],
    ),
    **{
        f"size {size}": lambda of, size=size: partial(of.size_based_auto_wrap_policy, min_num_params=size)
        for size in (0, 1, 57, 90, 111, 150, 288, 600)
    },
    "size, others": lambda of: partial(
        of.size_based_auto_wrap_policy,
        min_num_params=40,
        force_leaf_modules={nn.Sequential},
        exclude_wrap_modules={nn.Linear},
    ),
}


def units_by_torch(model, policy, ignored):
    """Give the names and settings of what torch's own code wraps, in its order."""
    Mark.made = []
    ignored = {part for one in ignored for part in one.modules()}
    if isinstance(policy, theirs._Policy):
        chosen = policy._run_policy(model, ignored, {})
        theirs._post_order_apply(model, theirs._construct_wrap_fn(model, chosen, Mark))
    else:
        parameters = {one for part in ignored for one in part.parameters()}
        theirs._recursive_wrap(model, policy, Mark, ignored, parameters, only_wrap_children=True)
    return Mark.made


@pytest.mark.parametrize("ignore", [(), ("0", "2.0", "layers.layers.1")], ids=["all", "some ignored"])
@pytest.mark.parametrize("make", [tree, transformer])
@pytest.mark.parametrize("policy", POLICIES)
def test_units_are_those_of_torch(policy, make, ignore):
    model = named(make())

    def ignored_in(model):
        return [module for module in model.modules() if module.name in ignore]

    other = copy.deepcopy(model)
    expected = units_by_torch(other, POLICIES[policy](theirs), ignored_in(other))
    found = ours.units_of(model, POLICIES[policy](theirs), ignored_in(model))
    assert [(module.name, settings) for module, settings in found] == expected
    assert [module.name for module in model.modules()] == list(dict(model.named_modules()))  # nothing was replaced


def test_the_policies_differ():
    """The test above is worth what its policies choose."""
    found = {name: [one.name for one, _ in ours.units_of(named(tree()), of(theirs))] for name, of in POLICIES.items()}
    assert len(set(map(tuple, found.values()))) >= 12
    assert found["size 111"] == ["1.0"]  # 110 and 6 elements; 90; 70 and 36; 288 in a leaf, which torch never takes


def test_a_shared_submodule_is_one_unit():
    classes = {nn.Linear, nn.Sequential}
    of_classes = partial(ours.transformer_auto_wrap_policy, transformer_layer_cls=classes)
    for policy in (of_classes, ours.ModuleWrapPolicy(classes)):
        found = ours.units_of(named(Shared()), policy)
        assert [one.name for one, _ in found] == ["inner", "first.1", "first", "second"]
    # Its 30 elements are taken by its own unit, wherever it stands.
    of_size = partial(ours.size_based_auto_wrap_policy, min_num_params=30)
    assert [one.name for one, _ in ours.units_of(named(Shared()), of_size)] == ["inner", "first.1"]


def test_ignored_parameters_are_not_counted():
    model = named(nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(3, 3)), nn.Linear(10, 10)))
    policy = partial(ours.size_based_auto_wrap_policy, min_num_params=100)
    found = ours.units_of(model, policy, ignored_params=[model[0][0].weight])
    assert [one.name for one, _ in found] == ["1"]


@pytest.mark.parametrize(
    "policy, says",
    [
        ({nn.Linear}, "ModuleWrapPolicy"),
        (nn.Linear, "ModuleWrapPolicy"),
        (nn.Linear(1, 1), "ModuleWrapPolicy"),
        (ours.ModuleWrapPolicy, "ModuleWrapPolicy"),
        (ours.transformer_auto_wrap_policy, "functools.partial"),
        (lambda module: True, "CustomPolicy"),
        (ours.CustomPolicy(lambda module: 1), "False/True or a kwarg dict, but it returned 1"),
        (ours.ModuleWrapPolicy([nn.Linear(1, 1)]), "ModuleWrapPolicy.* can't choose units: isinstance"),
    ],
)
def test_what_is_no_policy(policy, says):
    with pytest.raises(InvalidArgument, match=says):
        ours.units_of(tree(), policy)


def test_classes_besides_a_policy():
    """Units of classes that compute in another precision, wherever they stand, but not those that are ignored."""
    found = ours.units_of(named(tree()), None)
    assert found == []
    model = named(tree())
    found = ours.units_of(model, ours.ModuleWrapPolicy({nn.MultiheadAttention}), also=(nn.BatchNorm1d,))
    assert [one.name for one, _ in found] == ["2.0.1", "3"]
    found = ours.units_of(model, None, [model[2]], also=(nn.BatchNorm1d, nn.MultiheadAttention))
    assert [one.name for one, _ in found] == ["3"]


def test_what_is_ignored():
    model = tree()
    modules, parameters = ours.parse_ignored(model, [model[0]], [model[3], model[2][1].weight])
    assert modules == {model[0], model[3]}
    assert set(parameters) == {model[2][1].weight, *model[0].parameters(), *model[3].parameters()}
    for given, says in ((([3], None), "must be modules"), (([model[0]], ["0.weight"]), "modules or parameters")):
        with pytest.raises(InvalidArgument, match=says):
            ours.parse_ignored(model, *given)


def test_the_names_are_torchs():
    for name in theirs.__all__:
        assert getattr(ours, name) is getattr(theirs, name) is getattr(collectives.sharded, name)


def test_a_policy_that_names_another_models_module():
    class Wrong(ours.ModuleWrapPolicy):
        def _run_policy(self, *arguments):
            return {nn.Bilinear(1, 1, 1): {}}

    with pytest.raises(InvalidArgument, match="Bilinear"):
        ours.units_of(tree(), Wrong([nn.Linear]))


def test_wrap_inside_of_enable_wrap_only():
    layer = named(nn.Linear(2, 2))
    assert ours.wrap(layer, depth=3) is layer
    Mark.made = []
    with pytest.raises(ZeroDivisionError), ours.enable_wrap(wrapper_cls=Mark, depth=1, width=2):
        assert ours.wrap(layer, depth=3).module is layer
        ours.wrap(layer)
        raise ZeroDivisionError
    assert Mark.made == [("", {"depth": 3, "width": 2}), ("", {"depth": 1, "width": 2})]
    assert ours.wrap(layer) is layer
