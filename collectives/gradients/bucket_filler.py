"""BucketFiller: the hooks of parameters, by which gradients fill buckets while a backward runs."""

from __future__ import annotations

import weakref

import torch

from .bucket import GradientBucket

__all__ = ["BucketFiller", "ParameterState"]


class ParameterState:
    """A parameter with a hook, and where its gradient goes.

    ``name``: for messages and on the wire. ``bucket`` and ``index``: the bucket that reduces the
    gradient, or None, and the place there. ``view``: the gradient's view of the bucket, where it is
    copied there by itself. ``backwards_left``: backwards before the gradient is reduced, where
    these are counted.
    """

    __slots__ = ("backwards_left", "bucket", "index", "name", "param", "view")

    def __init__(self, name: str | None, param: torch.Tensor, passes: int | None):
        self.name = name
        self.param = param
        self.backwards_left = passes
        self.detach()

    def detach(self) -> None:
        """Take the parameter out of its bucket."""
        self.bucket: GradientBucket | None = None
        self.index = 0
        self.view: torch.Tensor | None = None

    def copy_to_view(self, grad: torch.Tensor) -> None:
        """Copy a gradient into the bucket."""
        view = self.view
        if grad is not view and not grad.is_sparse and grad.shape == view.shape and grad.dtype is view.dtype:
            view.copy_(grad)
            self.param.grad = view


class BucketFiller:
    """Post-accumulate-grad hooks on an owner's parameters; they find out which gradients have come.

    When the last missing gradient of a bucket is there, a hook calls
    ``owner.bucket_ready(bucket)``. ``passes``: the number of backwards that make a gradient
    complete. Then the owner reduces each gradient once and must have it as the backward left it:
    ``owner.refuse_gradient(state)``, which raises, is called for one backward too many and for a
    gradient that requires a gradient itself; `find_changed` finds a gradient that was changed.
    None: a bucket is ready with each parameter's first gradient, and again with each later one.

    ``closed``: while it isn't 0 the hooks do nothing. ``backward_ran``: whether gradients were
    counted since the last round. ``arrived``: complete gradients that came before their bucket was
    ready, in that order, each with its version. The owner is held weakly, so that hooks don't keep
    it alive, and the hooks are removed when it dies.
    """

    def __init__(self, owner, *, passes: int | None = None):
        self.passes = passes
        self.closed = 0
        self.backward_ran = False
        self.states: dict[int, ParameterState] = {}  # by id of the parameter
        self.arrived: dict[ParameterState, tuple[torch.Tensor, int]] = {}
        self.handles: dict[int, torch.utils.hooks.RemovableHandle] = {}  # by id of the parameter
        self.owner = weakref.ref(owner)
        weakref.finalize(owner, _remove_hooks, self.handles).atexit = False

    # ---- Parameters and buckets.

    def watch(self, param: torch.Tensor, name: str | None = None) -> None:
        """Register the hook of a parameter, unless it has one."""
        key = id(param)
        if key not in self.handles:
            if key not in self.states:
                self.states[key] = ParameterState(name, param, self.passes)
            self.handles[key] = param.register_post_accumulate_grad_hook(_make_hook(self, self.states[key]))

    def attach(self, buckets: list[GradientBucket]) -> None:
        """Let the gradients of watched parameters fill these buckets."""
        for bucket in buckets:
            for index, (param, view) in enumerate(zip(bucket.params, bucket.early_views(), strict=True)):
                state = self.states[id(param)]
                state.bucket, state.index, state.view = bucket, index, view

    def detach(self) -> None:
        """Take all parameters out of their buckets."""
        self.arrived.clear()
        for state in self.states.values():
            state.detach()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget the parameters."""
        _remove_hooks(self.handles)
        self.states.clear()
        self.arrived.clear()

    # ---- Rounds.

    def set_passes(self, passes: int) -> None:
        """Set the number of backwards, and count from 0."""
        self.passes = passes
        self.arrived.clear()
        for state in self.states.values():
            state.backwards_left = passes

    def rewind(self, buckets: list[GradientBucket]) -> None:
        """Begin a round: all gradients of the parameters and of these buckets are to come."""
        self.backward_ran = False
        if self.passes is not None:
            self.set_passes(self.passes)
        for bucket in buckets:
            bucket.rewind()

    def find_changed(self, buckets: list[GradientBucket]) -> ParameterState | None:
        """Return a parameter whose complete gradient was changed since it came or was packed."""
        for bucket in buckets:
            if bucket.recorded and (index := bucket.find_changed()) is not None:
                return self.states[id(bucket.params[index])]
        for state, (grad, version) in self.arrived.items():
            packed = state.bucket is not None and state.bucket.sending is not None
            if not packed and (state.param.grad is not grad or grad._version != version):
                return state
        return None


def _make_hook(filler: BucketFiller, state: ParameterState):
    """Return the hook that a parameter calls once its gradient is there.

    Nothing of it is in a function of its own: it runs for every gradient of every backward.
    """

    def gradient_ready(param):
        if filler.closed:
            return
        grad, counts = param.grad, filler.passes is not None
        if counts:
            if state.backwards_left <= 0 or grad.requires_grad:
                filler.owner().refuse_gradient(state)
            state.backwards_left -= 1
            filler.backward_ran = True
            if state.backwards_left:
                return
        bucket = state.bucket
        if bucket is not None:
            if bucket.on_cuda:
                bucket.add_stream()
            if state.view is not None:
                state.copy_to_view(grad)
                grad = param.grad
            missing = bucket.missing
            missing.discard(state.index)
            if not missing:
                owner = filler.owner()
                if owner is not None:
                    owner.bucket_ready(bucket)
                return
        if counts:
            filler.arrived[state] = grad, grad._version

    return gradient_ready


def _remove_hooks(handles: dict) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()
