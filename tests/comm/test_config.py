"""CommConfig: its fields, what NCCL gets of them, and that all ranks have the same."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

import collectives
from collectives import CommConfig
from collectives._nccl import CONFIG_FIELDS
from collectives.comm.config import gather_config, merge_config, order_launches, parse_config, to_nccl
from collectives.errors import InvalidArgument, Mismatch
from tests.ranks import run_ranks
from tests.streams.simulated import needs_simulation

EVERY = {
    "min_ctas": 2, "max_ctas": 8, "cga_cluster_size": 2, "net_name": "Socket", "split_share": True, "traffic_class": 3,
    "comm_name": "gathers", "collnet_enable": False, "cta_policy": "efficiency", "shrink_share": False, "nvls_ctas": 4,
    "n_channels_per_net_peer": 2, "nvlink_centric_sched": True, "graph_usage_mode": 1, "num_rma_ctx": 1,
    "max_p2p_peers": 2, "graph_stream_ordering": True, "launch_order_implicit": True, "num_rma_sig": 1,
    "rma_eager_init": False, "host_cft_mode": 0, "nvls_host_mode": 0,
}  # fmt: skip


def library(version: int, is_host: bool = False):
    return SimpleNamespace(version=version, path="libnccl.so.2", is_host=is_host)


def test_every_field_of_nccl_has_one():
    assert list(EVERY) == list(CommConfig.__match_args__)
    settings = to_nccl(CommConfig(**EVERY), library(99999))
    assert set(settings) == set(CONFIG_FIELDS)  # of which blocking is ours
    assert settings["blocking"] == 1 and settings["CTAPolicy"] == 1 and settings["commName"] == "gathers"


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_ctas": 0}, {"max_ctas": 65}, {"min_ctas": 9, "max_ctas": 8}, {"cga_cluster_size": 9}, {"net_name": ""},
        {"split_share": 2}, {"traffic_class": -1}, {"comm_name": 3}, {"comm_name": "\n"}, {"cta_policy": "none"},
        {"cta_policy": 3}, {"graph_usage_mode": 3}, {"max_ctas": True}, {"max_ctas": 2.0}, {"maxCTAs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused(wrong):
    with pytest.raises(InvalidArgument, match=list(wrong)[-1]):
        parse_config(wrong)


def test_forms():
    assert parse_config(None) == CommConfig() and repr(CommConfig()) == "CommConfig()"
    assert parse_config({"split_share": 1, "cta_policy": 2}) == CommConfig(split_share=True, cta_policy="zero")
    with pytest.raises(InvalidArgument, match="CommConfig or a dict"):
        parse_config("zero")
    parent = CommConfig(max_ctas=4, comm_name="a")
    assert merge_config(parent, CommConfig(max_ctas=2)) == CommConfig(max_ctas=2, comm_name="a")
    with pytest.raises(InvalidArgument, match="min_ctas=8 is more than max_ctas=4"):
        merge_config(parent, CommConfig(min_ctas=8))


def test_versions(monkeypatch):
    """What a version knows; a policy that came later than its field; a minimum alone, which NCCL refuses."""
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    assert to_nccl(CommConfig(min_ctas=4), library(21701)) == {"blocking": 1, "minCTAs": 4, "maxCTAs": 64}
    with pytest.raises(InvalidArgument, match=r"traffic_class=1 needs NCCL 2\.26\.2.* is 2\.21\.5"):
        to_nccl(CommConfig(traffic_class=1), library(22105))
    assert to_nccl(CommConfig(cta_policy="efficiency"), library(22703))["CTAPolicy"] == 1
    with pytest.raises(InvalidArgument, match=r"cta_policy='zero' needs NCCL 2\.28\.3"):
        to_nccl(CommConfig(cta_policy="zero"), library(22707))
    assert gather_config(library(22707)) is None and gather_config(library(23203, is_host=True)) is None
    assert gather_config(library(22803)) == CommConfig(cta_policy="zero")


@pytest.mark.parametrize("version, variable, field", [
    (22105, None, None), (22602, "1", None), (23007, "1", None), (23100, None, 1), (23203, None, 1),
])  # fmt: skip
def test_the_order_of_launches(monkeypatch, version, variable, field):
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(name, None)
    order_launches(version)
    assert os.environ.get(name) == variable
    assert to_nccl(CommConfig(), library(version)).get("launchOrderImplicit") == field
    if field:
        assert to_nccl(CommConfig(launch_order_implicit=False), library(version))["launchOrderImplicit"] == 0
    os.environ[name] = "0"  # the user's counts, and overrides a field
    order_launches(version)
    assert os.environ[name] == "0" and "launchOrderImplicit" not in to_nccl(CommConfig(), library(version))


def opened(ctx):
    """The config is checked and kept on every engine, children have it, and ranks that differ are named."""
    comm = ctx.new_communicator(config={"max_ctas": 8, "comm_name": "all"})
    assert comm.config == CommConfig(max_ctas=8, comm_name="all")
    children = comm.split(0), comm.split(comm.rank % 2, config=CommConfig(cta_policy="zero"))
    left = comm.shrink([2], config={"max_ctas": 4}) if comm.rank < 2 else None
    assert children[0].config == comm.config
    assert children[1].config == CommConfig(max_ctas=8, comm_name="all", cta_policy="zero")
    tensor = torch.ones(3).to(ctx.device)
    for each in (comm, *children, *([left] if left is not None else [])):
        each.all_reduce(tensor)
    for config, word in (({"max_cta": 1}, "max_cta"), ({"max_ctas": -1}, "max_ctas"), ({"min_ctas": 9}, "min_ctas")):
        with pytest.raises(InvalidArgument, match=word):
            comm.split(0, config=config)
    with pytest.raises(Mismatch, match=r"max_ctas=(1|2).* not on rank .*same on all ranks of color 0") as caught:
        comm.split(0, config={"max_ctas": 2 if comm.rank == 1 else 1})
    assert caught.value.peers == ((0, 2) if comm.rank == 1 else (1,))
    comm.split(comm.rank, config={"max_ctas": comm.rank + 1}).close()  # colors may differ
    if left is not None:
        left.close()
    settings = None
    if ctx.device_name == "simulated":
        from tests.streams.nccl import config_of

        settings = [config_of(each) for each in (comm, *children)]
    for each in (*children, comm):
        each.close()
    with pytest.raises(Mismatch, match="config"):
        ctx.new_communicator(config={"max_ctas": 4} if ctx.rank else None)
    return tensor.tolist(), settings


def test_communicators():
    run_ranks(opened, 3)


@needs_simulation
def test_what_nccl_gets():
    for _, (parent, inherited, zero) in run_ranks(opened, 3, device="simulated"):
        assert parent == {"blocking": 1, "maxCTAs": 8, "commName": b"all", "launchOrderImplicit": 1}
        assert inherited == parent and zero == {**parent, "CTAPolicy": 2}


def initialized(ctx):
    comm = collectives.init(device=ctx.device, config={"max_ctas": 8})
    assert comm.config == CommConfig(max_ctas=8)
    assert collectives.init() is comm and collectives.init(config=CommConfig(max_ctas=8)) is comm
    with pytest.raises(collectives.errors.InvalidUsage, match=r"max_ctas=4.*max_ctas=8"):
        collectives.init(config={"max_ctas": 4})
    comm.close()


def test_init():
    run_ranks(initialized, 1, fresh=True)
