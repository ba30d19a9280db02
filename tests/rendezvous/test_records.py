"""The ranks' records in a rendezvous: what arrives is checked. Any other bytes: tests/faults/test_fuzz.py."""

from __future__ import annotations

import json
import os

import pytest

from collectives import CommConfig
from collectives.errors import InvalidUsage, TransportError
from collectives.rendezvous.peers import RECORD_BYTES, Participant, PeerInfo, parse_record, validate
from tests.comm.test_config import EVERY
from tests.rendezvous.joining import nccl_like, over, threads

pytestmark = pytest.mark.usefixtures("no_launcher")


def records(engine, size=2, /, **changes):
    """The records of a whole world, as the ranks would write them; ``changes``: field -> one value for each rank."""
    written = [json.loads(Participant(rank, size, engine).make_record()) for rank in range(size)]
    for name, values in changes.items():
        for record, value in zip(written, values, strict=True):
            record[name] = value
    return [json.dumps(record).encode() for record in written]


def test_a_record_with_a_wrong_field_or_without_one(host):
    good = json.loads(records(host)[0])
    assert parse_record(records(host)[0], 0)["rank"] == 0
    wrong = [
        ("rank", 1), ("rank", True), ("rank", "0"), ("size", 2.0), ("engine", None), ("host", 7), ("boot_id", []),
        ("pid", "1"), ("device", 0), *(("unique_id", value) for value in ("00", None, "g" * 256, " 0" * 128)),
    ]  # fmt: skip
    bad = [good | {name: value} for name, value in wrong]
    bad += [{name: good[name] for name in good if name != missing} for missing in good]
    for fields in bad:
        with pytest.raises(TransportError, match="no record of rank 0") as caught:
            parse_record(json.dumps(fields).encode(), 0)
        assert caught.value.peers == (0,)


def test_a_foreign_value_in_the_store_is_an_error_and_is_not_unpickled(store, host):
    store.set("test/peer/1", b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    (error,) = threads(*over(store, host, (0,), 2))
    assert type(error) is TransportError and error.peers == (1,)
    store.set("other/error", b"\x80\x04N.")
    (error,) = threads(*over(store, host, (0,), 2, prefix="other"))
    assert type(error) is TransportError


def test_the_ranks_config(host):
    """All have the same, and the longest fits into a record."""
    data = records(host, 3, config=["CommConfig(max_ctas=1)", "CommConfig()", "CommConfig()"])
    with pytest.raises(InvalidUsage, match=r"same config: CommConfig\(max_ctas=1\) on rank 0; CommConfig\(\) on rank"):
        validate(data, Participant(1, 3, host))
    large = {name: 2**31 - 1 for name in ("traffic_class", "num_rma_ctx", "max_p2p_peers", "num_rma_sig")}
    modes = {name: 2**31 - 1 for name in ("host_cft_mode", "nvls_host_mode")}
    config = CommConfig(**{**EVERY, **large, **modes, "net_name": "\\" * 64, "comm_name": "\\" * 64})
    written = Participant(0, 1, host, "cuda:" + "7" * 59, config=repr(config)).make_record()
    assert len(written) < RECORD_BYTES - 300  # the names of hosts are short here
    assert parse_record(written, 0)["config"] == repr(config)


def test_the_host_engine_on_several_machines(host):
    data = records(host, 4, host=["a", "a", "b", "b"], boot_id=["1", "1", "2", "2"])
    found = validate(data, Participant(3, 4, host))
    assert found.nodes == ((0, 1), (2, 3)) and (found.local_rank, found.local_size) == (1, 2)
    for fields in ({"namespace": ["net:[1]", "net:[2]"]}, {"host": ["a", "b"], "boot_id": ["", ""]}):
        assert validate(records(host, 2, **fields), Participant(1, 2, host)).nodes == ((0,), (1,))


def test_nccl_on_several_machines(host):
    engine = nccl_like(lambda: bytes(128))
    names = {"host": ["a", "b", "a", "b", "b"], "boot_id": ["1", "2", "1", "2", "2"], "engine": ["nccl"] * 5}
    data = records(host, 5, **names)
    places = [validate(data, Participant(rank, 5, engine)) for rank in range(5)]
    assert [(place.local_rank, place.local_size) for place in places] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert places[0].peers[3] == PeerInfo(3, "b", "2", os.getpid(), None, places[0].peers[3].namespace)
