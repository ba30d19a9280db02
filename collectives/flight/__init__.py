"""Reader of the flight recorder's files: what a job's ranks did last, and what went wrong.

``python -m collectives.flight DIR`` says it in words.
"""

from ..comm.flight_recorder import dump
from .analysis import Finding, analyse
from .reading import Operation, RingFile, read_folder

__all__ = ["Finding", "Operation", "RingFile", "analyse", "dump", "read_folder"]
