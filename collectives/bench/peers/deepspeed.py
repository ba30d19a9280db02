"""DeepSpeed's shared-memory all-reduce for CPUs, a torch operator, in our rank processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ...comm.communicator import Communicator
from ..buffers import Buffers
from ..cases import Case
from ..control import Control
from ..implementation import InProcessImplementation, PeerMissing

__all__ = ["DeepSpeedPeer"]

_LEVELS = {"float32": 1, "bfloat16": 2, "float16": 2}  # its vector_kernel_level: AVX2, AVX-512
_LEVEL_NAMES = {1: "AVX2", 2: "AVX-512"}
_SHARED_BYTES = 80 << 20  # of /dev/shm, for each rank
_FILE = "/dev/shm/deepspeed_allreduce_buffer_{user}_bench_{job}_{rank}"


class DeepSpeedPeer(InProcessImplementation):
    """Operator of DeepSpeed's ShareMemCommBuilder, which compiles it at first use (minutes).

    Raises `PeerMissing`.
    """

    name = "deepspeed"

    def __init__(self, comm: Communicator, control: Control):
        super().__init__(comm.rank)
        reason = _missing_reason(comm)
        if reason:
            raise PeerMissing(reason)
        version, problem = None, None
        for compiles in (True, False):  # the others wait for rank 0's compiler
            if (comm.rank == 0) == compiles:
                try:
                    module, version = _load_operator()
                except Exception as error:  # any error of its set-up or the compiler
                    problem = f"its operator can't be loaded: {type(error).__name__}: {str(error)[:400]}"
            problems = [text for text in control.gather(problem) if text]
            if problems:
                raise PeerMissing(problems[0])
        self.fields = {"engine": self.name, "versions": {self.name: version, "torch": torch.__version__}}
        self.level = module.vector_kernel_level()
        # Part of its files' names in /dev/shm: files of an earlier job would be used.
        job = control.broadcast_from_rank_0(secrets.token_hex(8))
        with _environment(LOCAL_SIZE=str(comm.size), MASTER_ADDR="bench", MASTER_PORT=job):
            module.initialize(comm.size, comm.rank)
        control.gather(None)  # all ranks have mapped all files
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_FILE.format(user=os.getuid(), job=job, rank=comm.rank))
        self.all_reduce = torch.ops.deepspeed.inference_all_reduce_
        self.barrier_array = torch.zeros(1, device="cpu")

    def unsupported_reason(self, case: Case, in_place: bool) -> str | None:
        if case.op.name != "all_reduce" or case.redop != "sum":
            return "DeepSpeed's shared memory has the sum of all_reduce only"
        if not in_place:
            return "DeepSpeed's all_reduce is in place only"
        if case.kind.name not in _LEVELS:
            return f"DeepSpeed's shared memory has no {case.kind.name}"
        if self.level < _LEVELS[case.kind.name]:
            return f"DeepSpeed's {case.kind.name} needs {_LEVEL_NAMES[_LEVELS[case.kind.name]]}"
        if case.nbytes >= 2**31:
            return "DeepSpeed's sizes are ints"
        return "DeepSpeed reduces no empty array" if not case.count else None

    def barrier(self) -> None:
        self.all_reduce(self.barrier_array)

    def make_call(self, case: Case, buffers: Buffers) -> Callable[[], object]:
        return partial(self.all_reduce, buffers.recv)


def _missing_reason(comm: Communicator) -> str | None:
    if importlib.util.find_spec("deepspeed") is None:
        return "not installed (pip install deepspeed; it compiles its operator at first use, with ninja and g++)"
    if comm.device.type != "cpu":
        return "DeepSpeed's shared memory is measured on host memory only: --engine host"
    if comm.local_size != comm.size or comm.size == 1:
        return "DeepSpeed's shared memory is measured with two ranks or more on one machine"
    free = os.statvfs("/dev/shm")
    if comm.rank == 0 and free.f_bavail * free.f_frsize < _SHARED_BYTES * comm.size:
        return f"it needs {_SHARED_BYTES * comm.size >> 20} MiB in /dev/shm, and so much is not free there"
    return None


def _load_operator():
    """Import DeepSpeed and load its operator; return the module and DeepSpeed's version.

    Its output goes to stderr.
    """
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))  # ninja is there in a venv
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        with _environment(DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", "cpu"), PATH=path):
            import deepspeed
            from deepspeed.accelerator import get_accelerator

            return get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False), deepspeed.__version__
    finally:
        sys.stdout.flush()
        os.dup2(out, 1)
        os.close(out)


@contextlib.contextmanager
def _environment(**variables: str):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
