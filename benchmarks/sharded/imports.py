"""Imports of the benchmarks of sharding from benchmarks/, benchmarks/ddp and examples/."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "ddp"), str(HERE.parents[1] / "examples")]
from char_gpt import GPT, cut, load_text, loss_of  # noqa: E402
from expected import Wrong  # noqa: E402
from launch import add_options, end_on_signals, provenance, rows_of, slowest, write_rows  # noqa: E402
from process_memory import proportional_set_size, reset_peak, return_freed_memory, status_bytes  # noqa: E402

__all__ = [
    "GPT", "Wrong", "add_options", "cut", "end_on_signals", "reset_peak", "return_freed_memory", "write_rows",
    "load_text", "loss_of", "proportional_set_size", "provenance", "status_bytes", "rows_of", "slowest",
]  # fmt: skip
