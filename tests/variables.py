"""Environment variables for as long as a block runs."""

from __future__ import annotations

import contextlib
import os


@contextlib.contextmanager
def variables(**values):
    """Set variables, and give them back what they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
