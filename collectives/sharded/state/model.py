"""A model's state dict, full or sharded, by functions with
torch.distributed.checkpoint.state_dict's names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .dist_wrapper import DistWrapper, get_module_scheduler
from .fqns import clean_tensor_name, sharded_params_by_fqn
from .state_dict import GetOptions, as_shard_tensor, read_options, to_cpu, use_get_options

__all__ = ["get_model_state_dict", "set_model_state_dict"]


def get_model_state_dict(
    model: nn.Module, *, full_state_dict: bool = False, cpu_offload: bool = False, rank0_only: bool = False,
    use_dtensor: bool = False, options=None,
) -> dict[str, Any]:  # fmt: skip
    """Return a model's parameters and buffers, by the unsharded model's names. A collective, unless
    sharded.

    `full_state_dict`: plain tensors of the unsharded shapes, with memory of their own, gathered
    unit by unit: on each rank or, with `rank0_only`, on rank 0, and an empty dictionary elsewhere.
    Otherwise each parameter is a `ShardTensor`, which torch.distributed.checkpoint saves and loads,
    and which views this rank's memory; with `use_dtensor` it is a DTensor, sharded by its rows over
    the module's process group, with memory of its own: a collective, unit by unit. `cpu_offload`:
    on the host; the peak there is the model and one unit, and with `rank0_only` one unit on the
    other ranks. `options`: torch's StateDictOptions instead of the first three. Infixes that
    torch.compile, checkpoint wrappers and DistributedDataParallel put into names are left out.
    """
    form = read_options(options, full_state_dict, cpu_offload, rank0_only, use_dtensor)
    inner = _unwrapped(model)
    with use_get_options(form):
        made = inner.state_dict()
    if form.rank0_only:
        scheduler = get_module_scheduler(model)
        if scheduler is not None and scheduler.comm.rank:
            return {}
    if form.on_cpu:
        made = {key: to_cpu(value) for key, value in made.items()}
    frozen = set()
    if options is not None and options.ignore_frozen_params:
        frozen = {
            clean_tensor_name(name) for name, p in inner.named_parameters(remove_duplicate=False) if not p.requires_grad
        }
    return {
        name: value for name, value in ((clean_tensor_name(key), v) for key, v in made.items()) if name not in frozen
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return model


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, strict: bool = True, broadcast_from_rank0: bool = False,
    options=None,
):  # fmt: skip
    """Load full tensors, DTensors, or shards of the same ranks, into a model; return what
    ``load_state_dict`` returns.

    A local call, to be made on each rank; with DTensors, of any mesh and placements, a collective
    of the mesh's ranks, tensor by tensor. `broadcast_from_rank0`: rank 0 has the full tensors and
    the others nothing: a collective, tensor by tensor. `options`: torch's StateDictOptions instead
    of these. Raises ``RuntimeError``, as ``load_state_dict`` does, for missing or unexpected keys
    and other shapes.
    """
    if options is not None:
        read_options(options, True, False, False)
        strict, broadcast_from_rank0 = options.strict, options.broadcast_from_rank0
    inner = _unwrapped(model)
    if broadcast_from_rank0:
        model_state_dict = _scatter_from_rank0(model, model_state_dict)
    keys = {clean_tensor_name(key): key for key in _keys(inner)}
    return inner.load_state_dict({keys.get(name, name): v for name, v in model_state_dict.items()}, strict=strict)


def _keys(module: nn.Module) -> list[str]:
    """Return the keys of a module's state dict; nothing is gathered."""
    with use_get_options(GetOptions(full=False)):
        return list(module.state_dict())


def _scatter_from_rank0(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Return each rank's shards of the full tensors that rank 0 has. A collective."""
    params = sharded_params_by_fqn(model)

    def take(name: str, whole: torch.Tensor) -> torch.Tensor:
        param = params.get(name)
        if param is None:
            return whole
        if whole.shape != param.shape:  # of another model: torch raises, and names it
            return torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        here = torch.empty(param.shard.shape, dtype=whole.dtype, device=whole.device)
        return as_shard_tensor(param, here).copy_(whole)

    return DistWrapper(get_module_scheduler(model), "set_model_state_dict").scatter_from_rank0(lambda: given, take)
