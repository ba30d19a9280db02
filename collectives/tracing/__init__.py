"""Timelines: a Chrome trace, a table and a picture of where the time of a step goes, on every rank.

https://ui.perfetto.dev and chrome://tracing show the trace. ``python -m collectives.tracing`` prints
the table and draws the picture of traces. `collectives.recorder` says what is recorded.
"""

from ..recorder import Recorder, recording
from .session import Timeline, timeline

__all__ = ["Recorder", "Timeline", "recording", "timeline"]
