"""The report: findings as aligned text or as one JSON object, without names of people or hosts."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from .finding import ERROR, OK, WARNING, Finding, worst

__all__ = ["make_mask", "write_json", "write_text"]

_COLOURS = {OK: "32", WARNING: "33", ERROR: "31"}
_WIDEST = 120
_COMMON = ("root", "user", "localhost", "host", "docker", "python", "torch")  # names that name nobody


def make_mask() -> Callable[[Any], Any]:
    """Return a function that replaces the home folder, the user's and the host's name in any values."""
    pairs = []
    home = os.path.expanduser("~")
    if len(home) > 1 and home != "/root":
        pairs.append((re.escape(home) + r"(?![\w.-])", "~"))
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in a container
        user = ""
    host = socket.gethostname()
    for name, word in ((host, "<host>"), (host.partition(".")[0], "<host>"), (user, "<user>")):
        if len(name) > 2 and name not in _COMMON:
            pairs.append((rf"(?<![\w.-]){re.escape(name)}(?![\w-])", word))
    patterns = [(re.compile(pattern), word) for pattern, word in pairs]

    def mask(value):
        if isinstance(value, str):
            for pattern, word in patterns:
                value = pattern.sub(word, value)
            return value
        if isinstance(value, dict):
            return {key: mask(each) for key, each in value.items()}
        return [mask(each) for each in value] if isinstance(value, list | tuple) else value

    return mask


def write_json(findings: Sequence[Finding], header: dict, mask: Callable[[Any], Any], file: TextIO) -> None:
    """Write one JSON object: the header's entries, ``status``, and ``findings``."""
    rows = [
        {"name": each.name, "status": each.status, "text": each.text, "remedy": each.remedy, "values": each.values}
        for each in findings
    ]
    json.dump(mask({**header, "status": worst(findings), "findings": rows}), file, indent=1)
    file.write("\n")


def write_text(findings: Sequence[Finding], title: str, mask: Callable[[Any], Any], file: TextIO) -> None:
    """Write a line for each finding, and at the end what is wrong with the line that fixes it."""
    coloured = file.isatty() and not os.environ.get("NO_COLOR")
    width = min(shutil.get_terminal_size((100, 24)).columns, _WIDEST)
    names = max(len(each.name) for each in findings)

    def status_of(each: Finding) -> str:
        word = f"{each.status:<7}"
        return f"\x1b[{_COLOURS[each.status]}m{word}\x1b[0m" if coloured else word

    print(mask(title), end="\n\n", file=file)
    for each in findings:
        indent = 7 + 2 + names + 2
        text = textwrap.wrap(mask(each.text), max(width - indent, 40), break_on_hyphens=False, break_long_words=False)
        print(f"{status_of(each)}  {each.name:<{names}}  {text[0] if text else ''}", file=file)
        for line in text[1:]:
            print(" " * indent + line, file=file)
    wrong = [each for each in findings if each.status != OK]
    print(file=file)
    if not wrong:
        print("Nothing is wrong.", file=file)
    else:
        errors = sum(each.status == ERROR for each in wrong)
        print(f"To fix: {errors} error{'s' * (errors != 1)}, {len(wrong) - errors} warning"
              f"{'s' * (len(wrong) - errors != 1)}", file=file)  # fmt: skip
        fixed: set[str] = set()  # what follows from another fault is fixed by the same line
        for each in sorted(wrong, key=lambda each: each.status != ERROR):
            if each.remedy in fixed:
                continue
            fixed.add(each.remedy)
            first = textwrap.shorten(mask(each.text), 2 * width, placeholder=" ...")
            print(file=file)
            lines = textwrap.wrap(first, width - 9, break_on_hyphens=False, break_long_words=False)
            for index, line in enumerate(lines):
                print((f"{status_of(each)}  " if index == 0 else " " * 9) + line, file=file)
            print(f"         $ {mask(each.remedy)}", file=file)
        stacks = [each.values["output"] for each in wrong if each.values.get("output")]
        if stacks:
            print("\nWhat the failed process printed last:\n" + textwrap.indent(mask(stacks[0]), "  "), file=file)
    file.flush()
