"""What the fork server of tests/ranks.py has imported before it forks rank processes."""

import torch
import torch.distributed
import torch.nn.parallel

__all__ = ["torch"]
