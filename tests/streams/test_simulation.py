"""The simulation itself: wrong programs are reported. Right ones, all other tests show, are left alone."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import RankFailure, run_ranks
from tests.streams import build, start
from tests.streams.simulated import needs_simulation

pytestmark = needs_simulation


def on_one(program, *args):
    return run_ranks(program, 1, *args, device="simulated")[0]


@pytest.mark.parametrize(("line", "words"), [("", ""), ("cuda = '12.8'", "cuda '12.8'"), ("hip = '6.4'", "hip '6.4'")])
def test_a_build_for_gpus_is_refused(tmp_path, monkeypatch, line, words):
    none = [f"{name}: Optional[str] = None" for name in ("cuda", "hip", "xpu") if not line.startswith(name)]
    typed = line.replace(" =", ": Optional[str] =")
    (tmp_path / "version.py").write_text("\n".join(["__version__ = '2.13.0'", *none, typed]))
    monkeypatch.setattr(build, "torch_folder", lambda: tmp_path)
    assert words in start.why_not() and bool(start.why_not()) == bool(words)


# ---- What is wrong: (program, kind, words of the report).
def wait_forgotten(ctx):
    y = torch.ones(4, device="cuda") * 2
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        kept = y + 1
    y.record_stream(side)
    torch.cuda.synchronize()
    return kept


def scratch_used_again(ctx):
    scratch, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = scratch + 1
    scratch.fill_(2)
    torch.cuda.synchronize()
    return kept


def freed_too_early(ctx):
    y, side = torch.ones(4, device="cuda") * 2, torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept = y + 1
    del y
    torch.cuda.synchronize()
    return kept


def item_in_a_step(ctx):
    from tests.streams.checker import step

    with step():
        torch.ones(4, device="cuda").sum().item()


def pageable_copy(ctx):
    from tests.streams.checker import step

    with step():
        torch.arange(4).to("cuda", non_blocking=True)


def pinned_written_too_early(ctx):
    pinned = torch.ones(4).pin_memory()
    kept = pinned.to("cuda", non_blocking=True)
    pinned.add_(1)
    torch.cuda.synchronize()
    return kept


def pinned_read_too_early(ctx):
    back = torch.empty(4, pin_memory=True)
    back.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    assert back.sum() >= 0
    torch.cuda.synchronize()


def query_in_a_capture(ctx):
    event = torch.cuda.current_stream().record_event()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            event.query()


def synchronize_in_a_capture(ctx):
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.cuda.synchronize()


def another_device(ctx):
    torch.ones(4, device="cuda:1")


def a_thread_without_a_device(ctx):
    import threading

    from tests.streams.checker import checker

    checker.own_device = 1  # a thread begins with device 0
    thread = threading.Thread(target=lambda: torch.ones(4, device="cuda"))
    thread.start()
    thread.join()


def communicators_in_two_threads(ctx):
    import threading

    first = ctx.communicator()
    second = first.split(0)
    tensors = [torch.ones(4, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()

    def work():
        torch.cuda.set_device(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            second.all_reduce(tensors[1])

    first.all_reduce(tensors[0])
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    second.close()


def kernel_without_an_order(ctx):
    """One of the package's kernels, whose table is read for what it uses."""
    from collectives import kernels

    tensors = [torch.full((100,), float(i), device="cuda") for i in range(3)]
    flat = torch.empty(400, device="cuda")
    table = kernels.Table(tensors, torch.float32)
    torch.cuda.synchronize()
    tensors[1].add_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        kernels.pack(table, flat)
    torch.cuda.synchronize()
    assert flat[100:200].tolist() == [2.0] * 100


WRONG = [
    (wait_forgotten, "race", ("aten::add float32[4]", "reads what aten::mul", "test_simulation.py")),
    (scratch_used_again, "race", ("aten::fill_", "writes what aten::add")),
    (freed_too_early, "freed", ("is freed at", "aten::add")),
    (item_in_a_step, "host wait", ("_local_scalar_dense",)),
    (pageable_copy, "host wait", ("pageable memory",)),
    (pinned_written_too_early, "race", ("the host's aten::add_", "writes pinned memory")),
    (pinned_read_too_early, "race", ("the host's aten::sum", "reads pinned memory")),
    (query_in_a_capture, "capture", ("an event is queried",)),
    (synchronize_in_a_capture, "capture", ("waits for the device",)),
    (another_device, "device", ("on cuda:1", "cuda:0")),
    (a_thread_without_a_device, "device", ("on cuda:0",)),
    (communicators_in_two_threads, "order", ("two communicators",)),
    (kernel_without_an_order, "race", ("kernel coll_copy", "reads what aten::add")),
]


def reported(ctx, program, kind, words):
    from tests.streams import running

    program(ctx)
    running.expect(kind, *words)


@pytest.mark.parametrize(("program", "kind", "words"), WRONG, ids=[each[0].__name__ for each in WRONG])
def test_wrong_programs_are_reported(program, kind, words):
    on_one(reported, program, kind, words)


def test_a_report_fails_the_call():
    with pytest.raises(RankFailure, match="the checker has"):
        on_one(wait_forgotten)
