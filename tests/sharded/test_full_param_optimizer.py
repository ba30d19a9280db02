"""Optimizers of whole parameters over shards: the results, state and errors of one process."""

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.device_mesh import init_device_mesh

from collectives.comm.agree import all_gather_object
from collectives.errors import InvalidUsage, RemoteError
from collectives.sharded import (
    CPUOffloadPolicy,
    FullParamOptimizer,
    ShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    get_optimizer_state_dict,
    load,
    save,
    set_optimizer_state_dict,
)
from collectives.sharded.param_owners import assign_owners
from tests.ranks import run_ranks
from tests.sharded import states
from tests.sharded.states import differences
from tests.sharded.training import full

STEPS = 4


class Net(nn.Module):
    """Matrices of several shapes, biases, and a matrix that is used in every other step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 9))
        self.branch = nn.Linear(6, 9, bias=False)
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)

    def forward(self, x, branch=True):
        return self.net(x) + (self.branch(x) if branch else 0) + self.frozen.sum()


def batch(step, rank):
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def matrices(model):
    return [param for param in model.parameters() if param.dim() > 1 and param.requires_grad]


def vectors(model):
    return [param for param in model.parameters() if param.dim() == 1]


def muon_and_adamw(model, sharded):
    if sharded:
        muon = FullParamOptimizer(matrices(model), torch.optim.Muon, lr=0.05, weight_decay=0.01)
    else:
        muon = torch.optim.Muon(matrices(model), lr=0.05, weight_decay=0.01)
    return [muon, torch.optim.AdamW(vectors(model), lr=0.01, foreach=False)]


def adafactor(model, sharded):
    # The frozen parameter, too, in groups of other options.
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": vectors(model), "lr": 0.1}]
    if sharded:
        return [FullParamOptimizer(groups, torch.optim.Adafactor, lr=0.05)]
    return [torch.optim.Adafactor(groups, lr=0.05)]


def sgd(model, sharded):
    named = list(model.named_parameters())
    if sharded:
        return [FullParamOptimizer(named, torch.optim.SGD, lr=0.05, momentum=0.9)]
    return [torch.optim.SGD(named, lr=0.05, momentum=0.9)]


RULES = {rule.__name__: rule for rule in (muon_and_adamw, adafactor, sgd)}


def step_all(optimizers, schedulers):
    for each in [*optimizers, *schedulers]:
        each.step()
    for each in optimizers:
        each.zero_grad()


def schedules(optimizers):
    return [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in optimizers]


def train(model, optimizers, rank, first=0, last=STEPS):
    schedulers = schedules(optimizers)
    for step in range(first, last):
        model(batch(step, rank), branch=step % 2 == 0).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1e6)
        step_all(optimizers, schedulers)


def unsharded(rule, ranks, last=STEPS):
    """Train one process with the mean gradients of the ranks, summed in their order."""
    model = Net()
    optimizers = RULES[rule](model, False)
    schedulers = schedules(optimizers)
    for step in range(last):
        sums = {}
        for rank in range(ranks):
            model.zero_grad()
            model(batch(step, rank), branch=step % 2 == 0).square().mean().backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    sums[name] = param.grad if name not in sums else sums[name] + param.grad
        for name, param in model.named_parameters():
            param.grad = sums[name] / ranks if name in sums else None
        step_all(optimizers, schedulers)
    return model, optimizers


def shard(comm, how):
    model = Net()
    if how == "units":
        fully_shard(model.net[0], comm=comm)
        fully_shard(model.net, comm=comm)
        return fully_shard(model, comm=comm, reshard_after_forward=False)
    if how == "kept among 2":
        fully_shard(model.net, comm=comm, reshard_after_forward=2)
        return fully_shard(model, comm=comm)
    return ShardedDataParallel(model, comm=comm, sharding_strategy=ShardingStrategy[how])


def trained(ctx, rule, how):
    model = shard(ctx.communicator(), how)
    optimizers = RULES[rule](model, True)
    train(model, optimizers, ctx.rank)
    expected, theirs = unsharded(rule, ctx.size)
    ours = full(model)
    wrong = [name for name, value in expected.state_dict().items() if not torch.equal(value, ours[name])]
    assert optimizers[0].param_groups[0]["lr"] == theirs[0].param_groups[0]["lr"] != 0.05
    owned = [len(state) for state in optimizers[0].state_dict()["state"].values()]
    return wrong, len(owned)


def test_muon_and_adamw_are_those_of_one_process():
    for ranks, how in ((2, "units"), (3, "FULL_SHARD"), (2, "SHARD_OPTIMIZER"), (2, "NO_SHARD"), (2, "kept among 2")):
        found = run_ranks(trained, ranks, "muon_and_adamw", how)
        assert [wrong for wrong, _ in found] == [[]] * ranks, how
        assert sum(owned for _, owned in found) == (8 if how == "NO_SHARD" else 4), how


def replicated(ctx, path):
    """Two replicas of two shards: the owners are among the ranks of a replica."""
    dist.init_process_group("gloo", store=dist.FileStore(path, ctx.size), rank=ctx.rank, world_size=ctx.size)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        model = Net()
        fully_shard(model.net, mesh=mesh, offload_policy=CPUOffloadPolicy())
        fully_shard(model, mesh=mesh)
        optimizers = RULES["muon_and_adamw"](model, True)
        train(model, optimizers, ctx.rank)
        expected, ours = unsharded("muon_and_adamw", ctx.size)[0], full(model)
        wrong = [name for name, value in expected.state_dict().items() if not torch.allclose(value, ours[name])]
        return wrong, len(optimizers[0].state_dict()["state"])
    finally:
        dist.destroy_process_group()


def test_replicas_and_shards_on_the_host(tmp_path):
    found = run_ranks(replicated, 4, str(tmp_path / "store"))
    assert [wrong for wrong, _ in found] == [[]] * 4
    owned = [count for _, count in found]
    assert owned[:2] == owned[2:] and sum(owned[:2]) == 4 and all(owned)


def test_adafactor_and_sgd_are_those_of_one_process():
    for rule in ("adafactor", "sgd"):
        found = run_ranks(trained, 3, rule, "units")
        assert [wrong for wrong, _ in found] == [[]] * 3, rule
        assert sum(owned for _, owned in found) == 7


def test_owners_are_balanced_and_where_the_elements_are():
    # Three of a kind, each whole on a rank; then one that any rank may have, to the one that has most of it.
    owners = assign_owners([9.0, 9.0, 9.0, 1.0], [[0, 0, 9], [0, 9, 0], [9, 0, 0], [0, 1, 3]], [0.0] * 3)
    assert owners == [2, 1, 0, 2]
    # All on one rank: the dearest stays there, the others go where there is least.
    loads = [0.0, 0.0]
    assert assign_owners([4.0, 3.0, 2.0, 1.0], [[8, 0]] * 4, loads) == [0, 1, 1, 0]
    assert loads == [5.0, 5.0]


# ---- State.


def full_state(model, optimizers):
    return get_optimizer_state_dict(model, optimizers, full_state_dict=True)


def expected_state(model, optimizers):
    """Torch's own function for the unsharded model."""
    options = torch_state_dict.StateDictOptions(full_state_dict=True)
    return torch_state_dict.get_optimizer_state_dict(model, optimizers, options=options)


