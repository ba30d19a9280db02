"""Counts of one training step by every front end, on a simulated GPU: launches, passes over memory, bytes on the wire,
waits, allocations. ``python -m benchmarks.counts`` prints them; ``--write`` puts them into docs/counts.md.
"""
