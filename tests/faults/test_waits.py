"""A rank that waits for others to open a communicator: the others die, never come, or are late."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import errors, fused_allreduce
from collectives.comm import liveness as presence
from collectives.comm import waiting
from collectives.comm.error_ranks import renumber_error
from collectives.comm.multinode.error_store import ErrorStore
from collectives.rendezvous.control import dup_on_host
from tests.hosts import joined
from tests.launching import clean_environment, finish, free_port, started
from tests.programs import FORKING
from tests.ranks import run_ranks


def open_group(ctx, port, seconds):
    store = dist.TCPStore("127.0.0.1", port, ctx.size, ctx.rank == 0, wait_for_workers=False)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=limit)


def hooked():
    module = DistributedDataParallel(nn.Linear(4, 4))
    module.register_comm_hook(None, fused_allreduce)
    return module


def backward(module):
    module(torch.ones(2, 4)).sum().backward()


# ---- A rank that dies.


def dies(ctx, port, victim, looks_late):
    """A rank dies before its first backward, while the others wait for it there or before they look."""
    open_group(ctx, port, 50)
    module = hooked()
    ctx.barrier()
    if ctx.rank == victim:
        time.sleep(0.0 if looks_late else 0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5 if looks_late else 0.0)
    with pytest.raises(errors.CollectivesError) as caught:
        backward(module)
    dist.destroy_process_group()
    return type(caught.value).__name__, caught.value.peers, str(caught.value)


@pytest.mark.parametrize(("n", "victim"), [(2, 0), (3, 2)])
def test_a_rank_killed_before_its_first_backward(n, victim):
    """Rank 0's process serves the group's store: without that, the others know what they had read of it before."""
    results = run_ranks(dies, n, free_port(), victim, False, timeout=45, deaths={victim})
    for rank in set(range(n)) - {victim}:
        kind, peers, text = results[rank]
        assert kind == "RemoteError" and peers == (victim,)
        assert f"rank {victim}" in text and "has ended" in text and "gradient bucket" in text


def test_a_store_that_is_gone_before_the_first_backward():
    kind, _, text = run_ranks(dies, 2, free_port(), 0, True, timeout=45, deaths={0})[1]
    assert kind == "TransportError"
    assert "store has gone away" in text and "rank 0's" in text and "gradient bucket 0" in text


RAISES = """
import os, sys, torch, torch.distributed as dist
from tests.faults.test_waits import backward, hooked
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
module = hooked()
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("no such file: data.csv")
try:
    backward(module)
except Exception as error:
    print("RESULT", __import__("json").dumps({"kind": type(error).__name__, "text": str(error), "rank": 0}))
os._exit(0)  # Gloo's destructor may wait for a peer that is gone
"""


def test_a_rank_on_another_machine_that_an_exception_ends(tmp_path):
    """Its process can't be seen, but it leaves a note."""
    program, place = tmp_path / "program.py", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    program.write_text(RAISES)
    envs = [clean_environment(RANK=rank, WORLD_SIZE=2, COLLECTIVES_HOST_ID=rank, **place) for rank in range(2)]
    with started(*(([sys.executable, FORKING, str(program)], env) for env in envs)) as running:
        (result,), codes, _ = finish(running, 40)
    assert codes == [0, 1] and result["kind"] == "RemoteError"
    assert "rank 1: it ended with ValueError: no such file: data.csv" in result["text"]


# ---- A rank that doesn't come.


def stays_away(ctx, port):
    open_group(ctx, port, 2)
    module = hooked() if ctx.rank == 0 else DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(errors.CollectiveTimeout if ctx.rank == 0 else RuntimeError) as caught:  # the latter is Gloo's
        backward(module)
    ctx.barrier()
    dist.destroy_process_group()
    return getattr(caught.value, "peers", None), str(caught.value)


def test_the_groups_timeout_ends_the_wait():
    """The hook is on one rank alone."""
    peers, text = run_ranks(stays_away, 2, free_port(), timeout=45)[0]
    assert peers == (1,) and "rank 1 of 2 did not come within 2 s to open the communicator of process group" in text


