"""Sends and receives on the backend, past single messages: tags that grow, memory, ends, several nodes."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from collectives.errors import Aborted, CollectiveTimeout, InvalidUsage, Mismatch, RemoteError
from tests.backend.groups import over
from tests.ranks import Died, run_ranks
from tests.variables import variables


def resources():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@over("collectives")
def growing(ctx, count):
    """The tag is the number of the step."""
    peer, first = 1 - ctx.rank, None
    for step in range(count):
        got = torch.empty(10)
        works = [dist.irecv(got, peer, tag=step), dist.isend(torch.full((10,), float(step)), peer, tag=step)]
        for work in works:
            work.wait()
        assert (got == step).all()
        first = first or (step == 10 and resources())
    return first == resources()


def test_a_tag_that_grows_opens_nothing(tmp_path):
    assert run_ranks(growing, 2, tmp_path / "store", 300) == [True, True]


@over("collectives")
def overtaken(ctx):
    """Large messages in the opposite order, of many dtypes; from any rank and from one; both directions at once."""
    peer = 1 - ctx.rank
    dtypes = [torch.float32, torch.bool, torch.complex64, torch.int8, torch.bfloat16, torch.float64]
    tensors = [torch.arange(300_000).to(dtype) for dtype in dtypes]
    sends = [dist.isend(tensor, peer, tag=tag) for tag, tensor in enumerate(tensors)]
    for tag, tensor in reversed(list(enumerate(tensors))):
        got = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tag % 2:
            dist.recv(got, peer, tag=tag)
        else:
            assert dist.recv(got, tag=tag) == peer
        assert torch.equal(got, tensor)
    for work in sends:
        work.wait()
    # Receives from any rank and from one rank with one tag: the first that was posted takes the first message.
    first, second, third = (torch.zeros(1) for _ in range(3))
    works = [dist.irecv(first, tag=9), dist.irecv(second, peer, tag=9), dist.irecv(third, tag=9)]
    for value in (1.0, 2.0, 3.0):
        dist.isend(torch.tensor([value]), peer, tag=9).wait()
    for work in works:
        work.wait()
    assert (first.item(), second.item(), third.item()) == (1, 2, 3)
    with torch.inference_mode():  # the array is an inference tensor, and another thread stores the message
        dist.barrier()
        sends = [dist.isend(torch.full((2,), float(tag)), peer, tag=tag) for tag in (20, 21)]
        got = [torch.zeros(2), torch.zeros(2)]
        dist.irecv(got[1], peer, tag=21).wait()
        dist.irecv(got[0], peer, tag=20).wait()
        for work in sends:
            work.wait()
    assert [each.tolist() for each in got] == [[20, 20], [21, 21]]
    return True


def test_in_the_opposite_order(tmp_path):
    assert all(run_ranks(overtaken, 2, tmp_path / "store"))


@over("collectives")
def one_after_the_other(ctx):
    """Messages that no receive takes yet stay with their sender, while a receive for another tag waits."""
    if ctx.rank == 1:
        for _ in range(3):
            dist.send(torch.ones(1000), 0, tag=1)
        stay = [dist.isend(torch.ones(1000), 0, tag=1)]
        time.sleep(0.5)
        alone = stay[0].is_completed()
        stay.append(dist.isend(torch.full((1,), 7.0), 0, tag=2))  # now one is behind it, which somebody waits for
        for work in stay:
            work.wait()
        dist.barrier()
        return alone
    control = torch.zeros(1)
    work = dist.irecv(control, 1, tag=2)
    got = torch.empty(1000)
    for _ in range(3):
        dist.recv(got, 1, tag=1)
    work.wait()
    dist.recv(got, 1, tag=1)
    assert control.item() == 7 and (got == 1).all()
    dist.barrier()
    return False


def test_a_message_without_a_receive_stays_with_its_sender(tmp_path):
    assert run_ranks(one_after_the_other, 2, tmp_path / "store") == [False, False]


@over("collectives")
def unlike(ctx):
    """Both ends raise, also for a message that came before its receive; what comes next is right."""
    peer = 1 - ctx.rank
    for dtype, count in ((torch.float64, 4), (torch.int32, 4), (torch.float32, 5)):
        with pytest.raises(Mismatch, match="count") as caught:
            if ctx.rank == 0:
                dist.send(torch.ones(4), peer, tag=3)
            else:
                dist.recv(torch.ones(count, dtype=dtype), peer, tag=3)
        assert (caught.value.op, caught.value.rank) == (("send", "recv")[ctx.rank], ctx.rank)
        assert caught.value.peers == (peer,)
    got = torch.zeros(2)
    if ctx.rank == 0:
        works = [dist.isend(torch.ones(2), peer, tag=tag) for tag in (5, 6)]
        for work in works:
            work.wait()
    else:
        dist.recv(got, peer, tag=6)
        with pytest.raises(Mismatch, match="tag 5"):
            dist.recv(torch.zeros(3), peer, tag=5)
    dist.barrier()
    return got.sum().item()


def test_sizes_and_dtypes_that_differ(tmp_path):
    assert run_ranks(unlike, 2, tmp_path / "store") == [0, 2]


def in_flight(ctx, path):
    """The group ends while sends and receives are in flight, one of them from any rank; then there is another one."""
    for number in range(2):
        dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
        peer = 1 - ctx.rank
        works = [dist.irecv(torch.zeros(1), peer, tag=1), dist.isend(torch.ones(1), peer, tag=2)]
        works.append(dist.irecv(torch.zeros(1), tag=3))
        if ctx.rank == 0 and number == 1:  # a sender of the former life would be taken for one of this life
            with pytest.raises(CollectiveTimeout, match="any rank"):
                works[2].wait(timedelta(seconds=0.3))
        dist.barrier()
        dist.destroy_process_group()
        for work in works:
            with pytest.raises((Aborted, RemoteError)):
                work.wait()
        left = [each.name for each in threading.enumerate() if each.name.startswith("collectives-")]
        assert not left, left
    return True


def test_a_group_that_ends_with_transfers_in_flight(tmp_path):
    assert all(run_ranks(in_flight, 2, tmp_path / "store"))


@over("collectives")
def former(ctx):
    """A message of this life that nobody receives."""
    if ctx.rank == 1:
        dist.isend(torch.ones(1), 0, tag=4)
        time.sleep(0.1)
    dist.barrier()


@over("collectives")
def latter(ctx):
    got = torch.zeros(1)
    if ctx.rank == 0:
        work = dist.irecv(got, tag=4)
        with pytest.raises(CollectiveTimeout):
            work.wait(timedelta(seconds=0.3))
    dist.barrier()
    if ctx.rank == 0:
        work.wait()
    else:
        dist.send(torch.full((1,), 2.0), 0, tag=4)
    return got.item()


def twice(ctx, path):
    former(ctx, path)
    return latter(ctx, path)


def test_a_receive_from_any_rank_sees_no_sender_of_a_former_life(tmp_path):
    assert run_ranks(twice, 2, tmp_path / "store") == [2, 0]


@over("collectives")
def late(ctx):
    """A receive past the group's time limit stays in flight, and gets its message later."""
    got = torch.zeros(1)
    dist.send(got, 1) if ctx.rank == 0 else dist.recv(got, 0)  # the channel is open
    dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    if ctx.rank == 1:
        work = dist.irecv(got, 0, tag=1)
        for call in (work.wait, lambda: dist.recv(torch.zeros(1), 0, tag=2), lambda: dist.send(got, 0, tag=8)):
            with pytest.raises(CollectiveTimeout, match="from rank . to rank .") as caught:
                call()
            assert (caught.value.rank, caught.value.peers) == (1, (0,))
    dist.group.WORLD.set_timeout(timedelta(seconds=60))
    dist.barrier()
    if ctx.rank == 0:
        dist.send(torch.full((1,), 3.0), 1, tag=1)
        dist.send(torch.full((1,), 4.0), 1, tag=2)
        dist.recv(got, 1, tag=8)
    else:
        work.wait()
        again = torch.zeros(1)
        dist.recv(again, 0, tag=2)  # not the one that has raised, which is over
        assert again.item() == 4
        dist.send(torch.full((1,), 5.0), 0, tag=8)  # the one that has raised was never sent
    return got.item()


