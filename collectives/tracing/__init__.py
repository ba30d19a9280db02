"""Timelines: a Chrome trace, a page and a report of where the time of a step goes, on every rank.

https://ui.perfetto.dev and chrome://tracing show the trace, any browser the page, which ``python -m
collectives.tracing`` makes from traces. `collectives.recorder` says what is recorded.
"""

from ..recorder import Recorder, recording
from .session import Timeline, timeline

__all__ = ["Recorder", "Timeline", "recording", "timeline"]
