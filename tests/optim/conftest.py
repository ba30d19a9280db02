"""Fixtures of the tests of optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def nearest_square_root(monkeypatch):
    """Torch's on CPUs (MKL's) is off by one unit here and there; with this one all bits should be the same."""
    monkeypatch.setattr(torch, "_foreach_sqrt", lambda some: [torch.tensor(np.sqrt(each.numpy())) for each in some])
