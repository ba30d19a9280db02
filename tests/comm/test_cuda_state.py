"""What is asked of CUDA's driver about captures, and which device is set: without a GPU."""

import types
import warnings

import pytest
import torch

from collectives import cuda_state, errors
from collectives.comm.engine import Engine
from collectives.rendezvous import world

DEVICE = torch.device("cuda", 1)


def test_queries_are_allowed_by_the_threads_mode(monkeypatch):
    modes = [0]  # the driver's, of this thread: 0 global, 2 relaxed

    def exchange(mode):
        old, modes[:] = modes[0], [mode._obj.value]
        mode._obj.value = old
        return 0

    driver = types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    monkeypatch.setattr(cuda_state, "_driver", lambda: driver)
    with cuda_state.queries_allowed():
        assert modes == [2]
        with cuda_state.queries_allowed():
            assert modes == [2]
        assert modes == [2]
    assert modes == [0]
    driver.cuThreadExchangeStreamCaptureMode = lambda mode: 3
    with pytest.raises(errors.CudaError, match="CUresult 3"), cuda_state.queries_allowed():
        pass


def test_a_threads_first_call_asks_for_a_capture(monkeypatch):
    """The driver knows no context in a thread before the runtime has been called there."""
    ready = []

    def ask(stream, status, number, *rest):
        status._obj.value, number._obj.value = 1, 9
        return 0 if ready else 201

    monkeypatch.setattr(cuda_state, "_driver", lambda: types.SimpleNamespace(cuStreamGetCaptureInfo_v2=ask))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: ready.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: types.SimpleNamespace(cuda_stream=5))
    assert cuda_state.capture_id(None) == 9


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
