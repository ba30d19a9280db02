"""Device checks: ``device_ids`` and inputs that don't match the device of a module's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidArgument
from ..torch_compat import tree_map_only

__all__ = ["add_device_note", "check_device_ids"]


def check_device_ids(given, module: torch.nn.Module) -> None:
    """Raise `InvalidArgument` for ``device_ids`` of DistributedDataParallel that don't match the
    parameters' device.

    `given`: None, or a list with one device or index, as torch takes it. Torch itself refuses
    parameters on several devices.
    """
    if given is None or not isinstance(module, torch.nn.Module):
        return
    devices = _devices(module.parameters())
    if len(devices) != 1:
        return
    (own,) = devices
    if own.type == "cpu":
        right = "leave device_ids out, or move the module to this rank's GPU first: module.to(f'cuda:{local_rank}')"
    else:
        right = f"device_ids=[{own.index}], or leave it out"
    what = f"DistributedDataParallel: device_ids={given!r}, and the module's parameters are on {own}"
    if isinstance(given, torch.Tensor | str) or not isinstance(given, Sequence):
        raise InvalidArgument(f"{what}: it takes a list of one device: {right}")
    if len(given) > 1:
        raise InvalidArgument(f"{what}: a rank has one device, which its own process names: {right}")
    if given and _index(given[0]) != (own.type, own.index):
        raise InvalidArgument(f"{what}: {right}")


def add_device_note(error: BaseException, module: torch.nn.Module, inputs: Sequence) -> None:
    """Add a note to an error if inputs, tensors at any depth of containers, are on other devices
    than the module.
    """
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, list(inputs))
    own, others = _devices(module.parameters()), _devices(tensors)
    misplaced = [device for device in others if device not in own]
    if own and misplaced:
        error.add_note(
            f"collectives: the module's parameters are on {_names(own)}, its inputs on {_names(others)}. Move the "
            f"inputs, .to({str(own[0])!r}), or the module before it is wrapped, .to({str(misplaced[0])!r})"
        )


def _devices(tensors) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for tensor in tensors))


def _names(devices: list[torch.device]) -> str:
    return " and ".join(map(str, devices))


def _index(device) -> tuple[str, int | None]:
    """Return type and index of a device as torch takes it: 1, "cuda:1", torch.device("cuda", 1)."""
    if isinstance(device, int):
        return "cuda", device
    device = torch.device(device)
    return device.type, device.index
