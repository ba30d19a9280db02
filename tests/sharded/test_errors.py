"""Wrong programs: each raises a named error on every rank, no rank waits for ever, and training can go on."""

import copy
import os
import pickle
import signal
import time
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard  # bound before anything is sharded
from torch.nn.parallel import DistributedDataParallel

import collectives
from collectives.errors import CollectivesError, InvalidArgument, InvalidUsage, Mismatch, RemoteError
from collectives.sharded import MixedPrecisionPolicy, Unit, fully_shard
from tests.ddp.training import batch, make_model, over_gloo, run
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.sharded.programs import Net, averaged, differences, full_grads, loss_of, shard_blocks
from tests.sharded.training import over_comm, sharded


def raised(call):
    """Return an error's class and text."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


# ---- What is the same on all ranks.


def tied_weights(ctx):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    for layer in (model[0], model[2]):
        fully_shard(layer)


def other_modules(ctx):
    fully_shard(nn.Linear(4, 4 + ctx.rank))


def more_units(ctx):
    model = make_model()
    if ctx.rank == 0:
        fully_shard(model[0])
    fully_shard(model)


def late_unit(ctx):
    """One rank goes on to its forward while the other one still shards."""
    model = make_model()
    fully_shard(model[0])
    if ctx.rank == 0:
        fully_shard(model[2])
    model(batch(0, ctx.rank)[0])


def other_options(ctx):
    fully_shard(nn.Linear(4, 4), reshard_after_forward=ctx.rank == 0)


def outermost_first(ctx):
    model = fully_shard(make_model())
    fully_shard(model[0])


def optimizer_before(ctx):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fully_shard(model)
    model(batch(0, ctx.rank)[0]).sum().backward()
    optimizer.step()


class Reads(nn.Module):
    """Computes with the weight of an inner module without calling it."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.outer(x) @ self.inner.weight


def reads_an_inner_unit(ctx):
    model = Reads()
    fully_shard(model.inner)
    fully_shard(model)(torch.ones(2, 3))


class Writes(nn.Module):
    """Writes to its parameter in a forward."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.write = write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.second)
        return x * self.first * self.second


def set_data(param):
    param.data = param.data * 2


def writes_in_place(ctx):
    fully_shard(Writes(lambda param: param.mul_(2)))(torch.ones(4))


def writes_data(ctx):
    fully_shard(Writes(set_data))(torch.ones(4))


def writes_a_frozen_one(ctx):
    fully_shard(Writes(lambda param: param.mul_(2)).requires_grad_(False))(torch.ones(4))


def max_norm(ctx):
    fully_shard(nn.Embedding(5, 6, max_norm=0.1))(batch(0, ctx.rank)[1])


def step_between(ctx):
    """An optimizer's step between a forward and its backward."""
    model = sharded(reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = [model(batch(step, ctx.rank)[0]).square().sum() for step in range(2)]
    losses[0].backward()
    optimizer.step()
    losses[1].backward()


CASES = {
    tied_weights: (InvalidUsage, "weight of this Linear is tied to weight of Linear"),
    other_modules: (Mismatch, "the ranks shard other parameters of a Linear"),
    more_units: (Mismatch, "the ranks shard other parameters of a"),
    late_unit: (CollectivesError, ""),
    other_options: (Mismatch, "reshard_aft"),
    outermost_first: (InvalidArgument, "weight is distributed already"),
    optimizer_before: (InvalidUsage, "0.weight of Sequential, which was sharded after the optimizer was made"),
    reads_an_inner_unit: (InvalidUsage, "sharded parameter"),
    writes_in_place: (InvalidUsage, "the forward has written to second of Writes"),
    writes_data: (InvalidUsage, "the forward has written to second of Writes"),
    writes_a_frozen_one: (InvalidUsage, "the forward has written to second of Writes"),
    max_norm: (InvalidUsage, "the forward has written to weight of Embedding"),
    step_between: (InvalidUsage, "written to after the forward of this backward"),
}


@over_gloo
def all_cases(ctx):
    """All cases in one group: an error must leave the ranks in step."""
    found = {}
    for case in CASES:
        found[case.__name__] = raised(lambda case=case: case(ctx))
        model = sharded()
        model(batch(0, ctx.rank)[0]).sum().backward()
    return found


def test_errors_on_all_ranks(tmp_path):
    for rank, found in enumerate(run(all_cases, 2, str(tmp_path / "store"))):
        wrong = {}
        for case, (kind, text) in CASES.items():
            name, message = found[case.__name__]
            if not name or text not in message or (kind is not CollectivesError and name != kind.__name__):
                wrong[case.__name__] = name, message
        assert not wrong, rank


@over_gloo
def alone(ctx):
    """Errors that a rank finds without the others."""
    model = fully_shard(make_model())
    layer = nn.Linear(2, 2)
    empty = {
        "twice": lambda: fully_shard(model),
        "no module": lambda: fully_shard([model]),
        "an empty list": lambda: fully_shard([]),
        "int": lambda: fully_shard([layer, 3]),
        "Linear is in the list twice": lambda: fully_shard([layer, layer]),
        "ModuleList has no forward": lambda: fully_shard(nn.ModuleList([layer])),
        "divides 2 ranks": lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward=3),
        "comm": lambda: fully_shard(layer, comm="all"),
        "mp_policy must be": lambda: fully_shard(layer, mp_policy=torch.bfloat16),
        "param_dtype must be": lambda: fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.int32)),
        "offload_policy must be": lambda: fully_shard(layer, offload_policy=True),
        "ignored_params must be": lambda: fully_shard(layer, ignored_params=3),
        "no shape yet": lambda: fully_shard(nn.LazyLinear(3)),
        "is distributed already": lambda: fully_shard(nn.ParameterList([next(model.parameters())])),
        "can't be copied": lambda: copy.deepcopy(model),
        "can't be copied or pickled": lambda: pickle.dumps(model),
        "only sharded modules": lambda: model.set_modules_to_forward_prefetch([nn.Linear(2, 2)]),
        "nothing gathered": lambda: Unit(nn.Linear(2, 2), ctx.communicator()).wait_for_unshard(),
    }
    return {text: raised(call) for text, call in empty.items()}


