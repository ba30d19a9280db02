"""Jobs with a secret: ranks that have it connect, on one node and on several; who lacks it can't join."""

from __future__ import annotations

import os

import pytest
import torch

from collectives.errors import InvalidArgument, TransportError
from collectives.secret import read_secret, seal, unseal
from tests.hosts import joined
from tests.ranks import run_ranks
from tests.variables import variables

SECRET = "a secret of the job"


def sums(ctx, machines, secrets):
    from collectives.comm.engine import get_engine
    from collectives.errors import CollectivesError

    try:
        with variables(COLLECTIVES_SECRET=secrets[ctx.rank]), joined(ctx, machines, timeout=3.0) as comm:
            x = torch.ones(10)
            comm.all_reduce(x)
            return x[0].item()
    except CollectivesError as error:
        return str(error)
    finally:
        get_engine("host").library.set_init_timeout(60.0)  # this process serves other tests, without a secret


@pytest.mark.parametrize("machines", ["aaa", "aab"])
def test_ranks_with_the_secret_connect(machines):
    assert run_ranks(sums, 3, machines, [SECRET] * 3, timeout=40) == [3.0] * 3


def test_a_rank_with_another_secret_is_refused():
    results = run_ranks(sums, 2, "aa", [SECRET, "not the job's secret"], timeout=40)
    assert all("COLLECTIVES_SECRET" in str(text) for text in results), results


def test_a_record_is_taken_for_its_purpose_alone(monkeypatch):
    """And as it was sealed: tests/faults/test_fuzz.py."""
    assert seal(b"record", "a") == b"record" == unseal(b"record", "a")
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    sealed = seal(b"record", "a")
    assert sealed != seal(b"record", "a")  # a nonce
    assert unseal(sealed, "a") == b"record"
    for record, purpose in ((sealed, "b"), (b"record", "a"), (b"", "a")):
        with pytest.raises(TransportError):
            unseal(record, purpose)
    monkeypatch.delenv("COLLECTIVES_SECRET")
    with pytest.raises(TransportError, match="this process has none"):
        unseal(sealed, "a")


def test_a_file_of_the_secret(monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    monkeypatch.setenv("COLLECTIVES_SECRET_FILE", str(path))
    assert read_secret() == SECRET.encode()
    path.chmod(0o640)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        read_secret()
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(InvalidArgument, match="16 to"):
        read_secret()
    monkeypatch.setenv("COLLECTIVES_SECRET", SECRET)
    with pytest.raises(InvalidArgument, match="both set"):
        read_secret()
    monkeypatch.delenv("COLLECTIVES_SECRET")
    monkeypatch.setenv("COLLECTIVES_SECRET_FILE", os.path.join(tmp_path, "none"))
    with pytest.raises(InvalidArgument, match="No such file"):
        read_secret()
