"""Fixtures of the tests of the rendezvous."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from collectives.comm.engine import get_engine

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@pytest.fixture
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host():
    return get_engine("host")


@pytest.fixture
def store():
    return dist.HashStore()
