"""WireParts: parts of one array with a wire buffer each, which one kernel takes all."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidArgument
from ..layout import count_tiles, wire_layout
from . import abi

__all__ = ["WireParts"]


@dataclass(frozen=True, slots=True)
class WireParts:
    """Parts of one array, such as all ranks' shards of a bucket, each with a wire buffer of its
    own.

    Part p is the ``numel`` elements from ``p * stride`` on; the last ones have what is left of the
    array, or nothing. Its wire buffer begins ``p * wire_stride`` bytes behind part 0's and is as
    long as its own elements need.

    Args:
        count: The number of parts.
        numel: The elements of a part.
        wire_stride: The bytes from one wire buffer to the next, a multiple of 4 and at least what
            ``numel`` elements need.
        stride: The elements from one part to the next, at least ``numel``. None: ``numel``.
    """

    count: int
    numel: int
    wire_stride: int
    stride: int | None = None

    def read(self, total: int, format: str, block: int, op: str) -> tuple[abi.Parts, int, int, int]:
        """Return the kernel's arguments for an array of ``total`` elements, the elements of part 0,
        the bytes from the first wire's first to the last wire's last, and the number of tiles.
        """
        stride = self.numel if self.stride is None else self.stride
        named = {"count": self.count, "numel": self.numel, "wire_stride": self.wire_stride, "stride": stride}
        for name, value in named.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "count"):
                raise InvalidArgument(
                    f"parts.{name} must be a whole number from {name == 'count':d}, not {value!r:.60}", op=op
                )
        if stride < self.numel:
            raise InvalidArgument(f"parts.stride is {stride} elements, less than the {self.numel} of a part", op=op)
        most = (self.count - 1) * stride + self.numel
        if total > most:
            raise InvalidArgument(
                f"the array has {total} elements, {self.count} parts of {self.numel}, {stride} apart, end at {most}",
                op=op,
            )
        needed = wire_layout(self.numel, format, block).nbytes
        if self.wire_stride < needed or self.wire_stride % 4:
            raise InvalidArgument(
                f"parts.wire_stride is {self.wire_stride} bytes: it must be a multiple of 4, and {self.numel} values "
                f"as {format} need {needed}",
                op=op,
            )
        if not total or not self.numel:
            return abi.Parts(total, stride, self.wire_stride), 0, 0, 0
        last = min((total - 1) // stride, self.count - 1)  # the last part that has elements
        left = min(self.numel, total - last * stride)
        nbytes = last * self.wire_stride + wire_layout(left, format, block).nbytes
        tiles = last * count_tiles(self.numel) + count_tiles(left)
        return abi.Parts(total, stride, self.wire_stride), min(self.numel, total), nbytes, tiles
