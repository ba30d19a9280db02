"""What a step pays for a checkpoint: the char-GPT in shards with a Checkpointer, with a blocking save
and without, in turn.

Rounds of steps on two ranks; one checkpoint at the first step of each round. The median of a step of each round by
that of the round without one, and the seconds that `save` itself takes. Rows go to
benchmarks/results/checkpoint_cost.jsonl.

    torchrun --nproc-per-node 2 benchmarks/checkpoint_cost.py
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rows import RESULTS, append_rows, provenance
from sharded_char_gpt import CONTEXT, loss_of, make_sharded

import collectives
from collectives.sharded import Checkpointer, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="of a round")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun_with = provenance()
    comm = collectives.init()
    model, optimizer, count = make_sharded(comm, arguments.layers, arguments.width)
    folder = torch.zeros(200, dtype=torch.uint8)
    if comm.rank == 0:
        name = tempfile.mkdtemp(prefix="checkpoint_cost").encode()
        folder[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    comm.broadcast(folder, root=0)
    folder = Path(bytes(folder.tolist()).rstrip(b"\0").decode())
    checkpointer = Checkpointer(folder / "kept", keep=2)

    def step() -> float:
        begun = time.perf_counter()
        texts = torch.randint(128, (8, CONTEXT))
        optimizer.zero_grad()
        loss_of(model, texts, texts).backward()
        optimizer.step()
        return time.perf_counter() - begun

    def turn(way: str, number: int) -> tuple[float, float]:
        """Return the seconds of a round, and those of the save."""
        comm.barrier()
        begun, saving = time.perf_counter(), 0.0
        for at in range(arguments.steps):
            step()
            if at == 0:
                before = time.perf_counter()
                if way == "background":
                    checkpointer.save(number, model, optimizer)
                elif way == "blocking":
                    save(folder / f"blocking_{number}", model, optimizer)
                saving = time.perf_counter() - before
        seconds = time.perf_counter() - begun
        if way == "background":
            checkpointer.wait()
        return seconds, saving

    ways = ("none", "background", "blocking")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(3):
        step()
    turn("background", 0)  # allocates the snapshot
    for number in range(1, arguments.rounds + 1):
        for way in ways if number % 2 else ways[::-1]:
            found[way].append(turn(way, number))
        if comm.rank == 0:
            shutil.rmtree(folder / f"blocking_{number}")
        comm.barrier()
    if comm.rank == 0:
        rows = []
        for way in ways:
            extra = [mine[0] - none[0] for mine, none in zip(found[way], found["none"], strict=True)]
            rows.append(
                {
                    "case": way, "parameters": count, "ranks": comm.size, "steps": arguments.steps,
                    "step_ms": statistics.median(each[0] for each in found[way]) / arguments.steps * 1e3,
                    "save_ms": statistics.median(each[1] for each in found[way]) * 1e3,
                    "extra_ms": statistics.median(extra) * 1e3,
                    "extra_of_round": statistics.median(
                        mine[0] / none[0] - 1 for mine, none in zip(found[way], found["none"], strict=True)
                    ),
                }
            )  # fmt: skip
        append_rows([{**begun_with, **row} for row in rows], RESULTS / "checkpoint_cost.jsonl")
        shutil.rmtree(folder)
    comm.close()


if __name__ == "__main__":
    main()
