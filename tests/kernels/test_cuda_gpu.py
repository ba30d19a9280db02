"""Launching on a real GPU: streams, graphs, threads, devices, subnormals, the cache. Families test their own bits."""

from __future__ import annotations

import threading

import pytest
import torch

from collectives import kernels
from collectives.errors import InvalidUsage
from collectives.kernels import cuda

pytestmark = pytest.mark.gpu

BIG = 3 * 4096 * 1000 + 5  # elements: more tiles than blocks on any GPU


def packed(source: torch.Tensor, flat: torch.Tensor | None = None) -> torch.Tensor:
    flat = torch.zeros(source.numel() + 3, device=source.device) if flat is None else flat
    kernels.pack([source], flat[: kernels.Table([source], flat.dtype).total], scale=0.3)
    return flat


@pytest.fixture(scope="module")
def source():
    return torch.randn(BIG, generator=torch.Generator().manual_seed(1))


def test_subnormals_are_kept(source):
    """CuPy's own compilation flushes them."""
    tiny = source * 1e-39
    assert (tiny != 0).sum() > BIG // 2
    assert torch.equal(packed(tiny.cuda()).cpu(), packed(tiny))


def test_work_is_queued_on_the_current_stream(source):
    stream = torch.cuda.Stream()
    place, flat = torch.zeros(BIG, device="cuda"), torch.zeros(BIG + 3, device="cuda")
    packed(place, flat)  # compiled
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles, some 0.1 s
        place.copy_(source)
        packed(place, flat)
        assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    assert torch.equal(flat.cpu(), packed(source))


def test_a_graph_replays(source):
    place, flat = torch.zeros(BIG, device="cuda"), torch.zeros(BIG + 3, device="cuda")
    table, statistics = kernels.Table([place], torch.float32), kernels.Statistics("cuda")

    def step():
        kernels.pack(table, flat[: table.total], scale=0.3, statistics=statistics)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for factor in (1, 2):
        place.copy_(source * factor)
        graph.replay()
        assert torch.equal(flat.cpu(), packed(source * factor))
    expected = kernels.Statistics()
    kernels.pack([source * 2], torch.zeros(BIG + 3), scale=0.3, statistics=expected)
    assert statistics.sum_of_squares.item() == expected.sum_of_squares.item()


def test_the_first_call_can_not_be_captured(monkeypatch):
    monkeypatch.setattr(cuda, "_loaded", {})
    place = torch.zeros(5, device="cuda")
    table, flat = kernels.Table([place], torch.float32), torch.zeros(8, device="cuda")
    with pytest.raises(InvalidUsage, match="once before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        kernels.pack(table, flat, scale=0.3)


def test_threads(source):
    right, wrong = packed(source), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            if not torch.equal(packed(source.cuda()).cpu(), right):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_cache_is_used(tmp_path, monkeypatch, source):
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    for times in range(2):
        monkeypatch.setattr(cuda, "_loaded", {})
        monkeypatch.setattr(cuda, "_modules", {})
        if times:
            monkeypatch.setattr(cuda, "compile_source", None)
        assert torch.equal(packed(source.cuda()).cpu(), packed(source))
    assert list(tmp_path.glob("collectives-*"))


@pytest.mark.multigpu
def test_another_gpu_than_the_current_one(source):
    with torch.cuda.device(0):
        there = packed(source.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert torch.equal(there.cpu(), packed(source))
