"""Ring and direct algorithms: schedules, their execution, and the policy that selects one."""

__all__ = []
