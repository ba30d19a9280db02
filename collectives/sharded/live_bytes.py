"""Count of the bytes of live tensors."""

from __future__ import annotations

import functools

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_compat import TorchDispatchMode, tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make inside it, of `min_bytes` and more, while they live.

    `block`: bytes to whose multiples a storage's are rounded up. `max_allocated`: the most at one
    time. Temporaries inside an operation don't count.
    """

    def __init__(self, *, min_bytes: int = 1, block: int = 1):
        super().__init__()
        self.max_allocated = 0
        self._min_bytes = min_bytes
        self._block = block
        self._live: dict[int, tuple[StorageWeakRef, int, str]] = {}  # by the storage's address
        self._allocated = 0  # bytes of `_live`, some of which may have been freed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not _allocates(function):
            return result
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_plain(leaf)}
        for leaf in tree_leaves(result):
            if _is_plain(leaf) and leaf.untyped_storage()._cdata not in given:
                self._add(leaf.untyped_storage(), self.kind_of(function))
        return result

    def kind_of(self, function) -> str:
        """Return the kind of memory that an operation allocates; here there is one."""
        return ""

    def record_peak(self) -> None:
        """Count what is live now."""
        if self._allocated > self.max_allocated:
            self.max_allocated = max(self.max_allocated, sum(self.bytes_by_kind().values()))

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the live bytes of each kind."""
        self._live = {key: live for key, live in self._live.items() if not live[0].expired()}
        found: dict[str, int] = {}
        for _, nbytes, kind in self._live.values():
            found[kind] = found.get(kind, 0) + nbytes
        self._allocated = sum(found.values())
        return found

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        nbytes = storage.nbytes()
        if nbytes >= self._min_bytes and storage._cdata not in self._live:
            nbytes = -(-nbytes // self._block) * self._block
            self._live[storage._cdata] = StorageWeakRef(storage), nbytes, kind
            self._allocated += nbytes
            self.record_peak()


@functools.cache
def _allocates(function) -> bool:
    """Whether an operation may return memory of its own: its schema doesn't say that it returns
    its arguments' (in place, or a view).
    """
    return any(returned.alias_info is None for returned in function._schema.returns)


def _is_plain(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