def states_of(ctx, rule, ways):
    comm = ctx.communicator()
    model = shard(comm, "units")
    optimizers = RULES[rule](model, True)
    train(model, optimizers, ctx.rank)
    ours, theirs = full_state(model, optimizers), expected_state(*unsharded(rule, ctx.size))
    wrong = differences(ours["state"], theirs["state"])
    if rule == "muon_and_adamw":
        assert set(ours["state"]) == set(theirs["state"]) and len(ours["state"]) == 7
    # By torch's own recipe, on another model, with other values.
    again = shard(comm, "units")
    fresh = RULES[rule](again, True)
    for step in ways:
        set_optimizer_state_dict(again, fresh, ours if ctx.rank == 0 else None, broadcast_from_rank0=True) if (
            step == "broadcast"
        ) else set_optimizer_state_dict(again, fresh, ours)
        wrong += differences(full_state(again, fresh)["state"], ours["state"])
    return wrong


def test_full_state_is_the_unsharded_optimizers():
    for rule in RULES:
        assert run_ranks(states_of, 2, rule, ["load", "broadcast"]) == [[], []]


def own_states(ctx):
    """The optimizer's own functions, of unusual parameters: tied, of 0 dimensions, of 0 elements, of 1."""
    comm = ctx.communicator()
    plain, model, again = states.Net(), states.sharded(comm=comm), states.sharded(comm=comm)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    options = {"lr": 0.1, "momentum": 0.9}
    ours, fresh = (FullParamOptimizer(each.parameters(), torch.optim.SGD, **options) for each in (model, again))
    states.train(plain, theirs)
    states.train(model, ours)
    wrong = states.differences(model.state_dict(), plain.state_dict())

    def compare():
        return states.differences(full_state(again, fresh), full_state(model, ours))

    fresh.load_state_dict(ours.state_dict())
    wrong += compare()
    fresh.load_state_dict({**theirs.state_dict(), "state": {}})
    assert not fresh.state and compare()  # so that what comes next can fail
    fresh.load_state_dict(theirs.state_dict())
    wrong += compare()
    fresh.load_state_dict({**theirs.state_dict(), "state": {}})
    set_optimizer_state_dict(again, fresh, get_optimizer_state_dict(model, ours))
    wrong += compare()
    shards = {id(param) for param in again.parameters()}
    return wrong, all(id(param) in shards for param in fresh.state)


