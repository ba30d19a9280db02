"""Changes to torch's own objects: each has a reason, and an undo that restores torch's own."""

from __future__ import annotations

import torch

import collectives  # noqa: F401
from collectives import torch_patches


class Base:
    def inherited(self):
        return "torch's"


class Owner(Base):
    def own(self):
        return "torch's"


def test_undo_restores_own_and_inherited_attributes():
    before = dict(vars(Owner))
    patches = [
        torch_patches.patch_attribute(Owner, name, lambda self: "ours", "a test") for name in ("own", "inherited")
    ]
    assert Owner().own() == Owner().inherited() == "ours"
    assert torch_patches.applied_patches()[-2:] == patches
    for patch in reversed(patches):
        torch_patches.undo_patch(patch)
    assert dict(vars(Owner)) == before and Owner().own() == Owner().inherited() == "torch's"
    assert not {id(patch) for patch in patches} & {id(patch) for patch in torch_patches.applied_patches()}


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