def test_errors_of_one_rank(tmp_path):
    for found in run(alone, 2, str(tmp_path / "store")):
        found["sharded already"] = found.pop("twice")
        found["is sharded already"] = found.pop("no module")
        assert {
            text: each for text, each in found.items() if "Invalid" not in each[0] or text not in each[1]
        } == {}


def no_group(ctx):
    return raised(lambda: fully_shard(nn.Linear(2, 2)))


def test_without_a_process_group():
    ((name, text),) = run_ranks(no_group, 1)
    assert name == "InvalidUsage" and "init_process_group()" in text


# ---- torch's data parallelism around modules of ours, and ours around torch's.

TORCH = {
    "DistributedDataParallel": DistributedDataParallel, "FullyShardedDataParallel": lambda model:
    FullyShardedDataParallel(model, device_id=torch.device("cpu")), "fully_shard": torch_fully_shard,
    "ours": collectives.DistributedDataParallel, "a list": lambda model: torch_fully_shard([model[0], model[2]]),
}  # fmt: skip


@over_gloo
def with_torch(ctx):
    around, inside = {}, {}
    for name, wrap in TORCH.items():
        for whole in (True, False):
            model = make_model()
            fully_shard(model[0])
            if whole:
                fully_shard(model)
            around[name, whole] = raised(lambda wrap=wrap, model=model: wrap(model))[1]
            model(batch(0, ctx.rank)[0]).sum().backward()  # and the module is as it was
    fully_shard(make_model())
    wrapped = {
        "DistributedDataParallel": DistributedDataParallel(nn.Linear(3, 3)),
        "FullyShardedDataParallel": FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu")),
        "torch.distributed.fsdp.fully_shard": torch_fully_shard(nn.Linear(3, 3)),
    }
    for name, inner in wrapped.items():
        inside[name] = raised(lambda inner=inner: fully_shard(nn.Sequential(nn.Linear(3, 3), inner)))[1]
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), inner), ignored_params=set(inner.parameters()))
    model(torch.ones(2, 3)).sum().backward()
    assert isinstance(model[1], FSDPModule) and all(param.grad is not None for param in model.parameters())
    return around, inside


def test_torchs_data_parallelism(tmp_path):
    for around, inside in run(with_torch, 2, str(tmp_path / "store")):
        assert not {key: text for key, text in around.items() if "was sharded by collectives.sharded" not in text}
        assert "0, a Linear, was sharded" in around["DistributedDataParallel", False]
        assert not {name: text for name, text in inside.items() if f"1 is under torch's {name}" not in text}


@over_gloo
def modules_put_in_later(ctx):
    """Parameters that a module gets after it was sharded belong to no unit, and a warning names them once."""
    found = []
    for late, ignored in ((True, False), (False, False), (False, True)):
        model = make_model()
        if not late:
            model.to("meta")
        frozen = nn.Linear(5, 5)
        own = nn.Linear(5, 5)
        if ignored:
            model.append(own)
        fully_shard(model, ignored_params=list(own.parameters()))
        if not late:  # which makes other objects of ignored parameters
            model.to_empty(device="cpu").unshard()
        if late:
            model.append(nn.Linear(5, 5))
            model.append(frozen.requires_grad_(False))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model(batch(0, ctx.rank)[0]).sum().backward()
        found.append([str(each.message) for each in caught if each.category is RuntimeWarning])
    return found


