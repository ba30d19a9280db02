"""Parameters, optimizer state and objects from one rank to all; batch normalisation over all ranks' batches."""

from __future__ import annotations

from tests.horovod.started import started
from tests.ranks import run_ranks


def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def broadcast_state(ctx, hvd, found):
    """State dicts, and parameters in each of the forms in which they may be passed; return the model."""
    import torch

    torch.manual_seed(ctx.rank)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(3, 4))
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)  # and another, transposed:
    model[2].weight.data = torch.randn(3, 4).t()
    model[1].num_batches_tracked.fill_(ctx.rank)
    versions = [p._version for p in model.parameters()]
    if ctx.rank == 1:
        hvd.broadcast_parameters(model.state_dict(), 1)
    else:  # in whatever order a dict has its names
        hvd.broadcast_parameters(dict(reversed(model.state_dict().items())), root_rank=1)
    found["state"] = {name: value.tolist() for name, value in model.state_dict().items()}
    found["versions"] = all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
    for kind in (model.named_parameters, model.parameters, lambda: list(model.named_parameters())):
        with torch.no_grad():
            model[0].bias.fill_(ctx.rank)
        hvd.broadcast_parameters(kind(), root_rank=2)
        found.setdefault("bias", []).append(model[0].bias.tolist())
    odd = {"a": torch.full((), ctx.rank), "text": f"of {ctx.rank}", "none": None, "inference": None}
    with torch.inference_mode():
        odd["inference"] = torch.full((2,), ctx.rank)
    hvd.broadcast_parameters(odd, 0)
    found["odd"] = odd["a"].item(), odd["text"], odd["none"], odd["inference"].tolist()
    return model


def refuse_parameters(ctx, hvd, found, model):
    """What differs between the ranks is named; what is no parameter is refused."""
    import torch

    differing = torch.nn.Sequential(torch.nn.Linear(2, 3 + (ctx.rank == 1)))
    found["shape"] = raised(hvd.broadcast_parameters, differing.state_dict(), 0)
    differing = {f"layer{ctx.rank}": torch.zeros(1), "same": torch.zeros(2)}
    found["names"] = raised(hvd.broadcast_parameters, differing, 0)
    found["type"] = raised(hvd.broadcast_parameters, torch.zeros(3), 0)
    found["object"] = raised(hvd.broadcast_parameters, [("text", "x")], 0)
    found["root"] = raised(hvd.broadcast_parameters, model.state_dict(), 3)


def share_objects(ctx, hvd, found, model):
    """Objects, and parameters and objects in a process set."""
    import torch

    pair = hvd.add_process_set([0, 2])
    if ctx.rank != 1:
        with torch.no_grad():
            model[0].bias.fill_(ctx.rank)
        hvd.broadcast_parameters(model.state_dict(), 2, pair)
        found["pair"] = model[0].bias.tolist(), hvd.broadcast_object(ctx.rank, 2, process_set=pair)
        found["pair"] += (hvd.allgather_object("x" * ctx.rank, process_set=pair),)
    thing = {"rank": ctx.rank, "big": list(range(1000))} if ctx.rank == 1 else None
    found["objects"] = hvd.broadcast_object(thing, 1)["rank"], hvd.broadcast_object_fn(2, "named")([ctx.rank])
    found["gathered"] = hvd.allgather_object({"of": [ctx.rank] * ctx.rank}, name="gathered")
    lock = (i for i in range(3))
    found["no object"] = raised(hvd.broadcast_object, lock if ctx.rank == 0 else None)
    found["no gather"] = raised(hvd.allgather_object, lock if ctx.rank == 1 else None)
    found["after"] = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()


def broadcast_optimizers(ctx, hvd, found):
    """A resume on one rank, beside new optimizers; return an optimizer that differs between the ranks."""
    import torch

    import collectives

    optimizers = {
        "adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1 + ctx.rank)),
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1 + ctx.rank, amsgrad=True, betas=(0.5, 0.6)),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=ctx.rank == 0, dampening=0),
        "plain": lambda p: torch.optim.SGD(p, lr=0.1 + ctx.rank),
        "rprop": lambda p: torch.optim.Rprop(p, step_sizes=(1e-6, 40 + ctx.rank)),
        "ours": lambda p: collectives.optim.AdamW(p, lr=0.1 + ctx.rank),
        "our sgd": lambda p: collectives.optim.SGD(p, lr=0.1 + ctx.rank, momentum=0.5),
    }
    found["optimizers"] = {}
    for name, make in optimizers.items():
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 3))
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
        optimizer = make(groups)
        if ctx.rank == 0:
            train_and_go_back(model, optimizer)
            optimizer.param_groups[1]["weight_decay"] = 0.25
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        kinds = sorted({type(v).__name__ for state in optimizer.state.values() for v in state.values()})
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        weights = [p.tolist() for p in model.parameters()]
        found["optimizers"][name] = repr(options), kinds, weights
    if ctx.rank != 1:  # and the other way round: state where the root has none
        optimizer.step()
    else:
        optimizer = make(groups)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    found["none left"] = len(optimizer.state)
    found["lbfgs"] = raised(hvd.broadcast_optimizer_state, torch.optim.LBFGS(model.parameters()), 0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2 + ctx.rank))], lr=1)
    found["other"] = raised(hvd.broadcast_optimizer_state, other, 0)
    return other


