"""What programs rely on beside the results: zero gradients, `_parameter_names`, classes of errors."""

from __future__ import annotations

from tests.horovod.started import started
from tests.ranks import run_ranks


def zero_gradients(hvd):
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
    return {
        "fresh": layer.weight.grad.tolist(),
        "frozen": layer.bias.grad,
        "sparse": (table.weight.grad.is_sparse, table.weight.grad.to_dense().tolist()),
        "trained": trained.weight.grad.tolist(),
    }


def names(hvd):
    import torch

    model = torch.nn.Linear(3, 2)
    given = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    none = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return [[each._parameter_names[p] for p in model.parameters()] for each in (given, none)]


def program(ctx):
    import torch

    with started(ctx) as hvd:
        try:
            hvd.reducescatter(torch.ones(4), op=hvd.Adasum)
            error = None
        except Exception as caught:
            error = type(caught).__name__
        return zero_gradients(hvd), names(hvd), error


def test_what_programs_rely_on():
    (gradients, found, error), other = run_ranks(program, 2)
    assert gradients["fresh"] == [[0.0] * 3] * 2 and gradients["frozen"] is None
    assert gradients["sparse"] == (True, [[0.0] * 2] * 4)
    assert gradients["trained"] == [[1.0, 1.0]] * 2
    assert found[0] == ["weight", "bias"] and len(set(found[1])) == 2
    assert other == (gradients, found, error) and error == "RuntimeError"
