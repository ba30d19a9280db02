"""What an uncaught exception of this rank leaves behind: a record for torch's launcher, and what is printed.

Exit codes alone don't show whose failure came first: a rank that fails takes its time to end, and
other ranks, whose calls fail with it, may end before it does.
"""

from __future__ import annotations

import os
import sys
import traceback

__all__ = ["print_without_traceback", "record_last_exception"]

_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's launcher sets it, to another file for each rank
_installed = False


def record_last_exception() -> None:
    """Install a hook that records an uncaught exception for the launcher, before it is printed.

    Does nothing outside of torchrun and collectives.run, and when called again.
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


def print_without_traceback(error: BaseException) -> None:
    """Have an exception printed as one line if the program doesn't catch it: its cause is outside of
    the program, and no line of the program is to be looked at.
    """
    before = sys.excepthook

    def hook(kind, uncaught, trace):
        if uncaught is error:
            print(f"collectives: {error}", file=sys.stderr)
        else:
            before(kind, uncaught, trace)

    sys.excepthook = hook


def _record(error: BaseException, trace) -> None:
    """Write the file as torch's ``@record`` does, with the stack of the exception.

    torch takes the stack from the exception that is being handled.
    """
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
