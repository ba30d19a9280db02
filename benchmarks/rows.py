"""Rows of results: the fields that all of them have, and the file that they are appended to."""

import json
from pathlib import Path

import torch

import collectives
from collectives.bench.provenance import where_and_when

__all__ = ["RESULTS", "append_rows", "provenance"]

RESULTS = Path(__file__).resolve().parent / "results"


def provenance():
    """Return the fields of every row.

    Call it before anything of ours runs: one is the machine's load.
    """
    return where_and_when() | {"torch": torch.__version__, "collectives": collectives.__version__}


def append_rows(rows, path):
    """Append rows to a file, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"rows: {path}")
