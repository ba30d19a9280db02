"""The process group of this backend, which torch.distributed calls from Python and from C++.

It is a subclass of torch's ``ProcessGroup`` and takes its place; `mixed` adds the backends of the
group's other devices. Torch 2.14 and newer let Python subclass ``Backend``, too, to which torch's own
process group dispatches. But its dispatcher hands the program a holder of the Work, which forwards
``wait`` and ``get_future`` alone: ``is_completed`` is False for ever, ``exception`` always None, and
a receive from any source has no source.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
import torch.distributed as dist

from ..comm.communicator import Communicator
from ..comm.config import CommConfig
from ..comm.error_ranks import renumber_error
from ..comm.liveness import RankExits, publish_process
from ..comm.mem_pool import use_mem_pool
from ..comm.shared_memory_pool import SharedMemoryPool
from ..errors import CollectivesError, InvalidArgument, InvalidUsage
from ..rendezvous.group_life import begin_life
from ..rendezvous.process_groups import open_over_store, register_group_backend, unregister_group_backend
from ..torch_compat import c10d_backend, untraced
from .barriers import Barriers
from .channels import Channels
from .data_ops import DataOps
from .device_channels import DeviceChannels
from .meeting import Meeting
from .options import parse_options
from .p2p_ops import PointToPointOps
from .reduction_ops import ReductionOps
from .tensors import run_all
from .work import BackendWork

__all__ = ["CollectivesGroup"]

_CPU = torch.device("cpu")


@untraced
class CollectivesGroup(ReductionOps, DataOps, PointToPointOps, Barriers, dist.ProcessGroup):
    """Process group on this package's communicators: one for each device, shared with its hooks.

    `store`: the group's own; `timeout`: a timedelta; `name`: the group's; `global_ranks`: of its
    ranks in the default group; `devices`: the device types that it serves; `config`: of its
    communicators; `comm`: that of one device, which is open already, and stays so when the group is
    destroyed: `over_comm.open_group_over`. No other group has used its `store`.

    The constructor blocks until all ranks have come, and opens the CPU's communicator; a GPU's is
    opened at its first use, or at once where ``init_process_group`` has a `device_id`.
    """

    def __init__(
        self, store, rank: int, size: int, timeout: timedelta, name: str, global_ranks, devices,
        config: CommConfig | None = None, comm: Communicator | None = None,
    ):  # fmt: skip
        super().__init__(rank, size)
        self._rank, self._size, self._name, self._desc = rank, size, name, "undefined"
        self._global_ranks = list(global_ranks) or list(range(size))
        self._device_names = tuple(devices)
        self._timeout = timeout.total_seconds()
        if comm is None:
            store = begin_life(store, rank, size, self._timeout, f"to create process group {name!r}")
        self._store = store
        self._config = config or CommConfig()
        self._options = c10d_backend().Options("collectives", timeout)
        self._comms: dict[torch.device, Communicator] = {} if comm is None else {comm.device: comm}
        self._given = comm
        self._pool = SharedMemoryPool()
        self._sequence = 0
        self._monitored = 0
        self._coalesced: list[BackendWork] | None = None
        self._coalescing = contextlib.ExitStack()
        self._split_count = 0
        self._shut_down = False
        self._registered_name = name
        self._device_channels = DeviceChannels(rank, self._connect, self._timeout)
        register_group_backend(name, self)
        publish_process(self._store, rank)
        if "cpu" in devices and comm is None:
            self.communicator(_CPU)
        self._meeting = Meeting(self._store, rank, RankExits(self._store, range(size)))
        self._channels = Channels(rank, size, self._connect, self._meeting, self._store, self._timeout)

    # ---- Communicators.

    def communicator(self, device: torch.device) -> Communicator:
        """Return the group's communicator of a device, which the first call opens on all ranks."""
        if self._device_channels.unissued:
            self._device_channels.issue_opened()
        comm = self._comms.get(device)
        return self._open(device) if comm is None else comm

    def _check_device(self, device: torch.device) -> None:
        """Raise an error where the group does not serve a device, or was destroyed."""
        if device.type not in self._device_names:
            raise InvalidArgument(
                f"the group {self._name!r} has no communicator for {device}: it was created for "
                f"{' and '.join(self._device_names)}",
                op="init", rank=self._rank,
            )  # fmt: skip
        if self._shut_down:
            raise InvalidUsage(f"the process group {self._name!r} was destroyed", rank=self._rank)

    def _open(self, device: torch.device) -> Communicator:
        self._check_device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._comms:
            publish_process(self._store, self._rank)
            self._comms[device] = open_over_store(
                self._store, device.type, self._rank, self._size, device, self._timeout,
                f"to open the communicator of process group {self._name!r} on {device.type}",
                RankExits(self._store, range(self._size)), self._config,
            )  # fmt: skip
        return self._comms[device]

    def _connect(self, source: int, destination: int, device: torch.device = _CPU) -> Communicator:
        """Open the communicator of a channel: the source is its rank 0, the destination rank 1.

        Blocks until the other one does so too, or the group's end.
        """
        ranks, name = (source, destination), f"p2p/{device.type}/{source}/{destination}"
        publish_process(self._store, self._rank)
        self._meeting.wait(destination if source == self._rank else source, name)
        try:
            return open_over_store(
                self._store, name, ranks.index(self._rank), 2, device, self._timeout,
                f"to send from rank 0 to rank 1 of process group {self._name!r}", self._meeting.exits_of(ranks),
                self._config, agrees=False, logged_ranks=ranks,
            )  # fmt: skip
        except CollectivesError as error:
            raise renumber_error(error, ranks, op="init", rank=self._rank) from error

    def forget(self, comm: Communicator) -> None:
        """Drop a communicator that has failed: the next use opens another one on all ranks."""
        for device, known in list(self._comms.items()):
            if known is comm:
                del self._comms[device]

    # ---- What torch asks a process group, or a backend, for.

    def getBackendName(self) -> str:  # noqa: N802  (torch's names)
        return "collectives"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in self._device_names]

    def _get_backend(self, device):
        """Return what serves a device, which torch's own groups have a Backend for."""
        if torch.device(device).type not in self._device_names:
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self

    @property
    def options(self):
        return self._options

    def get_group_store(self):
        """Return the group's store."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of the operations from now on."""
        self._timeout = timeout.total_seconds()
        self._options._timeout = timeout
        self._channels.timeout = self._device_channels.timeout = self._timeout
        for comm in self._comms.values():
            comm.timeout = self._timeout

    _set_default_timeout = set_timeout

    # ---- Memory, which FSDP2 takes for its buffers.

    def supports_tensor_alloc(self, device) -> bool:
        """Return whether `allocate_tensor` works for a device."""
        kind = torch.device(device).type
        return kind in self._device_names and (kind == "cpu" or torch.cuda.is_available())

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device) -> torch.Tensor:
        """Return `size` elements of memory of the engine, which collectives use with no copy.

        Freed memory is kept for the next call: on the host until the group ends, on CUDA in a pool
        of torch's allocator, which orders its use by streams.
        """
        device = torch.device(device)
        if device.type == "cpu":
            return self._pool.allocate(self.communicator(device), size, dtype)
        with use_mem_pool(device):
            return torch.empty(size, dtype=dtype, device=device)

    # ---- Coalescing: calls that become one operation.

    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = False

    def start_coalescing(self, device=None) -> None:
        """Begin a block of calls that are issued together by `end_coalescing`."""
        if self._coalesced is not None:
            raise InvalidUsage("a coalescing block is open already", rank=self._rank)
        self._coalescing.enter_context(self._any_communicator(device).group())
        self._coalesced = []

    def end_coalescing(self, device=None) -> BackendWork:
        """Issue the calls since `start_coalescing`; return the Work of all of them."""
        if self._coalesced is None:
            raise InvalidUsage("no coalescing block is open", rank=self._rank)
        works, self._coalesced = self._coalesced, None
        self._coalescing.close()
        return BackendWork([each for work in works for each in work._works], [], run_all(work._store for work in works))

    def cancel_coalescing(self) -> None:
        """Drop the calls of an open coalescing block, since an exception has ended it."""
        self._coalesced = None
        stack, self._coalescing = self._coalescing, contextlib.ExitStack()
        stack.__exit__(InvalidUsage, InvalidUsage("the coalescing block raised"), None)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    def _any_communicator(self, device) -> Communicator:
        return self.communicator(torch.device(self._device_names[0] if device is None else device))

    # ---- Parts of a group.

    @property
    def supports_splitting(self) -> bool:
        return torch.cuda.is_available()

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Open a GPU's communicator now: ``init_process_group(device_id=...)`` calls it."""
        self.bound_device_id = device
        self.communicator(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: groups that this rank is no part of are opened without it."""

    def comm_split_count(self) -> int:
        """Return how many groups were split off this one."""
        return self._split_count

    def split_group(self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, devices=None):
        """Return the group of some ranks of this one; ``dist.split_group`` calls it on all of them."""
        self._split_count += 1
        ranks = [int(each) for each in ranks]
        child = type(self)(
            dist.PrefixStore(f"split/{self._split_count}/{min(ranks)}", self._store), ranks.index(self._rank),
            len(ranks), timeout or timedelta(seconds=self._timeout), group_name or f"{self._name}:split",
            [self._global_ranks[each] for each in ranks],
            self._device_names if devices is None else [torch.device(each).type for each in devices],
            parse_options(opts, self._config),
        )  # fmt: skip
        child.setGroupDesc(group_desc or "undefined")
        return child

    # ---- The end.

    @property
    def is_shut_down(self) -> bool:
        """Whether the group was destroyed or aborted."""
        return self._shut_down

    def _end(self, aborts: bool) -> None:
        """Refuse further operations, and end the sends and receives."""
        self._shut_down = True
        self._meeting.end()
        unregister_group_backend(self._registered_name, self)
        self._channels.close()
        self._device_channels.close(aborts)
        self._pool.trim()

    def abort(self) -> None:
        """End everything in flight on this rank, from any thread."""
        self._end(aborts=True)
        for comm in self._comms.values():
            comm.abort()

    def shutdown(self) -> None:
        """Wait for what is in flight, then free the communicators; ``destroy_process_group`` calls it."""
        if self._shut_down:
            return
        self._end(aborts=False)
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            if comm is not self._given:
                comm.close()
