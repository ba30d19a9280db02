"""The test of the tests: errors planted in the launchers, each of which the comparison of the two texts must catch.

A new family adds its cases and its rows. A row must change what the kernel does: no slower way to the same memory.
`make test` plants a few of them, chosen by the commit's hash, `make thorough` the others (tests/conftest.py).
"""

from __future__ import annotations

import pytest

from . import mutant_rows
from .mutants import Mutant, compile_soon, outcome, text_of

ROWS = mutant_rows.rows()
LAUNCHERS = sorted({mutant.launcher for mutant, _ in ROWS})


@pytest.fixture(scope="module", autouse=True)
def compile_ahead(request):
    """Compile those that will be asked for, beside the tests; not where other processes run the half of them."""
    if hasattr(request.config, "workerinput"):
        return
    for item in request.session.items:
        if item.module is request.module and "mutant" in getattr(item, "fixturenames", ()):
            compile_soon(item.callspec.params["mutant"])


@pytest.mark.sampled(one_in=100)
@pytest.mark.parametrize(("mutant", "cases"), ROWS, ids=lambda value: str(value) if isinstance(value, Mutant) else "by")
def test_mutants_are_caught(mutant, cases):
    found = outcome(compile_soon(mutant).result(), cases)
    print(found.detail)
    assert not found.same, "nothing noticed this error"


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_is_not_changed_passes(launcher):
    """Each case, on each text that it is used for: what is caught above is caught because of the change."""
    cases = tuple(dict.fromkeys(case for mutant, them in ROWS if mutant.launcher == launcher for case in them))
    found = outcome(text_of(Mutant(launcher, "", "")), cases)
    assert found.same, found.detail


def test_a_change_of_what_is_not_there_is_an_error():
    for before in ("no such text", "COLL_PACK"):
        with pytest.raises(AssertionError, match="has .* times what this mutant changes"):
            text_of(Mutant("cuda/cast.cu", before, "other"))
