"""The system's side: memory that can't be had, forked children, and that nothing is left behind."""

from __future__ import annotations

import glob
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conformance.cases import Case, run_cases
from tests.rank_process import ROOT
from tests.ranks import run_ranks

F32, SUM = 7, 0
TIB = 1 << 40
CASES = [Case("all_reduce", "float32", 5000)]


def lacks_memory(ctx):
    """Ask for more memory than there is; then, on rank 0 with RLIMIT_AS just above what is used, allocate and open.

    The engine fails cleanly, and works once the limit goes. Gives the errors.
    """
    from collectives.errors import CollectivesError

    def fails(call):
        with pytest.raises((CollectivesError, MemoryError)) as caught:
            call()
        return caught.value

    library = ctx.library
    before = library.memory_in_use()
    errors = {"much": fails(lambda: library.mem_alloc(TIB))}
    assert library.memory_in_use() == before
    library.mem_free(library.mem_alloc(1 << 20))  # what can be had still can
    unique_id = ctx.unique_id()
    library.set_init_timeout(5.0)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    try:
        if ctx.rank == 0:
            resource.setrlimit(resource.RLIMIT_AS, (now + (192 << 10), resource.RLIM_INFINITY))
            errors["limited"] = fails(lambda: library.mem_alloc(256 << 20))
        errors["init"] = fails(lambda: library.comm_init_rank(ctx.size, unique_id, ctx.rank))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ctx.barrier()
    return errors, run_cases(ctx, CASES, ctx.new_comm())


def test_memory_that_cannot_be_had():
    """Each error says how much; the init fails on every rank."""
    (errors, after), (_, after_too) = run_ranks(lacks_memory, 2, fresh=True)
    assert after == after_too == []
    much = errors["much"]
    assert (much.nbytes == TIB or str(TIB) in much.message) and re.search(rf"1\.0 TiB|{TIB}", much.message)
    assert re.search(r"256.0 MiB|268435456", str(errors["limited"])), errors
    assert re.search(r"bytes|MiB|KiB|memory", str(errors["init"])), errors


def in_child(work) -> str:
    """Run ``work`` in a forked child; what it returned, or how the child ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)
            os.write(write, str(work()).encode()[:4000])
        finally:
            os._exit(0)
    os.close(write)
    text = b""
    while part := os.read(read, 4096):
        text += part
    os.close(read)
    _, status = os.waitpid(pid, 0)
    return text.decode() if text else f"the child ended with status {status}"


def forked(ctx):
    from collectives.errors import InvalidUsage

    comm, queue = ctx.new_comm(), ctx.library.queue_create()
    x = np.ones(100, np.float32)
    comm.all_reduce(x.ctypes.data, x.ctypes.data, 100, F32, SUM, queue.handle)
    queue.wait(queue.record(), 20)

    def attempt(call):
        try:
            call()
        except InvalidUsage as error:
            return "refused" if "fork" in str(error).lower() else f"InvalidUsage without the cause: {error}"
        except Exception as error:
            return repr(error)
        return "accepted"

    child_calls = {
        "all_reduce": lambda: comm.all_reduce(x.ctypes.data, x.ctypes.data, 100, F32, SUM),
        "queued": lambda: comm.all_reduce(x.ctypes.data, x.ctypes.data, 100, F32, SUM, queue.handle),
        "split": lambda: comm.split(0, 0),
        "wait": lambda: queue.wait(1, 1),
    }
    found = []
    for name, call in child_calls.items():
        if (answer := in_child(lambda c=call: attempt(c))) != "refused":
            found.append(f"{name} in a forked child: {answer}")
    ctx.barrier()
    found += run_cases(ctx, CASES, comm) + run_cases(ctx, CASES, comm, queue=queue)
    queue.close()
    comm.destroy()
    return found


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    """Nor is a forked child that ends a rank that died."""
    assert run_ranks(forked, 2, fresh=True) == [[]] * 2


def forked_while_busy(ctx):
    """A fork may happen while other threads are inside of the engine: its locks must be free in the child."""
    comm, queue = ctx.new_comm(), ctx.library.queue_create()
    stop, found = threading.Event(), []

    def work():
        x = np.ones(20_000, np.float32)
        while not stop.is_set():
            comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, 2)
            comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, F32, 2, queue.handle)
            address = ctx.library.mem_alloc(4096)
            ctx.library.mem_free(address)

    def in_the_child():
        mine, own_queue = ctx.library.comm_init_rank(1, ctx.library.get_unique_id(), 0), ctx.library.queue_create()
        y = np.ones(4, np.float32)
        mine.all_reduce(y.ctypes.data, y.ctypes.data, 4, F32, SUM, own_queue.handle)
        own_queue.wait(own_queue.record(), 10)
        own_queue.close()
        mine.destroy()
        return y.tolist()

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(10):
        answer = in_child(in_the_child)
        if answer != "[1.0, 1.0, 1.0, 1.0]":
            found.append(f"in the child: {answer}")
    stop.set()
    thread.join(20)
    queue.close()
    return found


def test_fork_while_threads_are_inside_of_the_engine():
    assert run_ranks(forked_while_busy, 1, fresh=True) == [[]]


def socket_names() -> dict[str, str]:
    """Inode -> name of every Unix socket of the machine that has a name."""
    with open("/proc/net/unix") as lines:
        rows = [line.split() for line in lines][1:]
    return {row[6]: row[7] for row in rows if len(row) > 7}


def names_of(pid) -> set[str]:
    """What a process holds that has a name and so might outlive it: files in /dev/shm and /tmp, named sockets."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    with open(f"/proc/{pid}/maps") as maps:
        links += [parts[5].strip() for line in maps if len(parts := line.split(maxsplit=5)) > 5]
    inodes = [re.sub(r"\D", "", link) for link in links if link.startswith("socket:")]
    sockets = socket_names()
    files = {x for x in links if re.fullmatch(r"/(dev/shm|tmp)/[^/]+", x) and not x.endswith(" (deleted)")}
    return files | {sockets[inode] for inode in inodes if inode in sockets}