def test_a_receive_past_the_time_limit_stays_in_flight(tmp_path):
    assert run_ranks(late, 2, tmp_path / "store") == [5, 3]


@contextmanager
def opened(ctx, path, machines):
    """Open the default group, on one node or on a machine for each letter of `machines`."""
    with variables(COLLECTIVES_HOST_ID=machines[ctx.rank], MASTER_ADDR="127.0.0.1") if machines else nullcontext():
        dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def too_late(ctx, path, machines):
    with opened(ctx, path, machines):
        return ends_one_direction(ctx)


def ends_one_direction(ctx):
    """A send that runs out of time on an open channel ends this direction, at once for all that comes later."""
    peer, got = 1 - ctx.rank, torch.zeros(1)
    dist.send(got, 1) if ctx.rank == 0 else dist.recv(got, 0)
    dist.recv(got, 1) if ctx.rank == 0 else dist.send(got, 0)
    begun = time.monotonic()
    if ctx.rank == 0:
        dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
        with pytest.raises(CollectiveTimeout, match="nothing more can be sent to rank 1"):
            dist.send(got, 1)
        dist.group.WORLD.set_timeout(timedelta(seconds=60))
        for call in (lambda: dist.send(got, 1, tag=4), lambda: dist.isend(got, 1).wait()):
            with pytest.raises(InvalidUsage, match="can be sent to rank 1 .*, since an earlier one ran out of time"):
                call()
    dist.barrier()
    if ctx.rank == 1:
        for call in (lambda: dist.recv(got, 0), lambda: dist.recv(got, 0, tag=4)):
            with pytest.raises(RemoteError, match="rank 0 .*ran out of time"):
                call()
    assert time.monotonic() - begun < 20
    dist.recv(got, 1) if ctx.rank == 0 else dist.send(torch.full((1,), 6.0), 0)  # the other direction goes on
    dist.barrier()
    return got.item() if ctx.rank == 0 else peer


