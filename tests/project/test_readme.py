"""What the README and the pages say is so: programs run, and the path of a call is taken."""

import re
from pathlib import Path

from tests.launching import free_port
from tests.programs import run_python

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
# Pages whose blocks "```python run" are whole programs; every Python block of the README is one.
PAGES = ("horovod", "ddp", "sharded", "communicator", "fused-kernels")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
for _page in PAGES:
    PROGRAMS += re.findall(r"```python run\n(.*?)```", (ROOT / "docs" / f"{_page}.md").read_text(), re.DOTALL)
PATH = (
    "fused_allreduce -> DDPReducer.reduce_bucket -> NoCompression.reduce -> Communicator.all_reduce "
    "-> _nccl -> ncclAllReduce -> libnccl | host engine"
)


def run_alone(text):
    """Run a program as the only rank of a job, and return what it printed."""
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_python(text, timeout=100, COLLECTIVES_ENGINE="host", OMP_NUM_THREADS="1", **job)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_programs_run():
    """One after the other in one process, each with names of its own."""
    assert PROGRAMS
    names = [f"program {number}" for number in range(1, len(PROGRAMS) + 1)]
    lines = [
        f"exec(compile({program!r}, {name!r}, 'exec'), {{'__name__': '__main__'}}); print({name!r})"
        for name, program in zip(names, PROGRAMS, strict=True)
    ]
    out = run_alone("\n".join(lines))
    assert [line for line in out.splitlines() if line in names] == names


TRACER = """
import sys
import torch
import torch.distributed as dist
import collectives
from collectives import _nccl
from collectives.compression import NoCompression
from collectives.gradients.ddp_reducer import DDPReducer

methods = (collectives.fused_allreduce, DDPReducer.reduce_bucket, NoCompression.reduce)
names = {method.__code__: method.__qualname__ for method in methods}
hops = []
compiled = collectives.Communicator.all_reduce  # it has no frame
def all_reduce(*args, **options):
    hops.append(compiled.__qualname__)
    return compiled(*args, **options)

collectives.Communicator.all_reduce = all_reduce
def watch(frame, event, argument):
    if event == "call" and frame.f_code in names:
        hops.append(names[frame.f_code])

dist.init_process_group("gloo")
comm = collectives.init()
assert type(comm._native) is _nccl.Comm and comm.engine.library.has("ncclAllReduce")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 2))
model.register_comm_hook(collectives.HookState(comm), collectives.fused_allreduce)
loss = model(torch.ones(4, 8)).sum()
before = comm._native.sequence()  # the engine's own count of the collectives that reached it
sys.setprofile(watch)
loss.backward()
sys.setprofile(None)
print(*hops, comm._native.sequence() - before, comm.engine.library.path.rpartition("/")[2])
"""


def test_the_path_of_one_call_is_taken():
    assert PATH in " ".join(ARCHITECTURE.split())
    assert run_alone(TRACER).split() == [*PATH.split(" -> ")[:4], "1", "libcollectives_host.so"]
