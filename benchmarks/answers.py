"""Wait for what rank processes put into a queue, without waiting for ranks that have ended."""

import queue
import time


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