@pytest.mark.parametrize("machines", ["", "ab"])
def test_a_send_past_the_time_limit(machines, tmp_path):
    assert run_ranks(too_late, 2, tmp_path / "store", machines) == [6, 0]


def left(ctx, path, machines):
    """Rank 1 destroys its group, and its process lives on. Rank 0 waits behind a message, or for any rank."""
    with opened(ctx, path, machines):
        if ctx.rank == 1:
            work = dist.isend(torch.ones(1), 0, tag=1)
            time.sleep(0.5)
            dist.destroy_process_group()
            with pytest.raises(Aborted):
                work.wait()
            ctx.barrier()
            return True
        begun = time.monotonic()
        works = [dist.irecv(torch.zeros(1), 1, tag=2), dist.irecv(torch.zeros(1), tag=2)]
        for call in (works[0].wait, works[1].wait, lambda: dist.recv(torch.zeros(1), 1, tag=1)):
            with pytest.raises(RemoteError, match="rank 1") as caught:
                call()
            assert (caught.value.op, caught.value.rank, caught.value.peers) == ("recv", 0, (1,))
        assert time.monotonic() - begun < 10
        ctx.barrier()
        return True


@pytest.mark.parametrize("machines", ["", "ab"])
def test_a_group_that_ends_with_a_message_that_nobody_takes(machines, tmp_path):
    assert all(run_ranks(left, 2, tmp_path / "store", machines))


def killed(ctx, path):
    """Rank 1 ends: with a message of it that no receive takes, and before it has come at all."""
    dist.init_process_group("collectives", init_method=f"file://{path}", rank=ctx.rank, world_size=ctx.size)
    if ctx.rank == 1:
        dist.isend(torch.ones(1), 0, tag=1)
        time.sleep(0.5)
        os._exit(7)
    found = []
    for call in (
        lambda: dist.recv(torch.ones(1), 1, tag=2),
        lambda: dist.recv(torch.ones(1), 1, tag=1),  # whose header has come, and whose elements never will
        lambda: dist.recv(torch.ones(1), tag=2),
        lambda: dist.send(torch.ones(1), 1),
        lambda: dist.isend(torch.ones(1), 1).wait(),
    ):
        with pytest.raises(RemoteError, match="rank 1") as caught:
            call()
        found.append((caught.value.op, caught.value.rank, caught.value.peers))
    used = time.process_time()
    time.sleep(1)
    assert time.process_time() - used < 0.5  # no thread looks for ever at a channel that has failed
    dist.destroy_process_group()
    return found


def test_a_rank_that_dies_is_named(tmp_path):
    alive, dead = run_ranks(killed, 2, tmp_path / "store", deaths=[1])
    assert alive == [("recv", 0, (1,))] * 3 + [("send", 0, (1,))] * 2
    assert isinstance(dead, Died)


NEVER_WAITED = """
import sys, torch, torch.distributed as dist, collectives
rank, path, destroys = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "destroys"
dist.init_process_group("collectives", init_method=f"file://{path}", rank=rank, world_size=2)
for tag in range(3):
    dist.isend(torch.ones(1 << 20), 1 - rank, tag=tag)
    dist.irecv(torch.ones(1 << 20), 1 - rank, tag=10 + tag)
    dist.irecv(torch.ones(1), tag=20)
dist.barrier()
if destroys:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("ends", ["destroys", "exits"])
def test_transfers_that_nobody_waits_for(ends, tmp_path):
    command = [sys.executable, "-c", NEVER_WAITED]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), ends], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    found = [(each.communicate(timeout=240)[1], each.returncode) for each in ranks]
    assert [code for _, code in found] == [0, 0], found
    assert not any("terminate" in text or "Traceback" in text for text, _ in found), found


def apart(ctx, path):
    """The same between two nodes."""
    with opened(ctx, path, "ab"):
        assert late.__wrapped__(ctx) == (5, 3)[ctx.rank]
        assert overtaken.__wrapped__(ctx)
        assert one_after_the_other.__wrapped__(ctx) is False
        return len(dist.group.WORLD.communicator(torch.device("cpu")).machines)


def test_between_nodes(tmp_path):
    assert run_ranks(apart, 2, tmp_path / "store") == [2, 2]
