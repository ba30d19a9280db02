"""The progress board: an epoch ends at one position for all ranks, however late one of them notices it."""

import os
import threading

import pytest

from collectives.comm.liveness import this_process
from collectives.errors import CollectiveTimeout
from collectives.rendezvous.progress_board import ProgressBoard, Status


def boards(ranks, seconds):
    memory = bytearray(ProgressBoard.size_of(ranks))
    return [ProgressBoard(memory, rank, [this_process()] * ranks, lambda: seconds[0]) for rank in range(ranks)]


def together(*calls):
    """Return what the calls return, each in a thread of its own."""
    found = [None] * len(calls)

    def make(at):
        found[at] = calls[at]()

    threads = [threading.Thread(target=make, args=[at], daemon=True) for at in range(len(calls))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    return found


def test_a_rank_that_has_not_noticed_the_end_of_an_epoch_is_waited_for():
    """Two of three ranks leave, begin the next epoch and fail there, before the third runs again."""
    seconds = [60.0]
    first, second, late = boards(3, seconds)
    late._write_notes(7, 0, 0)
    late._words[late._own] = late._word | Status.LEFT  # as `leave` does, before it waits
    assert together(lambda: first.leave(5, 0), lambda: second.leave(6, 0)) == [([5, 6, 7], None)] * 2
    first.fail(Status.INTERRUPTED, 0, 4)
    second.fail(Status.FAILED, 0, 2)
    seconds[0] = 0.2
    with pytest.raises(CollectiveTimeout, match="rank 2") as raised:
        first.recover()
    assert raised.value.peers == (2,)
    seconds[0] = 60.0
    assert late.leave(7, 0) == ([5, 6, 7], None)
    late.fail(Status.FAILED, 0, 6)
    want = [Status.INTERRUPTED, Status.FAILED, Status.FAILED]
    assert together(first.recover, second.recover, late.recover) == [want] * 3
    assert [each.progress for each in (first, second, late)] == [[4, 2, 6]] * 3


def test_ranks_leave_and_recover_many_times():
    """Every rank reads of each epoch what the others have written in it."""
    ranks = boards(3, [60.0])

    def run(rank):
        found = []
        for step in range(200):
            found.append(ranks[rank].leave(10 * step + rank, 0)[0])
            if step % 3 == rank % 2:
                os.sched_yield()
            ranks[rank].fail(Status.FAILED if rank else Status.INTERRUPTED, step, step)
            while ranks[rank].recover() is None:
                assert not ranks[rank].is_needed()
            found.append(list(ranks[rank].progress))
        return found

    want = [each for step in range(200) for each in ([10 * step + rank for rank in range(3)], [step] * 3)]
    assert together(*(lambda rank=rank: run(rank) for rank in range(3))) == [want] * 3
