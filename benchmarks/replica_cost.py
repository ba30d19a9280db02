"""What a step pays for copies of all shards in other ranks' memory: the char-GPT in shards with a
ShardedState that is committed in each step, and without, in turn.

Rounds of steps; the median of the rounds' ratios of wall and CPU time, the least step of each, the
seconds that a commit blocks, bytes sent in a step and bytes of host memory of a rank.
Rows go to benchmarks/results/replica_cost.jsonl.

    torchrun --nproc-per-node 2 benchmarks/replica_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rows import RESULTS, append_rows, provenance
from sharded_char_gpt import CONTEXT, loss_of, make_sharded

import collectives
from collectives import elastic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6, help="of a round")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="texts of 64 characters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun_with = provenance()
    comm = collectives.init()
    model, optimizer, count = make_sharded(comm, arguments.layers, arguments.width)
    state = elastic.ShardedState(step=0)
    state.sync()
    state.attach(model, optimizer)

    def step() -> None:
        texts = torch.randint(128, (arguments.batch, CONTEXT))
        optimizer.zero_grad()
        loss_of(model, texts, texts).backward()
        optimizer.step()
        state.step += 1

    def turn(commits: bool) -> tuple[float, float, list[float], list[float]]:
        """Return the seconds of a round, this process's CPU seconds, the seconds of each step, commits
        included, and those in which the commits have blocked.
        """
        comm.barrier()
        begun, cpu, steps, blocked = time.perf_counter(), time.process_time(), [], []
        for _ in range(arguments.steps):
            first = time.perf_counter()
            step()
            before = time.perf_counter()
            if commits:
                state.commit()
            steps.append(time.perf_counter() - first)
            blocked.append(time.perf_counter() - before)
        state.wait()
        return time.perf_counter() - begun, time.process_time() - cpu, steps, blocked

    step()
    turn(True)  # allocates both versions
    found: dict[bool, list] = {False: [], True: []}
    for number in range(arguments.rounds):
        for commits in (False, True) if number % 2 else (True, False):
            found[commits].append(turn(commits))
    pieces = [buffer.numel() for version in state._versions for buffer in version.buffers]
    if comm.rank == 0:
        pairs = list(zip(found[True], found[False], strict=True))
        ratios = [mine[0] / none[0] - 1 for mine, none in pairs]
        least = {commits: min(each for turns in found[commits] for each in turns[2]) for commits in found}
        row = {
            "parameters": count, "ranks": comm.size, "rounds": arguments.rounds, "steps": arguments.steps,
            "batch": arguments.batch,
            "step_ms": statistics.median(each[0] for each in found[False]) / arguments.steps * 1e3,
            "extra_of_step": statistics.median(ratios), "extra_range": [min(ratios), max(ratios)],
            "least_step_ms": least[False] * 1e3, "extra_of_least": least[True] / least[False] - 1,
            "extra_cpu": statistics.median(mine[1] / none[1] - 1 for mine, none in pairs),
            "commit_ms": statistics.median(each for turns in found[True] for each in turns[3]) * 1e3,
            "least_commit_ms": min(each for turns in found[True] for each in turns[3]) * 1e3,
            "sent_mb": (comm.size > 1) * pieces[0] / 1e6, "host_mb": sum(pieces) / 1e6,
        }  # fmt: skip
        append_rows([{**begun_with, **row}], RESULTS / "replica_cost.jsonl")
        print(row)
    comm.close()


if __name__ == "__main__":
    main()
