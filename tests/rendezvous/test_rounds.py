"""Records of an elastic job's rounds: what is taken, and what is left out."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from collectives.comm.liveness import this_process
from collectives.errors import Aborted, CollectiveTimeout, InvalidArgument, TransportError
from collectives.rendezvous.launcher_store import LauncherStore
from collectives.rendezvous.rounds import Member, Round, Rounds, find_rounds


def make_rounds(**numbers):
    return Rounds(LauncherStore(dist.HashStore()), **{"start": 1, "least": 1, "most": 2, **numbers})


def test_a_job_of_one():
    rounds = make_rounds()
    first = rounds.join(None, 5.0)
    assert (first.number, first.rank, first.size) == (0, 0, 1)
    assert not rounds.has_joiners(first)
    second = rounds.join(first, 5.0, commits=3, report={"resets": 1})
    assert (second.number, second.members[0].commits, second.members[0].report) == (1, 3, {"resets": 1})
    assert second.joined() == [] and second.lost(first) == []
    rounds.end()
    with pytest.raises(Aborted, match="the job has ended"):
        rounds.join(second, 5.0)


def test_too_few_come():
    with pytest.raises(CollectiveTimeout, match="1 of at least 2 ranks"):
        make_rounds(start=2, least=2).join(None, 0.2)


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_member_that_does_not_come_is_left_out_in_the_end(is_reported):
    """Or at once, where its launcher has reported its death."""
    rounds = make_rounds(most=8)
    absent = Member("another node|pid:[1]|7|99", None, None)
    before = Round(0, (absent, Member(this_process())), 1)
    rounds.store.add("0/count", 2)
    for slot, member in enumerate(before.members):
        rounds.store.set(f"0/member/{slot}", json.dumps(vars(member)))
    rounds.store.set("0/closed", b"[0, 1]".hex())
    if is_reported:
        rounds.report_death(absent.process)
    joined = rounds.join(before, 1e6 if is_reported else 0.3)
    assert joined.size == 1 and joined.lost(before) == [0]


def test_a_record_without_the_secret_is_left_out(monkeypatch):
    rounds = make_rounds()
    rounds.store.add("0/count", 1)
    rounds.store.set("0/member/0", json.dumps(vars(Member("stranger"))))
    monkeypatch.setenv("COLLECTIVES_SECRET", "s" * 16)
    joined = rounds.join(None, 5.0)
    assert [member.process for member in joined.members] == [this_process()]
    monkeypatch.setenv("COLLECTIVES_SECRET", "t" * 16)
    with pytest.raises(TransportError, match="another COLLECTIVES_SECRET"):
        rounds.join(joined, 0.5)


@pytest.mark.parametrize(
    "values",
    [("host", "1:1:1"), ("host:x", "1:1:1"), ("host:1", ""), ("host:1", "1:2:3"), ("host:1", "2:1:1"), ("h:1", "a:b")],
)
def test_variables_that_cannot_be_used(values):
    names = ("COLLECTIVES_ELASTIC_STORE", "COLLECTIVES_ELASTIC_RANKS")
    with pytest.raises(InvalidArgument, match="COLLECTIVES_ELASTIC_"):
        find_rounds(dict(zip(names, values, strict=True)))
    assert find_rounds({}) is None
