"""Provenance of a figure: the fields of every row of results, as `collectives.bench` has them."""

from collectives.bench.provenance import where_and_when

__all__ = ["where_and_when"]
