"""Bucket layouts of a saved run, in which the first backwards after loading are reduced, so that
the results are bit for bit those of an uninterrupted run.

A new DDP object makes its buckets anew, and again after one or two backwards. The blocks of 8-bit
wires, a sum's second rounding and a norm's partial sums depend on the buckets.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
import weakref

from torch.utils.weak import WeakIdKeyDictionary

from ..comm.agree import verify_same
from ..parameter_names import ParameterNames

__all__ = ["SavedBuckets"]

_BACKWARDS_TO_FINAL = 2  # backwards after which DDP's buckets are the final ones, static_graph's too
_BACKWARDS_TO_WARN = 3  # backwards after which loaded state that matches no parameter is named
_MAX_NAMES = 8  # in a message


class _SavedLayout:
    """Buckets of one module as they were saved: `layout`, names by bucket.

    `layout` is None once the buckets are no longer used.
    """

    __slots__ = ("claimed", "layout", "used")

    def __init__(self, layout: list[list[str]]):
        self.layout: list[list[str]] | None = layout
        self.claimed = False
        self.used = 0  # number of backwards

    def regroup(self, buckets: list[list], parameter_names: ParameterNames) -> list[list]:
        """Return the parameters of each bucket to reduce in: those of the saved layout, or DDP's
        own `buckets`.
        """
        named = {
            name: param
            for params in buckets
            for name, param in zip(parameter_names.lookup(params), params, strict=True)
        }
        layout, self.used = self.layout, self.used + 1
        unmatched = {*itertools.chain.from_iterable(layout)}.symmetric_difference(named)
        if unmatched:
            warnings.warn(
                "the HookState was saved with other gradients than there are now, so that the next steps are not those "
                f"of the saved run bit for bit: only one of both has {_shown(sorted(map(str, unmatched)))}",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        final = self.used > _BACKWARDS_TO_FINAL
        if unmatched or final or layout == [parameter_names.lookup(params) for params in buckets]:
            self.layout = None  # DDP's own buckets are the saved ones, or it is another model
            return buckets
        return [[named[name] for name in bucket] for bucket in layout]


class SavedBuckets:
    """Bucket layouts, by name: of each module's last backward, and of a saved run.

    The former are saved; the first backwards after loading use the latter.
    """

    def __init__(self, parameter_names: ParameterNames):
        self._parameter_names = parameter_names
        self._seen: dict[tuple, list[list[weakref.ref]]] = {}  # ids of all parameters -> the parameters, by bucket
        self._saved: list[_SavedLayout] | None = None  # None: nothing was loaded
        self.world_size = 0  # of the saved run
        self._layout_of = WeakIdKeyDictionary()  # parameter -> the member of `_saved` that its module uses, or None
        self.warn_in = 0  # backwards until `warn_unmatched` checks the loaded state; 0: it does not

    # ---- Saving.

    def remember(self, buckets: list[list], saved: _SavedLayout | None) -> None:
        """Record a backward's buckets, in place of earlier ones with the same parameters."""
        key = tuple([tuple(map(id, params)) for params in buckets])
        known = self._seen.get(key)
        # Of dead parameters, whose ids others have now?
        if known is None or True in [reference() is None for bucket in known for reference in bucket]:
            here = set(itertools.chain.from_iterable(key))
            for other in list(self._seen):
                if not here.isdisjoint(itertools.chain.from_iterable(other)):
                    del self._seen[other]
            self._seen[key] = [[weakref.ref(param) for param in params] for params in buckets]
            if self._saved is not None:
                for param in itertools.chain.from_iterable(buckets):
                    self._layout_of[param] = saved

    def state_dict(self) -> list[list[list[str]]] | None:
        """Return the names by bucket of each module's last backward, and loaded layouts that were
        not used yet.
        """
        found = [each.layout for each in self._saved or () if not each.claimed]
        for layout in self._seen.values():
            buckets = [[reference() for reference in bucket] for bucket in layout]
            if not any(param is None for bucket in buckets for param in bucket):  # else the module is dead
                names = [self._parameter_names.lookup(bucket) for bucket in buckets]
                if not any(None in bucket for bucket in names):
                    found.append(names)
        return found or None

    # ---- Loading.

    @property
    def resumes(self) -> bool:
        """Whether the buckets of a saved run were loaded."""
        return self._saved is not None

    def load(self, layouts: list[list[list[str]]] | None, world_size: int) -> None:
        """Load a `state_dict` that was saved with `world_size` ranks."""
        self._saved = None if layouts is None else [_SavedLayout(layout) for layout in layouts]
        self.world_size = world_size
        self.schedule_warning()

    def check_world_size(self, world_size: int) -> None:
        """Drop layouts of another number of ranks: nothing can be bit for bit then, and new ranks
        have no layout.
        """
        if self.world_size != world_size:
            self._saved = None

    def find(self, comm, params: list) -> _SavedLayout | None:
        """Return the saved layout of the module that has these parameters of a bucket.

        None where there is none. At a module's first backward the ranks compare their layouts,
        which blocks. Raises `Mismatch` on all ranks where they differ: the ranks would add up
        gradients of different parameters.
        """
        if self._saved is None:
            return None
        if params[0] in self._layout_of:
            return self._layout_of[params[0]]
        own = self._parameter_names.lookup(params)
        names = set(own)
        layouts = ((each, itertools.chain.from_iterable(each.layout or ())) for each in self._saved)
        found = next((each for each, saved in layouts if not names.isdisjoint(saved)), None)
        layout = None if found is None else found.layout
        saved = "none" if layout is None else f"{len(layout)} from {layout[0][0]:.24} ({_digest(layout)})"
        here = f"{len(own)} from {own[0]!s:.24} ({_digest(own)})"
        verify_same(
            comm, "the ranks would go on in different buckets",
            {"saved buckets of this module": saved, "names of its first bucket": here},
            "load on all ranks what they saved at one moment of one run, and register the modules' hooks in one order",
        )  # fmt: skip
        if found is not None:
            found.claimed = True
        for param in params:
            self._layout_of[param] = found
        return found

    def schedule_warning(self) -> None:
        """Let `warn_unmatched` check the loaded state after some backwards."""
        self.warn_in = _BACKWARDS_TO_WARN

    def warn_unmatched(self, compressor) -> None:
        """Count a backward.

        After the third one warn of loaded residuals and buckets that match no parameter.
        """
        self.warn_in -= 1
        if self.warn_in:
            return
        residuals = self._parameter_names.unmatched(compressor.unclaimed_names())
        waiting = [each.layout for each in self._saved or () if not each.claimed]
        others = self._parameter_names.unmatched(name for layout in waiting for bucket in layout for name in bucket)
        for names, what in (
            (residuals, "what the wire had kept"),
            ([name for name in others if name not in residuals], "buckets"),
        ):
            if names:
                warnings.warn(
                    f"the loaded HookState has {what} of {_shown(names)}, and no module that is registered with it has "
                    "these: they are not used. Was it saved with another model, or, where one state serves several "
                    "modules, with these registered in another order?",
                    RuntimeWarning, stacklevel=2,
                )  # fmt: skip


def _digest(names: list) -> str:
    return hashlib.sha256(repr(names).encode()).hexdigest()[:16]


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
