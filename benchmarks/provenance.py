"""Where a figure was taken: the fields that stand in every row of results, as the installed benchmark writes them."""

from collectives.bench.provenance import where_and_when

__all__ = ["where_and_when"]
