"""Horovod jobs and trainings of the tests of hvd.DistributedOptimizer."""

import contextlib
import os
import pickle

import torch
from torch import nn

import collectives
from collectives import horovod as hvd
from collectives import optim
from collectives.horovod.basics import World, activate
from collectives.horovod.settings import read_settings
from collectives.rendezvous.peers import PeerInfo
from tests.ddp.training import batch, make_model

STEPS = 4


@contextlib.contextmanager
def a_job(ctx):
    """Make the ranks of this call a Horovod job."""
    comm = ctx.new_communicator()
    peers = [PeerInfo(rank, "here", "1", os.getpid()) for rank in range(ctx.size)]
    activate(World(comm, peers, owns=True, settings=read_settings()))
    try:
        yield
    finally:
        hvd.shutdown()


def train(model, optimizer, rank, *, passes=1, steps=STEPS, to_none=True, synchronizes=False):
    """Make steps of `passes` backwards each, by a call of synchronize() or without it; give the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        for micro in range(passes):
            images, labels = batch(step * passes + micro, rank)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            losses.append(loss.item())
        if synchronizes:
            optimizer.synchronize()
        with optimizer.skip_synchronize() if synchronizes else contextlib.nullcontext():
            optimizer.step()
    return losses


def train_ddp(make, rank, passes=1):
    """The same on DDP with our hook."""
    ddp = collectives.DistributedDataParallel(make_model())
    ddp.register_comm_hook(collectives.fused_allreduce)
    optimizer = make(ddp.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(passes):
            images, labels = batch(step * passes + micro, rank)
            with ddp.no_sync() if micro + 1 < passes else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(ddp(images), labels)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
    return ddp.module, losses


def same(model, other):
    return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


def same_on_all(ctx, model):
    return len(set(ctx.exchange(pickle.dumps([param.tolist() for param in model.parameters()])))) == 1


MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "ours": lambda params: optim.AdamW(params, lr=0.01),
}
