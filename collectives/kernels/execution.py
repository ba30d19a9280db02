"""Running a kernel: on host memory by the library, on a GPU through CuPy; threads, instruction
sets, statistics.
"""

from __future__ import annotations

import functools
import os
import threading
from ctypes import sizeof

import torch
from torch.autograd.graph import increment_version

from .._kernels import Library
from ..arrays import shown
from ..cuda_state import current_stream
from ..environment import parse_whole_number
from ..errors import EngineUnavailable, InvalidArgument
from ..launcher import detect_launcher
from ..torch_compat import TensorBase
from . import abi, cuda
from .rows import Rows
from .tensor_list import PLAIN, check_storage

__all__ = [
    "Launch",
    "Statistics",
    "bump_versions",
    "check_statistics",
    "get_num_threads",
    "library",
    "library_path",
    "run",
    "set_num_threads",
    "thread_limit",
    "use_isa",
]

_library: Library | None = None
_lock = threading.Lock()
_threads: int | None = None
_MANY_THREADS = (1 << 31) - 1  # the most that the library takes
_MOST_THREADS = 8  # memory is fast enough for no more


def library_path() -> str:
    """Return the path of the host library: COLLECTIVES_HOST_LIBRARY, or the one built with this
    package.
    """
    named = os.environ.get("COLLECTIVES_HOST_LIBRARY", "").strip()
    if named:
        return os.path.abspath(named)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return os.path.join(package, "_lib", "libcollectives_host.so")


def library() -> Library:
    """Load the host kernels, once; raise ``EngineUnavailable`` where the library is missing or of
    another version.
    """
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                found = Library(library_path())
                for kernel in (each for each in vars(abi).values() if isinstance(each, abi.Kernel)):
                    if found.args_size(kernel.number) != sizeof(kernel.args):
                        raise EngineUnavailable(
                            f"{found.path} was built from another version: {kernel.name} takes "
                            f"{found.args_size(kernel.number)} bytes there and {sizeof(kernel.args)} here. Cure: "
                            "install this package again"
                        )
                found.use_isa()
                _library = found
    return _library


def use_isa(name: str | None = None) -> str:
    """Select the instruction set of the host kernels from now on, and return its name.

    All instruction sets compute the same bits.

    Args:
        name: "baseline", "avx2" or "avx512". None: COLLECTIVES_ISA's, and without that the widest
            of this processor.

    Raises:
        InvalidArgument: For one that isn't there.
    """
    if name is not None and (not isinstance(name, str) or not name or not name.isascii() or "\0" in name):
        raise InvalidArgument(f"the instruction set must be a name, as 'avx2', or None, not {shown(name)}")
    return library().use_isa(name)


def set_num_threads(count: int | None) -> None:
    """Set the most threads of a host kernel on a big buffer.

    Args:
        count: The number. None: COLLECTIVES_KERNEL_THREADS, else by idle cores.
    """
    global _threads
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 < count <= _MANY_THREADS):
        raise InvalidArgument(
            f"the number of threads must be a whole number from 1 to {_MANY_THREADS}, not {shown(count)}"
        )
    _threads = count


def get_num_threads() -> int:
    """Return the number of threads that the host kernels of a big buffer (1,048,576 elements and
    more) may use.

    That is what `set_num_threads` or COLLECTIVES_KERNEL_THREADS says; else one for each core that
    this process may use, divided by the number of ranks on this node and at most 8. Each call uses
    as many of them as cores are idle.
    """
    return abs(thread_limit())


def thread_limit() -> int:
    """Return collKernelRun's number of threads: a negative one also asks for idle cores."""
    if _threads is not None:
        return _threads
    named = os.environ.get("COLLECTIVES_KERNEL_THREADS", "").strip()
    if not named:
        return -_free_threads()
    number = parse_whole_number(named, 1, _MANY_THREADS)
    if number is None:
        raise InvalidArgument(f"COLLECTIVES_KERNEL_THREADS={named}: must be a whole number from 1 to {_MANY_THREADS}")
    return number


@functools.cache
def _free_threads() -> int:
    try:
        identity = detect_launcher()
    except InvalidArgument:
        return 1  # the job's variables contradict each other; init() reports that
    ranks = identity.local_size or identity.size
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, _MOST_THREADS))


class Launch:
    """A kernel with its checked arguments, to be run any number of times.

    It holds the arrays. Its owner must make sure that their memory isn't exchanged (``resize_``,
    ``.data``), and must move the version counters of what is written.
    """

    __slots__ = ("_device", "_held", "_kernel", "_kept", "_rows", "args")

    def __init__(self, kernel: abi.Kernel, args, device: torch.device, held: tuple, rows: Rows | None = None):
        self._kernel = kernel
        self.args = args
        self._device = device
        self._held = held
        self._rows = rows
        self._kept = None if device.type == "cpu" else cuda.KeptArguments()

    def __call__(self) -> None:
        if self._kept is None:
            run_on_host(self._kernel, self.args, self._rows)
        else:
            cuda.launch(self._kernel, self.args, self._device, self._rows, self._kept)


