"""The ring and direct algorithms: their schedules, their execution by send and receive, and the choice among them."""

__all__ = []