def limits(ctx, port):
    open_group(ctx, port, 17)
    from collectives.rendezvous.process_groups import get_communicator

    found = []
    for group in (dist.group.WORLD, dist.new_group([0, 1], timeout=timedelta(seconds=19))):
        comm = get_communicator(group, torch.device("cpu"))
        found.append(comm.timeout)
        comm.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_a_communicator_has_its_groups_timeout():
    assert run_ranks(limits, 2, free_port()) == [[17.0, 19.0]] * 2


# ---- A rank that is late.


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def late(ctx, port):
    lines = Lines()
    logging.getLogger("collectives").addHandler(lines)
    open_group(ctx, port, 30)
    module, comm = hooked(), ctx.new_communicator()
    with mock.patch.object(waiting, "LOG_AFTER_S", 0.2):
        time.sleep(1.0 * ctx.rank)
        backward(module)
        ctx.barrier()
        time.sleep(0.8 * ctx.rank)
        dup_on_host(comm).close()
    comm.close()
    logging.getLogger("collectives").removeHandler(lines)
    del module
    ctx.barrier()
    dist.destroy_process_group()
    return lines.lines


def test_a_long_wait_is_said_on_the_log():
    lines, none = run_ranks(late, 2, free_port())
    assert not none and all(line.startswith("WARNING rank 0 has waited") for line in lines)
    for purpose in ("rank 1 to open the communicator of process group", "other ranks to open a second communicator"):
        assert any(purpose in line for line in lines), lines
    assert "; it goes on for at most 30 s more" in lines[0]


def test_a_channels_wait_has_the_groups_rank_numbers(caplog):
    purpose = "to send from rank 0 to rank 1 of process group 'x'"
    with mock.patch.object(waiting, "LOG_AFTER_S", 0.0):
        wait = waiting.RankWait(purpose, 0, 2, 0.5, logged_ranks=(5, 7))
        wait.check(lambda: [1])
    assert caplog.messages[0].startswith("rank 5 has waited 0 s for rank 7 to send from rank 5 to rank 7 of process")
    time.sleep(0.5)
    with pytest.raises(errors.CollectiveTimeout) as caught:
        wait.check(lambda: [1])
    found = renumber_error(caught.value, (5, 7), op="send", rank=5)
    text = "rank 7 did not come within 0.5 s to send from rank 5 to rank 7 of process group 'x'"
    assert (found.message, found.peers) == (text, (7,))


# ---- Processes.


def test_whether_a_process_has_ended():
    own = presence.this_process()
    assert not presence.has_ended(own)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    machine, namespace, _, _ = own.split("|")
    name = f"{machine}|{namespace}|{child.pid}|{presence.get_start_time(child.pid)}"
    assert not presence.has_ended(name)
    assert presence.has_ended(f"{machine}|{namespace}|{child.pid}|1")  # its number was used again
    child.stdin.close()
    until = time.monotonic() + 20
    while not presence.has_ended(name) and time.monotonic() < until:  # a zombie has ended, too
        time.sleep(0.02)
    assert presence.has_ended(name)
    child.wait()
    assert presence.has_ended(name)
    for unknown in ("", "a|b|c|d", f"elsewhere|{namespace}|{child.pid}|1", f"{machine}|other|{child.pid}|1"):
        assert not presence.has_ended(unknown)


def ring_over_two_machines(ctx):
    """Each rank sends to the next one; rank 1 dies. Rank 3 waits for rank 2, which waits for rank 1."""
    real = ErrorStore.fetch_error

    def patient(store, seconds=8.0, peers=()):
        return real(store, seconds, peers)

    with pytest.raises(errors.RemoteError) as raised, joined(ctx, "aaabbb") as comm:
        comm.all_reduce(torch.ones(4))
        ctx.barrier()
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1 << 18)
        # On the machine of the dead rank its end is seen, by the others only that rank 2 has closed its connection.
        with mock.patch.object(ErrorStore, "fetch_error", patient if ctx.rank < 3 else real):
            while True:
                with comm.group():
                    comm.send(x, (ctx.rank + 1) % ctx.size)
                    comm.recv(torch.empty_like(x), (ctx.rank - 1) % ctx.size)
    return raised.value.peers


def test_ranks_on_the_other_machine_name_the_one_that_died():
    found = run_ranks(ring_over_two_machines, 6, deaths=(1,))
    assert [peers for rank, peers in enumerate(found) if rank != 1] == [(1,)] * 5
