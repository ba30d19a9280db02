"""DistributedOptimizer: an optimizer that reduces its gradients over the ranks before each step."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from ..gradients.compilation import compile_gradient_kernels
from ..torch_compat import untraced
from ..torch_patches import patch_unscale
from .adasum_optimizer import AdasumReducer
from .basics import current
from .compression import Compression
from .gradient_reducer import GradientReducer
from .operations import Adasum, Average, ReduceOp
from .process_sets import global_process_set

__all__ = ["DistributedOptimizer"]

_ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
_SYNCHRONIZED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): nothing is "
    "reduced again; say `with optimizer.skip_synchronize(): optimizer.step()`"
)


def DistributedOptimizer(
    optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average,
    gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=global_process_set, *,
    gradient_as_bucket_view=True,
):  # fmt: skip
    """Return an optimizer with the same class and state that reduces gradients before steps.

    All ranks of the process set construct and step the same optimizers in the same order; other
    ranks step on their own.

    A parameter with no gradient on this rank takes part with zeros. One with no gradient on any
    rank keeps ``.grad`` None. With a closure the loss is the ranks' average, too, so that all ranks
    decide the same. ``synchronize()`` ends the reduction; after it call ``with
    optimizer.skip_synchronize(): optimizer.step()``. Between the two, gradients may be clipped or
    unscaled.

    Args:
        optimizer: The optimizer.
        named_parameters: (name, parameter) pairs as of ``model.named_parameters()``; for several
            models whose names may be equal a list of such iterables, or a dict of them by prefix.
            None: parameters are named by their positions.
        compression: A class of `Compression`, or a `Compressor` of your own.
        backward_passes_per_step: The number of backwards whose gradients accumulate before they are
            reduced.
        op: `Average`, `Sum`, `Min`, `Max`, `Product`, or `Adasum`, which reduces the changes of a
            step.
        gradient_predivide_factor: Gradients are divided by it before the sum of an average, and
            multiplied by it afterwards.
        num_groups: The deprecated form of ``groups``.
        groups: Lists of parameters that are reduced together, or a number of groups. None: groups
            are filled in the order in which gradients become ready.
        sparse_as_dense: Reduce sparse gradients as dense ones; they are sparse again afterwards, on
            all ranks.
        process_set: The ranks that reduce.
        gradient_as_bucket_view: From the second step on a ``.grad`` is a view of the memory that is
            reduced, and a later step overwrites it. False: gradients stay where the backward has
            put them, and are copied in both directions.

    Raises:
        ValueError: For invalid arguments.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _DistributedOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    if op not in tuple(ReduceOp) or isinstance(op, bool):
        raise ValueError(f"op must be hvd.Average, Sum, Adasum, Min, Max or Product, not {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor must be a number above 0, not {gradient_predivide_factor!r}")
    if num_groups != 0:
        warnings.warn("num_groups has been replaced by groups: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    _check_passes(backward_passes_per_step)
    current().check_process_set(process_set)
    groups = _read_groups(groups)
    named = _read_names(optimizer, named_parameters)
    names = {id(param): name for name, param in reversed(named)}
    if op == Adasum:
        if groups is not None or sparse_as_dense:
            raise ValueError("op=Adasum reduces what a step has changed: leave out groups and sparse_as_dense")
        reducer = AdasumReducer(names, compression, process_set)
    else:
        reducer = GradientReducer(
            names, _prefix(named, process_set), compression, backward_passes_per_step, op,
            gradient_predivide_factor, groups, sparse_as_dense, process_set, views=gradient_as_bucket_view,
        )  # fmt: skip
    base = type(optimizer)
    class_ = type(
        base.__name__, (_DistributedOptimizer, base), {"__module__": base.__module__, "__doc__": base.__doc__}
    )
    wrapped = class_.__new__(class_)
    wrapped.__dict__ = _share_attributes(optimizer, wrapped)
    wrapped._reducer = reducer
    wrapped._parameter_names = {param: name for name, param in named}  # Horovod's programs read it
    compile_gradient_kernels(
        [param for _, param in named], packs=True, wire=getattr(compression, "wire", "fp32"),
        dtypes=[getattr(compression, "dtype", None)],
    )  # fmt: skip
    reducer.register_hooks(wrapped)
    patch_unscale(_reduce_for_scaler)
    return wrapped


def _reduce_for_scaler(optimizer) -> None:
    """Reduce the gradients that a GradScaler is about to unscale and check.

    Otherwise each rank would look for infinities among its own gradients, and some ranks would skip
    the step.
    """
    if isinstance(optimizer, _DistributedOptimizer) and optimizer._reducer.backward_ran:
        optimizer._reducer.synchronize(optimizer)
        optimizer._reducer.reduced_for_scaler = True


def _share_attributes(optimizer, wrapped) -> dict:
    """Return the optimizer's attributes, which both optimizers share from now on.

    A scheduler that wraps the optimizer's ``step`` calls, and counts, the wrapper's steps.
    """
    shared = vars(optimizer)
    patched = shared.get("step")
    if patched is not None:
        if not hasattr(patched, "_wrapped_by_lr_sched"):
            raise ValueError("the optimizer's step() was replaced on the object: wrap it before that")
        owner = weakref.ref(wrapped)

        @functools.wraps(type(wrapped).step)
        def step(*arguments, **options):
            found = owner()
            if found is None:
                raise RuntimeError("this optimizer was wrapped by hvd.DistributedOptimizer, and that one is gone")
            found._opt_called = True
            return type(found).step(found, *arguments, **options)

        step._wrapped_by_lr_sched = True
        shared["step"] = step
    return shared


@untraced
class _DistributedOptimizer:
    """Base class that comes before the optimizer's own class."""

    def synchronize(self) -> None:
        """Reduce all gradients and wait for them; blocks.

        A parameter whose backward isn't complete takes part as it is.
        """
        self._reducer.synchronize(self)

    @contextlib.contextmanager
    def skip_synchronize(self):
        """Context in which step() doesn't reduce, because ``synchronize()`` was called before."""
        if self._reducer.steps_locally:
            raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        self._reducer.skip_reduction = True
        try:
            yield
        finally:
            self._reducer.skip_reduction = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backwards before gradients are reduced; call it between steps."""
        _check_passes(passes)
        self._reducer.set_passes(passes)

    def step(self, closure=None, **options):
        """Reduce the gradients, then step as the optimizer's own class does; blocks."""
        reducer = self._reducer
        stepping = functools.partial(super().step, **options)
        if reducer.steps_locally:
            return reducer.step(self, stepping if closure is None else functools.partial(stepping, closure))
        if closure is None:
            if not reducer.skip_reduction:
                if reducer.synchronized and not reducer.reduced_for_scaler:
                    warnings.warn(_SYNCHRONIZED, stacklevel=3)
                elif not reducer.synchronized:
                    reducer.synchronize(self)
            reducer.begin_step()
            return stepping()
        if not reducer.skip_reduction:
            if reducer.backward_ran:
                reducer.synchronize(self)
            closure = self._reduce_in_closure(closure)
        result = stepping(closure)
        reducer.begin_step()
        return result

    # Optimizer wraps a class's step in a profiler's mark and the step hooks. The inner step has
    # them.
    step.hooked = True

    def _reduce_in_closure(self, closure):
        reducer = self._reducer

        def closure_with_reduction():
            reducer.begin_step()
            loss = closure()
            if not reducer.synchronized:
                reducer.synchronize(self)
            return reducer.average_loss(loss)

        return closure_with_reduction

    def zero_grad(self, *arguments, **options) -> None:
        """As the optimizer's own.

        `AssertionError` between a backward and the step, while gradients are reduced.
        """
        if self._reducer.backward_ran:
            raise AssertionError(_ZERO_GRAD)
        super().zero_grad(*arguments, **options)

    def load_state_dict(self, *arguments, **options) -> None:
        """As the optimizer's own; waits for reductions under way and drops their results."""
        self._reducer.drain()
        super().load_state_dict(*arguments, **options)

    def add_param_group(self, param_group) -> None:
        """As the optimizer's own; its parameters are named by their positions. All ranks add it."""
        super().add_param_group(param_group)
        self._reducer.register_hooks(self)

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a DistributedOptimizer can't be pickled or copied: it has hooks on its parameters. Save its state_dict(), "
            "and wrap an optimizer over the copied parameters"
        )


