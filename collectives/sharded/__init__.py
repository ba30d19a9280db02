"""Sharded training: parameters, gradients and optimizer state divided among the ranks."""

__all__ = []
