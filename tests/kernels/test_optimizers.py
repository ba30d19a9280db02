"""sgd_step and adam_step: against float64, and all paths against each other. Against torch.optim: tests/optim."""

from __future__ import annotations

import gc
import math

import numpy as np
import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidArgument
from tests.buffers import Guarded, memory_of
from tests.kernels.ways import HOSTS, TEXTS

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LR = 1e-3
STATES = {
    "sgd": ("momentum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}

# What the kernel functions are given.
RULES = {
    "sgd": dict(),
    "sgd decay": dict(weight_decay=0.1),
    "sgd maximize": dict(maximize=True, weight_decay=0.1),
    "sgd momentum": dict(momentum=0.9),
    "sgd dampening": dict(momentum=0.8, dampening=0.3, weight_decay=0.01),
    "sgd nesterov": dict(momentum=0.9, nesterov=True, weight_decay=0.01, maximize=True),
    "adam": dict(),
    "adam decay": dict(weight_decay=0.1, maximize=True),
    "adam betas": dict(betas=(0.3, 0.5), eps=1e-3),
    "adam amsgrad": dict(weight_decay=0.01, amsgrad=True),
    "adamw": dict(weight_decay=0.1),
    "adamw amsgrad": dict(amsgrad=True, maximize=True, betas=(0.95, 0.98)),
}


def values(count, dtype, seed, spread=3.0):
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(count, generator=generator, dtype=F64) * spread)
    return (torch.randn(count, generator=generator, dtype=F64) * scale * 0.01).to(dtype)


def kind_of(rule):
    name = rule.partition(" ")[0]
    return "sgd" if name == "sgd" else "amsgrad" if RULES[rule].get("amsgrad") else "adam"


def step_ours(rule, param, grad, states, *, step, lr=LR, **more):
    """The step of ``rule`` by our kernel; ``states``: in the order of STATES."""
    how = dict(RULES[rule])
    if kind_of(rule) == "sgd":
        momentum = how.pop("momentum", 0.0)
        buffers = states if momentum else ()
        kernels.sgd_step(param, grad, *buffers, momentum_factor=momentum, lr=lr, step=step, **how, **more)
    else:
        largest = states[2] if how.pop("amsgrad", False) else None
        how.setdefault("weight_decay", 0.01 if rule.startswith("adamw") else 0.0)
        more |= {"max_exp_avg_sq": largest, "decoupled": rule.startswith("adamw"), "lr": lr, "step": step}
        kernels.adam_step(param, grad, *states[:2], **how, **more)


def same_bits(one, other):
    """Whether all bits are the same, or both are NaN."""
    as_bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return bool(((one.view(as_bits) == other.view(as_bits)) | (one.isnan() & other.isnan())).all())


# ---- float64.
def wide(tensor):
    return tensor.double().numpy().astype(np.longdouble)


def in_float64(rule, param, grad, states, *, step, factor=1.0):
    """The formulas of torch's documentation, in more than float64 where NumPy has it: the new parameter and states."""
    how = RULES[rule]
    p, g = param, wide(grad) * factor * (-1 if how.get("maximize") else 1)
    if kind_of(rule) == "sgd":
        g = g + how.get("weight_decay", 0) * p
        momentum = how.get("momentum", 0)
        if momentum:
            buffer = g if step == 1 else momentum * states[0] + (1 - how.get("dampening", 0)) * g
            g = g + momentum * buffer if how.get("nesterov") else buffer
            states = [buffer]
        return p - LR * g, states
    beta1, beta2 = how.get("betas", (0.9, 0.999))
    decay = how.get("weight_decay", 0.01 if rule.startswith("adamw") else 0)
    if rule.startswith("adamw"):
        p = p * (1 - LR * decay)
    else:
        g = g + decay * p
    m = beta1 * states[0] + (1 - beta1) * g
    v = beta2 * states[1] + (1 - beta2) * g * g
    x = np.maximum(states[2], v) if how.get("amsgrad") else v
    p = p - LR * (m / (1 - beta1**step)) / (np.sqrt(x / (1 - beta2**step)) + how.get("eps", 1e-8))
    return p, [m, v, x][: len(states)]


def make(rule, count, param_type=F32, grad_type=F32, master=False, seed=0):
    """Arrays for one step: a parameter, its gradient, states, master."""
    wide = F64 if param_type == F64 else F32
    states = [values(count, wide, seed + 3 + i, 1.0) for i in range(len(STATES[kind_of(rule)]))]
    states[1:] = [each.abs() for each in states[1:]]
    if kind_of(rule) == "sgd" and not RULES[rule].get("momentum"):
        states = []
    more = {"master": values(count, F32, seed + 2)} if master else {}
    return dict(param=values(count, param_type, seed), grad=values(count, grad_type, seed + 1), states=states, **more)


TYPES = [
    (F32, F32, False),
    (F32, BF16, False),
    (F32, F16, False),
    (BF16, BF16, False),
    (BF16, F32, True),
    (BF16, BF16, True),
    (F16, F16, True),
    (F16, F32, False),
    (F64, F64, False),
    (F64, BF16, False),
]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("sgd dampening", "adam betas")])
def test_against_float64(rule):
    """A third step, of SGD a first one too. Where the terms of a step cancel, tests/optim compares it with torch's."""
    for number, (param_type, grad_type, master) in enumerate(TYPES):
        step = 1 if kind_of(rule) == "sgd" and number % 2 else 3
        a = make(rule, 9001, param_type, grad_type, master)
        start = wide(a.get("master", a["param"]))
        olds = [wide(each) for each in a["states"]]
        p, states = in_float64(rule, start, a["grad"], olds, step=step, factor=0.125 * 0.75)
        more = {"master": a["master"]} if master else {}
        step_ours(rule, a["param"], a["grad"], a["states"], step=step, grad_scale=0.125, clip=0.75, **more)
        unit = 2.0**-52 if param_type == F64 else 2.0**-23
        for mine, before, exact in zip(a["states"], olds, states, strict=True):
            # The terms of a sum may cancel, so the bound is on the larger of what comes in and what goes out.
            room = np.abs(exact) + np.abs(before) + np.abs(exact - before)
            assert (np.abs(wide(mine) - exact) <= 4 * unit * room).all(), (param_type, grad_type)
        stepped = a["master"] if master else a["param"]
        if master:
            assert torch.equal(a["param"], a["master"].to(param_type))  # torch rounds to nearest, ties to even
        elif param_type in (BF16, F16):
            unit = 2.0**-8 if param_type == BF16 else 2.0**-11
        moved = np.abs(p - start)
        least = 2.0**-14 if stepped.dtype == F16 else 0  # the units of fp16 are no smaller below it
        # In fp64 the bias corrections count as well: the rounding of beta2^3 is 300 times as much of 1 - beta2^3.
        room = 2 * np.maximum(np.abs(p), least) + (512 if param_type == F64 else 16) * moved
        assert (np.abs(wide(stepped) - p) <= unit * room).all(), (param_type, grad_type)