def test_own_state_dicts_and_unusual_parameters():
    assert run_ranks(own_states, 2) == [([], True)] * 2  # of 2 equal gradients the mean is exact


def of_rank_0(ctx):
    """Load rank 0's own state dict on all ranks, then each rank's own, and the unsharded optimizer's."""
    model, again = (shard(ctx.communicator(), "units") for _ in range(2))
    optimizers, fresh = RULES["muon_and_adamw"](model, True), RULES["muon_and_adamw"](again, True)[0]
    train(model, optimizers, ctx.rank, last=1)
    own = optimizers[0].state_dict()
    rank_0s = pickle.loads(bytes.fromhex(all_gather_object(ctx.communicator(), pickle.dumps(own).hex())[0]))
    plain = unsharded("muon_and_adamw", ctx.size, last=1)[1][0].state_dict()
    texts = []
    for given in (rank_0s, own, plain, {**plain, "state": {}}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fresh.load_state_dict(given)
        texts.append([str(each.message) for each in caught])
    return texts


def test_another_ranks_own_state_dict_is_a_warning():
    found = run_ranks(of_rank_0, 2)
    assert found[0] == [[], [], [], []]
    (text,), *others = found[1]
    assert "weight of unit" in text and "begin with no state" in text and others == [[], [], []]


def saving(ctx, rule, path):
    model = shard(ctx.communicator(), "units")
    optimizers = RULES[rule](model, True)
    train(model, optimizers, ctx.rank, last=2)
    save(path, model, optimizers, extra=2)
    return True


def loading(ctx, rule, path):
    """Load on another number of ranks, or in torch's own way, and train on: the same as without the stop."""
    model, at_once = shard(ctx.communicator(), "FULL_SHARD"), unsharded(rule, ctx.size, last=0)[0]
    optimizers = RULES[rule](model, True)
    assert load(path, model, optimizers) == 2
    state = full_state(model, optimizers)
    # The unsharded model and optimizer, from the same checkpoint.
    plain = RULES[rule](at_once, False)
    load(path, at_once, plain)
    wrong = differences(state["state"], expected_state(at_once, plain)["state"])
    owned = [len(each.state_dict()["state"]) for each in optimizers]
    x = batch(9, 0)
    for whole, each in ((at_once, plain), (model, optimizers)):
        whole(x).square().mean().backward()
        step_all(each, [])
    ours = full(model)
    wrong += [name for name, value in at_once.state_dict().items() if not torch.allclose(value, ours[name], atol=1e-6)]
    return wrong, owned[0]


def test_checkpoints_on_another_number_of_ranks(tmp_path):
    for rule in ("muon_and_adamw", "adafactor"):
        path = str(tmp_path / rule)
        run_ranks(saving, 2, rule, path)
        for ranks in (3, 1):
            found = run_ranks(loading, ranks, rule, path)
            assert [wrong for wrong, _ in found] == [[]] * ranks
            assert sum(owned for _, owned in found) == (4 if rule == "muon_and_adamw" else 7)


def by_torch(ctx, store, path, saves):
    dist.init_process_group("gloo", store=dist.FileStore(store, ctx.size), rank=ctx.rank, world_size=ctx.size)
    try:
        model = Net()
        fully_shard(model.net)
        fully_shard(model)
        optimizers = RULES["muon_and_adamw"](model, True)
        if saves:
            train(model, optimizers, ctx.rank, last=2)
        model_state, optim_state = torch_state_dict.get_state_dict(model, optimizers)
        state = {"model": model_state, "optim": optim_state}
        if saves:
            dcp.save(state, checkpoint_id=path)
        else:
            dcp.load(state, checkpoint_id=path)
            torch_state_dict.set_state_dict(
                model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"]
            )
        found = full_state(model, optimizers)["state"]
        return {name: {key: value.tolist() for key, value in each.items()} for name, each in found.items()}
    finally:
        dist.destroy_process_group()


def test_torchs_own_recipe_on_another_number_of_ranks(tmp_path):
    saved = run_ranks(by_torch, 2, str(tmp_path / "a"), str(tmp_path / "saved"), True)
    loaded = run_ranks(by_torch, 3, str(tmp_path / "b"), str(tmp_path / "saved"), False)
    assert [saved[0]] * 3 == loaded and len(saved[0]) == 7
    assert any(any(row) for row in saved[0]["net.0.weight"]["momentum_buffer"])


# ---- Scalers and closures.


def scaled(ctx):
    model = shard(ctx.communicator(), "units")
    optimizer = FullParamOptimizer(matrices(model), torch.optim.Muon, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full(model)

    def step(value):
        optimizer.zero_grad()
        scaler.scale(model(batch(0, ctx.rank)).square().mean() * (value if ctx.rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return full(model)["net.0.weight"]

    skipped = torch.equal(step(math.inf), before["net.0.weight"])
    stepped = not torch.equal(step(1.0), before["net.0.weight"])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(batch(1, ctx.rank)).square().mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    return skipped, stepped, scaler.get_scale(), calls, loss.requires_grad


def test_scalers_skip_on_all_ranks_and_closures_run_once():
    assert run_ranks(scaled, 2) == [(True, True, 2.0, [True], True)] * 2


# ---- Errors.


class Raises(torch.optim.SGD):
    """Raises on the owner of a matrix, in its second step."""

    @torch.no_grad()
    def step(self, closure=None):
        if any(p.grad is not None and p.shape == (17, 33) for group in self.param_groups for p in group["params"]):
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == self.param_groups[0]["fails_at"]:
                raise ZeroDivisionError("in the owner's step")
        super().step(closure)


class Clips(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step(closure)


def failing(ctx, fails_at):
    model = shard(ctx.communicator(), "units")
    group = {"params": matrices(model), "fails_at": fails_at}
    optimizer = FullParamOptimizer([group], Raises, lr=0.01)
    raised = None
    for step in range(8):
        model(batch(step, ctx.rank)).square().mean().backward()
        try:
            optimizer.step()
        except (RemoteError, ZeroDivisionError) as error:
            assert step == fails_at - 1 and raised is None
            raised = type(error).__name__, getattr(error, "peers", None)
        optimizer.zero_grad()
    return raised, full(model)["net.2.weight"].tolist()


@pytest.mark.parametrize("fails_at", [1, 5])
def test_an_optimizer_that_raises_on_its_owner_raises_everywhere(fails_at):
    """In a negotiated step, and in one that follows a schedule; after it training goes on."""
    found = run_ranks(failing, 3, fails_at)
    kinds = [raised[0] for raised, _ in found]
    assert sorted(kinds) == ["RemoteError", "RemoteError", "ZeroDivisionError"]
    owner = kinds.index("ZeroDivisionError")
    assert all(raised[1] == (owner,) for raised, _ in found if raised[0] == "RemoteError")
    assert all(values == found[0][1] for _, values in found)


def mismatched(ctx, kind, late):
    model = shard(ctx.communicator(), "units")
    params = matrices(model)
    if kind == "order" and ctx.rank:
        params = params[::-1]
    if kind == "other" and ctx.rank:
        params = params[1:]
    if kind == "alike":  # of one name and shape, in two units
        model = nn.Sequential(*(fully_shard(nn.Linear(5, 5, bias=False), comm=ctx.communicator()) for _ in range(2)))
        params = list(model.parameters())[:: -1 if ctx.rank else 1]
    if kind in ("order", "other", "alike"):
        with pytest.raises(InvalidUsage, match="same call"):
            FullParamOptimizer(params, torch.optim.Muon)
        return True
    optimizer = FullParamOptimizer(params, torch.optim.Muon, lr=0.01)
    for step in range(6 if late else 1):
        model(batch(step, ctx.rank)).square().mean().backward()
        if step == 5 or not late:
            break
        optimizer.step()
        optimizer.zero_grad()
    if kind == "gradient" and ctx.rank:
        params[1].grad = None
    if kind == "forward" and ctx.rank:
        with pytest.raises((InvalidUsage, RemoteError)):
            for _ in range(2):
                model(batch(0, ctx.rank)).square().mean().backward()
    else:
        with pytest.raises((InvalidUsage, RemoteError)):
            optimizer.step()
            model(batch(0, ctx.rank)).square().mean().backward()
    optimizer.zero_grad()
    model(batch(7, ctx.rank)).square().mean().backward()
    optimizer.step()
    return bool(full(model)["net.2.weight"].isfinite().all())


@pytest.mark.parametrize("kind", ["order", "other", "alike", "gradient", "forward"])
def test_ranks_that_differ_raise(kind):
    for late in (False, True) if kind in ("gradient", "forward") else (False,):
        assert run_ranks(mismatched, 2, kind, late) == [True, True], late


def refused(ctx):
    model = shard(ctx.communicator(), "units")
    for kind in (torch.optim.LBFGS, Clips):
        with pytest.raises(InvalidUsage, match="looks at all parameters together"):
            FullParamOptimizer(model.parameters(), kind)
    with pytest.raises(ValueError, match="no parameters"):
        FullParamOptimizer([], torch.optim.Muon)
    with pytest.raises(ValueError, match="must return a torch.optim.Optimizer"):
        FullParamOptimizer(model.parameters(), list)
    with pytest.raises(InvalidUsage, match="wasn't given"):
        FullParamOptimizer(matrices(model), lambda params: torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]))
    with pytest.raises(InvalidUsage, match="copied or pickled"):
        copy.deepcopy(FullParamOptimizer(matrices(model), torch.optim.Muon))
    with torch.device("meta"):
        model = Net()
    fully_shard(model, comm=ctx.communicator())
    with pytest.raises(InvalidUsage, match="net.0.weight is on the meta device"):
        FullParamOptimizer(matrices(model), torch.optim.Muon)
    return True


def test_what_is_refused():
    assert run_ranks(refused, 2) == [True, True]


def added(ctx):
    model = shard(ctx.communicator(), "units")
    first, *rest = matrices(model)
    optimizer = FullParamOptimizer([first], torch.optim.Muon, lr=0.1)
    optimizer.add_param_group({"params": rest, "lr": 0.5})
    model(batch(0, ctx.rank)).square().mean().backward()
    optimizer.step()
    return [group["lr"] for group in optimizer.param_groups], len(optimizer.state_dict()["state"])


def test_groups_are_added():
    (lrs, mine), (_, theirs) = run_ranks(added, 2)
    assert lrs == [0.1, 0.5] and mine + theirs == 4 and mine and theirs
