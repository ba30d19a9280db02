"""Changes to torch's own objects: each has a reason, and an undo that restores torch's own."""

from __future__ import annotations

import collectives  # noqa: F401
from collectives import torch_patches


def test_an_attribute_is_restored():
    """One of the class itself, and one that it inherits, which is then inherited again."""

    class Base:
        value = 1

    class Derived(Base):
        own = 2

    before = torch_patches.applied_patches()
    patches = [torch_patches.patch_attribute(Derived, name, 7, "a test") for name in ("own", "value")]
    assert (Derived.own, Derived.value, Base.value) == (7, 7, 1)
    assert [(each.target, each.reason) for each in patches] == [("Derived.own", "a test"), ("Derived.value", "a test")]
    assert torch_patches.applied_patches() == [*before, *patches]
    for patch in patches:
        torch_patches.undo_patch(patch)
    assert (Derived.own, Derived.value) == (2, 1) and "value" not in vars(Derived)
    assert torch_patches.applied_patches() == before
