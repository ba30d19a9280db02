"""Wire formats of gradient buckets: fp32, 16 and 8 bits with error feedback, PowerSGD, hierarchical."""

__all__ = []
