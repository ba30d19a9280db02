"""Tests that are written once for every device: the host engine, the simulated GPU, a real GPU.

A test's function takes a `Rank` and never names a device::

    def add(rank):
        tensor = rank.tensor([1.0, 2.0])
        rank.comm.all_reduce(tensor)
        return tensor

    @everywhere()
    def test_add(device, ranks):
        check(device, add, ranks)     # on a GPU, what the host engine gives, bit for bit

Test ids hold the device and ``1rank`` or ``2ranks``, so that ``-m gpu -k 1rank`` selects. Two ranks share one GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import tempfile
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from tests import one_gpu
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation

__all__ = ["DEVICES", "Rank", "check", "compare", "everywhere", "in_group", "on", "on_host", "process_group"]

DEVICES = ("host", "simulated", "cuda")
SECONDS = {"host": 60.0, "simulated": 60.0, "cuda": one_gpu.SECONDS}


# ---- Which tests there are.


def everywhere(cases=None, *, everyday=None, ranks=(1, 2), devices=DEVICES):
    """Parametrize a test by ``device, ranks`` and, where there are `cases`, ``case``.

    Without a GPU the cases of `everyday` (all of them, where it isn't given) run with the largest number of ranks on
    the simulated GPU in the everyday suite; the others, fewer ranks, and the host engine alone are marked thorough.
    With a GPU all of them run.
    """
    names = [None] if cases is None else list(cases)
    unknown = set(everyday or ()) - set(names)
    if unknown:
        raise ValueError(f"no such cases: {sorted(unknown)}")
    given = []
    for device in devices:
        for count in ranks:
            for case in names:
                marks = []
                if device == "cuda":
                    marks.append(pytest.mark.gpu)
                if device == "simulated":
                    marks.append(needs_simulation)
                rare = count != max(ranks) or (everyday is not None and case not in everyday)
                rare = rare or device == "host" and "simulated" in devices  # whose numbers are compared with the host's
                if device != "cuda" and rare:
                    marks.append(pytest.mark.thorough)
                name = f"{device}-{count}{'rank' if count == 1 else 'ranks'}" + (f"-{case}" if case is not None else "")
                values = (device, count) if case is None else (device, count, case)
                given.append(pytest.param(*values, id=name, marks=marks))
    return pytest.mark.parametrize("device, ranks" if cases is None else "device, ranks, case", given)


# ---- Running them.


def on(device: str, function, ranks: int, *args, env=None, timeout: float | None = None, deaths=(), fresh=False):
    """Call ``function(rank, *args)`` on so many ranks of a device, and return their results, with tensors on the host.

    `env`: variables during the call, a dictionary or one for each rank. `deaths`: ranks that are to end their process.
    """
    __tracebackhide__ = True
    where = {"engine": "nccl", "start_env": one_gpu.start_env(ranks)} if device == "cuda" else {}
    if device == "simulated":
        where = {"device": "simulated"}
    options = {"env": env, "deaths": deaths, "fresh": fresh, "timeout": timeout or SECONDS[device], **where}
    found = run_ranks(_call, ranks, device, function, *args, **options)
    return [pickle.loads(each) if isinstance(each, bytes) else each for each in found]


def _call(ctx, device, function, *args):
    torch.set_num_threads(1)
    rank = Rank(ctx, device)
    result = function(rank, *args)
    rank.synchronize()
    return pickle.dumps(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), result))


_made: dict = {}


def on_host(function, ranks: int, *args, env=None):
    """Give the results of the host engine, by which those of the other devices are judged; made once."""
    key = (function, ranks, args, repr(env))
    if key not in _made:
        _made[key] = on("host", function, ranks, *args, env=env)
    return _made[key]


def check(device, function, ranks: int, *args, exact: bool = True, rtol=None, atol=None, same: bool = True, env=None):
    """Run a function on a device and compare its results with the host engine's; give them.

    `exact`: bit for bit, else within `rtol` and `atol`, or torch's for the dtype. `same`: all ranks' are equal.
    """
    __tracebackhide__ = True
    hosts = on_host(function, ranks, *args, env=env)
    found = hosts if device == "host" else on(device, function, ranks, *args, env=env)
    if same:
        for other in found[1:]:
            compare(other, found[0])
    if device != "host":
        for mine, wanted in zip(found, hosts, strict=True):
            compare(mine, wanted, exact=exact, rtol=rtol, atol=atol)
    return found


def compare(found, wanted, *, exact: bool = True, rtol=None, atol=None):
    """Compare results, tensors in lists, tuples and dictionaries; `exact`: the same bits, NaN as NaN."""
    __tracebackhide__ = True
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": rtol, "atol": atol}
    torch.testing.assert_close(found, wanted, equal_nan=True, **tolerance)


# ---- What a test's function gets.


class Rank:
    """One rank of a test, on some device: what differs between the devices, so that no test's function does."""

    def __init__(self, ctx, device: str):
        self._ctx = ctx
        self.kind = device
        self.rank: int = ctx.rank
        self.size: int = ctx.size
        self.engine: str = ctx.engine
        self.exchange = ctx.exchange
        self.barrier = ctx.barrier
        self.device = ctx.device
        self.is_host = device == "host"

    @property
    def comm(self):
        """The communicator of all ranks, opened once."""
        return self._ctx.communicator()

    def new_communicator(self, **options):
        """Open a communicator of all ranks, which the function closes."""
        return self._ctx.new_communicator(**options)

    # ---- Tensors.

    def tensor(self, data, dtype=torch.float32) -> torch.Tensor:
        """Give a tensor on the device."""
        return torch.tensor(data, dtype=dtype).to(self.device)

    def full(self, value, *shape, dtype=torch.float32) -> torch.Tensor:
        """Give a tensor of one value on the device."""
        return torch.full(shape, value, dtype=dtype).to(self.device)

    def random(self, *shape, seed: int = 0, of: int | None = None) -> torch.Tensor:
        """Give the same random tensor on every device; `of`: the rank that it is for, this one unless given."""
        generator = torch.Generator().manual_seed(1000 * seed + (self.rank if of is None else of))
        return torch.randn(*shape, generator=generator).to(self.device)

    # ---- Streams.

    def synchronize(self) -> None:
        """Wait until the device has done all."""
        if not self.is_host:
            torch.cuda.synchronize(self.device)

    def new_stream(self):
        """Give a stream that is ordered behind the current one, for `use` and ``stream=``; None on the host."""
        if self.is_host:
            return None
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return stream

    def use(self, stream):
        """Make a stream the current one for a block."""
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    def current_stream(self) -> int:
        """Give torch's current stream as a number; 0 on the host."""
        return 0 if self.is_host else torch.cuda.current_stream(self.device).cuda_stream

    def join(self, stream) -> None:
        """Order the current stream behind another one."""
        if stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def delay(self) -> None:
        """Keep the current stream busy for some milliseconds, so that what isn't ordered behind it comes too early."""
        if self.kind == "cuda":
            torch.cuda._sleep(20_000_000)  # cycles

    def capture(self, step):
        """Record a function's work in a CUDA graph and give what replays it; on the host the function itself.

        The function must have run before, so that all that is made once is made.
        """
        if self.is_host:
            return step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    @contextlib.contextmanager
    def no_host_waits(self):
        """Fail where the host waits for the device inside the block: a step must not."""
        if self.is_host:
            yield
            return
        self.synchronize()
        if self.kind == "simulated":
            from tests.streams.running import step

            with step():
                yield
            return

        def refuse(name):
            def waited(*args, **kwargs):
                raise AssertionError(f"the host waits for the GPU: torch.cuda.{name}")

            return waited

        # torch's mode finds copies and item(); of the explicit waits it knows nothing.
        waits = [(torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")]
        with contextlib.ExitStack() as patches:
            for owner, name in waits:
                patches.enter_context(mock.patch.object(owner, name, refuse(f"{owner.__name__}.{name}")))
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def process_group(rank, backend):
    """Open torch's default process group of a test's ranks; destroy it behind the block."""
    path = rank.exchange(tempfile.mktemp(prefix="collectives-store-") if rank.rank == 0 else None)[0]
    store = dist.FileStore(path, rank.size)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_group(function=None, *, backend: str = "gloo"):
    """Run a test's function inside a default process group, over Gloo, which takes tensors of any device, too.

    One over our backend has its communicator open already: its first call blocks until all ranks have made it.
    """
    if function is None:
        return functools.partial(in_group, backend=backend)

    @functools.wraps(function)
    def inside(rank, *args):
        with process_group(rank, backend):
            opened_with = rank.full(1.0, 1) if backend == "collectives" else None
            if opened_with is not None:
                dist.all_reduce(opened_with)
            result = function(rank, *args)
            rank.synchronize()
            # Gloo may hang in its destructor while a DDP object still holds it or a peer still talks to it.
            gc.collect()
            dist.barrier()
            return result

    return inside
