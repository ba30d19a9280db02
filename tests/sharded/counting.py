"""Count of the bytes of live tensors: those that operations make, and the host engine's memory."""

from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collectives.comm import registration
from collectives.sharded import param


class Counted(TorchDispatchMode):
    """Inside it every new storage on the host counts while it lives: `now`, and `most` at one time.

    The engine's blocks count with all their bytes; tensors that view them don't count again.
    Of memory that all ranks share each counts its part. Temporaries inside an operation aren't counted.
    """

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known = {}
        self._common = {}  # bytes by address of memory of all ranks, of which this one's part is counted

    def __enter__(self):
        allocate = registration.allocate

        def counted(*args):
            tensor = allocate(*args)
            self._take(tensor.untyped_storage())
            return tensor

        allocate_common = param.allocate_common

        def noted(comm, nbytes):
            memory, reason = allocate_common(comm, nbytes)
            if memory is not None:
                self._common[memory.ctypes.data] = nbytes
            return memory, reason

        self._patches = [
            mock.patch.object(registration, "allocate", counted), mock.patch.object(param, "allocate_common", noted)
        ]  # fmt: skip
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        for patch in self._patches:
            patch.stop()
        return super().__exit__(*error)

    def begin(self) -> None:
        """Forget the peak so far."""
        self._sweep()
        self.most = self.now

    def _take(self, storage) -> None:
        if storage.nbytes():
            self._known.setdefault(storage._cdata, StorageWeakRef(storage))
        self._sweep()
        self.most = max(self.most, self.now)

    def _sweep(self) -> None:
        """Count what is alive: a storage may have other memory than when it was made."""
        self.now = 0
        for key, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[key]
            elif storage.nbytes() < self._common.get(storage.data_ptr(), 1 << 62):
                self.now += storage.nbytes()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on local parts come here next
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and _address(leaf) not in given:
                self._take(leaf.untyped_storage())
        return result


def _address(leaf):
    return leaf.untyped_storage()._cdata if isinstance(leaf, torch.Tensor) else None
