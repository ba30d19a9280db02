"""Run rank processes and wait for what they put into a queue, without waiting for ranks that have ended."""

import contextlib
import queue
import time


@contextlib.contextmanager
def running(processes):
    """Start processes; at the end of the block wait for them, 30 s each, and kill what is left, in any case."""
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


def next_answer(results, processes, until: float, who: str):
    """Return the next item of a multiprocessing queue; end the program where a rank has failed or the time is over.

    ``until``: on ``time.monotonic``'s clock, in seconds; ``who``: what to call the run in the message.
    """
    while True:
        try:
            return results.get(timeout=0.5)
        except queue.Empty:
            ended = [process.exitcode for process in processes if process.exitcode]
            if ended or time.monotonic() > until:
                raise SystemExit(f"{who}: " + (f"a rank ended with {ended[0]}" if ended else "too slow")) from None
