"""Casts of a unit's inputs and outputs, and walks over the tensors in them.

Inputs and outputs are trees of tuples, lists, dictionaries (subclasses, too, such as a Hugging Face
model's outputs) and dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["cast_floating", "find_tensors", "map_tensors"]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Return a tree with the function's results in place of its tensors; the tree itself where nothing changes."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
        new = {name: map_tensors(function, value) for name, value in old.items()}
        changed = {name: value for name, value in new.items() if value is not old[name]}
        if not changed:
            return tree
        made = copy.copy(tree)  # keeps fields that __init__ doesn't take, and frozen classes
        for name, value in changed.items():
            object.__setattr__(made, name, value)
            if isinstance(made, Mapping):
                made[name] = value
        return made
    if isinstance(tree, Mapping):
        new = {key: map_tensors(function, value) for key, value in tree.items()}
        if all(new[key] is value for key, value in tree.items()):
            return tree
        made = copy.copy(tree)
        for key, value in new.items():
            made[key] = value
        return made
    if isinstance(tree, (tuple, list)):
        new = [map_tensors(function, value) for value in tree]
        if all(a is b for a, b in zip(new, tree, strict=True)):
            return tree
        if hasattr(tree, "_fields"):  # a named tuple
            return type(tree)(*new)
        return type(tree)(new)
    return tree


def find_tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in its order."""
    found: list[torch.Tensor] = []

    def note(tensor):
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of a tree."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
