"""Planted errors: with a fix taken back the checker reports just that."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.streams import test_communicator, test_ddp, test_horovod, test_sharded
from tests.streams.planted import Change, reports_without, sites, sweep
from tests.streams.simulated import needs_simulation, steps

pytestmark = needs_simulation


def dropped_input(ctx):
    """hvd's input is dropped as soon as the operation was submitted."""
    from tests.horovod.optimizer_training import a_job

    with a_job(ctx) as _:
        from collectives import horovod as hvd

        x = torch.ones(1000, device=ctx.device)
        for _ in range(2):
            handle = hvd.allreduce_async(x * 2, name="dropped")
            hvd.synchronize(handle)
        torch.cuda.synchronize()


def large_table(ctx):
    """A table whose rows don't fit into a kernel's arguments."""
    from collectives import kernels

    tensors = [torch.ones(8, device=ctx.device) for _ in range(300)]
    flat = torch.empty(8 * 300, device=ctx.device)
    with steps(ctx):
        kernels.pack(tensors, flat)


def shared_scratch(ctx):
    test_communicator.algorithms(ctx, "ring", True)


def moved_residuals(ctx, path):
    options = {"wire": "int8", "error_feedback": True, "streams": 2}
    test_ddp.trained(ctx, path, options)


def two_streams(ctx, path):
    test_ddp.bucketed_on_two_streams(ctx, path)


def offloaded(ctx, path):
    test_sharded.by_units(ctx, path, "offload")


PLANTED = {
    "hvd: what an operation reads isn't recorded on its stream": (
        [
            Change(
                "collectives/horovod/fusion.py", "Executor._perform_on_stream", "tensor.record_stream(stream)", "pass"
            )
        ],
        dropped_input,
        ("freed", "is freed"),
    ),
    "offload: no wait for the gradients' copies": (
        [Change("collectives/sharded/streams.py", "HostCopies.wait", "event.synchronize()", "pass")],
        offloaded,
        ("race", "pinned memory"),
    ),
    "buckets: no wait for the streams that made the gradients": (
        [
            Change(
                "collectives/gradients/bucket.py",
                "GradientBucket._wait_for_backward",
                "current.wait_stream(stream)",
                "pass",
            )
        ],
        two_streams,
        ("race", "pack"),
    ),
    "ring: no order between calls from two streams": (
        [
            Change(
                "collectives/comm/algorithms/plan.py",
                "ExecutionPlan.run_on_streams",
                "transfers.wait_stream(kernels)\n        kernels.wait_stream(transfers)\n",
                "transfers.wait_stream(outer)\n",
            )
        ],
        shared_scratch,
        ("race", "nccl recv"),
    ),
    "DDP: residuals go on in another stream": (
        [Change("collectives/compression/scratch.py", "use_on_current_stream", "last != stream", "False")],
        moved_residuals,
        ("freed", "is freed"),
    ),
    "kernels: a table is copied from pageable memory": (
        [Change("collectives/kernels/rows.py", "_copied_from", "non_blocking=True", "non_blocking=False")],
        large_table,
        ("host wait", "rows.py"),
    ),
}


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("name", PLANTED)
def test_a_fix_that_is_taken_back_is_reported(tmp_path, name):
    changes, program, (kind, words) = PLANTED[name]
    args = (tmp_path / "store",) if program in (moved_residuals, offloaded, two_streams) else ()
    for found, _ in run_ranks(reports_without, 2, changes, program, *args, device="simulated"):
        assert found and {each for each, _ in found} == {kind}, found
        assert any(words in text for _, text in found), found


# ---- Any synchronisation of the package.


def ring_and_direct(ctx):
    for name in ("ring", "direct"):
        test_communicator.algorithms(ctx, name, True)


def communicator(ctx):
    test_communicator.every_operation(ctx, True)
    test_communicator.streams_and_futures(ctx)
    test_communicator.groups(ctx, True)


def horovod(ctx):
    test_horovod.operations(ctx)
    test_horovod.trained(ctx, {})
    dropped_input(ctx)


def hook(ctx, path):
    options = {"wire": "int8", "error_feedback": True, "streams": 2, "max_norm": 0.1}
    test_ddp.trained(ctx, path + "a", options)
    test_ddp.trained(ctx, path + "b", {"optimizer": "AdamW", "streams": 2})


def buckets(ctx, path):
    test_ddp.bucketed(ctx, path, {}, 2)


def units(ctx, path):
    for kind in ("plain", "int8", "offload"):
        test_sharded.by_units(ctx, path + kind, kind)
    test_sharded.by_strategy(ctx, path, "SHARD_OPTIMIZER")


def tables(ctx):
    """Tables by copies from pinned memory that is used again, and statistics on two streams."""
    from collectives import kernels

    for _ in range(4):
        large_table(ctx)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    tensors, flat = [torch.ones(8, device=ctx.device)], torch.empty(8, device=ctx.device)
    found = kernels.Statistics(ctx.device)
    kernels.pack(tensors, flat, statistics=found)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        kernels.pack(tensors, flat, statistics=found)
    for tensor in (*tensors, flat):
        tensor.record_stream(side)
    del found, tensor, tensors, flat
    torch.cuda.synchronize()


def residuals(ctx, path):
    moved_residuals(ctx, path)


