"""Ranks are killed in the midst of a training, and the others go on as a training of their own would."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.horovod.jobs import horovod
from tests.ranks import Died, run_ranks

KILLED = Died(signal=9, exitcode=0)
EPOCHS, BATCH, SAMPLES = 2, 4, 48  # of one rank's batch; samples: a multiple of BATCH * 1, 2, 3, 4 ranks


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def made():
    """The same model, optimizer and data on every rank and in the reference."""
    import torch

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = torch.randn(SAMPLES, 6, dtype=torch.float64)
    return model, optimizer, data, data.sin().sum(1, keepdim=True)


def step(hvd, model, optimizer, data, target, before=None):
    """One step on this rank's samples, with the gradients averaged one by one as the backward brings them."""
    import torch

    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(data), target)
    handles = []
    for number, param in enumerate(model.parameters()):
        hook = lambda p, n=number: handles.append(hvd.allreduce_async_(p.grad, name=f"grad {n}"))  # noqa: E731
        param._hook = param.register_post_accumulate_grad_hook(hook)
    try:
        loss.backward()
        if before is not None:
            before()
        for handle in handles:
            hvd.synchronize(handle)
    finally:
        for param in model.parameters():
            param._hook.remove()
    optimizer.step()
    return hvd.allreduce(loss.detach(), name="loss").item()


def train(ctx, deaths, every, log):
    """Train elastically. ``deaths``: rank -> (step at which, "backward", "commit" or "recovery"); commit each `every`."""
    import torch

    with horovod(ctx) as hvd:
        first = ctx.rank
        model, optimizer, data, target = made()
        sampler = hvd.elastic.ElasticSampler(data, seed=5)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, curve=[])
        resets = []

        def reset():
            resets.append((hvd.rank(), hvd.size()))
            if deaths.get(first, (0, ""))[1] == "recovery":
                die()

        state.register_reset_callbacks([reset])
        at, how = deaths.get(first, (-1, ""))

        @hvd.elastic.run
        def training(state):
            while state.epoch < EPOCHS:
                batches = torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=state.sampler)
                for number, indices in enumerate(batches):
                    dies = state.step == at and how == "backward"
                    arguments = state.model, state.optimizer, data[indices], target[indices]
                    loss = step(hvd, *arguments, die if dies else None)
                    used = sorted(x for rank in hvd.allgather_object(indices.tolist()) for x in rank)
                    state.sampler.record_batch(number, BATCH)
                    state.curve.append((state.epoch, hvd.size(), used, loss))
                    state.step += 1
                    if state.step == at and how == "commit":
                        die()
                    if state.step % every == 0:
                        state.commit()
                state.epoch += 1
                state.sampler.set_epoch(state.epoch)
            return "done"

        result = training(state)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        return result, state.curve, weights.tolist(), resets, len(hvd.allgather(torch.zeros(1)))


def reference(curve):
    """What one process makes of the same batches: losses and weights."""
    import torch

    model, optimizer, data, target = made()
    losses = []
    for _, _, used, _ in curve:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data[used]), target[used])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


@pytest.mark.parametrize(
    ("n", "deaths", "every"),
    [
        (3, {1: (3, "backward")}, 1),
        (2, {1: (4, "backward")}, 2),
        (3, {0: (3, "commit")}, 2),
        (4, {1: (2, "backward"), 2: (2, "backward")}, 1),
        (4, {0: (2, "backward"), 1: (0, "recovery")}, 2),
    ],
    ids=["in a backward", "one is left", "rank 0 before a commit", "two at once", "one more in the recovery"],
)
def test_the_others_go_on(n, deaths, every):
    results = run_ranks(train, n, deaths, every, None, timeout=60, deaths=set(deaths))
    survivors = [rank for rank in range(n) if rank not in deaths]
    assert all(results[rank] == KILLED for rank in deaths)
    curves = [results[rank][1] for rank in survivors]
    assert all(curve == curves[0] for curve in curves)
    losses, weights = reference(curves[0])
    for number, rank in enumerate(survivors):
        result, curve, mine, resets, size = results[rank]
        assert result == "done"
        assert size == len(survivors)
        assert resets[-1] == (number, len(survivors))
        assert [loss for *_, loss in curve] == pytest.approx(losses, rel=1e-9)
        assert mine == pytest.approx(weights, rel=1e-9)
    for epoch in range(EPOCHS):  # each sample once, whoever had it
        used = sorted(x for at, _, indices, _ in curves[0] for x in indices if at == epoch)
        assert used == list(range(SAMPLES))
    assert {size for _, size, *_ in curves[0]} <= {n, *range(len(survivors), n)}
    assert curves[0][-1][1] == len(survivors)
