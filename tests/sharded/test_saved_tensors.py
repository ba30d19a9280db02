"""What autograd saves of gathered parameters keeps no buffer, and what users keep of them keeps its values."""

import torch
from torch import nn

from collectives.errors import InvalidUsage
from collectives.sharded import ModuleWrapPolicy, ShardedDataParallel, ShardingStrategy, fully_shard
from tests.ddp.training import over_gloo
from tests.sharded.test_scheduler import check, equal, expected, gradients

WIDTH = 160  # of units that are large enough for the pool


class Views(nn.Module):
    """Saves views of its parameters of every kind for the backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.complex = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 4)
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept = None

    def forward(self, x):
        h = self.norm(self.linear(x)) @ self.weight.t() + x * self.weight[3:4] + (x * self.weight[:0, :1].sum()).sin()
        h = h + (h * self.weight[5].view(1, -1)[:, :0].square().sum()) + h * self.weight.diagonal()
        z = torch.complex(h, x) @ self.complex.conj()
        z = z * self.complex[0].conj() * self.complex[1]
        parts = torch.view_as_real(self.complex)
        return z.real * parts[2, :, 1] + z.imag * self.complex.conj().imag[3] * self.complex.real[4]


def make_views():
    torch.manual_seed(21)
    return nn.Sequential(*(Views() for _ in range(3)))


def sharded(model, **how):
    for each in model:
        fully_shard(each, **how)
    return fully_shard(model)


def data(rank, step=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model, rank):
    model(data(rank).requires_grad_()).square().sum().backward()


def allocated(model):
    """Return the bytes of the model's pool that are in use."""
    pool = model._scheduler.pool
    pool.trim()
    return pool.allocated


def gathered(model):
    """Return the pooled bytes of all units that are gathered."""
    groups = [group for each in model for group in each._unit.groups]
    return sum(group.gathered.nbytes for group in groups if group.gathered is not None)


def twice(model, rank):
    loss = model(data(rank).requires_grad_()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_gradients(model, rank):
    x = data(rank).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()


@over_gloo
def saved(ctx):
    found = {}
    for name, run in {"once": backward, "retained": twice, "of gradients": of_gradients}.items():
        theirs = expected(make_views, run, ctx.size)
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD"):
            model = ShardedDataParallel(
                make_views(), sharding_strategy=ShardingStrategy[strategy], auto_wrap_policy=ModuleWrapPolicy({Views})
            )
            for step in ("first", "later"):
                run(model, ctx.rank)
                found[name, strategy, step] = equal(gradients(model), theirs, close=True)
                model.zero_grad()
    model = sharded(make_views())
    out = model(data(ctx.rank).requires_grad_())
    found["no buffer before the first backward"] = [] if allocated(model) == gathered(model) == 0 else ["kept"]
    out.sum().backward()
    out = model(data(ctx.rank).requires_grad_())
    kept = [each._unit.state.name for each in model]
    found["only those with which the backward begins"] = (
        [] if allocated(model) == gathered(model) and kept.count("SHARDED") >= 1 else [allocated(model), kept]
    )
    out.sum().backward()
    found["no buffer after the backward"] = [] if allocated(model) == 0 else [allocated(model)]
    return found


def test_saved_views_keep_no_buffer(tmp_path):
    check(saved, tmp_path)


@over_gloo
def other_hooks(ctx):
    """A user's saved-tensor hooks get what is no parameter, and no view of one."""
    found = {}
    model = sharded(make_views())
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor.shape, tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1]):
        loss = model(data(ctx.rank).requires_grad_()).square().sum()
    found["called"] = [] if len(seen) > 20 else [len(seen)]
    found["no buffer"] = [] if allocated(model) == 0 else [allocated(model)]
    loss.backward()
    found["gradients"] = equal(gradients(model), expected(make_views, backward, ctx.size), close=True)
    return found


def test_other_hooks_get_other_tensors(tmp_path):
    check(other_hooks, tmp_path)


class Keeps(nn.Module):
    """Keeps views of its weight, and the weight."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept = []

    def forward(self, x):
        weight = self.linear.weight
        self.kept = [weight, weight.detach().t(), weight[2], weight.detach().clone()]
        return torch.tanh(self.linear(x))


def make_keeping():
    torch.manual_seed(22)
    return nn.Sequential(*(Keeps() for _ in range(3)))


@over_gloo
def kept(ctx):
    """Views of a full parameter past its reshard, over other units' gathers, an optimizer's step, and backwards."""
    found = {}
    model = sharded(make_keeping())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    views = []
    for step in range(4):
        out = model(data(ctx.rank, step))
        views += [each.kept[1:] for each in model]
        loss = out.square().mean()
        if step == 1:  # used in a graph, after the unit that it is of is resharded
            loss = loss + model[0].kept[2].square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wrong = [n for n, (view, row, then) in enumerate(views) if not (view.equal(then.t()) and row.equal(then[2]))]
    found["values of then"] = wrong
    found["of each step"] = [] if not views[0][2].equal(views[-3][2]) else ["nothing was trained"]
    count = len({view.untyped_storage().data_ptr() for view, _, _ in views})
    found["a buffer for each"] = [] if count == len(views) and allocated(model) >= count * 4 * WIDTH**2 else [count]
    weights = [each.kept[0] for each in model]
    found["not the parameters"] = [n for n, weight in enumerate(weights) if not weight.isnan().all()]
    found["of their shape"] = [weight.shape for weight in weights if weight.shape != (WIDTH, WIDTH)]
    for each in model:
        each.kept = []
    views.clear()
    del out, loss
    found["the buffers come back"] = [] if allocated(model) == 0 else [allocated(model)]
    return found


def test_views_that_users_keep(tmp_path):
    check(kept, tmp_path)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            self.second.mul_(2)
        return x * self.first * self.second * self.third


@over_gloo
def written(ctx):
    model = fully_shard(Writes())
    try:
        model(torch.ones(4))
    except InvalidUsage as error:
        return {"named": [] if "written to second" in str(error) else [str(error)]}
    return {"named": ["no error"]}


def test_the_parameter_that_a_forward_writes_to_is_named(tmp_path):
    check(written, tmp_path)
