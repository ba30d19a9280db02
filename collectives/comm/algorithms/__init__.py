"""The ring and direct algorithms: schedules, execution by send and receive, and choice."""

__all__ = []