def train_and_go_back(model, optimizer):
    """Make three steps, and restore the parameters: the optimizer has a state."""
    import torch

    with torch.no_grad():
        before = [p.clone() for p in model.parameters()]
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.5)
            optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            p.copy_(old)


def zero_gradients(hvd, found):
    """What programs rely on beside the results: gradients after a broadcast, which are zero where there were none."""
    import torch

    layer = torch.nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    hvd.broadcast_optimizer_state(torch.optim.Adam(layer.parameters()), root_rank=0)
    table = torch.nn.Embedding(4, 2, sparse=True)
    hvd.broadcast_optimizer_state(torch.optim.SparseAdam(table.parameters()), root_rank=0)
    trained = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    trained(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    found["fresh"], found["frozen"] = layer.weight.grad.tolist(), layer.bias.grad
    found["sparse"] = table.weight.grad.is_sparse, table.weight.grad.to_dense().tolist()
    found["trained"] = trained.weight.grad.tolist()


def parameters(ctx):
    found = {}
    with started(ctx) as hvd:
        zero_gradients(hvd, found)
        model = broadcast_state(ctx, hvd, found)
        refuse_parameters(ctx, hvd, found, model)
        share_objects(ctx, hvd, found, model)
        other = broadcast_optimizers(ctx, hvd, found)
    for name, call in (
        ("parameters", lambda: hvd.broadcast_parameters({}, 0)),
        ("optimizer", lambda: hvd.broadcast_optimizer_state(other, 0)),
        ("object", lambda: hvd.broadcast_object(1)),
    ):
        found[f"{name} before init"] = raised(call)
    return found


def test_from_one_rank_to_all():
    results = run_ranks(parameters, 3)
    first = results[0]
    for rank, found in enumerate(results):
        pair = found.pop("pair", None)
        assert (pair is None) == (rank == 1)
        if pair is not None:
            assert pair == ([2.0] * 3, 2, ["", "xx"])
        assert found == first, [key for key in first if first[key] != found[key]]
    assert first["fresh"] == [[0.0] * 3] * 2 and first["frozen"] is None
    assert first["sparse"] == (True, [[0.0] * 2] * 4) and first["trained"] == [[1.0, 1.0]] * 2
    assert first["state"]["1.num_batches_tracked"] == 1
    assert first["versions"]
    assert first["bias"] == [[2.0] * 3] * 3
    assert first["odd"] == (0, "of 0", None, [0, 0])
    assert "0.weight: '[3, 2] float32 on cpu' on ranks 0, 2; '[4, 2] float32 on cpu' on rank 1" in first["shape"]
    words = "layer0: '[1] float32 on cpu' on rank 0; absent on ranks 1, 2 | layer1: absent on ranks 0, 2"
    assert words in first["names"]
    assert first["type"].startswith("ValueError: invalid params of type: <class 'torch.Tensor'>")
    assert "'text' isn't a tensor" in first["object"]
    assert "root_rank must be one of the ranks [0, 1, 2], not 3" in first["root"]
    assert first["objects"] == (1, [2])
    assert first["gathered"] == [{"of": []}, {"of": [1]}, {"of": [2, 2]}]
    assert "rank 0's object can't be pickled" in first["no object"]
    assert "rank 1's object can't be pickled" in first["no gather"]
    assert first["after"] == 3.0
    options, kinds, _ = first["optimizers"]["amsgrad"]
    assert "'weight_decay': 0.25" in options and "'betas': (0.5, 0.6)" in options and kinds == ["Tensor"]
    assert "tensor(0.1000)" in first["optimizers"]["adam"][0]
    assert "'step_sizes': (1e-06, 40)" in first["optimizers"]["rprop"][0]
    assert first["none left"] == 0
    assert first["lbfgs"].startswith("ValueError: cannot broadcast torch.optim.LBFGS state")
    assert "parameter 0 of group 0: '[2] float32 on cpu' on rank 0; '[3] float32 on cpu' on rank 1" in first["other"]
    for name in ("parameters", "optimizer", "object"):
        assert first[f"{name} before init"] == "ValueError: Horovod has not been initialized; use hvd.init()."


SHAPES = [(5, 4), (2, 3, 7), (4, 2, 3, 3), (3, 2, 2, 2, 2)]


def normalise(ctx):
    """One module over all ranks' batches, of different and empty sizes, beside torch's on all batches together."""
    import torch

    found = []
    with started(ctx) as hvd:
        for case, shape in enumerate(SHAPES):
            for dtype, options in (
                (torch.float64, {}),
                (torch.float32, {"momentum": None}),
                (torch.float64, {"affine": False}),
                (torch.float64, {"track_running_stats": False}),
                (torch.bfloat16, {}),
            ):
                torch.manual_seed(case)
                kind = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)[max(0, len(shape) - 3)]
                mine = hvd.SyncBatchNorm(shape[1], **options).to(dtype)
                theirs = kind(shape[1], **options).double()
                if mine.affine:
                    torch.nn.init.uniform_(mine.weight, 0.5, 2)
                    torch.nn.init.uniform_(mine.bias)
                theirs.load_state_dict(mine.state_dict())
                sizes = [shape[0], 0, 2]
                for _ in range(2):
                    whole = (torch.randn(sum(sizes), *shape[1:], dtype=torch.float64) * 2 + 30).to(dtype)
                    weights = torch.randn(whole.shape, dtype=torch.float64).to(dtype)
                    part = whole.split(sizes)[ctx.rank].clone().requires_grad_()
                    wide = whole.double().requires_grad_()
                    out, expected = mine(part), theirs(wide)
                    for module in (mine, theirs):
                        module.zero_grad()
                    (out * weights.split(sizes)[ctx.rank]).sum().backward()
                    (expected * weights).sum().backward()
                    grads = [hvd.allreduce(p.grad, op=hvd.Sum) for p in mine.parameters()]
                    pairs = [(out, expected.split(sizes)[ctx.rank]), (part.grad, wide.grad.split(sizes)[ctx.rank])]
                    pairs += zip(grads, [p.grad for p in theirs.parameters()], strict=True)
                    pairs += zip(mine.buffers(), theirs.buffers(), strict=True)
                    scale = {torch.float64: 1e-10, torch.float32: 3e-4, torch.bfloat16: 6e-2}[dtype]
                    for number, (ours, right) in enumerate(pairs):
                        worst = ((ours.double() - right).abs() / right.abs().clamp(min=1)).max() if ours.numel() else 0
                        if worst > scale or ours.dtype not in (dtype, torch.int64) or ours.shape != right.shape:
                            found.append((shape, str(dtype), options, number, float(worst)))
                mine.eval(), theirs.eval()
                if ctx.rank == 0:  # nothing is sent
                    ours, right = mine(whole.detach()).double(), theirs(whole.double())
                    if not torch.allclose(ours, right, rtol=scale, atol=scale):
                        found.append((shape, str(dtype), options, "eval"))
        one = hvd.SyncBatchNorm(2)
        few = raised(one, torch.zeros(int(ctx.rank == 0), 2))
        flat = raised(one, torch.zeros(4)), raised(one, torch.zeros(4, 3))
        before = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.ModuleList([torch.nn.BatchNorm1d(2)])).eval()
        after = hvd.SyncBatchNorm.convert_sync_batchnorm(before)
        kinds = [type(m).__name__ for m in after.modules()], after[0].training, len(after.state_dict())
    return found, few, flat, kinds


def test_batch_normalisation_over_all_ranks():
    for found, few, flat, kinds in run_ranks(normalise, 3):
        assert not found
        assert few.startswith("ValueError: expected more than 1 value per channel when training, got 1 on all ranks")
        assert "at least 2D input (got 1D" in flat[0] and "expected 2 channels" in flat[1]
        assert kinds == (["Sequential", "SyncBatchNorm", "ModuleList", "SyncBatchNorm"], False, 10)


def alone(ctx):
    import torch

    with started(ctx) as hvd:
        module, batch = hvd.SyncBatchNorm(2), torch.randn(4, 2)
        same = torch.equal(module(batch), torch.nn.BatchNorm1d(2)(batch))
        hvd.broadcast_parameters(module.state_dict(), 0)
        return hvd.allgather_object(7), hvd.broadcast_object({"x": 1}), same


def test_alone():
    assert run_ranks(alone, 1) == [([7], {"x": 1}, True)]
