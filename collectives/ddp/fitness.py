"""Whether `fused_allreduce` can serve a DDP object."""

from __future__ import annotations

import torch

from ..comm.engine import get_engine
from ..errors import CollectivesError

__all__ = ["find_reason", "has_hook"]


def has_hook(ddp) -> bool:
    """Return whether a hook is registered on a DDP object, of Python or of C++.

    torch's list ``_comm_hooks`` doesn't say: a copied object has it, and a reducer without a hook.
    """
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


def find_reason(ddp) -> str:
    """Return why `fused_allreduce` must not be registered on a DDP object, or ""."""
    reasons = {
        "mixed_precision registers a hook of its own": ddp.mixed_precision is not None,
        "it has a hook of its own": has_hook(ddp),
        "its optimizer runs in the backward": any(hasattr(p, "_in_backward_optimizers") for p in ddp.parameters()),
        'optimize_ddp="python_reducer" has no buckets': ddp._use_python_reducer,
        "it delays the all-reduce of some parameters": ddp._delay_all_reduce_params,
        "skip_all_reduce_unused_params leaves out buckets": getattr(ddp, "skip_all_reduce_unused_params", False),
        f"no engine works on its device(s), {ddp.device_type}": ddp.is_multi_device_module
        or ddp.device_type not in ("cpu", "cuda"),
        "it has sparse gradients": any(
            isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse for module in ddp.modules()
        ),
        "join() divides by the ranks that are left, which a hook isn't told": ddp._join_config.enable
        and not ddp._divide_by_initial_world_size,
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    try:
        get_engine(None, ddp.device_type)
    except CollectivesError as error:
        return f"{type(error).__name__}: {error}"
    return ""
