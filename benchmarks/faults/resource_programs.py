"""The programs of the trials of `resources`: what a rank does while it lacks something."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch

from tests.hosts import apart

__all__ = ["DISK", "TIMEOUT", "preload", "take_part"]

DISK = Path("/mnt")
TIMEOUT = 1.5  # of the communicator
INIT_TIMEOUT = 5.0
_NEW_MOUNTS, _OWN_DIRECTORY = 0x20000, 0x200  # CLONE_NEWNS, CLONE_FS
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18  # MS_REC, MS_PRIVATE
_build = tempfile.TemporaryDirectory(prefix="clock-")


@functools.cache
def preload() -> dict[str, str]:
    """Return the environment in which a process has a clock that jumps."""
    library = Path(_build.name, "libclock.so")
    source = Path(__file__).with_name("clock.cpp")
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return {"LD_PRELOAD": str(library)}


def take_part(ctx, plan: dict) -> dict:
    """One rank's part of a trial."""
    import collectives.rendezvous.world as world
    from tests.rank_process import bind_submodules

    bind_submodules()
    world._generation, world._world = 0, None
    if plan["kind"] in ("disk", "shm"):
        _mount(ctx, DISK if plan["kind"] == "disk" else Path("/dev/shm"), int(plan["amount"]))
    if plan["machines"]:
        with apart(ctx, plan["machines"]):
            return _Rank(ctx, plan).run()
    return _Rank(ctx, plan).run()


