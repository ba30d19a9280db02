"""The package's environment variables: all are known and described, and what can't be meant is refused."""

from __future__ import annotations

import re
import warnings

import pytest

import collectives
from collectives import environment as variables
from collectives.comm.multinode import topology
from collectives.errors import InvalidArgument
from tests.project.test_imports import PACKAGE, ROOT
from tests.streams.start import VARIABLE


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch):
    monkeypatch.setattr(variables, "_warned", set())
    monkeypatch.delenv("COLLECTIVES_HOST_ID", raising=False)


def alone():
    with collectives.init(device="cpu") as comm:
        return comm.size


@pytest.mark.parametrize("value", ["maybe", "2", "yes"])
def test_a_switch_is_0_or_1(monkeypatch, value):
    monkeypatch.setenv("COLLECTIVES_CHECK", value)
    with pytest.raises(InvalidArgument, match=f"COLLECTIVES_CHECK must be 0 or 1, not '{value}'"):
        alone()
    for good in ("0", "1", "", " 1 "):
        monkeypatch.setenv("COLLECTIVES_CHECK", good)
        assert alone() == 1


@pytest.mark.parametrize(("value", "text"), [("", "set and empty"), (" ", "set and empty"), ("x" * 256, "letters")])
def test_a_machine_has_a_name(monkeypatch, value, text):
    monkeypatch.setenv("COLLECTIVES_HOST_ID", value)
    for call in (alone, topology.read_host_id, topology.identify_node):
        with pytest.raises(InvalidArgument, match=f"COLLECTIVES_HOST_ID .*{text}"):
            call()


def test_the_tests_own_variables_are_no_unknown_ones():
    assert variables.find_unknown({VARIABLE: "4", "COLLECTIVES_SIMULATED": "4"}) == {"COLLECTIVES_SIMULATED": ""}


def test_an_unknown_variable_is_warned_of_once(monkeypatch):
    monkeypatch.setenv("COLLECTIVES_ENGIN", "host")
    monkeypatch.setenv("COLLECTIVES_XYZZYPLUGH", "1")
    with pytest.warns(UserWarning) as caught:
        assert alone() == 1
    first, second = sorted(str(each.message) for each in caught)
    assert first.endswith("COLLECTIVES_ENGIN is unknown to this version and sets nothing: is COLLECTIVES_ENGINE meant?")
    assert second.endswith("COLLECTIVES_XYZZYPLUGH is unknown to this version and sets nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert alone() == 1


def test_all_that_are_read_are_known_and_described():
    text = "".join(path.read_text() for path in (*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.py[xi]")))
    text += "".join(path.read_text() for path in (*(ROOT / "host").glob("*.cpp"), ROOT / "tests" / "conftest.py"))
    named = set(re.findall(r"COLLECTIVES_[A-Z]+(?:_[A-Z]+)*(?!_)\b", text))
    assert named == variables.KNOWN, sorted(named ^ variables.KNOWN)
    page = (ROOT / "docs" / "environment.md").read_text()
    assert set(re.findall(r"COLLECTIVES_[A-Z]+(?:_[A-Z]+)*", page)) == variables.KNOWN
    everywhere = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
    assert set(re.findall(r"COLLECTIVES_[A-Z]+(?:_[A-Z]+)*", everywhere)) == variables.KNOWN
