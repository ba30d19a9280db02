"""Opening of a communicator: its binding object, the ranks' agreement, and its children's inheritance."""

from __future__ import annotations

from dataclasses import replace

import torch

from .._nccl import SHRINK_ABORT, ArrayCalls, Comm
from ..environment import check_variables
from ..errors import InvalidArgument, Mismatch
from ..torch_compat import cuda_get_device
from .agree import agree_on_settings, all_gather_object
from .arguments import invalid, parse_int, parse_rank, parse_size
from .config import CommConfig, merge_config, order_launches, parse_config, to_nccl
from .engine import Engine, resolve_device
from .group import open_groups
from .multinode.comm import MultiNodeComm, NoFastPath
from .multinode.topology import group_ranks_by_node

__all__ = ["agree", "inherit", "open_array_calls", "open_native", "ranks_by_node", "shrink", "split"]


def open_native(engine, unique_id: bytes, rank: int, size: int, device, config: CommConfig, native):
    """Return the binding object, the one that is given or a new one, and the device; see
    `Communicator`. A new one blocks until all ranks have come.
    """
    if not isinstance(engine, Engine):
        raise InvalidArgument(f"engine must come from collectives.comm.engine.get_engine(), not {engine!r}")
    size = parse_size(size)
    rank = parse_rank(rank, size, "rank", rank=None, name="Communicator")
    check_variables()
    device = resolve_device(engine, device)
    if native is None and device.type == "cuda":
        library = engine.library
        settings = to_nccl(config, library) if config.to_dict() or library.has("ncclCommInitRankConfig") else None
        order_launches(library.version)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates torch's CUDA context, which NCCL then uses
            native = library.comm_init_rank(size, unique_id, rank, config=settings)
    elif native is None:
        native = engine.library.comm_init_rank(size, unique_id, rank)
    return native, device


def agree(comm) -> None:
    """Have the ranks of a new communicator agree on its settings; blocks, and aborts it where they don't."""
    try:
        with comm._device_guard():
            comm._chunk = agree_on_settings(comm)
    except BaseException:
        comm.abort()
        raise


def open_array_calls(comm):
    """Return the fast path of a communicator's blocking calls on plain arrays."""
    if not isinstance(comm._native, Comm):
        return NoFastPath()
    current_device = None if comm._on_host or comm._checks_calls else cuda_get_device()
    return ArrayCalls(
        comm._native, comm._reader.array_reader, open_groups, current_device, owner=comm,
        rank_ordered=comm.deterministic and comm.size > 1 and not comm._on_host,
    )  # fmt: skip


def ranks_by_node(comm) -> tuple[tuple[int, ...], ...] | None:
    """Return the ranks of each node of a communicator, None if not known."""
    if comm.peers is not None:
        return group_ranks_by_node(peer.node for peer in comm.peers)
    return (tuple(range(comm.size)),) if comm._on_host else None


# ---- Children.


def split(comm, color: int | None, key: int | None, config):
    """Return this rank's part: its binding object, None where it has none, its name, its config."""
    color = -1 if color is None else parse_int(comm, color, "color", -1, "split", 2**31)
    key = comm.rank if key is None else parse_int(comm, key, "key", -(2**31), "split", 2**31)
    merged, settings = _child_config(comm, config)
    if config is not None:
        comm._check_open("split")
        _compare_configs(comm, color, merged)
    comm._child_count += 1
    with comm._device_guard():
        native = comm._native.split(color, key, config=settings)
    return native, f"split{comm._child_count}/{color}", merged


def _child_config(comm, config) -> tuple[CommConfig, dict | None]:
    """Return the config of a communicator's child, and what its binding call takes: None to inherit."""
    if config is None:
        return comm.config, None
    merged = merge_config(comm.config, parse_config(config))
    return merged, None if comm._on_host else to_nccl(merged, comm.engine.library)


def _compare_configs(comm, color: int, config: CommConfig) -> None:
    """Raise `Mismatch` unless the ranks of each color give the same config; blocks.

    Before the split: NCCL's ranks that differ may hang while they connect.
    """
    values = all_gather_object(comm, [color, config.to_dict()])
    others = [rank for rank, value in enumerate(values) if value[0] == color and value[1] != config.to_dict()]
    if others and color >= 0:
        raise Mismatch(
            f"config={config!r} here, and not on rank {', '.join(map(str, others))}: it must be the same on all ranks "
            f"of color {color}",
            op="split", rank=comm.rank, peers=others,
        )  # fmt: skip


def shrink(comm, exclude, abort: bool, config):
    """Return the communicator of the ranks that are left: its binding object, its name, its config."""
    excluded = sorted({parse_rank(r, comm.size, "exclude", rank=comm.rank, name="shrink") for r in exclude})
    if comm.rank in excluded:
        raise invalid(comm, "shrink", f"rank {comm.rank} is to be left out, so it must not call shrink")
    merged, settings = _child_config(comm, config)
    if abort and comm._algorithms is not None:
        comm._algorithms.abort()
    comm._child_count += 1
    with comm._device_guard():
        native = comm._native.shrink(excluded, flags=SHRINK_ABORT if abort else 0, config=settings)
    return native, f"shrink{comm._child_count}", merged


def inherit(comm, native, config: CommConfig) -> tuple:
    """Return what `Communicator._initialize` takes for a communicator's child, after `native`."""
    engine, peers = comm.engine, None
    if isinstance(native, MultiNodeComm):
        local_rank, local_size, peers = native.local_rank, native.local_size, native.peers
    elif comm._on_host:  # its ranks are on one node, and its parent's may be on several
        local_rank, local_size = native.rank, native.size
        engine = engine if native.library is engine.library else replace(engine, library=native.library)
    else:  # NCCL's ranks keep the local rank that the launcher gave
        local_rank, local_size = comm.local_rank, comm.local_size
    return (
        engine, comm.device, local_rank, local_size, comm.timeout, comm.deterministic, config, peers, comm._chunk,
    )  # fmt: skip
