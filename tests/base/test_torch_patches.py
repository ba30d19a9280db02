"""Changes to torch's own objects: each has a reason, and an undo that restores torch's own."""

from __future__ import annotations

import torch

import collectives  # noqa: F401
from collectives import torch_patches


def test_the_norm_of_torch_is_restored():
    before = len(torch_patches.applied_patches())
    norm = torch.nn.utils.get_total_norm
    torch_patches.patch_total_norm.__wrapped__(lambda *args: torch.tensor(7.0))
    try:
        assert norm([torch.ones(4)]) == 7 and torch.nn.utils.get_total_norm([torch.ones(4)]) == 7
    finally:
        for patch in reversed(torch_patches.applied_patches()[before:]):
            torch_patches.undo_patch(patch)
    assert torch.nn.utils.get_total_norm([torch.ones(4)]) == 2 == norm([torch.ones(4)])
