"""Gradient buckets: the hook's options and state, the pipeline that reduces and steps, and GradientBuckets."""

__all__ = []
