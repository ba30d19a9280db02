"""Which exception ended this rank, for torch's launcher: exit codes alone don't tell whose failure came first.

A rank that fails takes its time to end, and the others, whose calls fail with it, may be gone before it is.
"""

from __future__ import annotations

import os
import sys
import traceback

__all__ = ["record_last_exception"]

_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's launcher, for each rank another
_installed = False


def record_last_exception() -> None:
    """Have an exception that nobody catches written down for the launcher, before it is printed as ever.

    Under torchrun and collectives.run; elsewhere does nothing. Again: does nothing.
    """
    global _installed
    if _installed or not os.environ.get(_FILE):
        return
    _installed = True
    before, process = sys.excepthook, os.getpid()

    def hook(kind, error, trace):
        if os.getpid() == process and issubclass(kind, Exception) and not os.path.exists(os.environ.get(_FILE, "")):
            _record(error, trace)
        before(kind, error, trace)

    sys.excepthook = hook


def _record(error: BaseException, trace) -> None:
    """Write it as torch's ``@record`` does, which takes the stack from the exception that is being handled."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        try:
            raise error
        except Exception:
            get_error_handler().record_exception(error)
    except OSError:  # a full disk; the traceback is printed in any case
        traceback.print_exc()
    finally:
        error.__traceback__ = trace
