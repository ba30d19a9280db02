"""Finding: one thing that is well or wrong, and Section: the values and findings of one part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["ERROR", "OK", "WARNING", "Finding", "Section", "make_section"]

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass
class Finding:
    """One thing that was found.

    `status`: "ok", "warning" (training works, and something is slow, or unlike what was meant) or
    "error" (training would fail); `text`: one sentence; `remedy`: the line that mends it, a command
    or a setting, "" where nothing has to be mended.
    """

    status: str
    text: str
    remedy: str = ""


@dataclass
class Section:
    """A part of the report: values by name, in the order in which they are printed, and findings."""

    name: str
    values: dict = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def warn(self, text: str, remedy: str) -> None:
        """Add a warning."""
        self.findings.append(Finding(WARNING, text, remedy))

    def fail(self, text: str, remedy: str) -> None:
        """Add an error."""
        self.findings.append(Finding(ERROR, text, remedy))


def make_section(name: str, examine: Callable[[Section], None]) -> Section:
    """Return the section that `examine` fills in. An exception in it becomes a finding."""
    section = Section(name)
    try:
        examine(section)
    except Exception as error:
        section.fail(f"could not be examined: {type(error).__name__}: {error}", "paste this report into an issue")
    return section
