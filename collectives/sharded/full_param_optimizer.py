"""Optimizer of whole parameters over shards: each parameter is put together on one rank, its owner,
which steps it and sends the parts back.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..arrays import kind_of
from ..errors import InvalidArgument, InvalidUsage
from ..optim import FusedOptimizer
from .optimizer_trial import differs_apart
from .param_owners import OwnedParam, assign_owners, default_cost, exchange
from .scheduler import Scheduler, open_schedulers

__all__ = ["FullParamOptimizer", "steps_full_params"]

_NAMES = ("params", "param_names")  # entries of a param group that are no options
_OP = "FullParamOptimizer"
_COUPLES = re.compile("lbfgs|prodigy|dadapt")  # parts of the names of classes that look at all parameters together


_inner_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def steps_full_params(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is the one inside of a `FullParamOptimizer`, whose state is of
    whole parameters.
    """
    return optimizer in _inner_optimizers


class FullParamOptimizer(torch.optim.Optimizer):
    """Steps whole parameters of sharded modules by an optimizer that can't step shards (Muon, Shampoo,
    Adafactor, LAMB), each parameter on one rank.

    `params`: the sharded parameters, as ``model.parameters()`` has them: tensors, (name, tensor)
    pairs, or param groups of either. `optimizer_class`: an optimizer's class, or a function that
    returns an optimizer, called with param groups of parameters in their full shapes, and `defaults`
    as keyword arguments. Their values are there during a step only. `cost`: a function of a
    parameter's full shape that returns what its step costs, by which the owners are chosen; None:
    elements times the shorter side.

    A step is a collective of all ranks. Parts of parameters and gradients are sent to the owners, as
    one group of messages, and after the optimizer's step the parts of parameters are sent back, as
    another one. A rank that has all of a parameter owns it where the balance allows it, and steps it
    in place. The others take twice their size on the owner, during the step. State is on the owner
    alone. The results are those of the optimizer on unsharded parameters with the same gradients.
    Parameters that are whole on each rank (NO_SHARD, `ignored_params`) are stepped there.

    `param_groups` hold the shards and the optimizer's options: schedulers may change them, and
    gradient scalers, `clip_grad_norm_` and `zero_grad` find the shards' gradients there. A closure is
    called once, before the step. ``state_dict()`` is of the parameters that this rank owns, in their
    full shapes; ``load_state_dict()`` takes that of any ranks, or of an unsharded optimizer, and
    keeps what this rank owns. `get_optimizer_state_dict`, `save` and their counterparts take this
    optimizer as any other, on other numbers of ranks, too.

    Making it is a collective, which blocks. Raises `InvalidUsage` on all ranks where they give other
    parameters, and for parameters over several communicators, shards on the host of modules on a GPU
    (CPU offload), and optimizers that look at all parameters together (LBFGS, Prodigy). Where a
    rank's optimizer raises in `step`, the others raise `RemoteError`: on the host in the same step,
    on CUDA at the latest in their next collective.
    """

    def __init__(
        self, params: Iterable, optimizer_class: Callable[..., torch.optim.Optimizer], *,
        cost: Callable[[torch.Size], float] | None = None, **defaults: Any,
    ):  # fmt: skip
        self._is_made = False
        self._number: int | None = None  # among those of the communicator
        self._scheduler: Scheduler | None = None
        self._cost = default_cost if cost is None else cost
        self._loads: dict[int, list[float]] = {}  # by a communicator's id
        self._owned: list[OwnedParam] = []  # all sharded parameters, in order
        self._shards: dict[int, torch.Tensor] = {}  # id of what the optimizer holds -> what param_groups do
        inner = optimizer_class(self._add(_as_groups(params)), **defaults)
        if not isinstance(inner, torch.optim.Optimizer):
            raise InvalidArgument(f"optimizer_class must return a torch.optim.Optimizer, not {kind_of(inner)}", op=_OP)
        self._check_inner(inner)
        held = {id(param) for group in inner.param_groups for param in group["params"]}
        self._owned = [each for each in self._owned if id(each.full) in held]
        self._inner = inner
        _inner_optimizers.add(inner)
        super().__init__([self._outer_group(group) for group in inner.param_groups], dict(inner.defaults))
        self._is_made = True
        self._agree()

    def __repr__(self):
        return f"FullParamOptimizer of {self._inner!r}"

    def __getstate__(self):
        raise InvalidUsage(
            "an optimizer over shards can't be copied or pickled: save its state_dict(), or use "
            "collectives.sharded.save",
            op=_OP,
        )

    @property
    def full_params(self) -> dict[int, OwnedParam]:
        """The sharded parameters that are stepped as a whole, by their shards' ids."""
        return {id(each.param.shard): each for each in self._owned}

    # ---- Making it.

    def _add(self, groups: list[dict]) -> list[dict]:
        """Find the sharded parameters of new groups, and give them owners; return the groups with
        parameters of full shapes.
        """
        found = _find_sharded()
        added: list[OwnedParam] = []

        def as_full(param):
            if isinstance(param, tuple):
                return param[0], as_full(param[1])
            if not isinstance(param, torch.Tensor):
                raise InvalidArgument(f"params must be tensors, not {kind_of(param)}", op=_OP)
            full = param
            if id(param) in found:
                scheduler, unit, group, sharded = found[id(param)]
                if self._scheduler not in (None, scheduler):
                    raise InvalidUsage("its parameters are over several communicators: make one for each", op=_OP)
                if param.is_meta:
                    text = f"{sharded.name} is on the meta device: make this optimizer after to_empty()"
                    raise InvalidUsage(text, op=_OP)
                if group.store != group.device:
                    raise InvalidUsage(
                        f"{sharded.name} has its shards on the host and is computed on {group.device} (CPU offload): "
                        "whole parameters are exchanged where the shards are, so leave the offload_policy out",
                        op=_OP,
                    )
                self._scheduler = scheduler
                if unit.ranks.shard is not None:
                    added.append(OwnedParam(sharded, group, f"{sharded.name} of unit {unit.index}"))
                    full = added[-1].full
            self._shards[id(full)] = param
            return full

        full_groups = [{**group, "params": [as_full(param) for param in group["params"]]} for group in groups]
        for comm in {id(each.comm): each.comm for each in added}.values():
            members = [each for each in added if each.comm is comm]
            loads = self._loads.setdefault(id(comm), [0.0] * comm.size)
            costs = [float(self._cost(each.param.shape)) for each in members]
            for each, owner in zip(members, assign_owners(costs, [m.held for m in members], loads), strict=True):
                each.set_owner(owner)
        self._owned += added
        return full_groups

    def _check_inner(self, inner: torch.optim.Optimizer) -> None:
        unknown = [p for group in inner.param_groups for p in group["params"] if id(p) not in self._shards]
        if unknown:
            raise InvalidUsage(
                f"the optimizer has a parameter of shape {list(unknown[0].shape)} that it wasn't given: let "
                "optimizer_class make it of its first argument alone",
                op=_OP,
            )
        cls = type(inner)
        known = isinstance(inner, FusedOptimizer) or (
            cls.__module__.startswith("torch.optim.") and cls is not torch.optim.LBFGS
        )
        dims = [{param.dim() for param in group["params"]} for group in inner.param_groups]
        named = any(_COUPLES.search(each.__name__.replace("_", "").lower()) for each in cls.__mro__)
        if self._owned and not known and (named or differs_apart(inner, dims)):
            raise InvalidUsage(
                f"{cls.__name__} looks at all parameters together (a norm of all gradients, one step size), and here "
                "each rank steps some of them: leave its option for that out (clip by clip_grad_norm_ instead), use "
                "another optimizer, or keep the parameters whole by ShardingStrategy.NO_SHARD",
                op=_OP,
            )

    def _outer_group(self, inner_group: dict) -> dict:
        """Return a group with the shards in place of the full parameters."""
        outer = {**inner_group, "params": [self._shards[id(param)] for param in inner_group["params"]]}
        names = outer.pop("param_names", None)
        if names is not None:
            outer["params"] = list(zip(names, outer["params"], strict=True))
        return outer

    def _agree(self) -> None:
        """Check that all ranks have the same parameters, and number this optimizer."""
        if self._scheduler is None:
            return
        rows = [f"FullParamOptimizer of {type(self._inner).__name__}"]
        for at, group in enumerate(self.param_groups):
            options = sorted(key for key in group if key not in _NAMES)
            rows.append(f"group {at} has {len(group['params'])} parameters and the options {', '.join(options)}")
        rows += [f"{each.name} {list(each.param.shape)} on rank {each.owner}" for each in self._owned]
        self._scheduler.agreement.barrier("; ".join(rows))
        if self._number is None:
            self._number = self._scheduler.full_param_optimizers.add(self)

    def add_param_group(self, param_group: dict) -> None:
        """Add a param group, as `torch.optim.Optimizer.add_param_group`. A collective of all ranks,
        which blocks.
        """
        if not self._is_made:  # called by torch's own constructor
            super().add_param_group(param_group)
            return
        (full_group,) = self._add(_as_groups([param_group]))
        self._inner.add_param_group(full_group)
        super().add_param_group(self._outer_group(self._inner.param_groups[-1]))
        self._agree()

    # ---- A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient; return what the closure returns. A collective of
        all ranks.

        A parameter has a gradient on all ranks, or on none. `closure`: called once, before the step,
        as in ``torch.optim.SGD``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _copy_options(self.param_groups, self._inner.param_groups)
        if self._owned:
            self._step_owned()
        else:
            self._inner.step()
        _copy_options(self._inner.param_groups, self.param_groups)
        self._publish_state()
        return loss

    def _step_owned(self) -> None:
        has_grad = tuple(each.param.shard.grad is not None for each in self._owned)
        agreement = self._scheduler.agreement
        agreement.begin_step(self._number, has_grad, lambda: self._describe(has_grad))
        error = self._exchange(has_grad, self._inner.step)
        if error is not None:
            agreement.fail()
            raise error
        torch.autograd.graph.increment_version([each.param.shard for each in self._owned])
        agreement.end_pass()

    def _exchange(self, has_grad: tuple[bool, ...], function: Callable[[], Any]) -> BaseException | None:
        """Call a function while this rank's parameters are there, and send the results back; return
        its error.

        On the host all ranks raise where one has an error; on CUDA the host waits for none of them,
        and parameters are sent back as they are.
        """
        agreement, on_host = self._scheduler.agreement, self._scheduler.comm._on_host
        stepped = [each for each, has in zip(self._owned, has_grad, strict=True) if has]
        mine = [each for each in stepped if each.is_here]
        error = None
        try:
            for each in mine:
                each.acquire()
            exchange(stepped, back=False)
            try:
                function()
            except BaseException as raised:
                error = raised
            failed = agreement.share_failure(error is not None) if on_host else None
            if failed is not None and error is None:
                agreement.raise_failed_step(failed)
            if failed is None:
                exchange(stepped, back=True)
                for each in mine:
                    each.store()
        finally:
            for each in mine:
                each.release()
        return error

    def join_step(self, has_grad: tuple[bool, ...]) -> None:
        """Take part in a step that only other ranks make, after this rank has failed: parameters stay
        as they are.
        """

        def fail() -> None:
            raise InvalidUsage("this rank doesn't make the step", op=_OP)

        with torch.no_grad():
            self._exchange(has_grad, fail)

    def _describe(self, has_grad: tuple[bool, ...]) -> str:
        rows = [f"steps FullParamOptimizer {self._number} of {type(self._inner).__name__}"]
        for each, has in zip(self._owned, has_grad, strict=True):
            rows.append(f"{each.name} has {'a' if has else 'no'} gradient")
        return "; ".join(rows)

    # ---- State.

    def _publish_state(self) -> None:
        """Let `state` have the optimizer's state by the shards, as `param_groups` have them."""
        self.state.clear()
        for param, state in self._inner.state.items():
            self.state[self._shards[id(param)] if id(param) in self._shards else param] = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the parameters that this rank owns, in their full shapes, and all
        options. A local call.
        """
        _copy_options(self.param_groups, self._inner.param_groups)
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of any ranks, or one of an unsharded optimizer: the state of parameters
        that this rank owns. Warns where it has none of some of these, and that of others. A local call.
        """
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        held = [param for group in self._inner.param_groups for param in group["params"]]
        state, by_full = state_dict["state"], {id(each.full): each for each in self._owned}
        owned = [(number, by_full[id(p)]) for number, p in zip(numbers, held, strict=False) if id(p) in by_full]
        drop = {number for number, each in owned if not each.is_here}
        kept = {number: entries for number, entries in state.items() if number not in drop}
        missing = [each.name for number, each in owned if each.full.requires_grad and number not in state]
        if missing and len(kept) < len(state):
            _warn_of_missing(missing)
        self._inner.load_state_dict({**state_dict, "state": kept})
        _copy_options(self._inner.param_groups, self.param_groups)
        self._publish_state()

    @contextlib.contextmanager
    def zero_params(self) -> Iterator[torch.optim.Optimizer]:
        """Yield the optimizer of whole parameters while those that this rank owns are zeros, so that
        it can make its state. A local call.
        """
        mine = [each for each in self._owned if each.is_here]
        try:
            for each in mine:
                each.acquire(values=False)
            yield self._inner
        finally:
            for each in mine:
                each.release()
            self._publish_state()


