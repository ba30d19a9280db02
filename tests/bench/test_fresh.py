"""New data in every call: each call has the next array, and what is left in the arrays is checked. No process."""

import pytest
import torch

from collectives.bench.cases import OPS, TYPES, Case
from collectives.bench.implementation import InProcessImplementation, Plan


class Doubling(InProcessImplementation):
    """An all-reduce of two ranks that have the same input; notes on what it was called."""

    def __init__(self):
        super().__init__(0)
        self.calls, self.barriers, self.wrong_calls = [], 0, ()

    def barrier(self):
        self.barriers += 1

    def make_first_call(self, call):
        pass  # so that the calls of the turns are counted alone

    def make_call(self, case, buffers):
        def call():
            self.calls.append((buffers.recv.data_ptr(), buffers.send.clone()))
            torch.mul(buffers.send, 2, out=buffers.recv)
            buffers.recv[7] += len(self.calls) in self.wrong_calls

        return call


class SameInput(Case):
    def inputs(self):
        return super().inputs()[:1].repeat(2, 0)


CASE = SameInput(**vars(Case.of(OPS["all_reduce"], TYPES["float32"], "sum", 0, 4000, 2)))


@pytest.mark.parametrize("in_place", [False, True])
def test_each_call_has_the_next_array_with_its_input(in_place):
    library = Doubling()
    library.prepare(CASE, in_place, 4)
    (times,) = library.time_turn(Plan(warmup=2, calls=3, batches=2, fresh=True))
    assert len(times) == 2 and min(times) > 0 and library.barriers == 1 + 8
    addresses = [address for address, _ in library.calls]
    assert len(set(addresses)) == 4 and addresses[:4] == addresses[4:]
    first = library.calls[0][1]
    assert all(torch.equal(send, first) for _, send in library.calls)  # in place: written anew
    library.time_turn(Plan(warmup=0, calls=1, batches=1, fresh=True))
    assert library.calls[8][0] == addresses[0]  # a turn goes on where the last one has ended
    assert library.check() == [0]


@pytest.mark.parametrize(
    ("wrong_calls", "counts"), [((3,), [1, 0]), ((5,), [1, 0]), ((1, 2, 4), [1, 0]), ((7,), [0, 1])]
)
def test_what_fresh_turns_have_left_is_checked_once(wrong_calls, counts):
    """Of 5 calls on 3 arrays the first two are overwritten; the check makes the sixth, the next the seventh."""
    library = Doubling()
    library.wrong_calls = wrong_calls
    library.prepare(CASE, True, 3)
    library.time_turn(Plan(warmup=0, calls=5, batches=1, fresh=True))
    assert [library.check()[0], library.check()[0]] == counts
