"""Optimizers that use whole parameters raise for shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import collectives
from collectives.errors import InvalidUsage
from collectives.sharded import (
    ShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    register_elementwise_optimizer,
)
from collectives.sharded.optimizer_hooks import _is_elementwise
from tests.ranks import run_ranks


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False))


def backward(model, rank, step=0):
    torch.manual_seed(10 * step + rank)
    model(torch.randn(4, 6)).square().sum().backward()


class Third(torch.optim.Optimizer):
    """A stranger's optimizer, element by element: Lion."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.sub_(group["lr"] * torch.sign(0.9 * mean + 0.1 * param.grad))
                mean.lerp_(param.grad, 0.01)


class PytorchLAMB(Third):
    pass


class SingleDeviceMuonWithAuxAdam(Third):
    pass


class Derived(PytorchLAMB):
    pass


def refused(ctx):
    comm = ctx.communicator()
    kinds = [torch.optim.Adafactor, torch.optim.LBFGS, PytorchLAMB, SingleDeviceMuonWithAuxAdam, Derived]
    kinds += [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []
    found = {}
    for kind in kinds:
        model = fully_shard(net(), comm=comm)
        before = [param.detach().clone() for param in model.parameters()]
        backward(model, ctx.rank)
        optimizer = kind(model.parameters())
        try:
            optimizer.step(lambda: 0.0)
        except InvalidUsage as error:
            untouched = all(map(torch.equal, before, model.parameters()))
            found[kind.__name__] = untouched and kind.__name__ in str(error) and "piece" in str(error)
        else:
            found[kind.__name__] = False
        whole = ShardedDataParallel(net(), comm=comm, sharding_strategy=ShardingStrategy.NO_SHARD)
        backward(whole, ctx.rank)
        kind(whole.parameters()).step(lambda: 0.0)
    return found


def test_optimizers_of_whole_parameters_raise_at_their_first_step():
    for found in run_ranks(refused, 2):
        assert len(found) >= 5
        assert all(found.values()), found


def test_which_optimizers_are_element_by_element():
    named = "SGD Adam AdamW NAdam RAdam Adagrad Adadelta RMSprop Rprop Adamax ASGD SparseAdam".split()
    mine = [collectives.optim.SGD, collectives.optim.Adam, collectives.optim.AdamW, Third]
    for kind in [*(getattr(torch.optim, name) for name in named), *mine]:
        assert _is_elementwise(kind), kind
    names = "Lion Lamprey Polarstern Camera Soaping Sophia AdEMAMix ScheduleFreeAdamW LambdaSGD Lomo DecoupledAdamW"
    for name in names.split():
        assert _is_elementwise(type(name, (torch.optim.Optimizer,), {})), name
    names = "Lamb LAMB FusedLAMB LAMB8bit Lars LARS PytorchLARS LARC Adafactor AdaFactor Muon DistributedShampoo SOAP"
    names += " FusedNovoGrad Lamb8bit Adam_mini AdamMini CAME SM3 Prodigy DAdaptAdam GaLoreAdamW LBFGS FullBatchLBFGS"
    for name in names.split():
        assert not _is_elementwise(type(name, (torch.optim.Optimizer,), {})), name


class Fast(Third):
    """A stranger's optimizer whose name says nothing; the subclasses say what of a parameter they use."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(group["lr"] * self.update(param, param.grad))


class OfNorm(Fast):
    def update(self, param, grad):
        return grad * param.norm() / grad.norm()


class OfProduct(Fast):
    def update(self, param, grad):
        return grad @ grad.T @ grad


class OfRows(Fast):
    def update(self, param, grad):
        return grad - grad.mean(dim=-1, keepdim=True)


class OfAll(Fast):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([param for group in self.param_groups for param in group["params"]], 0.1)
        super().step()

    def update(self, param, grad):
        return grad


class InFloat(Fast):
    def update(self, param, grad):
        return (grad.float() / (grad.float().abs() + 1)).to(grad.dtype)


class Noisy(Fast):
    """That can't be compared: other random numbers each time."""

    def update(self, param, grad):
        return grad + torch.randn_like(grad)


class OfModel(Fast):
    """That can't be made again from what the optimizer has."""

    def __init__(self, params, model):
        super().__init__(params)

    update = InFloat.update


class Declared(OfRows):
    pass


def tried(ctx):
    found = {}
    kinds = [OfNorm, OfProduct, OfRows, OfAll, InFloat, Noisy, OfModel, Declared]
    for kind in kinds:
        model = fully_shard(net(), comm=ctx.communicator())
        optimizer = kind(model.parameters(), model) if kind is OfModel else kind(model.parameters())
        # A first step with a schedule that begins with 0, and without gradients, on which nothing can be found.
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
        optimizer.step()
        backward(model, ctx.rank)
        before = torch.get_rng_state()
        values = [param.detach().clone() for param in model.parameters()]
        if kind is Declared:
            assert register_elementwise_optimizer(Declared) is Declared
        try:
            optimizer.step()
        except InvalidUsage as error:
            assert all(map(torch.equal, values, model.parameters()))
            found[kind.__name__] = "FullParamOptimizer" in str(error) and "trial on tiny parameters" in str(error)
        assert kind is Noisy or torch.equal(before, torch.get_rng_state())
    with pytest.raises(collectives.errors.InvalidArgument, match="subclass of torch.optim.Optimizer"):
        register_elementwise_optimizer(optimizer)
    return found


def test_strangers_are_tried_on_tiny_parameters():
    found = {"OfNorm": True, "OfProduct": True, "OfRows": True, "OfAll": True}
    assert run_ranks(tried, 2) == [found, found]


def third(ctx):
    model = fully_shard(net(), comm=ctx.communicator())
    optimizer = Third(model.parameters())
    plain = net()
    theirs = Third(plain.parameters())
    for step in range(3):
        backward(model, ctx.rank, step)
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(ctx.size):
            backward(plain, rank, step)
        for param in plain.parameters():
            param.grad /= ctx.size
        theirs.step()
        theirs.zero_grad()
    state = model.state_dict()
    return [name for name, value in plain.state_dict().items() if not torch.allclose(value, state[name], atol=1e-6)]


def test_an_unknown_optimizer_element_by_element_trains():
    assert run_ranks(third, 2) == [[], []]


def exchanging(ctx, path):
    store = dist.FileStore(path, ctx.size)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size)
    try:
        model = fully_shard(net(), comm=ctx.communicator())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        before = [param.detach().clone() for param in model.parameters()]
        backward(model, ctx.rank)
        with pytest.raises(InvalidUsage, match="ZeroRedundancyOptimizer takes parameters to be equal on all ranks"):
            optimizer.step()
        return all(map(torch.equal, before, model.parameters()))
    finally:
        dist.destroy_process_group()


def test_an_optimizer_that_exchanges_parameters_is_refused(tmp_path):
    """It would overwrite a rank's shards with those of another rank."""
    assert run_ranks(exchanging, 2, str(tmp_path / "store")) == [True, True]
