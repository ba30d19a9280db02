"""The simulation itself: right programs are left alone, wrong ones are reported, numbers are right."""

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


# ---- What is right.
def right_streams(ctx):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    y = torch.ones(4, device="cuda") * 2
    side.wait_stream(main)
    with torch.cuda.stream(side):
        z = y + 1
        done = side.record_event()
    y.record_stream(side)
    main.wait_event(done)
    z.mul_(2)
    z.record_stream(main)
    assert z.tolist() == [6.0] * 4


def right_after_host_wait(ctx):
    y = torch.ones(4, device="cuda") * 2
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        z = y + 1
        torch.cuda.current_stream().synchronize()
    assert z.tolist() == [3.0] * 4


def right_after_query(ctx):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.ones(4, device="cuda")
        event = side.record_event()
    answers = [event.query() for _ in range(4)]
    assert answers == [False, False, True, True]
    assert (y + 1).tolist() == [2.0] * 4
    y.record_stream(torch.cuda.current_stream())


def pinned_memory(ctx):
    pinned = torch.arange(4.0).pin_memory()
    assert pinned.is_pinned() and not torch.arange(4.0).is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    there = pinned.to("cuda", non_blocking=True)
    back = torch.empty(4, pin_memory=True)
    back.copy_(there * 2, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    pinned.zero_()
    assert back.tolist() == [0.0, 2.0, 4.0, 6.0]
    del pinned, back, there


def training(ctx):
    """Forward, backward and optimizers of torch: the numbers are the CPU's, whose norm has another order of sums."""
    from tests.streams.checker import step

    found = []
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        results = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(3)
            layers = [torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 1)]
            model = torch.nn.Sequential(*layers).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
            batches = [torch.randn(3, 4).to(device) for _ in range(3)]
            with step():
                for batch in batches:
                    optimizer.zero_grad()
                    model(batch).square().mean().backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
            results.append([p.detach().cpu() for p in model.parameters()])
        found.append(all(torch.allclose(a, b) for a, b in zip(*results, strict=True)))
    assert found == [True] * 3, found


def backward_streams(ctx):
    """A backward's operations run on the streams of the forward's, and torch orders them."""
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 3
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    y.sum().backward()
    assert x.grad.tolist() == [3.0] * 4
    torch.cuda.synchronize()


def graph(ctx):
    x = torch.ones(4, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    held = torch.cuda.CUDAGraph()
    with torch.cuda.graph(held):
        assert torch.cuda.is_current_stream_capturing()
        side.wait_stream(torch.cuda.current_stream())
        x.add_(1)
        with torch.cuda.stream(side):
            y = torch.zeros(4, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        y.add_(x)
        z = torch.softmax(y * 2, 0)
    assert x.tolist() == [1.0] * 4
    held.replay()
    held.replay()
    assert x.tolist() == [3.0] * 4 and y.tolist() == [3.0] * 4 and z.tolist() == [0.25] * 4


def scaler(ctx):
    model = torch.nn.Linear(4, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cuda", init_scale=4.0)
    before = model.weight.tolist()
    for batch in (torch.ones(3, 4).cuda(), torch.full((3, 4), float("inf")).cuda()):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).sum()
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
    assert model.weight.tolist() != before and scale.get_scale() == 2.0


def devices(ctx):
    assert torch.cuda.device_count() == 4 and torch.cuda.is_available()
    assert torch.cuda.get_device_properties(0).uuid != torch.cuda.get_device_properties(1).uuid
    assert torch.tensor([1, 2], device="cuda").device == torch.device("cuda", 0)
    assert torch.cuda.current_stream().cuda_stream == 0 == torch._C._cuda_getCurrentRawStream(0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side == torch.cuda.ExternalStream(side.cuda_stream)
        assert torch._C._cuda_getCurrentRawStream(0) == side.cuda_stream
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)


RIGHT = [
    right_streams, right_after_host_wait, right_after_query, pinned_memory, training, backward_streams, graph, scaler,
    devices,
]  # fmt: skip


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_right_programs_are_left_alone(program):
    on_one(program)


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


# ---- The package's kernels.
def kernels_are_seen(ctx, ordered):
    from collectives import kernels
    from tests.streams import running

    tensors = [torch.full((100,), float(i), device="cuda") for i in range(3)]
    flat = torch.empty(400, device="cuda")
    table = kernels.Table(tensors, torch.float32)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    tensors[1].add_(1)
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernels.pack(table, flat)
    torch.cuda.synchronize()
    assert flat[100:200].tolist() == [2.0] * 100
    if not ordered:
        running.expect("race", "kernel coll_copy", "reads what aten::add")


@pytest.mark.parametrize("ordered", [True, False])
def test_kernels_are_seen(ordered):
    on_one(kernels_are_seen, ordered)
