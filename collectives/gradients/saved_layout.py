"""The buckets of a run that was saved, in which its first backwards go on, so that training goes on bit for bit.

A new DDP object makes its buckets anew, and again after one or two backwards; what 8-bit blocks, a sum's second
rounding and a norm's partial sums are depends on them.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
import weakref

from torch.utils.weak import WeakIdKeyDictionary

from ..comm.consensus import RankOptions
from ..errors import Mismatch
from ..parameter_names import Names

__all__ = ["SavedBuckets"]

_REPLAYS = 2  # backwards after which DDP's buckets are the final ones, static_graph's too
_COMES = 3  # backwards after which what was loaded and still matches no parameter is named
_MOST = 8  # names in a message


class _Saved:
    """The buckets of one module as they were saved: `layout`, by name; None once they are not used any more."""

    __slots__ = ("claimed", "layout", "used")

    def __init__(self, layout: list[list[str]]):
        self.layout: list[list[str]] | None = layout
        self.claimed = False
        self.used = 0  # in so many backwards

    def members(self, buckets: list[list], names: Names) -> list[list]:
        """Give the parameters of each bucket to reduce in, for those of DDP's: the saved ones, or DDP's own."""
        named = {name: param for params in buckets for name, param in zip(names.of(params), params, strict=True)}
        layout, self.used = self.layout, self.used + 1
        unlike = {*itertools.chain.from_iterable(layout)}.symmetric_difference(named)
        if unlike:
            warnings.warn(
                "the HookState was saved with other gradients than there are now, so that the next steps are not those "
                f"of the saved run bit for bit: only one of both has {_shown(sorted(map(str, unlike)))}",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        if unlike or self.used > _REPLAYS or layout == [names.of(params) for params in buckets]:
            self.layout = None  # DDP's own are those, or it is another model
            return buckets
        return [[named[name] for name in bucket] for bucket in layout]


class SavedBuckets:
    """In which buckets the parameters of each module were in its last backward, and those of a saved run, by name."""

    def __init__(self, names: Names):
        self._names = names
        self._seen: dict[tuple, list[list[weakref.ref]]] = {}  # ids of all parameters -> the parameters, by bucket
        self._saved: list[_Saved] | None = None  # None: nothing was loaded
        self.ranks = 0  # of the saved run
        self._goes_by = WeakIdKeyDictionary()  # parameter -> what of `_saved` its module goes by, or None
        self._looks_in = 0  # so many backwards

    # ---- What is saved.

    def remember(self, buckets: list[list], saved: _Saved | None) -> None:
        """Take note of a backward's buckets, in place of those in which its parameters were before."""
        key = tuple(tuple(map(id, params)) for params in buckets)
        known = self._seen.get(key)
        if known is None or any(
            reference() is not param
            for bucket, params in zip(known, buckets, strict=True)
            for reference, param in zip(bucket, params, strict=True)
        ):
            here = set(itertools.chain.from_iterable(key))
            for other in list(self._seen):
                if not here.isdisjoint(itertools.chain.from_iterable(other)):
                    del self._seen[other]
            self._seen[key] = [[weakref.ref(param) for param in params] for params in buckets]
            if self._saved is not None:
                for param in itertools.chain.from_iterable(buckets):
                    self._goes_by[param] = saved

    def state_dict(self) -> list[list[list[str]]] | None:
        """Give the buckets of each module's last backward, by name, and those that were loaded and not used yet."""
        found = [each.layout for each in self._saved or () if not each.claimed]
        for layout in self._seen.values():
            buckets = [[reference() for reference in bucket] for bucket in layout]
            if not any(param is None for bucket in buckets for param in bucket):  # else of a module that is gone
                names = [self._names.of(bucket) for bucket in buckets]
                if not any(None in bucket for bucket in names):
                    found.append(names)
        return found or None

    # ---- What was loaded.

    @property
    def resumes(self) -> bool:
        """Whether the buckets of a saved run were loaded."""
        return self._saved is not None

    def load(self, layouts: list[list[list[str]]] | None, ranks: int) -> None:
        """Take what `state_dict` gave with so many ranks."""
        self._saved = None if layouts is None else [_Saved(layout) for layout in layouts]
        self.ranks = ranks
        self.expect()

    def check_ranks(self, ranks: int) -> None:
        """Drop what was saved with another number of ranks: nothing can be bit for bit then, and new ones have none."""
        if self.ranks != ranks:
            self._saved = None

    def find(self, comm, params: list) -> _Saved | None:
        """Give the saved buckets of the module that has these parameters, those of a bucket; None where there are none.

        When the module first comes the ranks compare them, which blocks: with different ones they would add up what
        doesn't belong together. Raises `Mismatch` on all of them then.
        """
        if self._saved is None:
            return None
        if params[0] in self._goes_by:
            return self._goes_by[params[0]]
        own = self._names.of(params)
        names = set(own)
        layouts = ((each, itertools.chain.from_iterable(each.layout or ())) for each in self._saved)
        found = next((each for each, saved in layouts if not names.isdisjoint(saved)), None)
        layout = None if found is None else found.layout
        saved = "none" if layout is None else f"{len(layout)} from {layout[0][0]:.24} ({_digest(layout)})"
        here = f"{len(own)} from {own[0]!s:.24} ({_digest(own)})"
        RankOptions({"saved buckets of this module": saved, "names of its first bucket": here}).verify_same(
            comm, "the ranks would go on in different buckets",
            "load on all ranks what they saved at one moment of one run, and register the modules' hooks in one order",
            Mismatch,
        )  # fmt: skip
        if found is not None:
            found.claimed = True
        for param in params:
            self._goes_by[param] = found
        return found

    def expect(self) -> None:
        """Have `name_unmatched` look after some backwards."""
        self._looks_in = _COMES

    def name_unmatched(self, wire) -> None:
        """Count a backward; after the third one warn of what was loaded, for a wire or as buckets, for no parameter."""
        if not self._looks_in:
            return
        self._looks_in -= 1
        if self._looks_in:
            return
        lost = self._names.unknown(wire.unclaimed())
        waiting = [each.layout for each in self._saved or () if not each.claimed]
        others = self._names.unknown(name for layout in waiting for bucket in layout for name in bucket)
        for names, what in (
            (lost, "what the wire had kept"),
            ([name for name in others if name not in lost], "buckets"),
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
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
