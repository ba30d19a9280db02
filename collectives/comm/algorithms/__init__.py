"""Ring and direct algorithms: schedules, their execution, and the selection of one."""

__all__ = []
