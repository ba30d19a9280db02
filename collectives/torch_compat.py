"""All private names of torch that this package uses, with the torch versions that have them.

torch may rename or remove such a name in any release. Each name is written here once and imported
from here, so that a change of torch needs a change in one place. Names of modules are bound below.
Attributes of torch's objects are used where the object is, and are listed in ``ATTRIBUTES``. A test
looks up each of both in the installed torch.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import types

import torch
import torch.distributed as dist

from .errors import EngineUnavailable

__all__ = [
    "ATTRIBUTES",
    "OLDEST",
    "AsyncCollectiveTensor",
    "BatchNorm",
    "DTensorSpec",  # noqa: F822
    "TensorBase",
    "TensorMeta",  # noqa: F822
    "TorchDispatchMode",
    "c10d_backend",
    "cuda_current_raw_stream",
    "cuda_get_device",
    "can_swap_storage_memory",
    "current_graph_task_id",
    "default_store",
    "disabled_torch_function",
    "flatten_dense_tensors",
    "foreach_types",  # noqa: F822
    "fsdp_collectives",
    "fsdp_state_class",
    "group_backends",
    "group_timeout_setter",
    "init_optimizer_state",  # noqa: F822
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "open_process_groups",
    "optimizer_types",  # noqa: F822
    "premul_sum",
    "recursive_wrap",  # noqa: F822
    "register_process_group",
    "reset_group_names",
    "set_nested",  # noqa: F822
    "storage_use_count",
    "swap_storage_memory",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "untraced",
    "will_engine_execute",
]

# The first version that has all of them but those that say otherwise. In 2.6 compiled autograd hands
# other gradients to DDP hooks than the ones that it has.
OLDEST = "2.8"
_FOLDER = os.path.dirname(__file__) + os.sep


def _check_version(version: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) < tuple(map(int, OLDEST.split("."))):
        raise EngineUnavailable(
            f"collectives needs torch {OLDEST} or newer, and this is torch {version}: pip install 'torch>={OLDEST}'"
        )


_check_version(torch.__version__)

# ---- Names that 2.8 to 2.15 have.
from torch._C import TensorBase  # noqa: E402  (its attributes as functions, which need no Python frame for each tensor)
from torch._C._dynamo import eval_frame as _eval_frame  # noqa: E402
from torch._C._nn import flatten_dense_tensors  # noqa: E402
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: E402
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten  # noqa: E402

# Names of modules that take a second to import: bound at their first use.
_LAZY = {
    "DTensorSpec": ("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
    "TensorMeta": ("torch.distributed.tensor._dtensor_spec", "TensorMeta"),
    # Lists of the classes of tensors for which optimizers and clip_grad_norm_ choose foreach operations.
    "foreach_types": ("torch.utils._foreach_utils", "_foreach_supported_types"),
    "optimizer_types": ("torch.optim.optimizer", "_foreach_supported_types"),
    # Gives an optimizer that has not stepped its state, by a step with gradients and a learning rate of 0.
    "init_optimizer_state": ("torch.distributed.checkpoint.state_dict", "_init_optim_state"),
    # Calls a function for the submodules that a wrap policy of FSDP1 chooses, the deepest first.
    "recursive_wrap": ("torch.distributed.fsdp.wrap", "_recursive_wrap"),
    # Sets an element of nested dictionaries and lists by its path.
    "set_nested": ("torch.distributed.checkpoint._traverse", "set_element"),
}


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)


# The `__torch_function__` of subclasses whose operations are those of plain tensors, as nn.Parameter's.
disabled_torch_function = torch._C._disabled_torch_function_impl


def untraced(target=None, *, recursive: bool = True):
    """Keep torch.compile out of a function, or of all methods of a class that are this package's; a decorator.

    A compiled program runs them as they are, between two graphs. ``recursive``: what they call isn't
    traced either. Unlike torch.compiler.disable it wraps nothing, so that the eager program pays
    nothing, and doesn't import dynamo, which takes a second. Since 2.7.
    """
    if target is None:
        return functools.partial(untraced, recursive=recursive)
    functions = [target]
    if isinstance(target, type):
        classes = [cls for cls in target.__mro__ if cls.__module__.startswith(f"{__package__}.")]
        functions = [each for cls in classes for each in vars(cls).values()]
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
    for function in functions:
        if isinstance(function, property):
            function = function.fget
        if not isinstance(function, types.FunctionType):
            function = getattr(function, "__wrapped__", None)  # of the binding's, which has no frame of its own
        if isinstance(function, types.FunctionType):
            function._torchdynamo_disable = True  # where it would be traced as part of a caller
            function._torchdynamo_disable_msg = "it calls a communication library"
            # All wrappers that a decorator such as torch.no_grad makes have one code.
            while hasattr(function, "__wrapped__") and not function.__code__.co_filename.startswith(_FOLDER):
                function = function.__wrapped__
            _eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return target


# The number of the backward that this thread is in; -1 outside of one.
current_graph_task_id = torch._C._current_graph_task_id


# ---- CUDA. Builds without CUDA have neither name. Each call looks it up, since a simulated device
# may come later.
def cuda_get_device():
    """Return the function that returns the index of the thread's current device."""
    return torch._C._cuda_getDevice


