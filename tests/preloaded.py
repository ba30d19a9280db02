"""What the fork server of tests/ranks.py has imported before it forks rank processes: libraries, nothing of ours."""

import gc
import importlib
import importlib.util

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

# The examples' libraries. Tests on a GPU need none of them, and are run where they aren't installed.
EXAMPLES = (
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "sklearn.datasets",
    "sklearn.model_selection",
    "tqdm",
)
for name in EXAMPLES:
    if importlib.util.find_spec(name.partition(".")[0]) is not None:
        importlib.import_module(name)

# The collector of a rank process then leaves all of this alone: going through it takes 0.3 s, and copies its memory.
gc.collect()
gc.freeze()