def test_parameters_that_come_after_the_sharding(tmp_path):
    for late, *others in run(modules_put_in_later, 2, str(tmp_path / "store")):
        (text,) = late
        assert "7.weight, 7.bias" in text and "8." not in text and "ignored_params" in text
        assert others == [[], []]


# ---- Ranks that do different things.


@over_comm
def other_units(ctx, machines):
    """One rank calls another block, or evaluates alone: a Mismatch on all ranks names both units."""
    found = {}

    def body(comm):
        comm.timeout = 20.0
        net = shard_blocks(Net(), comm=comm)
        for step in range(2):
            loss_of(net, ctx.rank, step).backward()
        order = [0, 1, 2] if ctx.rank == 0 else [0, 2, 1]
        net.blocks = nn.ModuleList([net.blocks[at] for at in order])
        began = time.monotonic()
        found["order"] = *raised(lambda: loss_of(net, ctx.rank, 3).backward()), time.monotonic() - began

    if machines is None:
        body(ctx.communicator().split(0))
    else:
        try:
            with joined(ctx, machines) as comm:
                body(comm)
        except CollectivesError:
            pass
    return found


def test_ranks_in_other_units():
    for found in run_ranks(other_units, 2, None):
        name, text, seconds = found["order"]
        assert name == "Mismatch" and "blocks.1 (Block)" in text and "blocks.2 (Block)" in text, found
        assert seconds < 10


@over_comm
def kinds_of_divergence(ctx):
    """On communicators of their own, since not all of these errors reach all ranks."""
    found = {}

    def evaluates(net):
        if ctx.rank == 0:
            with torch.no_grad():
                net(batch16(ctx.rank))
        loss_of(net, ctx.rank, 1).backward()

    def fails(net):
        if ctx.rank == 1:
            handle = net.blocks[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                net(batch16(0))
            handle.remove()
        loss_of(net, ctx.rank, 1).backward()

    def stops(net):
        if ctx.rank == 0:
            loss_of(net, ctx.rank, 1).backward()

    for way in (evaluates, fails, stops):
        comm = ctx.communicator().split(0)
        comm.timeout = 2.0
        net = shard_blocks(Net(), comm=comm)
        loss_of(net, ctx.rank, 0).backward()
        began = time.monotonic()
        found[way.__name__] = *raised(lambda way=way, net=net: way(net)), time.monotonic() - began
        ctx.barrier()
        comm.abort()
    return found


def batch16(rank):
    return torch.ones(2, 16) * rank


def test_other_kinds_of_divergence():
    first, second = run_ranks(kinds_of_divergence, 2)
    for found in (first, second):
        for way in ("evaluates", "fails"):
            name, text, seconds = found[way]
            assert name == "Mismatch" and "unit" in text and seconds < 10, found
    name, text, seconds = first["stops"]
    assert name == "CollectiveTimeout" and "rank 1" in text and seconds < 10, first


@over_comm
def dies(ctx):
    """A rank is killed in a step: the others' errors name it within seconds."""
    net = shard_blocks(Net(), comm=ctx.communicator().split(0))
    for step in range(6):
        if step == 3 and ctx.rank == 1:
            net.blocks[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        began = time.monotonic()
        try:
            loss_of(net, ctx.rank, step).backward()
        except RemoteError as error:
            return step, error.peers, str(error), time.monotonic() - began
    return None


def test_a_rank_that_is_killed():
    (step, peers, text, seconds), _ = run_ranks(dies, 2, deaths=[1])
    assert step == 3 and peers == (1,) and "rank 1" in text and seconds < 10


# ---- Exceptions on all ranks.


@over_gloo
def interrupted(ctx):
    """Ctrl-C in a forward and in a backward; then training goes on."""
    torch.manual_seed(0)
    reference = Net()
    torch.manual_seed(0)
    net = shard_blocks(Net())

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    found = {}
    try:
        for name, register in (
            ("forward", net.blocks[1].register_forward_hook),
            ("backward", net.blocks[1].register_full_backward_hook),
        ):
            handle = register(interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss_of(net, ctx.rank, 0).backward()
            handle.remove()
            net.zero_grad()
            loss_of(net, ctx.rank, 1).backward()
            expected = averaged(ctx, reference, lambda model, rank: loss_of(model, rank, 1).backward())
            found[name] = differences(full_grads(net), expected)
    finally:
        signal.signal(signal.SIGINT, before)
    return found


def test_ctrl_c(tmp_path):
    for found in run_ranks(interrupted, 2, str(tmp_path / "store")):
        assert found == {"forward": [], "backward": []}
