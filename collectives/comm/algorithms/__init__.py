"""The ring and direct algorithms as schedules, their execution by send and receive, and the choice among algorithms."""

__all__ = []
