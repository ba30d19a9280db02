"""The benchmark with a communicator whose rank 1 spoils three elements of the result of every
all-reduce in place.
"""

import sys

from collectives import Communicator
from collectives.bench.__main__ import main

right = Communicator.all_reduce


def spoil(self, array, *args, **keywords):
    right(self, array, *args, **keywords)
    if self.rank == 1 and array.numel() > 100:
        for element in (0, 100, -1):
            array[element] += 1


Communicator.all_reduce = spoil
sys.exit(main())
