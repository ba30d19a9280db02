"""Choice of the submodules that become units, by torch's wrap policies, which are exported here,
too.

A policy is a function of (module, recurse, nonwrapped_numel), most often one of torch's with its
settings filled in by ``functools.partial``, or an object: `ModuleWrapPolicy`, `CustomPolicy`.
Torch's own code chooses. `units_of` only names the submodules, and the caller shards them in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from ..errors import InvalidArgument
from ..torch_compat import recursive_wrap

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "parse_ignored",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "units_of",
    "wrap",
]


def units_of(
    module: nn.Module, policy, ignored_modules: Iterable[nn.Module] = (), ignored_params: Iterable[nn.Parameter] = (),
    *, also: tuple[type, ...] = (),
) -> list[tuple[nn.Module, dict[str, Any]]]:  # fmt: skip
    """Return the submodules of which a policy makes units, with the settings that it has for each.

    A submodule comes after all units inside it. The root isn't among them, nor modules that are sharded
    already, whatever the policy says. One that stands in several places comes once. Changes nothing.

    Args:
        module: The root.
        policy: A wrap policy. None: no submodules.
        ignored_modules: Modules that are never units, nor are those inside them, and whose parameters
            don't count in `nonwrapped_numel`.
        ignored_params: Parameters that don't count in it.
        also: Classes of modules that are units, too.

    Returns:
        Pairs of a submodule and its settings: empty ones except with a policy that has some, such as
        `CustomPolicy`.

    Raises:
        InvalidArgument: For what is no policy.
    """
    ignored = {part for one in ignored_modules for part in one.modules()}
    found = {} if policy is None else _run(module, policy, ignored, ignored_params)
    for one in module.modules():
        if isinstance(one, also) and one not in ignored:
            found.setdefault(one, {})
    return [
        (one, dict(found[one] or {}))
        for one in _children_first(module)
        if one in found and one is not module and not hasattr(one, "_sharded_unit")
    ]


def parse_ignored(module: nn.Module, modules, states) -> tuple[set[nn.Module], list[nn.Parameter]]:
    """Return the modules, and the parameters, that FSDP1's ``ignored_modules`` and ``ignored_states`` name."""
    modules, states = list(modules or ()), list(states or ())
    parameters = [each for each in states if isinstance(each, nn.Parameter)]
    modules += [each for each in states if not isinstance(each, nn.Parameter)]
    if not all(isinstance(each, nn.Module) for each in modules):
        raise InvalidArgument("ignored_modules must be modules, ignored_states modules or parameters")
    if module in modules:
        raise InvalidArgument("ignored_modules holds the module itself: there is nothing left to shard")
    return set(modules), parameters + [param for each in modules for param in each.parameters()]


def _run(module: nn.Module, policy, ignored: set[nn.Module], ignored_params) -> dict[nn.Module, Any]:
    run_policy = getattr(policy, "_run_policy", None)
    if run_policy is None or isinstance(policy, type):
        _check_function(policy)
        found: dict[nn.Module, Any] = {}

        def note(submodule, **_):
            found[submodule] = {}
            return submodule

        not_counted = {*ignored_params, *(param for part in ignored for param in part.parameters())}
        recursive_wrap(module, policy, note, ignored, not_counted, only_wrap_children=True)
        return found
    try:
        found = run_policy(module, ignored, {})
    except (TypeError, ValueError) as error:  # torch looks at a policy's arguments only here
        raise InvalidArgument(f"{policy!r} can't choose units: {error}") from error
    inside = set(module.modules())
    strangers = [type(one).__name__ for one in found if one not in inside]
    if strangers:
        raise InvalidArgument(f"{policy!r} names modules that aren't in the model: {', '.join(strangers)}")
    return dict(found)


def _check_function(policy):
    """Raise, with what to write instead, unless the object can be called as a policy is."""
    ask = {"module": None, "recurse": True, "nonwrapped_numel": 0}
    if isinstance(policy, type | nn.Module) or not callable(policy):
        raise InvalidArgument(
            f"{policy!r} is no wrap policy: give ModuleWrapPolicy({{...}}) with the classes of the submodules that "
            f"become units, CustomPolicy(function), or a function of (module, recurse, nonwrapped_numel)"
        )
    try:
        signature = inspect.signature(policy)
    except ValueError:  # of C, without a signature: the call will fail or not
        return
    try:
        signature.bind(**ask)
    except TypeError as error:
        raise InvalidArgument(
            f"{policy!r} can't be called as policy(module=..., recurse=..., nonwrapped_numel=...): {error}. Fill in "
            f"what else it takes by functools.partial(policy, ...); CustomPolicy takes a function of the module alone"
        ) from None


def _children_first(module, seen=None) -> Iterator[nn.Module]:
    """Yield a module and all below it, each once, after those inside it."""
    seen = {module} if seen is None else seen
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _children_first(child, seen)
    yield module
