"""What the fork server of tests/ranks.py has imported before it forks rank processes: libraries, nothing of ours."""

import numpy
import pytest
import torch
import torch._dynamo
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.nn.parallel

__all__ = ["numpy", "pytest", "torch"]