def _as_groups(params: Iterable) -> list[dict]:
    """Return param groups, each with a list of parameters, from what optimizers take."""
    if isinstance(params, torch.Tensor):
        raise InvalidArgument("params must be an iterable of tensors or dicts, not one tensor", op=_OP)
    given = list(params)
    if not given:
        raise InvalidArgument("params has no parameters", op=_OP)
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    made = []
    for group in groups:
        members = group["params"]
        made.append({**group, "params": [members] if isinstance(members, torch.Tensor) else list(members)})
    return made


def _find_sharded() -> dict[int, tuple]:
    """Return (scheduler, unit, group, sharded parameter) of all shards, by their ids."""
    return {
        id(param.shard): (scheduler, unit, group, param)
        for scheduler in open_schedulers()
        for unit in scheduler.units
        for group in unit.groups
        for param in group.params
    }


def _copy_options(source: list[dict], to: list[dict]) -> None:
    """Copy the options of param groups, without their parameters."""
    for theirs, ours in zip(source, to, strict=True):
        ours.update({key: value for key, value in theirs.items() if key not in _NAMES})


def _warn_of_missing(names: list[str]) -> None:
    """Warn that a state dict has no state of these parameters, and that of other ranks' ones."""
    more = ", ..." if len(names) > 3 else ""
    warnings.warn(
        f"the state dict has no state of {', '.join(names[:3])}{more}, which this rank steps, and has that "
        "of parameters that other ranks step: they begin with no state. If it is another rank's state_dict(), "
        "load each rank's own, or use collectives.sharded.save and load",
        RuntimeWarning,
        stacklevel=3,
    )
