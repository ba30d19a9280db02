"""Rank processes of a benchmark, and the queue of their results."""

import contextlib
import queue
import time


@contextlib.contextmanager
def running(processes):
    """Start processes; at the end of the block wait 30 s for each, and kill those that still run."""
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def next_result(results, processes, deadline: float, name: str):
    """Return the next item of a multiprocessing queue.

    Ends the program where a rank has failed, or at the ``deadline``, in seconds of
    ``time.monotonic``. ``name``: of the run, for the message.
    """
    while True:
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            ended = [process.exitcode for process in processes if process.exitcode]
            if ended or time.monotonic() > deadline:
                raise SystemExit(f"{name}: " + (f"a rank ended with {ended[0]}" if ended else "too slow")) from None
