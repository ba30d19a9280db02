"""Which device init() sets, without a GPU."""

import warnings

import pytest
import torch

from collectives import cuda_state
from collectives.comm.engine import Engine
from collectives.rendezvous import world

DEVICE = torch.device("cuda", 1)


def test_init_takes_the_device_where_cuda_is_unused(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuda_state.set_first_device(DEVICE)
        cuda_state.set_first_device(torch.device("cpu"))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
        cuda_state.set_first_device(DEVICE)  # it is the current one
    assert taken == [DEVICE]


def test_init_takes_it_before_anything_is_opened(monkeypatch):
    class Stop(Exception):
        pass

    def first(device):
        raise Stop(device)

    engine = Engine("nccl", "cuda", "2.29.7", "libnccl.so.2", None)
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "get_engine", lambda *args: engine)
    monkeypatch.setattr(world, "set_first_device", first)
    with pytest.raises(Stop, match="cuda:1"):
        world.init(device="cuda:1")
