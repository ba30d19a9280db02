"""Fault trials: programs at random, with ranks that die or deviate, and what came of each.

``python -m benchmarks.faults kills --trials 200`` runs trials of one kind, from ``--seed`` on, and
``--table`` writes the table of docs/reliability.md. A seed determines the whole trial:
``python -m benchmarks.faults kills --seed 17`` repeats one and prints all of it.
"""
