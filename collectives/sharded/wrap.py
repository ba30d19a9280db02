"""Wrap policies, which choose the submodules that become units: names and meanings of torch's
FSDP1.

A policy is a function of (module, recurse, nonwrapped_numel), most often one of the functions below
with its settings filled in by ``functools.partial``, or an object: `ModuleWrapPolicy`,
`CustomPolicy`, or one of torch's own. Nothing is wrapped here: `units_of` names the submodules, and
the caller shards them in place.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

from ..errors import InvalidArgument, InvalidUsage

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "or_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "units_of",
    "wrap",
]

# ---- Function policies, called twice for a module: whether to look inside, then whether it is a unit itself.


def always_wrap_policy(*args, **kwargs) -> bool:
    """Make every submodule a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Make a unit of each submodule for which `lambda_fn` of the submodule is true."""
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Collection[type[nn.Module]]
) -> bool:
    """Make a unit of each submodule of one of these classes; parameters shared with others stay in
    a unit above.
    """
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]) -> bool:
    """Make a unit of each submodule of which one of these policies, all functions, would make one."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Make a unit of each submodule with `min_num_params` elements or more that are in no unit
    inside it.

    Modules of `force_leaf_modules` aren't looked into, those of `exclude_wrap_modules` are no units
    themselves. The defaults are the attributes FORCE_LEAF_MODULES and EXCLUDE_WRAP_MODULES of this
    function.
    """
    if nonwrapped_numel < min_num_params:
        return False
    own = size_based_auto_wrap_policy
    if recurse:
        spared = own.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        spared = own.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(spared))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # its forward uses its children's parameters
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # they have no forward


# ---- Object policies, which get the whole model. The method's name and arguments are torch's.


class ModuleWrapPolicy:
    """Make a unit of each submodule of one of these classes."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]):
        self._module_classes = _classes(module_classes)

    def _run_policy(self, root_module, ignored_modules, root_kwargs):
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, self._module_classes)
        }

    def __call__(self, module, recurse, *args, **kwargs) -> bool:
        """Answer as a policy that is a function, for `or_policy` and for torch's own."""
        return True if recurse else isinstance(module, self._module_classes)

    def __repr__(self):
        return f"ModuleWrapPolicy({{{', '.join(sorted(one.__qualname__ for one in self._module_classes))}}})"


class CustomPolicy:
    """Make a unit of each submodule for which `lambda_fn` returns True, or a dictionary of settings
    of its own.

    False and an empty dictionary mean no unit. Settings override those of the root.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]):
        if not callable(lambda_fn):
            raise InvalidArgument(f"CustomPolicy takes a function of a module, not {lambda_fn!r}")
        self._lambda_fn = lambda_fn

    def _run_policy(self, root_module, ignored_modules, root_kwargs):
        found = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, bool | dict):
                raise InvalidArgument(
                    f"the function of CustomPolicy gave {answer!r} for a {type(module).__name__}: it must give True, "
                    f"False or a dictionary of settings"
                )
            if answer:
                found[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return found


def _classes(given):
    """Return classes of modules as a tuple."""
    found = tuple(given) if isinstance(given, Iterable) else ()
    if not found or not all(isinstance(one, type) and issubclass(one, nn.Module) for one in found):
        raise InvalidArgument(f"ModuleWrapPolicy takes a set of classes of modules, not {given!r}")
    return found


# ---- From a policy to units.


def units_of(
    module: nn.Module, policy, ignored_modules: Iterable[nn.Module] = (), ignored_params: Iterable[nn.Parameter] = ()
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return the submodules of which a policy makes units, with the settings that it has for each.

    A submodule comes after all units inside it; the root isn't among them, whatever the policy
    says. One that stands in several places comes once. `ignored_modules`, with all that is inside
    them, are never units, and neither their parameters nor `ignored_params` count in
    `nonwrapped_numel`. The settings are empty except with a policy that has some, such as
    `CustomPolicy`. Changes nothing. Raises InvalidArgument for what is no policy.
    """
    ignored = {part for one in ignored_modules for part in one.modules()}
    run_policy = getattr(policy, "_run_policy", None)
    if run_policy is None or isinstance(policy, type):
        _check_function(policy)
        not_counted = {id(one) for one in ignored_params} | {id(one) for part in ignored for one in part.parameters()}
        found = dict.fromkeys(_PolicyWalk(policy, ignored, not_counted).inside(module))
    else:
        found = run_policy(module, ignored, {})
        inside = set(module.modules())
        strangers = [type(one).__name__ for one in found if one not in inside]
        if strangers:
            raise InvalidArgument(f"{policy!r} names modules that aren't in the model: {', '.join(strangers)}")
    return [(one, dict(found[one] or {})) for one in _children_first(module) if one in found and one is not module]


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


class _PolicyWalk:
    """Calls a function policy for every submodule, the deepest first."""

    def __init__(self, policy, ignored, not_counted):
        self.policy, self.ignored, self.not_counted = policy, ignored, not_counted
        self.taken: dict[nn.Module, int] = {}  # of each visited submodule: elements in units, its own and those inside
        self.units: list[nn.Module] = []

    def inside(self, module):
        """Return the units below a module."""
        self._below(module, self._count(module))
        return self.units

    def _count(self, module):
        return sum(one.numel() for one in module.parameters() if id(one) not in self.not_counted)

    def _below(self, module, count):
        """Visit the children; return the elements in units among and in them, or None if the policy
        doesn't look inside.
        """
        if not self.policy(module=module, recurse=True, nonwrapped_numel=count):
            return None
        return sum(self._visit(child) for child in module.children() if child not in self.ignored)

    def _visit(self, module):
        if module not in self.taken:
            self.taken[module] = 0  # a module inside itself is visited once
            count = self._count(module)
            below = self._below(module, count)
            if below is not None:
                own = self.policy(module=module, recurse=False, nonwrapped_numel=count - below)
                self.taken[module] = count if own else below
                if own:
                    self.units.append(module)
        return self.taken[module]


def _children_first(module, seen=None) -> Iterator[nn.Module]:
    """Yield a module and all below it, each once, after those inside it."""
    seen = {module} if seen is None else seen
    for child in module.children():
        if child not in seen:
            seen.add(child)
            yield from _children_first(child, seen)
    yield module


# ---- Units chosen where the model is built.

_enabled = contextvars.ContextVar("enable_wrap", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs) -> Iterator[None]:
    """Let `wrap` call `wrapper_cls` with these settings inside this context, for this thread alone.

    Raises InvalidArgument if `wrapper_cls` can't be called, InvalidUsage inside another
    `enable_wrap`.
    """
    if not callable(wrapper_cls):
        raise InvalidArgument(f"wrapper_cls must be a class or function of a module, not {wrapper_cls!r}")
    if _enabled.get() is not None:
        raise InvalidUsage("enable_wrap inside of enable_wrap: end the first, or give wrap() what differs")
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides) -> nn.Module:
    """Make a module a unit inside `enable_wrap`, with its settings, which these override; otherwise
    return it.
    """
    if _enabled.get() is None:
        return module
    wrapper_cls, settings = _enabled.get()
    return wrapper_cls(module, **{**settings, **wrap_overrides})
