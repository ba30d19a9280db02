"""The report: findings, as aligned text or as one JSON object."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

__all__ = ["ERROR", "OK", "WARNING", "Finding", "find_worst", "write_json", "write_text"]

OK, WARNING, ERROR = "ok", "warning", "error"
_ORDER = (OK, WARNING, ERROR)
_WIDEST = 120


@dataclass
class Finding:
    """What a check has found.

    `name`: "cores", or "cores.quota" for something wrong. `status`: "ok"; "warning": it works, but
    slowly, or not for every program; "error": it doesn't work. `text`: sentences for a person.
    `remedy`: the one line to type that fixes it, "" where nothing is wrong. `values`: what was
    read, for JSON.
    """

    name: str
    status: str
    text: str
    remedy: str = ""
    values: dict = field(default_factory=dict)


def find_worst(findings: Iterable[Finding]) -> str:
    """Return the worst status of these findings, "ok" for none."""
    return max((each.status for each in findings), key=_ORDER.index, default=OK)


def write_json(findings: Sequence[Finding], header: dict, file: TextIO) -> None:
    """Write one JSON object: the header's entries, ``status``, and ``findings``."""
    rows = [vars(each) for each in findings]
    json.dump({**header, "status": find_worst(findings), "findings": rows}, file, indent=1)
    file.write("\n")


def write_text(findings: Sequence[Finding], title: str, file: TextIO) -> None:
    """Write a line for each finding, and at the end what is wrong with the line that fixes it."""
    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    names = max(len(each.name) for each in findings)

    def write(first: str, text: str) -> None:
        room = max(width - len(first), 40)
        lines = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
        for number, line in enumerate(lines):
            print(f"{first if number == 0 else ' ' * len(first)}{line}", file=file)

    print(title, end="\n\n", file=file)
    for each in findings:
        write(f"{each.status:<7}  {each.name:<{names}}  ", each.text)
    wrong = sorted((each for each in findings if each.status != OK), key=lambda each: each.status != ERROR)
    errors = sum(each.status == ERROR for each in wrong)
    if wrong:
        others = len(wrong) - errors
        print(f"\nTo fix: {errors} error{'s' * (errors != 1)}, {others} warning{'s' * (others != 1)}", file=file)
    else:
        print("\nNothing is wrong.", file=file)
    fixed: set[str] = set()  # what follows from another fault is fixed by the same line
    for each in wrong:
        if each.remedy not in fixed:
            fixed.add(each.remedy)
            print(file=file)
            write(f"{each.status:<7}  ", textwrap.shorten(each.text, 2 * width, placeholder=" ..."))
            print(f"         $ {each.remedy}", file=file)
    output = next((each.values["output"] for each in wrong if each.values.get("output")), "")
    if output:
        print("\nWhat the failed process printed last:\n" + textwrap.indent(output, "  "), file=file)
    print("\nIn an issue attach the output of this too: python -m torch.utils.collect_env", file=file)
    file.flush()
