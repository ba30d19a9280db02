"""RaggedTensor: each operation against the same on a plain tensor, and what must raise."""

import copy
import io
import itertools
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

from collectives.errors import InvalidUsage
from collectives.sharded.placement import RaggedShard
from collectives.sharded.ragged_tensor import RaggedTensor
from tests.ddp.training import over_gloo, run
from tests.ranks import ROOT
from tests.sharded.shards import mesh_of, set_grads, sharded, values, whole

OPERATIONS = {
    "detach": lambda a, b: a.detach(),
    "copy_": lambda a, b: a.copy_(b),
    "add": lambda a, b: 1 + a + b,
    "add_": lambda a, b: a.add_(b, alpha=2),
    "mul_": lambda a, b: a.mul_(b).mul_(torch.tensor(2.0)),
    "double": lambda a, b: a.double() + 1,
    "half": lambda a, b: a.to(torch.bfloat16),
    "addcdiv_": lambda a, b: a.addcdiv_(a.clone(), b, value=0.5),
    "lerp": lambda a, b: a.lerp(b, torch.tensor(0.3)).lerp_(b, 0.3),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "maximum": lambda a, b: torch.maximum(a, b),
    "out": lambda a, b: torch.add(a, b, out=a),
    "frexp": lambda a, b: list(torch.frexp(a)),
    "==": lambda a, b: a == a.clone(),
    "masked_fill_": lambda a, b: a.masked_fill_(a > 0, 0.0),
    "like": lambda a, b: [torch.zeros_like(a), torch.full_like(a, 3.0), a.new_zeros(2, 3), a.new_ones(a.shape)],
    "sum": lambda a, b: [a.sum(), a.mean(), b.max(), a.isfinite().all(), (a > 0).sum(), a.argmax(), a.std()],
    "norms": lambda a, b: [torch.linalg.vector_norm(a, order) for order in (2, 1, 3, math.inf, 0, -math.inf)],
    "norms of dimensions": lambda a, b: [a.norm(dim=-1), a.sum(0), a.mean(-1, keepdim=True)],
    "products": lambda a, b: [a @ b.T, a.T @ a],
    "views": lambda a, b: [a.t(), a.view(-1), a.view(a.shape), a[2], a[:, 1:], *a.chunk(2), a.expand(2, 8, 6), a.mT],
    "several": lambda a, b: [torch.cat([a, b]), torch.stack([a, b]), torch._C._nn.flatten_dense_tensors([a, b])],
    "sorts": lambda a, b: [a.cumsum(0), a.sort(0)[0], a.topk(2, dim=0)[0], torch.linalg.svdvals(a)],
    "broadcast rows": lambda a, b: a * b[0],
    "broadcast columns": lambda a, b: a * b[:, :1] + b.sum(1, keepdim=True),
    "broadcast to more": lambda a, b: a + torch.stack([b, b]),
    "index": lambda a, b: [a[a > 0], a[:, [1]], a[torch.tensor([3])]],
    "lists in place": lambda a, b: [
        torch._foreach_mul_([a, b], 2.0), torch._foreach_add_([a], [b], alpha=2), torch._foreach_lerp_([a], [b], 0.1),
        torch._foreach_addcdiv_([a], [b.clone()], [b], [0.1]), torch._foreach_copy_([b], [a]),
    ],
    "lists": lambda a, b: [
        *torch._foreach_add([a], [b], alpha=2), *torch._foreach_sqrt([b]), *torch._foreach_sign([a, b]),
        *torch._foreach_norm([a, b]), *torch._foreach_norm([a, b], math.inf), *torch._foreach_max([a]),
    ],
    "lists of views": lambda a, b: torch._foreach_mul_([a[0], a[1], b], 2.0),
    "write a row": lambda a, b: a[1].zero_(),
    "write rows": lambda a, b: a.__setitem__(slice(2, 5), 0.5),
    "write a row from another": lambda a, b: a.__setitem__(3, b[0]),
    "write all rows": lambda a, b: [row.mul_(2) for row in a.unbind()],
    "write two views": lambda a, b: [view.fill_(3) for view in (a[0], a[1])],
    "write to a view and otherwise": lambda a, b: [(v := a.view(-1)).mul_(2), a.add_(1), v[5].zero_(), v + 1],
    "write under a view": lambda a, b: [(v := a.t()), a.fill_(2), v.sum(), v],
    "squeeze_": lambda a, b: a.squeeze_(),
    "matmul out": lambda a, b: torch.mm(b, b.T @ b, out=a),
    "data": lambda a, b: a.data.mul_(2),
    "set data": lambda a, b: setattr(a, "data", b),
    "vectors": lambda a, b: nn.utils.parameters_to_vector([a, b]),
    "deepcopy": lambda a, b: copy.deepcopy(a),
    "copy": lambda a, b: copy.copy(a),
    "pickle": lambda a, b: pickle.loads(pickle.dumps(a)),
    "save": lambda a, b: loaded(saved({"a": a})),
    "total norm": lambda a, b: nn.utils.get_total_norm([a, b]),
}  # fmt: skip

