"""What is fuzzed, by name."""

from __future__ import annotations

from benchmarks.faults import fuzz_files, fuzz_messages, fuzz_records

__all__ = ["TARGETS"]

TARGETS = {
    target.name: target for target in (*fuzz_records.TARGETS, *fuzz_messages.TARGETS, *fuzz_files.TARGETS)
}