def _mount(ctx, folder: Path, kib: int) -> None:
    """Mount a small tmpfs over a folder, in a mount namespace of these ranks alone. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args) -> None:
        if getattr(libc, name)(*args) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    if ctx.rank == 0:
        call("unshare", _NEW_MOUNTS)
        call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
        call("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={kib + 4}k".encode())
    ctx.barrier()
    if ctx.rank != 0:
        file = os.open(f"/proc/{ctx.pids[0]}/ns/mnt", os.O_RDONLY)
        call("unshare", _OWN_DIRECTORY)  # the system lets no process change that shares these with another
        call("setns", file, _NEW_MOUNTS)
        os.close(file)
    os.chdir("/")


class _Rank:
    def __init__(self, ctx, plan: dict):
        self.ctx, self.plan = ctx, plan
        self.kind, self.action, self.amount = plan["kind"], plan["action"], plan["amount"]
        self.is_victim = ctx.rank in plan["victims"]
        self.wrong: list[str] = []

    def run(self) -> dict:
        ctx, comm = self.ctx, None
        warm = self.open(30.0)  # what is opened, and imported, once for a process
        self.check_sum(warm)
        warm.split(0).close()
        warm.close()
        if self.action not in ("init", "flight"):
            comm = self.open(30.0)
            comm.timeout = TIMEOUT
            self.check_sum(comm)
        x = torch.ones(1 << 22 if self.kind == "memory" else 1000)
        ctx.barrier()
        error, began, made = None, time.monotonic(), []
        with self.lacking():
            try:
                made.append(self.act(comm, x))
            except Exception as found:
                error = found
            seconds = time.monotonic() - began
        ctx.barrier()
        for each in [*made, comm]:
            if hasattr(each, "abort") and not each.closed:
                each.abort()
        again = self.open(30.0)
        self.check_sum(again)
        again.close()
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {
            "wrong": self.wrong, "error": type(error).__name__ if error else None, "text": str(error)[:1500],
            "peers": list(getattr(error, "peers", ())), "kinds": kinds, "seconds": seconds,
            "limit": INIT_TIMEOUT + 2 if self.action in ("init", "split") else TIMEOUT + (
                self.amount if self.kind == "pause" else 0.0),
        }  # fmt: skip

    def open(self, seconds: float = INIT_TIMEOUT):
        import collectives

        if self.plan["machines"]:
            return collectives.init(timeout=seconds)
        engine_library = self.ctx.library
        engine_library.set_init_timeout(seconds)
        try:
            return self.ctx.new_communicator(timeout=TIMEOUT)
        finally:
            engine_library.set_init_timeout(60.0)

    def check_sum(self, comm) -> None:
        x = torch.full((1000,), float(comm.rank + 1))
        comm.all_reduce(x)
        if set(x.tolist()) != {comm.size * (comm.size + 1) / 2}:
            self.wrong.append(f"a wrong sum: {x[:4]}")

    # ---- What is missing.

    @contextlib.contextmanager
    def lacking(self):
        if not self.is_victim or self.kind in ("disk", "shm"):
            yield
        elif self.kind == "descriptors":
            with _limit(resource.RLIMIT_NOFILE, _first_free_descriptor() + int(self.amount)):
                yield
        elif self.kind == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            with _limit(resource.RLIMIT_AS, used + int(self.amount * 1024)):
                yield
        elif self.kind == "clock":
            move = ctypes.CDLL(None).move_clock
            move.argtypes = [ctypes.c_long]
            timer = threading.Timer(0.02, move, [int(self.amount)])
            timer.start()
            try:
                yield
            finally:
                timer.join()
                move(0)
        else:
            script = f"kill -STOP {os.getpid()}; sleep {self.amount}; kill -CONT {os.getpid()}"
            helper = subprocess.Popen(["sh", "-c", f"sleep 0.05; {script}"])
            yield
            helper.wait()

    # ---- What is done meanwhile.

    def act(self, comm, x):
        action = self.action
        if action == "init":
            return self.open()
        if action == "split":
            for _ in range(20 if self.kind in ("clock", "pause") else 1):
                child = comm.split(0)
                self.check_sum(child)
                child.close()
                time.sleep(0.01 if self.kind in ("clock", "pause") else 0)
            return None
        if action == "empty":
            array = comm.empty(1 << 20, dtype=torch.float32)
            array.fill_(1.0)
            comm.all_reduce(array)
            return None
        if action == "register":
            registered = comm.register(comm.empty(len(x)))
            comm.all_reduce(x)
            comm.deregister(registered)
            return None
        return getattr(self, f"do_{action}")(comm, x)

    def repeat(self, call) -> None:
        """Make calls for some time; the same number on all ranks."""
        for _ in range(30):
            call()
            time.sleep(0.01)

    def do_all_reduce(self, comm, x) -> None:
        self.repeat(lambda: comm.all_reduce(x.fill_(1.0)))

    def do_barrier(self, comm, x) -> None:
        self.repeat(comm.barrier)

    def do_async(self, comm, x) -> None:
        self.repeat(lambda: [work.wait() for work in [comm.all_reduce(x.fill_(1.0), async_op=True) for _ in range(3)]])

    def do_send(self, comm, x) -> None:
        def ring():
            with comm.group():
                comm.send(x, (comm.rank + 1) % comm.size)
                comm.recv(torch.empty_like(x), (comm.rank - 1) % comm.size)

        self.repeat(ring)

    def do_timeout(self, comm, x) -> None:
        """A rank comes too late: the time limit counts seconds, whatever the clock says."""
        if self.ctx.rank == 0:
            time.sleep(TIMEOUT + 1)
            comm.abort()
            return
        began = time.monotonic()
        try:
            comm.all_reduce(x)
        finally:
            if time.monotonic() - began < TIMEOUT - 0.1:
                self.wrong.append(f"a time limit of {TIMEOUT} s was over after {time.monotonic() - began:.2f} s")

    # ---- On a disk that is full.

    def do_flight(self, _comm, x):
        from tests.variables import variables

        with variables(COLLECTIVES_FLIGHT_DIR=DISK / "flight"):
            comm = self.open()
        for _ in range(100):
            comm.all_reduce(x.fill_(1.0))
        if comm._flight is None or comm._flight.ring.issued < 100:
            self.wrong.append("the flight recorder does not go on in memory")
        return comm

    def do_dump(self, comm, x) -> None:
        from collectives.comm import flight_recorder

        comm.all_reduce(x)
        try:
            flight_recorder.dump(DISK / "dump")
        finally:
            if list(DISK.glob("dump/*.partial")):
                self.wrong.append("a part of a file is left")

    def do_save(self, comm, x) -> None:
        from collectives.sharded import save

        self.checkpoint(comm, lambda path, model, step: save(path / str(step), model))

    def do_checkpointer(self, comm, x) -> None:
        from collectives.sharded import Checkpointer

        keep: list = []

        def save(path, model, step):
            keep.append(keep[0] if keep else Checkpointer(path / "steps"))
            keep[0].save(step, model, block=True)

        self.checkpoint(comm, save)

    def checkpoint(self, comm, save) -> None:
        """Save checkpoints until the disk is full; all that are there can be loaded."""
        from collectives.sharded import load
        from tests.sharded.states import sharded

        comm.timeout = 30.0  # the disk is slow, maybe
        model = sharded(comm=comm)
        try:
            for step in range(60):
                save(DISK, model, step)
        finally:
            self.ctx.barrier()
            for path in sorted([*DISK.glob("[0-9]*"), *DISK.glob("steps/step_*")]):
                if path.suffix in (".partial", ".removed"):
                    self.wrong.append(f"{path.name} is left")
                else:
                    load(path, model)


@contextlib.contextmanager
def _limit(what: int, amount: int):
    before = resource.getrlimit(what)
    resource.setrlimit(what, (min(amount, before[1]) if before[1] >= 0 else amount, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def _first_free_descriptor() -> int:
    file = os.open("/dev/null", os.O_RDONLY)
    os.close(file)
    return file
