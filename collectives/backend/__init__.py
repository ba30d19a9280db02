"""The backend "collectives" of torch.distributed: ``dist.init_process_group("collectives")``.

``import collectives`` registers it for CPUs and CUDA. `register_backend` does it by hand.
"""

from .over_comm import is_group_over, open_group_over
from .registration import NAME, register_backend

__all__ = ["NAME", "is_group_over", "open_group_over", "register_backend"]