def files() -> set[str]:
    """Files that look like ours where a job could leave some."""
    return {
        x for folder in ("/dev/shm", "/tmp") for word in ("coll", "nccl") for x in glob.glob(f"{folder}/*{word}*")
    }


JOB = """
import os, sys, time
sys.path.insert(0, {root!r})
import numpy as np
from tests.rank_process import library_path, load_binding
library = load_binding().Library(library_path("host"))
rank, how = int(sys.argv[1]), sys.argv[2]
comm = library.comm_init_rank(2, library.named_unique_id(sys.argv[3].encode()), rank)
queue = library.queue_create()
memory = library.mem_alloc(1 << 20)
x = np.ones(200_000, np.float32)
comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, 7, 0)
comm.all_reduce(x.ctypes.data, x.ctypes.data, x.size, 7, 0, queue.handle)
queue.wait(queue.record(), 20)
print("ready", flush=True)
if how == "exception":
    raise RuntimeError("made")
if how == "kill":
    time.sleep(60)
if how == "init":  # killed while a second communicator waits for a rank that never comes
    library.comm_init_rank(3, library.named_unique_id(sys.argv[3].encode() + b"2"), rank)
if how == "normal":
    queue.close()
    library.mem_free(memory)
    comm.destroy()
"""


@pytest.mark.parametrize("how", ["normal", "exception", "kill", "init"])
def test_nothing_is_left_behind(how):
    before = files()
    code = JOB.format(root=str(ROOT))
    name = f"leftovers {how} {os.getpid()} {time.monotonic_ns()}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen([sys.executable, "-c", code, str(rank), how, name], **pipes) for rank in range(2)]
    names = set()
    try:
        for job in jobs:
            line = job.stdout.readline()
            assert line == "ready\n", line + job.stderr.read()
        if how in ("kill", "init"):
            time.sleep(0.3)
            names = set().union(*(names_of(job.pid) for job in jobs))
            for job in jobs:
                job.kill()
        ends = [job.wait(timeout=30) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()
    assert ends == {"exception": [1, 1], "kill": [-9, -9], "init": [-9, -9]}.get(how, [0, 0])
    assert files() <= before
    # Only a meeting that goes on has a name at all: the abstract socket of its rank 0, gone with the process.
    assert len(names) == (1 if how == "init" else 0), names
    assert not names & set(socket_names().values())
    assert not any(os.path.exists(name) for name in names)


def named_while_running(ctx):
    comm = ctx.new_comm()
    address = ctx.library.mem_alloc(1 << 20)
    found = run_cases(ctx, CASES, comm)
    ctx.barrier()
    found += names_of("self")
    found += [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
    ctx.barrier()
    ctx.library.mem_free(address)
    comm.destroy()
    return found


def test_no_names_while_running():
    """While a job runs nothing of it has a name that somebody else could open, nor is in /dev/shm, which is small."""
    assert run_ranks(named_while_running, 2) == [[], []]
