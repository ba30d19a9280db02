"""The report as text and as JSON."""

from __future__ import annotations

import os
import sys

from .findings import ERROR, OK, WARNING, Section

__all__ = ["as_json", "has_errors", "print_report"]

_COLOURS = {ERROR: "31", WARNING: "33", OK: "32", "title": "1"}


def _paint(text: str, kind: str, stream) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_COLOURS[kind]}m{text}\033[0m"


def has_errors(sections: list[Section]) -> bool:
    """Return whether any finding is an error."""
    return any(finding.status == ERROR for section in sections for finding in section.findings)


def as_json(sections: list[Section]) -> dict:
    """Return the report as one object: ``status``, ``sections`` and ``findings``, worst first."""
    worst = OK
    for status in (WARNING, ERROR):
        if any(finding.status == status for section in sections for finding in section.findings):
            worst = status
    return {
        "status": worst,
        "sections": {section.name: section.values for section in sections},
        "findings": [
            {"section": section.name, "status": finding.status, "text": finding.text, "remedy": finding.remedy}
            for status in (ERROR, WARNING, OK)
            for section in sections
            for finding in section.findings
            if finding.status == status
        ],
    }


def print_report(sections: list[Section], stream=None) -> None:
    """Print all values, and then what is wrong and the line that mends it."""
    stream = sys.stdout if stream is None else stream
    for section in sections:
        print(_paint(section.name, "title", stream), file=stream)
        width = max((len(name) for name in section.values), default=0)
        for name, value in section.values.items():
            first, *rest = str(value).splitlines() or [""]
            print(f"  {name:<{width}}  {first}", file=stream)
            for line in rest:
                print(f"  {'':<{width}}  {line}", file=stream)
    print(_paint("found", "title", stream), file=stream)
    found = as_json(sections)["findings"]
    for finding in found:
        print(f"  {_paint(finding['status'] + ':', finding['status'], stream)} {finding['text']}", file=stream)
        print(f"    mend it: {finding['remedy']}", file=stream)
    if not found:
        print(f"  {_paint('nothing wrong', OK, stream)}", file=stream)
