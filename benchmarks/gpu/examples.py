"""The examples by one rank and by two on one GPU: each checks itself; a row has its last line of JSON.

Four at a time, the longest first. An example that is out of its time, or whose ranks end with another
status than 0, is a failure of the stage.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from . import VARIABLE
from .program import ROOT, Program, run_ranks

AT_ONCE = 4
SECONDS = 70.0  # of one example
RANKS_AND_WORDS = (
    (2, "sharded_digits.py", "--epochs", "2"),
    (1, "ddp_benchmark.py", "--blocks", "3"),
    (2, "train_digits.py", "--epochs", "2"),
    (2, "horovod_digits.py", "--epochs", "2"),
    (1, "sharded_digits.py", "--epochs", "2"),
    (2, "char_gpt.py", "--steps", "60", "--sharded"),
    (1, "char_gpt.py", "--steps", "60", "--compare", "bf16,int8"),
    (2, "save_and_resume.py"),
    (2, "load_on_rank_0.py"),
    (1, "sharded_muon.py", "--steps", "40"),
    (1, "gradient_accumulation.py"),
    (2, "activation_checkpointing.py", "--steps", "6"),
    (1, "sharded_t5.py", "--steps", "20"),
    (1, "frameworks/accelerate_train.py", "--way", "hook"),
    (1, "frameworks/trainer_train.py", "--way", "backend"),
    (1, "frameworks/lightning_train.py", "--way", "backend"),
)
DRY = ((1, "fit_surface.py"),)  # on the CPU


def run_example(program: Program, folder: str, device: str, ranks: int, words: tuple[str, ...]) -> bool:
    """Run an example by so many ranks; write its row. Return whether it passed."""
    case, begun = f"{words[0]}, {ranks} rank{'s' * (ranks > 1)}", time.monotonic()
    command = [sys.executable, str(ROOT / "examples" / words[0]), *words[1:]]
    variables = {"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), VARIABLE: ""}
    statuses, texts = run_ranks([command] * ranks, device, cwd=folder, seconds=SECONDS, **variables)
    passed = not any(status != 0 for status in statuses)
    fields = {"statuses": statuses, "seconds": round(time.monotonic() - begun, 1)}
    lines = [line for line in texts[0].splitlines() if line.startswith("{")]
    if lines:
        fields["result"] = json.loads(lines[-1])
    if not passed:
        fields["said"] = [text[-1500:] for text in texts]
    with _writing:
        program.row(case=case, passed=passed, **fields)
    return passed


_writing = threading.Lock()


def main() -> int:
    program = Program(__doc__, "examples")
    arguments = program.parse()
    device = "cpu" if arguments.dry else arguments.device
    jobs = DRY if arguments.dry else RANKS_AND_WORDS
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        passed = list(pool.map(lambda job: run_example(program, folder, device, job[0], job[1:]), jobs))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
