"""Import of the compiled extensions: where they are missing, the error says how to find out why."""

from __future__ import annotations

import os

try:
    from . import _kernels, _nccl  # noqa: F401
except ModuleNotFoundError as error:
    _DOCTOR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "doctor", "__main__.py")
    raise ModuleNotFoundError(
        f"{error}: collectives is not installed whole. What is missing, and the line that mends it: python {_DOCTOR}",
        name=error.name, path=error.path,
    ) from error  # fmt: skip

__all__ = []
