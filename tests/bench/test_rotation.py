"""New data in every call: how many arrays there are, that each call has the next one, and that what is
left in them is checked.
"""

import pytest
import torch

from collectives.bench.cases import OPS, TYPES, Case
from collectives.bench.implementation import InProcessImplementation, Plan
from collectives.bench.options import UsageError, parse
from collectives.bench.rotation import bytes_of_arrays, count_arrays, last_level_cache

MIB = 1 << 20


def all_reduce(nbytes, ranks=2):
    return Case.of(OPS["all_reduce"], TYPES["float32"], "sum", 0, nbytes, ranks)


@pytest.mark.parametrize(
    ("nbytes", "calls", "most", "arrays"),
    [
        (1024, 325, 512 * MIB, 325),  # each call has an array of its own
        (MIB, 100, 512 * MIB, 32),  # which pass a cache of 32 MiB
        (64 * MIB, 100, 512 * MIB, 1),  # one is larger than the cache
        (16 * MIB, 100, 40 * MIB, 2),  # more don't fit
        (16 * MIB, 100, MIB, 1),
        (0, 10, 512 * MIB, 10),
    ],
)
def test_count(nbytes, calls, most, arrays):
    assert count_arrays(all_reduce(nbytes), True, calls, 32 * MIB, most) == arrays


def test_bytes_are_those_of_the_rank_that_has_most():
    gather = Case.of(OPS["gather"], TYPES["float32"], None, 1, 3 * 1024, 3)
    assert bytes_of_arrays(gather, True) == 3 * 1024 + 64
    assert bytes_of_arrays(gather, False) == 4 * 1024 + 128


def test_the_last_level_cache_is_sysfs_s(tmp_path):
    assert last_level_cache(tmp_path) == 0  # nothing is known
    assert count_arrays(all_reduce(8 * MIB), True, 100, 0, 512 * MIB) == 8
    for index, (level, size) in enumerate([(1, "48K"), (3, "36864K"), (2, "2M"), (4, "odd")]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(f"{level}\n")
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    (tmp_path / "index9").mkdir()
    assert last_level_cache(tmp_path) == 36 * MIB


class Doubling(InProcessImplementation):
    """An all-reduce of two ranks that have the same input; notes where and on what it was called."""

    def __init__(self):
        super().__init__(0)
        self.calls, self.barriers, self.wrong_calls = [], 0, ()

    def barrier(self):
        self.barriers += 1

    def make_call(self, case, buffers):
        def call():
            self.calls.append((buffers.recv.data_ptr(), buffers.send.clone()))
            torch.mul(buffers.send, 2, out=buffers.recv)
            buffers.recv[7] += len(self.calls) in self.wrong_calls

        return call


class SameInput(Case):
    def inputs(self):
        return super().inputs()[:1].repeat(2, 0)


@pytest.mark.parametrize("in_place", [False, True])
def test_each_call_has_the_next_array_with_its_input(in_place):
    case, library = SameInput(**vars(all_reduce(4000))), Doubling()
    library.prepare(case, in_place, 4)
    (times,) = library.turn(Plan(warmup=2, calls=3, batches=2, fresh=True))
    assert len(times) == 2 and min(times) > 0 and library.barriers == 1 + 8
    addresses = [address for address, _ in library.calls]
    assert len(set(addresses)) == 4 and addresses[:4] == addresses[4:]
    assert all(address % 64 == 0 for address in addresses)
    first = library.calls[0][1]
    assert all(torch.equal(send, first) for _, send in library.calls)  # in place: written anew
    library.turn(Plan(warmup=0, calls=1, batches=1, fresh=True))
    assert library.calls[8][0] == addresses[0]  # a turn goes on where the last one has ended
    assert library.check() == [0]


@pytest.mark.parametrize(
    ("wrong_calls", "counts"), [((3,), [1, 0]), ((5,), [1, 0]), ((1, 2, 4), [1, 0]), ((7,), [0, 1])]
)
def test_what_fresh_turns_have_left_is_checked_once(wrong_calls, counts):
    """Of 5 calls on 3 arrays the first two are overwritten; the check makes the sixth, the next the seventh."""
    library = Doubling()
    library.wrong_calls = wrong_calls
    library.prepare(SameInput(**vars(all_reduce(4000))), True, 3)
    library.turn(Plan(warmup=0, calls=5, batches=1, fresh=True))
    assert [library.check()[0], library.check()[0]] == counts


def test_option():
    assert parse([]).fresh is None
    assert parse(["--fresh"]).fresh == 512 * MIB and parse(["--fresh", "3M"]).fresh == 3 * MIB
    for wrong in ("0", "much"):
        with pytest.raises(UsageError, match="--fresh"):
            parse(["--fresh", wrong])