def cuda_current_raw_stream(index: int) -> int:
    """Return the address of the current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(index)


def storage_use_count(tensor: torch.Tensor) -> int:
    """Return how many tensors and other objects share a tensor's storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


@functools.cache
def can_swap_storage_memory() -> bool:
    """Whether torch has `swap_storage_memory`, which came with 2.12."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def is_transformed() -> bool:
    """Whether torch.func's transforms, or forward-mode differentiation, are in progress."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def swap_storage_memory(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Exchange the memory of two storages of one size, or of one that has none. Since 2.12."""
    storage._swap_data_ptr_(other)


def will_engine_execute(node) -> bool:
    """Whether the backward in progress runs a node of autograd's graph."""
    return torch._C._will_engine_execute_node(node)


# ---- torch.distributed. Builds without it have none of these.
def default_store():
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def open_process_groups():
    """Return a dictionary whose keys are the open process groups."""
    return dist.distributed_c10d._world.pg_map


def register_process_group(group, backend: str, store, name: str, ranks: list[int]) -> None:
    """Make a process group known to torch.distributed, as ``new_group`` does with those that it creates.

    `store`: the one of which the group's is a part; `ranks`: of the default group, in the group's order.
    """
    c10d = dist.distributed_c10d
    world, tag = c10d._world, f"ptd:{name}"
    group._set_group_name(name)
    world.pg_map[group] = backend, store
    world.pg_names[group] = name
    world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(backend)))
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    c10d._register_process_group(name, group)


def c10d_backend():
    """Return the C++ class of which the backends of process groups are."""
    return torch._C._distributed_c10d.Backend


def group_backends(group) -> list:
    """Return the backends of a process group, one for each type of device."""
    found = [group._get_backend(device) for device in group._device_types]
    return [getattr(backend, "wrapped_pg", backend) for backend in found]  # wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL


def group_timeout_setter():
    """Return torch's function that sets the timeout of a group whose backend is Gloo or NCCL."""
    return dist.distributed_c10d._set_pg_timeout


def reset_group_names() -> None:
    """Have the default group that is opened next named as the first one, where none is open: the ranks
    need one name, and a try that has failed has taken one.
    """
    dist.distributed_c10d._world.group_count = 0


def premul_sum(factor):
    """Return the reduction that multiplies by a factor before it sums."""
    return dist._make_nccl_premul_sum(factor)


def fsdp_collectives():
    """Return the module with FSDP2's interfaces AllGather and ReduceScatter, or None. Since 2.9."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_api
    except ImportError:
        return None
    return _fsdp_api if hasattr(_fsdp_api, "AllGather") else None


def fsdp_state_class() -> type:
    """Return the class whose ``init`` FSDP2's ``fully_shard`` calls before it changes a module."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return FSDPState


# ---- Attributes of torch's objects: names that instances or the class itself have, by the path of
# the class.
ATTRIBUTES = {
    "torch.nn.parallel.DistributedDataParallel": (
        "_join_config", "_divide_by_initial_world_size", "_comm_hooks", "_use_python_reducer",
        "_delay_all_reduce_params", "_ddp_init_helper", "_get_ddp_logging_data",
    ),
    "torch.distributed.Reducer": ("_rebuild_buckets",),
    "torch.amp.GradScaler": ("_scale", "_per_optimizer_states", "_unscale_grads_"),
    "torch.Tensor": ("_version",),
    "torch.UntypedStorage": ("_cdata",),
    "torch.nn.Module": ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_apply"),
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": ("init",),
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent": (
        "_assign_worker_ranks", "_exit_barrier", "_monitor_workers", "_shutdown", "_pcontext",
    ),
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent": ("_exit_barrier_timeout", "_remaining_restarts"),
    "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler": ("_popen",),
}  # fmt: skip