def units_on_two_streams(ctx, path):
    test_sharded.on_two_streams(ctx, path, "plain")
    test_sharded.on_two_streams(ctx, path + "8", "gathered as int8")


SCENARIOS = {
    "collectives/compression/scratch.py": [(residuals, True)],
    "collectives/sharded/quantized_gather.py": [(units_on_two_streams, True)],
    "collectives/sharded/unit.py": [(units_on_two_streams, True)],
    "collectives/comm/algorithms": [(ring_and_direct, False)],
    "collectives/comm/cuda_queue.py": [(communicator, False)],
    "collectives/horovod": [(horovod, False)],
    "collectives/sharded": [(units, True)],
    "collectives/gradients/bucket.py": [(buckets, True), (two_streams, True)],
    "collectives/kernels": [(tables, False), (hook, True)],
    "collectives/": [(hook, True), (units, True)],
}

# Calls without which no program here is reported, by file and function, each with the reason why it stays.
_MEASURES = "the event is for a time or a limit on the host, and orders nothing"
_NOT_RUN = "no program here comes to it: "
SUPERFLUOUS = {
    ("collectives/auto/model.py", "Model._now"): _MEASURES,
    ("collectives/auto/trial.py", "_wait_at_most"): _MEASURES,
    ("collectives/gradients/bucket_gradients.py", "_begin_trace"): _MEASURES,
    ("collectives/gradients/bucket_gradients.py", "_end_trace"): _MEASURES,
    ("collectives/recorder.py", "_anchor"): _MEASURES,
    ("collectives/comm/cuda_queue.py", "CudaQueue.record_completion"): _MEASURES,
    (
        "collectives/comm/cuda_queue.py",
        "CudaQueue.drain_all",
    ): "it is for the interpreter's end and abort(), where nothing is ordered",
    ("collectives/gradients/bucket.py", "GradientBucket._collect"): "rounds on several streams, which the program that "
    "makes the gradients orders itself; without that order the wait is what keeps the flat buffer whole",
    (
        "collectives/gradients/shard_state.py",
        "reshard_state",
    ): "a state that is replaced while a step still reads it",
    (
        "collectives/comm/algorithms/plan.py",
        "ExecutionPlan.run_on_streams",
        "kernels.wait_stream(transfers)",
    ): "a call's first kernel follows a "
    "message of the same call, and so the transfers before it; the second one is for a capture's own memory",
    ("collectives/gradients/ddp_fast_path.py", "FastPath._record_buffers"): _NOT_RUN + "a backward on a new stream",
    ("collectives/gradients/ddp_reducer.py", "DDPReducer._keep_for_caller"): _NOT_RUN
    + "DDP made on one stream and trained on another, as in tests/gpu/test_hook_futures.py",
    ("collectives/gradients/round_flags.py", "RoundFlags._copy_async"): _NOT_RUN
    + "rounds in which a rank's flags are unusual",
    ("collectives/sharded/unit.py", "Unit._record_stream"): _NOT_RUN
    + "a gather begun on one stream and used on another",
    ("collectives/sharded/device_buffers.py", "DeviceBuffers._wait_for_last_user", "wait_for_stream(buffer.stream)"): (
        _NOT_RUN + "a gather begun on one stream and used on another"
    ),
    ("collectives/sharded/gather_windows.py", "GatherWindows.acquire"): _NOT_RUN
    + "a unit that is resharded on one stream, and whose window another one takes on another stream",
    ("collectives/sharded/reduction.py", "start_reduction", "current_stream(unit.device).wait_stream(home)"): (
        _NOT_RUN + "custom collectives that return no work"
    ),
    ("collectives/sharded/streams.py", "use_on_current"): "memory of custom collectives; the buffers that units use in "
    "turn have events of their own",
    ("collectives/sharded/streams.py", "HostCopies.to_host"): "memory of custom collectives, as above",
    (
        "collectives/compression/scratch.py",
        "use_on_current_stream",
    ): "each alone: streams are joined between backwards, and here the last reader of old "
    "residuals is their memory's own stream; both taken back are reported, see above",
}


def excepted(site) -> bool:
    return (site.file, site.function) in SUPERFLUOUS or (site.file, site.function, site.call) in SUPERFLUOUS


def scenarios_of(site):
    return next(found for folder, found in SCENARIOS.items() if site.file.startswith(folder))


@pytest.mark.thorough
@pytest.mark.slow
def test_every_call_that_is_taken_back_is_reported(tmp_path):
    left = {site: [] for site in sites()}
    programs = {each for site in left for each in scenarios_of(site)}
    for number, (program, over_gloo) in enumerate(sorted(programs, key=lambda each: each[0].__name__)):
        mine = [site for site in left if (program, over_gloo) in scenarios_of(site)]
        folder = tmp_path / str(number)
        folder.mkdir()
        path = str(folder) if over_gloo else None
        results = run_ranks(sweep, 2, mine, program, path, device="simulated", timeout=900)
        for site, *ranks in zip(mine, *results, strict=True):
            left[site] += ranks
    assert len(left) >= 30
    missed = [
        f"{site}: passed {[count for count, _ in found]} times"
        for site, found in left.items()
        if not any(kinds for _, kinds in found) and not excepted(site)
    ]
    assert not missed, "not reported:\n" + "\n".join(missed)
    there = {(site.file, site.function) for site in left}
    assert not [each for each in SUPERFLUOUS if each[:2] not in there]
