"""What the benchmarks of sharding use of files that lie beside them: of benchmarks/ddp, and the model of an example."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent / "ddp"), str(HERE.parents[1] / "examples")]
from char_gpt import GPT, cut, load_text, loss_of  # noqa: E402
from expected import Wrong  # noqa: E402
from launch import add_options, end_on_signals, keep, provenance, rows_of, slowest  # noqa: E402
from resident import forget_peak, give_back_what_is_freed, proportional, resident  # noqa: E402

__all__ = [
    "GPT", "Wrong", "add_options", "cut", "end_on_signals", "forget_peak", "give_back_what_is_freed", "keep",
    "load_text", "loss_of", "proportional", "provenance", "resident", "rows_of", "slowest",
]  # fmt: skip
