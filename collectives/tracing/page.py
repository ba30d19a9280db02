"""Page of a timeline: one HTML file with the tables, the picture's data and the code that draws it.

Nothing in it is loaded from elsewhere, and its Content-Security-Policy forbids that; scripts and
styles but its own don't run, whatever a module is called.
"""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape
from pathlib import Path

from .page_data import LIMIT_BYTES, page_data
from .page_tables import about_list, longest_table, summary_table
from .summary import summarize
from .writing import write_whole

__all__ = ["page_path", "page_text", "write_page"]

_SCRIPTS = ("page_model.js", "page_canvas.js", "page_controls.js")


def page_path(trace: Path) -> Path:
    """Return the page's name beside a trace: ``trace.html`` for ``trace.json``; other names get
    ``.html`` appended.
    """
    return trace.with_suffix(".html") if trace.suffix == ".json" else trace.with_name(f"{trace.name}.html")


def write_page(path: Path, records: list[dict], remarks=()) -> None:
    """Write the page of all ranks' records. Raises the ``OSError`` of a file that can't be written."""
    write_whole(path, [page_text(records, remarks)])


def page_text(records: list[dict], remarks=(), limit: int = LIMIT_BYTES) -> str:
    """Return the page as text.

    ``remarks``: further sentences for its head. ``limit``: of the picture's data, in bytes; events
    past it aren't drawn, and the page says so. The tables count all.
    """
    summary = summarize(records)
    data, drawn = page_data(records, limit)
    style, script = _read("page.css"), "".join(map(_read, _SCRIPTS))
    notes = [*_missing_ranks(records), *remarks, *summary.remarks, *drawn.remarks]
    parts = {
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}",
        "title": escape(f"Timeline of {records[0]['about'].get('program', 'a program')}"),
        "about": about_list(records, summary),
        "notes": "".join(f"<li>{escape(note)}</li>\n" for note in notes),
        "summary": summary_table(summary, records[0]["size"]),
        "longest": longest_table(records, drawn),
        "style": style,
        "script": script,
        # "<" can't end the element then, nor begin a comment in it.
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"<!--@(\w+)@-->|@(policy|title)@", lambda found: parts[found[1] or found[2]], _read("page.html"))


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _missing_ranks(records: list[dict]):
    here, size = {record["rank"] for record in records}, records[0]["size"]
    missing = [str(rank) for rank in range(size) if rank not in here]
    if missing:
        listed = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        yield (
            f"Ranks recorded here: {len(here)} of {size}. Missing: {listed}. The ranks' own files are put together by "
            "python -m collectives.tracing trace.rank*.json."
        )