def _check_passes(passes) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, not {passes!r}")


# ---- Arguments.


def _read_groups(groups):
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return groups
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"groups should be a positive integer or a list of lists of parameters, not {groups!r:.60}")
    seen: set[int] = set()
    for group in groups:
        if isinstance(group, torch.Tensor) or not isinstance(group, Iterable):
            raise ValueError("groups should be a list of lists of parameters")
    read = [list(group) for group in groups]
    for group in read:
        for param in group:
            if not isinstance(param, torch.Tensor):
                raise ValueError(f"groups must consist of torch.Tensor, not of {type(param).__name__}")
            if id(param) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(param))
    return read


def _is_pair(entry) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


def _read_names(optimizer, named_parameters) -> list[tuple[str, torch.Tensor]]:
    """Return (name, parameter) pairs from all forms of ``named_parameters``."""
    inside = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [
            (f"allreduce.noname.{number}.{index}", param)
            for number, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
        ]
    if isinstance(named_parameters, Mapping):
        entries = list(named_parameters.items())
        models = [entry for entry in entries if not isinstance(entry[1], torch.Tensor)]
        named = [entry for entry in entries if isinstance(entry[1], torch.Tensor)]
        several = [(f"{prefix}.", pairs) for prefix, pairs in models]
    else:
        entries = list(named_parameters)
        iterables = [
            not _is_pair(entry) and isinstance(entry, Iterable) and not _is_not_pairs(entry) for entry in entries
        ]
        if entries and all(iterables):
            named, several = [], [(f"{index}.", pairs) for index, pairs in enumerate(entries)]
        else:
            named, several = entries, []
    for prefix, pairs in several:
        pairs = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
        named += [(prefix + pair[0], *pair[1:]) if _is_pair(pair) else pair for pair in pairs]
    if not all(_is_pair(entry) and isinstance(entry[1], torch.Tensor) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters(); for several models a list of such sequences, or a dict of them by prefix"
        )
    twice = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(twice[:8])}. For several models pass a list of their named_parameters(), or a dict "
            "such as {'encoder': encoder.named_parameters(), 'decoder': decoder.named_parameters()}"
        )
    known = {id(param) for _, param in named}
    unnamed = [param for param in inside if id(param) not in known]
    if unnamed:
        shapes = ", ".join(str(tuple(param.shape)) for param in unnamed[:8])
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(unnamed)} of shapes {shapes}: name the parameters of all models that the optimizer has"
        )
    mine = {id(param) for param in inside}
    return [(name, param) for name, param in named if id(param) in mine]


def _is_not_pairs(entry) -> bool:
    """Return whether an iterable entry isn't a sequence of pairs."""
    if isinstance(entry, (str, torch.Tensor)):
        return True
    return isinstance(entry, (tuple, list)) and not all(map(_is_pair, entry))


# By world: the number of optimizers with the same names.
_prefix_counts: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _prefix(named, process_set) -> str:
    """Return a prefix that is unique among optimizers with the same parameter names."""
    counts = _prefix_counts.setdefault(current(), Counter())
    key = process_set.process_set_id, tuple(name for name, _ in named)
    counts[key] += 1
    return "" if counts[key] == 1 else f"{counts[key]}."