RANDOM = {
    "normal_": lambda a: a.normal_(),
    "kaiming_uniform_": lambda a: nn.init.kaiming_uniform_(a),
    "trunc_normal_": lambda a: nn.init.trunc_normal_(a),
    "orthogonal_": lambda a: nn.init.orthogonal_(a),
    "rand_like": lambda a: torch.rand_like(a),
    "bernoulli_": lambda a: a.bernoulli_(torch.full_like(a, 0.5)),
    "dropout": lambda a: nn.functional.dropout(a, 0.4),
    "multinomial": lambda a: torch.multinomial(a.abs(), 2),
    "row": lambda a: a[2].normal_(),
    "generator": lambda a: a.uniform_(generator=torch.Generator().manual_seed(3)),
}

LOCAL = ("add", "add_", "mul_", "double", "half", "lerp", "where", "maximum", "out", "==", "deepcopy", "pickle")


def saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def loaded(data):
    return torch.load(io.BytesIO(data), weights_only=True)["a"]


def flat(made):
    return list(itertools.chain.from_iterable(map(flat, made))) if isinstance(made, (list, tuple)) else [made]


def compare(name, got, want):
    for a, b in zip(flat(got), flat(want), strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(whole(a), whole(b), msg=lambda text: f"{name}: {text}")
            assert whole(a).shape == b.shape and a.dtype == b.dtype
        else:
            assert a == b


@over_gloo
def operate(ctx):
    mesh = mesh_of()
    shapes = [(8, 6), (8, 6)]
    first = values(0, shapes)
    full, other = first[0], first[1].abs() + 0.5
    for placement, wrap in itertools.product(placements_of(ctx.size), (nn.Parameter, lambda tensor: tensor)):
        for name, function in OPERATIONS.items():
            with torch.no_grad():
                a, b = (wrap(RaggedTensor.from_full(each, mesh, placement)) for each in (full, other))
                x, y = full.clone(), other.clone()
                got, want = function(a, b), function(x, y)
                compare(f"{name} {placement}", [got, a, b], [want, x, y])
                assert name not in LOCAL or isinstance(got, RaggedTensor), name
        for name, function in RANDOM.items():
            with torch.no_grad():
                a, x = wrap(RaggedTensor.from_full(full, mesh, placement)), full.clone()
                torch.manual_seed(5)
                got = function(a)
                torch.manual_seed(5)
                compare(f"{name} {placement}", [got, a], [function(x), x])
    check_kinds(mesh)
    check_autograd(mesh)
    check_versions(mesh)


def placements_of(ranks):
    rows, elements = [0, *[3] * (ranks - 1), 8], [0, *[17] * (ranks - 1), 48]
    return RaggedShard(rows), RaggedShard(elements, by_rows=False), RaggedShard([0] * ranks + [8])


def check_kinds(mesh):
    """Integers, booleans, complex numbers, no dimensions, no elements."""
    torch.manual_seed(7)
    tensors = [
        torch.arange(12).view(4, 3), torch.arange(8) % 3 == 0, torch.randn(4, 3, dtype=torch.complex64),
        torch.randn(5, dtype=torch.complex64), torch.tensor(2.5), torch.empty(0, 3), torch.empty(3, 0),
    ]  # fmt: skip
    for full, a in zip(tensors, sharded(tensors, mesh), strict=True):
        wanted = [full, full + full, full == full, torch.zeros_like(full)]
        compare("kinds", [a, a + a, a == a, a.clone().zero_()], wanted)
        if full.dtype.is_complex:
            pairs = torch.view_as_real(a)
            assert isinstance(pairs, RaggedTensor)
            pairs.mul_(2)
            twice = full * 2
            torch.testing.assert_close(whole(a.sum()), twice.sum())
            compare("complex", [pairs, torch.view_as_complex(pairs), a], [torch.view_as_real(twice), twice, twice])
        if full.is_floating_point() and full.numel():
            assert whole(torch.linalg.vector_norm(a)) == torch.linalg.vector_norm(full)
        assert copy.deepcopy(a).shape == full.shape and repr(a)
    for dtype in (torch.complex64, torch.complex128):
        full = [torch.randn(4, 3, dtype=dtype) for _ in range(2)]
        params = [nn.Parameter(sharded(full[:1], mesh)[0]), nn.Parameter(full[0].clone())]
        for param in params:
            set_grads([param], full[1:])
        for param in params:
            torch.optim.Adam([param], foreach=True).step()
        torch.testing.assert_close(whole(params[0]), params[1].detach())


def check_autograd(mesh):
    full = values(0, [(8, 6)])[0]
    param, plain = nn.Parameter(sharded([full], mesh)[0]), nn.Parameter(full.clone())
    for function in (
        lambda p: (p * 3).sum(),
        lambda p: p.square().sum(),
        lambda p: (p[0] * p[1]).sum() + p.view(-1)[3],
        lambda p: (p.full_tensor() if isinstance(p, DTensor) else p).pow(3).sum(),
    ):
        param.grad = plain.grad = None
        function(param).backward()
        function(plain).backward()
        torch.testing.assert_close(whole(param.grad), plain.grad)
    assert isinstance(param.grad, RaggedTensor)
    assert type(param) is RaggedTensor and isinstance(param, nn.Parameter)


def check_versions(mesh):
    """Every write is counted, also through lists, views and detached tensors, so that units notice it."""
    param = nn.Parameter(sharded(values(0, [(8, 6)]), mesh)[0])
    param.grad = torch.ones_like(param)
    with torch.no_grad():
        for write in (
            lambda: param.add_(1), lambda: param.data.add_(1), lambda: param.detach().add_(1),
            lambda: param[0].fill_(1), lambda: torch._foreach_add_([param], 1),
            lambda: torch._foreach_mul_([param[0], param[1]], 2),
            lambda: torch.optim.AdamW([param], fused=True).step(), lambda: setattr(param, "data", param + 1),
        ):  # fmt: skip
            before = param._version
            write()
            assert param._version > before


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_operations(ranks, tmp_path):
    run(operate, ranks, tmp_path / "store")


@over_gloo
def refuse(ctx):
    mesh = mesh_of()
    full = values(0, [(8, 6)])[0]
    param = nn.Parameter(RaggedTensor.from_full(full, mesh, RaggedShard([0, 3, 8])))
    other = RaggedTensor.from_full(full, mesh, RaggedShard([0, 4, 8]))
    even = distribute_tensor(full, mesh, [Shard(0)])
    turned = RaggedTensor.from_full(full, DeviceMesh("cpu", [1, 0]), param.ragged)  # the same bounds, other ranks
    wrong = {
        "a plain tensor": [
            lambda: param + full, lambda: param.mul_(full[0]), lambda: torch.equal(param, full),
            lambda: param.__setitem__(0, full[0]), lambda: param.index_add_(0, torch.tensor([1]), full[:1]),
            lambda: param @ full.T, lambda: torch._foreach_add_([param], [full]), lambda: param.data.copy_(full),
            lambda: setattr(param, "data", full), lambda: param.set_(full),
            lambda: nn.functional.embedding(full.long(), param),
        ],
        "RaggedShard": [
            lambda: param + turned, lambda: param + other, lambda: torch._foreach_add_([param], [other]),
            lambda: param.copy_(other),
        ],
        r"Shard\(dim=0\)": [lambda: param + even, lambda: param.copy_(even), lambda: param @ even],
        "placed otherwise": [lambda: even.copy_(param), lambda: full.clone().add_(param)],
        "change the shape": [lambda: param.t_(), lambda: param.unsqueeze_(0), lambda: param.detach().resize_(3, 3)],
        "can't become": [lambda: setattr(param, "data", param.data.bfloat16())],
        "no memory of its own": [lambda: param.share_memory_(), lambda: torch.from_dlpack(param.detach())],
    }  # fmt: skip
    with torch.no_grad():
        for match, functions in wrong.items():
            for function in functions:
                with pytest.raises(InvalidUsage, match=match):
                    function()
    for function in (param.tolist, param.numpy):
        with pytest.raises(RuntimeError):
            function()
    assert torch.equal(whole(param), full) and not param.is_shared()
    for placement in (Replicate(), Shard(0), Shard(1), RaggedShard([0, 0, 8])):
        assert torch.equal(param.detach().redistribute(placements=[placement]).full_tensor(), full)
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    torch.testing.assert_close(compiled(param.detach()).full_tensor(), full * 2 + 1)
    return saved({"a": param})


def test_mixtures_raise(tmp_path):
    data = run(refuse, 2, tmp_path / "store")[1]
    # Read in another process, without a process group.
    (tmp_path / "saved").write_bytes(data)
    program = (
        "import torch, collectives.sharded\n"
        f"a = torch.load({str(tmp_path / 'saved')!r}, weights_only=True)['a']\n"
        "print(type(a).__qualname__, a.requires_grad, list(a.shape), list(a.to_local().shape), a.placements)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert found.stdout == "RaggedTensor True [8, 6] [5, 6] (RaggedShard((0, 3, 8)),)\n", found.stderr
