"""Optimizer state of a rank's shards: its creation, its redistribution when buckets change, and the
full state.

A parameter's sharded state is one tensor of one dimension for each key, with the elements that the
rank owns. Its layout is in the state as "shard": an int64 tensor of (the parameter's offset in the
bucket, the fields of `ShardSpec`, the parameter's strides).
"""

from __future__ import annotations

from typing import Any

import torch

from ..comm.agree import verify_same
from ..errors import InvalidArgument, InvalidUsage, Mismatch
from ..optimizer_state import init_state, new_state_tensor, state_dtype
from .shard_spec import ShardSpec, flat_view

__all__ = ["check_shard_rank", "full_state_dict", "init_sharded_state", "parse_shard", "reshard_state"]

_KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "master_param")  # of state by element


def parse_shard(shard) -> tuple[int, ShardSpec, list[int]]:
    """Return offset, `ShardSpec` and strides of a state's "shard"."""
    offset, numel, world_size, align, rank, *strides = shard.tolist()
    return offset, ShardSpec(numel, world_size, align, rank), strides


def check_shard_rank(shard, world_size, rank, name) -> None:
    """Raise `InvalidArgument` where a state's "shard" is another rank's, or of another number of
    ranks.
    """
    _, spec, _ = parse_shard(shard)
    if (spec.world_size, spec.rank) != (world_size, rank):
        raise InvalidArgument(
            f"the state of {name} is the shard of rank {spec.rank} of {spec.world_size}, and this is rank {rank} of "
            f"{world_size}: save and load the full state (state_dict(full=True)), which any number of ranks can load"
        )


@torch.inference_mode(False)
def init_sharded_state(param, state, columns, spans, *, counts: bool, masters: bool) -> None:
    """Add what is missing in a parameter's sharded state; see `optimizer_state.init_state`.

    `spans`: (first, count) of the elements that it owns.
    """
    parts = [flat_view(param, first, count) for first, count in spans] or [param.new_empty(0)]
    total = sum(count for _, count in spans)
    init_state(
        param, state, columns, counts=counts, masters=masters, master=lambda: torch.cat(parts).to(torch.float32),
        zeros=lambda: torch.zeros(total, dtype=state_dtype(param), device=param.device),
    )  # fmt: skip


@torch.inference_mode(False)
@torch.no_grad()
def reshard_state(comm, optimizer, bucket_state) -> None:
    """Bring the state of a bucket's parameters into the bucket's layout.

    A collective: all ranks do, or all raise. Raises `InvalidArgument` for state that doesn't fit
    the parameters, and `Mismatch` where the ranks' states don't belong together.
    """
    params, spec = bucket_state.params, bucket_state.spec
    states = [optimizer.state[param] for param in params]
    wrong = None
    described = {}
    for at, (param, state) in enumerate(zip(params, states, strict=True)):
        name = bucket_state.name(at)
        try:
            described[name] = _describe(param, state, spec, name)
        except InvalidArgument as error:
            wrong = wrong or error
    try:
        verify_same(
            comm, "the ranks' optimizer states don't belong together",
            {"what is wrong": wrong and wrong.message, "the bucket": spec[:3], **described},
            "load the same full state on all ranks, or on each rank its own shard of the same moment",
        )  # fmt: skip
    except Mismatch:
        if wrong is None:
            raise
    if wrong is not None:
        raise wrong
    for at, (param, state) in enumerate(zip(params, states, strict=True)):
        known = state.get("shard")
        if known is None or known.tolist() != bucket_state.shard_fields[at]:
            for key in _KEYS:
                if isinstance(state.get(key), torch.Tensor):
                    if state[key].is_cuda:  # made on the stream of the bucket that had the parameter before
                        state[key].record_stream(torch.cuda.current_stream(state[key].device))
                    full = _gather(comm, param, state[key], known)
                    state[key] = _cut(full, bucket_state.spans[at], state[key].dtype)
                    del full
            state["shard"] = torch.tensor(bucket_state.shard_fields[at], dtype=torch.int64, device="cpu")
    bucket_state.shards = [state["shard"] for state in states]


def full_state_dict(comm, optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict as if its state had not been sharded.

    A collective where it is sharded. `comm`: the communicator of the state's ranks; None raises
    `InvalidUsage` where there is sharded state.
    """
    found = optimizer.state_dict()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        state = found["state"].get(number)
        if state is None or "shard" not in state:
            continue
        if comm is None:
            raise InvalidUsage(
                "the state is sharded and no bucket has come yet: give state_dict the communicator of its ranks"
            )
        shard = state["shard"]
        _describe(param, state, ShardSpec(0, comm.size, 1, comm.rank), f"parameter {number}")
        found["state"][number] = {
            key: _gather(comm, param, value, shard) if key in _KEYS and value is not None else value
            for key, value in state.items()
            if key != "shard"
        }
    return found


def _describe(param, state, spec, name) -> tuple:
    """Return what must be the same on all ranks of a parameter's state.

    `InvalidArgument` for unusable state.
    """
    shard = state.get("shard")
    here = [key for key in _KEYS if isinstance(state.get(key), torch.Tensor)]
    if shard is None:
        for key in here:
            if state[key].shape != param.shape:
                raise InvalidArgument(
                    f"{key} of {name} has the shape {tuple(state[key].shape)}, its parameter {tuple(param.shape)}: "
                    "load a state of this model"
                )
        layout = None
    else:
        check_shard_rank(shard, spec.world_size, spec.rank, name)
        offset, known, strides = parse_shard(shard)
        count = sum(count for _, count in known.local_spans(offset, param.numel()))
        if len(strides) != param.dim() or any(state[key].shape != (count,) for key in here):
            raise InvalidArgument(f"the sharded state of {name} isn't of a parameter of shape {tuple(param.shape)}")
        layout = (offset, *known[:3], strides)
    step = state.get("step")
    return layout, here, None if step is None else float(step)


def _gather(comm, param, value, shard) -> torch.Tensor:
    """Return a parameter's full state, in the parameter's shape and order.

    A collective, where it is sharded.
    """
    if shard is None:
        return new_state_tensor(param).copy_(value)
    offset, spec, strides = parse_shard(shard)
    full = torch.zeros(param.numel(), dtype=value.dtype, device=value.device)
    place = 0
    for first, count in spec.local_spans(offset, param.numel()):
        # Of the remainder, which all ranks have, only rank 0 contributes.
        most = count if spec.rank == 0 else max(0, min(count, spec.sharded_numel - offset - first))
        full[first : first + most] = value[place : place + most]
        place += count
    if comm.size > 1 and full.numel():
        comm.all_reduce(full.view(torch.int32), "sum")  # as integers, since -0.0 + 0.0 has other bits
    ordered = full.as_strided(param.shape, strides)
    if list(param.stride()) == strides:
        return ordered
    return torch.empty_like(param, dtype=value.dtype, memory_format=torch.preserve_format).copy_(ordered)


def _cut(full, spans, dtype) -> torch.Tensor:
    """Return a copy of the spans of a parameter's full state."""
    parts = [full.as_strided((count,), (1,), first) for first, count in spans]
    return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=full.device)
