"""Changes to torch.distributed for this backend's groups, each with its reason."""

from __future__ import annotations

import contextlib
import functools
import inspect

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..rendezvous.process_groups import find_group_backend
from ..torch_compat import group_timeout_setter, untraced
from ..torch_patches import patch_attribute

__all__ = ["install", "install_for_groups"]

_OF_OBJECTS = (
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
)  # fmt: skip


@functools.cache
def install() -> None:
    """Make ``monitored_barrier`` and ``batch_isend_irecv`` work on groups of this backend.

    Done where the backend is registered, since a program that imports them by name before its first
    group would keep torch's own, with which they fail.
    """
    c10d = dist.distributed_c10d
    barrier, batch = c10d.monitored_barrier, c10d.batch_isend_irecv

    @untraced
    @functools.wraps(barrier)
    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        backend = _find_backend(group)
        if backend is None:
            return barrier(group, timeout, wait_all_ranks)
        return backend.monitored_barrier(timeout, wait_all_ranks)

    @untraced
    @functools.wraps(batch)
    def batch_isend_irecv(p2p_op_list):
        backend = _find_backend(p2p_op_list[0].group) if isinstance(p2p_op_list, list) and p2p_op_list else None
        if backend is None or not hasattr(p2p_op_list[0], "tensor") or p2p_op_list[0].tensor.device.type == "cpu":
            return batch(p2p_op_list)
        device = p2p_op_list[0].tensor.device
        backend.start_coalescing(device)
        try:
            batch(p2p_op_list)
        except BaseException:
            backend.cancel_coalescing()
            raise
        return [backend.end_coalescing(device)]

    for module in (c10d, dist):
        patch_attribute(module, "monitored_barrier", monitored_barrier, "torch refuses it for all backends but Gloo")
        patch_attribute(
            module, "batch_isend_irecv", batch_isend_irecv,
            "torch issues a batch call by call on process groups that are subclasses, and NCCL needs it as one group",
        )  # fmt: skip


@functools.cache
def install_for_groups() -> None:
    """Make the changes that only a program with a group of this backend needs.

    ``_set_pg_timeout`` works on these groups. Blocking ``send`` and ``recv`` are faster on them, and
    DistributedDataParallel's buckets on the host are allocated in memory that the ranks share. Its
    built-in hook FP16_COMPRESS is torch's hook in Python. torch.compile leaves the collectives of
    objects to the eager program, on any backend.
    """
    _share_buckets()
    _replace_fp16_hook()
    c10d, set_timeout = dist.distributed_c10d, group_timeout_setter()
    for name in _OF_OBJECTS:  # torch.compile fails on what they look up of a group, on every backend
        untraced(inspect.unwrap(getattr(c10d, name)))

    @untraced
    @functools.wraps(set_timeout)
    def _set_pg_timeout(timeout, group=None):
        backend = _find_backend(group)
        return set_timeout(timeout, group) if backend is None else backend.set_timeout(timeout)

    blocking = {name: _waited_at_once(getattr(c10d, name)) for name in ("send", "recv")}
    patch_attribute(
        c10d, "_set_pg_timeout", _set_pg_timeout, "torch sets the timeout of its own backends only, and warns of others"
    )
    for module in (c10d, dist):
        for name, call in blocking.items():
            patch_attribute(module, name, call, "torch's is a non-blocking one and a wait, which would wake a thread")


def _share_buckets() -> None:
    init_reducer = DistributedDataParallel._ddp_init_helper

    @untraced
    @functools.wraps(init_reducer)
    def _ddp_init_helper(self, *args, **kwargs):
        from ..ddp.zero_copy import allocate_buckets, rebuild_in_shareable_memory  # whose package changes torch's DDP

        backend = _find_backend(self.process_group)
        shares_memory = self.device.type == "cpu" and backend is not None and backend.supports_tensor_alloc("cpu")
        # With find_unused_parameters DDP keeps the buckets that it makes here, else those that it makes next.
        with allocate_buckets(self) if shares_memory and self.find_unused_parameters else contextlib.nullcontext():
            init_reducer(self, *args, **kwargs)
        if shares_memory:
            rebuild_in_shareable_memory(self)

    patch_attribute(
        DistributedDataParallel, "_ddp_init_helper", _ddp_init_helper,
        "torch asks a group for buckets' memory only by its C++ class Backend, and has malloc allocate them",
    )  # fmt: skip


def _replace_fp16_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    register = DistributedDataParallel._register_builtin_comm_hook

    @untraced
    @functools.wraps(register)
    def _register_builtin_comm_hook(self, comm_hook_type):
        if comm_hook_type != dist.BuiltinCommHookType.FP16_COMPRESS or _find_backend(self.process_group) is None:
            return register(self, comm_hook_type)
        return self.register_comm_hook(self.process_group, fp16_compress_hook)

    patch_attribute(
        DistributedDataParallel, "_register_builtin_comm_hook", _register_builtin_comm_hook,
        "torch's hook in C++ takes futures of C++ alone; its hook in Python computes the same",
    )  # fmt: skip


def _waited_at_once(function):
    """Return torch's blocking ``send`` or ``recv``, in which a backend of ours wakes no thread."""

    @untraced
    @functools.wraps(function)
    def call(*args, **options):
        backend = _find_backend(args[2] if len(args) > 2 else options.get("group"))
        if backend is None:
            return function(*args, **options)
        with backend.waited_at_once():
            return function(*args, **options)

    return call


def _find_backend(group):
    """Return the backend of a process group if it is this one, else None."""
    return find_group_backend(dist.group.WORLD if group is None else group)
