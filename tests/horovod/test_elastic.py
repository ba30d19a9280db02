"""Ranks are killed in the midst of a training, and the others go on as a training of their own would."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.horovod.started import started
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


def train(ctx, deaths):
    """Train elastically; commit each second step. ``deaths``: rank -> (step, "backward", "commit" or "recovery")."""
    import torch

    with started(ctx) as hvd:
        first, resets = ctx.rank, []
        model, optimizer, data, target = made()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        sampler = hvd.elastic.ElasticSampler(data, seed=5)
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0, curve=[])
        at, how = deaths.get(first, (-1, ""))

        def reset():
            resets.append((hvd.rank(), hvd.size()))
            if how == "recovery":
                die()

        state.register_reset_callbacks([reset])

        @hvd.elastic.run
        def training(state):
            while state.epoch < EPOCHS:
                batches = torch.utils.data.DataLoader(range(SAMPLES), BATCH, sampler=state.sampler)
                for number, indices in enumerate(batches):
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(model(data[indices]), target[indices])
                    loss.backward()
                    if state.step == at and how == "backward":
                        die()
                    optimizer.step()
                    loss = hvd.allreduce(loss.detach(), name="loss").item()
                    used = sorted(x for rank in hvd.allgather_object(indices.tolist()) for x in rank)
                    state.sampler.record_batch(number, BATCH)
                    state.curve.append((state.epoch, hvd.size(), used, loss))
                    state.step += 1
                    if state.step == at and how == "commit":
                        die()
                    if state.step % 2 == 0:
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


def test_the_others_go_on():
    """One dies in a step, one in the recovery from that, and later one after a step that isn't committed."""
    n, deaths = 4, {0: (2, "backward"), 1: (0, "recovery"), 2: (9, "commit")}
    results = run_ranks(train, n, deaths, timeout=60, deaths=set(deaths))
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
    assert curves[0][0][1] == n
    assert curves[0][-1][1] == len(survivors)


def raised(call):
    """What a call raises: the class's name, the text, and the cause's class's name."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return None


class NoPickle:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("not this one")


def without_deaths(ctx):
    """Interrupts, limits, errors of the program's own, and states that can't be: one job after the other."""
    import torch

    found = {}
    with started(ctx) as hvd:
        tensor = torch.ones(1000)

        # Work that was not committed is kept where new hosts are reported.
        state, calls = hvd.elastic.TorchState(x=0), []

        @hvd.elastic.run
        def interrupted(state):
            calls.append(state.x)
            while state.x < 4:
                state.x += 1
                if state.x == 2 and ctx.rank == 1:
                    state.on_hosts_updated(time.time())
                state.commit()

        interrupted(state)
        found["interrupted"] = calls, state.x
        limited = hvd.elastic.run(lambda state: state.commit(), reset_limit=0)
        state.on_hosts_updated(time.time() + 10)
        found["limit"] = raised(lambda: limited(state))

        # A rank that says by itself that something has failed: all go back. What comes back each
        # time is given up.
        state, calls = hvd.elastic.TorchState(torch.nn.Linear(2, 2), x=0), []

        @hvd.elastic.run
        def fails(state):
            handle = hvd.allreduce_async(tensor, name="left behind")  # in flight through the commit, and the failure
            state.commit()
            calls.append(state.x)
            state.x += 1
            state.model.weight.data.zero_()
            if len(calls) < 3 and ctx.rank == 0:
                raise hvd.HorovodInternalError("said so")
            hvd.synchronize(handle)
            return hvd.allreduce(tensor, op=hvd.Sum)[0].item()

        found["fails"] = fails(state), calls, state.x

        @hvd.elastic.run
        def fails_always(state):
            hvd.allreduce(torch.ones(3 + hvd.rank()), name="unlike")

        found["always"] = raised(lambda: fails_always(state))

        # A bug ends the job for all, also in a reset callback.
        @hvd.elastic.run
        def has_a_bug(state):
            if hvd.rank() == 1:
                raise KeyError("bug")
            hvd.allreduce(tensor)

    with started(ctx) as hvd:
        found["bug"] = raised(lambda: has_a_bug(state))
    with started(ctx) as hvd:
        state = hvd.elastic.ObjectState(x=0)
        state.register_reset_callbacks([lambda: 1 / hvd.rank()])

        @hvd.elastic.run
        def resets(state):
            raise hvd.HorovodInternalError("first")

        found["callback"] = raised(lambda: resets(state))
    with started(ctx) as hvd:
        state = hvd.elastic.ObjectState(x=0, odd=NoPickle())
        found["pickle"] = raised(state.sync)
        found["copy"] = raised(lambda: hvd.elastic.ObjectState(x=0, lock=threading.Lock()))
        found["name"] = raised(lambda: hvd.elastic.TorchState(commit=1))
        few = hvd.elastic.run(lambda state: 1, min_np=3)
        found["few"] = raised(lambda: few(hvd.elastic.ObjectState()))
    found["init"] = raised(lambda: few(hvd.elastic.ObjectState()))
    return found


def test_without_deaths():
    results = run_ranks(without_deaths, 2, timeout=60)
    for rank, found in enumerate(results):
        assert found["interrupted"] == ([0, 2], 4)
        assert found["limit"][0] == "HorovodInternalError" and "reset_limit" in found["limit"][1]
        assert found["fails"] == (2.0, [0, 0, 0], 1)
        assert "differ in shape" in found["always"][1] and "nobody has died" in found["always"][1]
        own = ("KeyError", "'bug'", "NoneType") if rank == 1 else None
        expect_error(found["bug"], own, 1, "KeyError: 'bug'")
        own = ("ZeroDivisionError", "division by zero", "NoneType") if rank == 0 else None
        expect_error(found["callback"], own, 0, "ZeroDivisionError: division by zero")
        assert found["pickle"][0] == "ValueError" and "odd can't be: " in found["pickle"][1]
        assert found["copy"][0] == "ValueError" and "attribute 'lock'" in found["copy"][1]
        assert found["name"][0] == "ValueError" and "'commit'" in found["name"][1]
        assert found["few"][0] == "InvalidArgument" and "min_np" in found["few"][1]
        assert found["init"] == ("ValueError", "Horovod has not been initialized; use hvd.init().", "NoneType")


def expect_error(found, own, rank, text):
    """The rank that ended the job has its own error, the others learn of it."""
    if own is not None:
        assert found == own
    else:
        text = f"rank {rank} has ended the job by an error of its own: {text}"
        assert found == ("HorovodInternalError", text, "RemoteError")
