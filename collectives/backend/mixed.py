"""Groups with another backend for each device, such as ``"cpu:gloo,cuda:collectives"``.

A process group of this backend takes the place of torch's, which dispatches by device. So it has to
do it: it calls a process group of torch's for the tensors of other devices.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..errors import InvalidUsage
from ..torch_compat import untraced
from .data_ops import DataOps
from .options import parse_options
from .p2p_ops import PointToPointOps
from .process_group import CollectivesGroup
from .reduction_ops import ReductionOps

__all__ = ["create"]


class OtherBackend(NamedTuple):
    """A device of the group that another backend serves; `made`: torch's Backend, if it was created."""

    device: str
    backend: str
    made: object


def _read_devices() -> tuple[list[str], list[OtherBackend]]:
    """Return the devices for which torch creates this backend, and those of other backends.

    Torch passes neither to a backend: they are local variables of its function
    ``_new_process_group_helper``, two frames above.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    if frame is None:
        raise InvalidUsage("a group of the backend 'collectives' is created by torch.distributed's functions")
    values = frame.f_locals
    chosen = values["backend_config"].get_device_backend_map()
    name = str(values["backend_str"])
    devices = [device for device, backend in chosen.items() if str(backend) == name]
    others = []
    for device, backend in chosen.items():
        if str(backend) != name:
            made = None
            if device in [each.type for each in values["pg"]._device_types]:
                made = values["pg"]._get_backend(torch.device(device))
            others.append(OtherBackend(device, str(backend), made))
    return devices, others


@untraced
class MixedGroup(CollectivesGroup):
    """Process group with other backends for some devices, in a process group of torch's."""

    def __init__(self, *args, others: list[OtherBackend] = ()):
        super().__init__(*args)
        self._other_names = tuple(other.device for other in others)
        self._others = dist.ProcessGroup(self._store, self._rank, self._size)
        for other in others:
            backend = other.made or _create_backend(self, other)
            kind = dist.Backend.backend_type_map.get(other.backend, dist.ProcessGroup.BackendType.CUSTOM)
            self._others._register_backend(torch.device(other.device), kind, backend)
        self._others._set_group_name(self._name)

    def setGroupName(self, name):  # noqa: N802
        super().setGroupName(name)
        self._others._set_group_name(name)

    @property
    def _device_types(self):
        return [*super()._device_types, *map(torch.device, self._other_names)]

    def _get_backend(self, device):
        if torch.device(device).type in self._other_names:
            return self._others._get_backend(torch.device(device))
        return super()._get_backend(device)

    def barrier(self, opts=None, timeout=None):
        device = getattr(opts, "device", None)
        if device is not None and device.type in self._other_names:
            return self._others.barrier(opts)
        return super().barrier(opts, timeout)

    def start_coalescing(self, device=None):
        if device is not None and device.type in self._other_names:
            return self._others._start_coalescing(device)
        return super().start_coalescing(device)

    def end_coalescing(self, device=None):
        if device is not None and device.type in self._other_names:
            return self._others._end_coalescing(device)
        return super().end_coalescing(device)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    def set_timeout(self, timeout):
        super().set_timeout(timeout)
        if hasattr(self._others, "set_timeout"):
            self._others.set_timeout(timeout)
        else:  # torch 2.8
            for device in self._others._device_types:
                self._others._get_backend(device)._set_default_timeout(timeout)

    def abort(self):
        super().abort()
        self._others.abort()

    def shutdown(self):
        super().shutdown()
        self._others.shutdown()


def _dispatched(own, name: str):
    @functools.wraps(own)
    def call(self, *args, **kwargs):
        tensor = _first_tensor(args)
        if tensor is not None and tensor.device.type in self._other_names:
            return getattr(self._others, name)(*args, **kwargs)
        return own(self, *args, **kwargs)

    return call


def _first_tensor(args) -> torch.Tensor | None:
    for each in args:
        if isinstance(each, torch.Tensor):
            return each
        if isinstance(each, list | tuple):
            found = _first_tensor(each)
            if found is not None:
                return found
    return None


def _create_backend(group, other: OtherBackend):
    """Create a backend of torch's as torch does."""
    store = dist.PrefixStore(f"{other.device}/", group._store)
    timeout = timedelta(seconds=group._timeout)
    if other.backend == dist.Backend.GLOO:
        made = dist.ProcessGroupGloo(store, group._rank, group._size, timeout=timeout)
        made._set_sequence_number_for_group()
        return made
    if other.backend == dist.Backend.NCCL:
        if not dist.is_nccl_available():
            raise InvalidUsage("this torch has no NCCL: 'collectives' can serve CUDA, too", rank=group._rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        made = dist.ProcessGroupNCCL(store, group._rank, group._size, options)
        made._set_sequence_number_for_group()
        return made
    plugin = dist.Backend._plugins.get(other.backend.upper())
    if plugin is None or plugin.extended_api:
        raise InvalidUsage(
            f"the backend {other.backend!r} for {other.device} can't stand beside 'collectives': gloo, nccl and "
            "plugins without torch's extended API can",
            rank=group._rank,
        )
    return plugin.creator_fn(store, group._rank, group._size, timeout)


for _cls in (ReductionOps, DataOps, PointToPointOps):
    for _name, _function in vars(_cls).items():
        if hasattr(dist.ProcessGroup, _name) and not _name.startswith("__"):
            setattr(MixedGroup, _name, untraced(_dispatched(_function, _name)))


def create(options, backend_options=None) -> CollectivesGroup:
    """Create the group of ``_DistributedBackendOptions``; see `registration.create_backend`."""
    devices, others = _read_devices()
    if isinstance(backend_options, Communicator):
        return CollectivesGroup(
            options.store, options.group_rank, options.group_size, options.timeout, options.group_id,
            options.global_ranks_in_group, devices, backend_options.config, backend_options,
        )  # fmt: skip
    args = (
        options.store, options.group_rank, options.group_size, options.timeout, options.group_id,
        options.global_ranks_in_group, devices, parse_options(backend_options),
    )  # fmt: skip
    return MixedGroup(*args, others=others) if others else CollectivesGroup(*args)
