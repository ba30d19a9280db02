"""Picture of the last operations of all ranks, as an SVG file: a row for each rank, time to the right."""

from __future__ import annotations

from collections import defaultdict
from html import escape

from .reading import Operation, RingFile

__all__ = ["draw"]

_WIDTH, _ROW, _LEFT, _TOP = 1200, 22, 150, 40
_COLORS = {
    "all_reduce": "#4878cf", "reduce_scatter": "#6acc65", "all_gather": "#d65f5f", "broadcast": "#b47cc7",
    "send": "#c4ad66", "recv": "#77bedb",
}  # fmt: skip
_PENDING = "#222222"


def draw(rings: list[RingFile], last: int = 200) -> str:
    """Return an SVG of the last operations of each rank, one block for each communicator.

    An operation that is not known to have ended reaches to the right edge, hatched dark.
    """
    groups = defaultdict(list)
    for ring in rings:
        groups[ring.name].append(ring)
    parts, top = [], _TOP
    for name, some in sorted(groups.items()):
        body, height = _draw_comm(name, sorted(some, key=lambda ring: ring.rank), last, top)
        parts += body
        top += height + _TOP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _draw_comm(name: str, rings: list[RingFile], last: int, top: int) -> tuple[list[str], int]:
    shown = {ring.rank: ring.operations[-last:] for ring in rings}
    begins = [op.submitted + ring.clock for ring in rings for op in shown[ring.rank]]
    parts = [f'<text x="8" y="{top - 10}" font-weight="bold">communicator {escape(name)}</text>']
    if not begins:
        return parts, _ROW
    start = min(begins)
    end = max((op.ended or op.submitted) + ring.clock for ring in rings for op in shown[ring.rank])
    end = max(end, max(ring.last_at for ring in rings), start + 1000)
    scale = (_WIDTH - _LEFT - 20) / (end - start)
    for row, ring in enumerate(rings):
        y = top + row * _ROW
        parts.append(f'<text x="8" y="{y + 14}">rank {ring.rank}: {escape(ring.state)}</text>')
        for op in shown[ring.rank]:
            parts.append(_draw_operation(op, ring, start, end, scale, y))
    y = top + len(rings) * _ROW + 14
    parts.append(f'<text x="{_LEFT}" y="{y}" fill="#666">0</text>')
    parts.append(f'<text x="{_WIDTH - 20}" y="{y}" fill="#666" text-anchor="end">{(end - start) / 1e6:.3f} ms</text>')
    return parts, (len(rings) + 1) * _ROW


def _draw_operation(op: Operation, ring: RingFile, start: int, end: int, scale: float, y: int) -> str:
    begin = op.submitted + ring.clock
    until = op.ended + ring.clock if op.ended else (end if op.pending else begin)
    x, width = _LEFT + (begin - start) * scale, max(1.0, (until - begin) * scale)
    color = _PENDING if op.pending else _COLORS.get(op.name, "#999999")
    title = f"{op.number}: {op.describe()}" + (", has not ended" if op.pending else f", {(until - begin) / 1e3:.1f} us")
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill="{color}">'
        f"<title>{escape(title)}</title></rect>"
    )
