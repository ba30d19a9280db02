"""Start the ranks of a program on one GPU, and wait for them: ``python -m benchmarks.gpu.ranks 2 PROGRAM ...``

PROGRAM is a file or ``-m MODULE``. Where a rank fails the others are ended. Prints what each rank has said; the exit
status is 0 where all ranks have ended with 0.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time

import torch


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables with which a rank starts; where there is a GPU, those that make NCCL share it."""
    found = {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if torch.cuda.is_available():
        from collectives.comm.engine import get_engine
        from tests.one_gpu import environment

        found |= environment(rank, ranks, get_engine("nccl").library.version)
    return found


def main() -> int:
    ranks, words = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outputs = [tempfile.TemporaryFile() for _ in range(ranks)]
    processes = [
        subprocess.Popen([sys.executable, *words], env={**os.environ, **environment_of(rank, ranks, port)},
                         stdout=output, stderr=output)
        for rank, output in enumerate(outputs)
    ]  # fmt: skip
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(3)  # the others may say more of it
            break
        time.sleep(0.05)
    statuses = [process.poll() for process in processes]
    for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        process.kill()
        process.wait()
        output.seek(0)
        print(f"---- rank {rank}: {'ended here' if statuses[rank] is None else f'status {statuses[rank]}'}")
        print(output.read().decode(errors="replace")[-100_000:], flush=True)
    return 1 if any(status != 0 for status in statuses) else 0


if __name__ == "__main__":
    sys.exit(main())
