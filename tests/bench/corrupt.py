"""The benchmark with a communicator whose rank 1 spoils three elements of the result of every
all-reduce.
"""

import sys

from collectives import Communicator
from collectives.bench.__main__ import main

right = Communicator.all_reduce


def spoil(self, array, *args, out=None, **keywords):
    right(self, array, *args, out=out, **keywords)
    result = array if out is None else out
    if self.rank == 1 and result.numel() > 100:
        for element in (0, 100, -1):
            result[element] += 1


Communicator.all_reduce = spoil
sys.exit(main())
