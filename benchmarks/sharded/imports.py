"""Imports of the benchmarks of sharding from benchmarks/, benchmarks/ddp and examples/."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "ddp"), str(HERE.parents[1] / "examples")]
from char_gpt import GPT, cut, load_text, loss_of  # noqa: E402
from expected import Wrong  # noqa: E402
from launch import append_rows, make_parser, provenance, rows_of, run, slowest  # noqa: E402
from process_memory import proportional_set_size, reset_peak, return_freed_memory, status_bytes  # noqa: E402

__all__ = [
    "GPT", "Wrong", "append_rows", "cut", "load_text", "loss_of", "make_parser", "proportional_set_size", "provenance",
    "reset_peak", "return_freed_memory", "rows_of", "run", "slowest", "status_bytes",
]  # fmt: skip
