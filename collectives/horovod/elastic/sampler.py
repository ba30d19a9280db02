"""Sampler of `collectives.elastic` over Horovod's ranks."""

from __future__ import annotations

from ... import elastic
from .channel import CHANNEL

__all__ = ["ElasticSampler"]


class ElasticSampler(elastic.ElasticSampler):
    """`collectives.elastic.ElasticSampler` over Horovod's ranks."""

    channel = CHANNEL