def run(kernel: abi.Kernel, args, device: torch.device, rows: Rows | None = None) -> None:
    """Run a kernel. On the host it is done when this returns; on a GPU it is queued on torch's
    current stream.

    ``rows``: those of the table that the kernel reads; ``args`` has their address on the host.
    Without ``rows``, ``args`` has the address of rows that stay there until the kernel is done.
    """
    if device.type == "cpu":
        run_on_host(kernel, args, rows)
    else:
        cuda.launch(kernel, args, device, rows)


def bump_versions(arrays) -> None:
    """Increment the version counters of torch tensors that a kernel has written; inference tensors
    have none.
    """
    if not PLAIN.issuperset(map(type, arrays)) or any(map(TensorBase.is_inference, arrays)):
        arrays = [each for each in arrays if isinstance(each, torch.Tensor) and not each.is_inference()]
    increment_version(arrays)


def run_on_host(kernel: abi.Kernel, args, rows: Rows | None = None) -> None:
    """Run a kernel on host memory; ``args`` has the address of its table's ``rows``."""
    library().run(kernel.number, args, thread_limit())


def check_statistics(statistics, op: str) -> None:
    """Raise `InvalidArgument` for what is no `Statistics`."""
    if not isinstance(statistics, Statistics):
        raise InvalidArgument(f"statistics must be a Statistics, not {type(statistics).__name__}", op=op)


class Statistics:
    """The sum of squares and the number of non-finite values that a kernel finds in its pass.

    Each call that gets this object overwrites both. Squares are of the values after scaling and
    before rounding, taken and added in fp32 (fp64 for fp64) inside of tiles of 4,096 elements, then
    in fp64, in an order that depends on neither device nor threads. A value counts as non-finite
    also where rounding it to the destination's type makes it infinite.

    On a GPU the results are there for whatever follows on the same stream; use one object a stream.

    Args:
        device: The device of the two tensors.

    Attributes:
        sum_of_squares: A float64 tensor of one element.
        nonfinite: An int64 tensor of one element.
    """

    def __init__(self, device: torch.device | str = "cpu"):
        self.sum_of_squares = torch.zeros(1, dtype=torch.float64, device=device)
        self.device = self.sum_of_squares.device
        self.nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        self._sums = torch.empty(0, dtype=torch.float64, device=device)
        self._bad = torch.empty(0, dtype=torch.int32, device=device)
        self._streams = []  # on which it was made and used
        if self.device.type == "cuda":
            self._streams.append(torch.cuda.current_stream(self.device))

    @property
    def norm(self) -> torch.Tensor:
        """The square root of the sum of squares, float64, one element; no wait for the GPU."""
        return self.sum_of_squares.sqrt()

    def begin(self, work: abi.Work, device: torch.device, op: str, overlaps=None) -> None:
        """Set where a kernel writes the sums of its tiles. ``overlaps``: whether it also writes to
        (address, bytes).
        """
        if device != self.device:
            raise InvalidArgument(f"the statistics are on {self.device}, the arrays on {device}", op=op)
        for name in ("sum_of_squares", "nonfinite"):
            tensor = getattr(self, name)
            ptr = tensor.data_ptr()
            check_storage(tensor, f"the statistics' {name}", op)
            if overlaps is not None and overlaps(ptr, 8):
                raise InvalidArgument(f"the statistics' {name} lies inside of what is written: use other memory", op=op)
        if self._sums.numel() < work.tiles:
            self._sums = torch.empty(work.tiles, dtype=torch.float64, device=device)
            self._bad = torch.empty(work.tiles, dtype=torch.int32, device=device)
        if device.type == "cuda":
            self._record(current_stream(device))
        work.sums, work.bad = self._sums.data_ptr(), self._bad.data_ptr()
        if not work.tiles:
            work.sums = self.sum_of_squares.data_ptr()  # not NULL: statistics are wanted

    def _record(self, stream) -> None:
        """Keep the memory from being used again while a stream on which it wasn't made uses it."""
        if stream not in self._streams:
            self._streams.append(stream)
        if len(self._streams) > 1:
            for tensor in (self.sum_of_squares, self.nonfinite, self._sums, self._bad):
                tensor.record_stream(stream)

    def finish(self, tiles: int) -> None:
        """Add up the sums of the tiles."""
        args = abi.FinishArgs(
            abi.Work(1, self._sums.data_ptr(), self._bad.data_ptr()),
            tiles,
            self.sum_of_squares.data_ptr(),
            self.nonfinite.data_ptr(),
        )
        run(abi.FINISH, args, self.device)