# ---- All paths agree.
def snapshot(a):
    tensors = [a["param"], a["grad"], *a["states"], *([a["master"]] if "master" in a else [])]
    return [each.clone() for each in tensors]


WAYS = [*HOSTS[::2], HOSTS[-1], *TEXTS[:3]]
SOME = pytest.mark.parametrize("way", [HOSTS[0], HOSTS[-1], TEXTS[1]], ids=lambda way: way[0])


def spoil(a):
    """Values at which arithmetic may differ between paths."""
    odd = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-39, 1e-38, 3e38, -3e38, 65504.0, 1e-20]
    for shift, tensor in enumerate([a["param"], a["grad"], *a["states"]]):
        for i in range(min(len(odd) ** 2, tensor.numel())):
            tensor[i] = odd[(i // len(odd) if shift % 2 else i) % len(odd)]


@pytest.mark.parametrize("param_type, grad_type, master", TYPES, ids=str)
@pytest.mark.parametrize("rule", ["sgd dampening", "adam decay", "adamw amsgrad"])
def test_all_paths_give_the_same_bits(rule, param_type, grad_type, master):
    seed = 77 if param_type == BF16 else None

    expected = None
    for name, way in WAYS:
        a = make(rule, 9001, param_type, grad_type, master)
        spoil(a)
        more = {"master": a["master"]} if master else {}
        with way():
            step_ours(rule, a["param"], a["grad"], a["states"], step=3, clip=0.3, seed=seed, position=5, **more)
        expected = expected or snapshot(a)
        assert all(map(same_bits, snapshot(a), expected)), name


def guarded(tensor, offset):
    """A copy of a tensor between guard zones, ``offset`` bytes past a 64-byte boundary."""
    zone = Guarded(memory_of("host"), tensor.numel() * tensor.element_size(), offset)
    zone.write(tensor.view(torch.uint8).numpy() if tensor.numel() else np.empty(0, np.uint8))
    bytes_ = zone.block[zone.start : zone.start + zone.nbytes]
    return zone, torch.from_numpy(bytes_).view(tensor.dtype)


def step_together(rule, arrays, **how):
    """One launch for all."""
    states = [[a["states"][i] for a in arrays] for i in range(len(arrays[0]["states"]))]
    params, grads, masters = ([a.get(key) for a in arrays] for key in ("param", "grad", "master"))
    step_ours(rule, params, grads, states, master=masters, **how)


@pytest.mark.parametrize("rule", ["sgd nesterov", "adamw amsgrad"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_unaligned_tensors_of_all_types_and_sizes_in_one_launch(way, rule):
    """The bits of a call for each of them, with a step of its own; nothing is written beside them."""
    counts = [7, 0, 4095, 1, 4097, 0, 8192, 3, 5000, 33 * 4096 + 5 if way in HOSTS else 12289]
    alone, together = (
        [make(rule, n, *t, seed=10 * i) for i, (n, t) in enumerate(zip(counts, TYPES, strict=True))] for _ in range(2)
    )
    steps, zones = list(range(1, 1 + len(counts))), []
    for a, step in zip(alone, steps, strict=True):
        step_ours(rule, a["param"], a["grad"], a["states"], step=step, master=a.get("master"))

    def placed(tensor):
        zone, view = guarded(tensor, (len(zones) + 1) * tensor.element_size() % 64)
        zones.append(zone)
        return view

    views = [
        {key: [placed(e) for e in value] if key == "states" else placed(value) for key, value in a.items()}
        for a in together
    ]
    with way[1]():
        step_together(rule, views, step=steps)
    for a, b in zip(alone, views, strict=True):
        assert all(map(same_bits, snapshot(a), snapshot(b)))
    assert all(zone.guards_intact() for zone in zones)


# ---- Scalars.
@SOME
@pytest.mark.parametrize("rule", ["sgd dampening", "adamw"])
def test_device_scalars_are_read_when_the_kernel_runs(rule, way):
    host, device = make(rule, 5000), make(rule, 5000)
    numbers = dict(lr=0.25, grad_scale=0.5, clip=0.375)
    step_ours(rule, host["param"], host["grad"], host["states"], step=6, **numbers)
    for types in [(F32, F64, torch.int64), (F64, F32, F32), (F32, F32, F64)]:
        device = make(rule, 5000)
        tensors = {
            "lr": torch.tensor([0.25], dtype=types[0]),
            "grad_scale": torch.tensor(0.5, dtype=types[1]),
            "clip": torch.tensor([[0.375]]),
            "step": torch.tensor(6, dtype=types[2]),
        }
        with way[1]():
            step_ours(rule, device["param"], device["grad"], device["states"], **tensors)
        assert all(map(same_bits, snapshot(host), snapshot(device)))


@SOME
@pytest.mark.parametrize("rule", ["sgd momentum", "adamw"])
def test_a_step_is_left_out_where_something_is_not_finite(rule, way):
    statistics = kernels.Statistics()
    statistics.nonfinite.fill_(3)
    tensors = [torch.tensor([2]), torch.tensor(1.0), torch.tensor(math.nan, dtype=F64)]
    for found in (1, True, math.nan, *tensors, statistics):
        a = make(rule, 5000, BF16, BF16, True)
        before = snapshot(a)
        a["grad"][7] = math.inf
        before[1][7] = math.inf
        with way[1]():
            step_ours(rule, a["param"], a["grad"], a["states"], master=a["master"], step=1, found_nonfinite=found)
        assert all(map(same_bits, snapshot(a), before))
    for found in (0, None, torch.tensor([0]), torch.tensor(0.0), kernels.Statistics()):
        a = make(rule, 5000)
        before = a["param"].clone()
        step_ours(rule, a["param"], a["grad"], a["states"], step=1, found_nonfinite=found)
        assert not torch.equal(a["param"], before)


def test_a_plan_keeps_what_it_reads():
    params, grads = [torch.ones(9), torch.ones(5000)], [torch.ones(9), torch.ones(5000)]
    plan = kernels.ParameterTable("sgd_step", params, grads).plan_sgd(lr=torch.tensor(0.5))
    rubbish = [torch.full((1,), 7.0) for _ in range(1000)] + [torch.full((22 * k,), 9.0) for k in range(50)]
    gc.collect()
    plan()
    assert all(bool((param == 0.5).all()) for param in params)
    assert rubbish[0].item() == 7.0


# ---- Rounding at random.
def rounded(value, count, **how):
    """What bf16 parameters become whose masters go to ``value``."""
    param, master = torch.zeros(count, dtype=BF16), torch.full((count,), float(value))
    kernels.sgd_step(param, torch.zeros(count), master=master, lr=1.0, **how)
    return param


@pytest.mark.parametrize("share", [0.0, 1 / 65536, 0.25, 0.9])
def test_rounding_at_random_has_the_right_mean(share):
    count = 1 << 18
    above = (rounded(1 + share / 128, count, seed=4).float() - 1) * 128
    assert set(above.tolist()) <= {0.0, 1.0}
    error = 5 * math.sqrt(max(share * (1 - share), 1 / count) / count)  # five standard deviations
    assert abs(above.mean().item() - share) <= (error if share else 0)


def test_random_bits_are_a_function_of_seed_step_and_position():
    one = rounded(1.003, 5000, seed=1, step=2)
    assert torch.equal(one, rounded(1.003, 5000, seed=1, step=2))
    assert torch.equal(one[1234:], rounded(1.003, 5000 - 1234, seed=1, step=2, position=1234))
    far = rounded(1.003, 16, seed=1, step=2, position=2**40)
    others = [dict(seed=2, step=2), dict(seed=1, step=3), dict(seed=1 + 2**40, step=2), dict(seed=1)]
    for how in others:
        assert 0.3 < (rounded(1.003, 5000, **how) != one).float().mean() < 0.6
    assert not torch.equal(far, one[:16])


def test_several_tensors_follow_each_other_or_have_their_own_positions():
    whole = rounded(1.003, 300, seed=1)
    for position in (0, [0, 100, 200]):
        params = [torch.zeros(100, dtype=BF16) for _ in range(3)]
        masters = [torch.full((100,), 1.003) for _ in range(3)]
        grads = [torch.zeros(100) for _ in range(3)]
        kernels.sgd_step(params, grads, master=masters, lr=1.0, seed=1, position=position)
        assert torch.equal(torch.cat(params), whole)


@SOME
def test_only_bf16_is_rounded_at_random(way):
    params = [torch.zeros(5000, dtype=dtype) for dtype in (F16, BF16, F32, F64)]
    masters = [torch.full((5000,), 1.0001), torch.full((5000,), 1.003), None, None]
    grads = [torch.zeros(5000), torch.zeros(5000), torch.full((5000,), -1.003), torch.full((5000,), -1.003)]
    with way[1]():
        kernels.sgd_step(params, grads, master=masters, lr=1.0, seed=1)
    assert [len(param.unique()) for param in params] == [1, 2, 1, 1]


# ---- Other arrays.
def test_numpy_arrays_are_taken_by_pointer():
    a, b = make("adamw", 1000), make("adamw", 1000)
    step_ours("adamw", a["param"], a["grad"], a["states"], step=1)
    step_ours("adamw", b["param"].numpy(), b["grad"].numpy(), [each.numpy() for each in b["states"]], step=1)
    assert all(map(same_bits, snapshot(a), snapshot(b)))


def test_tensors_that_are_dense_in_another_order():
    shape = (4, 3, 5, 6)
    plain = {key: values(360, F32, i).view(shape) for i, key in enumerate("pgmv")}
    plain["v"].abs_()
    other = {key: each.clone().contiguous(memory_format=torch.channels_last) for key, each in plain.items()}
    turned = {key: each.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for key, each in plain.items()}
    for a in (plain, other, turned):
        kernels.adam_step(a["p"], a["g"], a["m"], a["v"], lr=LR, step=1)
    assert torch.equal(plain["p"], other["p"]) and torch.equal(plain["p"], turned["p"])
    assert torch.equal(plain["v"], other["v"]) and torch.equal(plain["v"], turned["v"])
    with pytest.raises(InvalidArgument, match=r"grad 0 has strides .* and param 0 .*: they must be the same"):
        kernels.sgd_step(other["p"], plain["g"], lr=LR)
    with pytest.raises(InvalidArgument, match=r"grad 0 of shape .* isn't contiguous"):
        kernels.sgd_step(plain["p"], other["g"], lr=LR)
    with pytest.raises(InvalidArgument, match=r"tensor 0 of shape .* isn't contiguous"):
        kernels.pack([turned["p"]], torch.empty(360))


# ---- GPUs.
@pytest.mark.gpu
@pytest.mark.parametrize("param_type, grad_type, master", TYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_gpu_has_the_bits_of_the_host(rule, param_type, grad_type, master):
    seed = 77 if param_type == BF16 else None
    counts = [100003, 1, 0, 4097]
    host = [make(rule, n, param_type, grad_type, master, seed=10 * i) for i, n in enumerate(counts)]
    spoil(host[0])

    def run(device):
        def there(tensor):
            return torch.cat([tensor.new_zeros(1), tensor]).to(device)[1:]  # unaligned

        together = [{key: [there(e) for e in v] if key == "states" else there(v) for key, v in a.items()} for a in host]
        lr, clip = torch.tensor(LR, dtype=F64, device=device), torch.tensor([0.3], device=device)
        step_together(rule, together, step=torch.tensor(3, device=device), lr=lr, clip=clip, seed=seed)
        return [each.cpu() for a in together for each in snapshot(a)]

    for mine, other in zip(run("cuda"), run("cpu"), strict=True):
        assert same_bits(mine, other)


@pytest.mark.gpu
def test_gpu_leaves_a_step_out():
    a = {key: torch.ones(5000, device="cuda") for key in "pgmv"}
    kernels.adam_step(*a.values(), lr=LR, step=1, found_nonfinite=torch.tensor([1], device="cuda"))
    assert all((each == 1).all() for each in a.values())
    with pytest.raises(InvalidArgument, match="grad 0 is on cpu"):
        kernels.sgd_step(a["p"], torch.ones(5000), lr=LR)
    kernels.sgd_step(a["p"], a["g"], lr=torch.tensor(0.5))  # a host scalar is read at once
    assert (a["p"] == 0.5).all()
