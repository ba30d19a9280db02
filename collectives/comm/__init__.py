"""Communicators, and what they are made of: engines, asynchronous work, groups, memory, algorithms, the watchdog."""

__all__ = []
