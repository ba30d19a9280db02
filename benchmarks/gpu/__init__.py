"""`make gpu`: everything that only a GPU can show, in one command, offline, within a time budget.

A program of this package that starts with COLLECTIVES_TEST_SIMULATED_GPU set has that many simulated
GPUs: they must be registered before anything imports torch, so it is done here.
"""

import os

VARIABLE = "COLLECTIVES_TEST_SIMULATED_GPU"

if os.environ.get(VARIABLE):
    from tests.streams.start import start

    start(int(os.environ[VARIABLE]))
