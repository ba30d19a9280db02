"""The cost model of collectives for many ranks, its fit to measured rows, and its predictions.

``python -m benchmarks.scaling`` prints them; ``benchmarks/scaling_doc.py`` writes them to
docs/scaling.md.
"""
