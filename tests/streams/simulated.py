"""What tests of CUDA paths need: to run on the simulated GPU and on the host alike, and to be skipped with a reason."""

from __future__ import annotations

import contextlib

import pytest

from . import start

_reason = start.why_not()
needs_simulation = pytest.mark.skipif(bool(_reason), reason=_reason)


@contextlib.contextmanager
def steps(ctx, strictly=True):
    """A training step: on the simulated GPU the host must not wait in it, unless ``strictly`` is False."""
    if ctx.device_name != "simulated" or not strictly:
        yield
        return
    from .running import step

    with step():
        yield
