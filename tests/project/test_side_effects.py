"""What the package changes in a process, and when: docs/side-effects.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import collectives
from collectives.comm import config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "side-effects.md").read_text()
PROGRAM = """
import json, os, signal, sys, types, warnings
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
assert "collectives" not in sys.modules


def state():
    return {
        "environ": dict(os.environ), "excepthook": sys.excepthook is sys.__excepthook__,
        "signals": [str(signal.getsignal(number)) for number in signal.valid_signals()],
        "path": list(sys.path), "filters": [str(each) for each in warnings.filters],
        "threads": torch.get_num_threads(), "default device": str(torch.get_default_device()),
    }


def patches():
    from collectives.torch_patches import applied_patches
    return {each.target: each.reason for each in applied_patches()}


def functions():  # and classes of torch's modules, and the functions of the latter, by their names there
    found = {}
    for module in [each for name, each in list(sys.modules.items()) if name.partition(".")[0] == "torch"]:
        for name, value in list(vars(module).items()):
            if issubclass(type(value), types.FunctionType | type):  # isinstance would look at lazy objects
                found[module.__name__, name] = value
            if issubclass(type(value), type) and value.__module__ == module.__name__:
                members = list(vars(value).items())
                found |= {(value, name): each for name, each in members if isinstance(each, types.FunctionType)}
    return found


torch.optim.SGD([torch.zeros(1)], 0.1)  # torch itself wraps the class's step then
before, own, found = state(), functions(), {}


def replaced():
    now = functions()
    return sorted({name for (owner, name), each in own.items() if now.get((owner, name)) is not each})


import collectives
found["changed"] = [name for name, value in state().items() if value != before[name]]
found["import"], found["replaced by the import"] = patches(), replaced()
with collectives.init() as comm:
    comm.all_reduce(torch.ones(4))
    found["communicator"] = patches()
    found["SIGUSR2"] = callable(signal.getsignal(signal.SIGUSR2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 2))
    found["gloo"] = patches()
    ddp.register_comm_hook(None, collectives.fused_allreduce)  # the first use: the method is looked up before the hook
    found["hook"] = patches()
    from collectives.torch_patches import find_hooked_ddps
    found["recorded"] = find_hooked_ddps(ddp.module.weight) == [ddp]
    del ddp
    dist.destroy_process_group()
    dist.init_process_group("collectives", store=dist.HashStore(), rank=0, world_size=1)
    found["group"] = patches()
    dist.destroy_process_group()
    collectives.sharded.fully_shard(torch.nn.Linear(2, 2), comm=comm)
    import collectives.auto
    from collectives.elastic.agent import install_agent
    install_agent()
    collectives.horovod.init()
    linear = torch.nn.Linear(2, 2)
    collectives.horovod.DistributedOptimizer(torch.optim.SGD(linear.parameters(), 0.1), linear.named_parameters())
found["all"], found["replaced"] = patches(), replaced()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    # A process of its own: the fork server of tests/programs.py has imported this package, as torch's checkpoints do.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "COLLECTIVES_ENGINE": "host", "OMP_NUM_THREADS": "1"}
    command, env = [sys.executable, "-c", PROGRAM], {**os.environ, **alone}
    done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names(targets) -> set[str]:
    return {target.rpartition(".")[2] for target in targets}


def test_an_import_changes_three_functions_of_torch_and_nothing_else(found):
    assert found["changed"] == []
    assert names(found["import"]) == {"monitored_barrier", "batch_isend_irecv", "register_comm_hook"}
    assert found["communicator"] == found["import"] and found["SIGUSR2"]


def test_each_feature_changes_what_it_needs(found):
    hook = names(found["hook"]) - names(found["import"])
    assert hook == {"scale", "_lazy_init_scale_growth_tracker"}
    assert found["gloo"] == found["import"] and found["recorded"]
    assert names(found["group"]) - names(found["hook"]) == {
        "send", "recv", "_set_pg_timeout", "_ddp_init_helper", "_register_builtin_comm_hook",
    }  # fmt: skip


def test_all_of_them_are_on_the_page_with_a_reason(found):
    assert all(found["all"].values())
    assert {name for name in names(found["all"]) if not re.search(rf"\b{name}`", PAGE)} == set()


def test_no_function_of_torch_is_replaced_but_those(found):
    assert set(found["replaced by the import"]) == names(found["import"])
    assert {"send", "load_state_dict", "forward", "distribute_tensor"} <= set(found["replaced"]) <= names(found["all"])


def test_nccls_order_of_launches_is_set_by_torchs_nccl_at_the_import(monkeypatch):
    for cuda, version, value in (
        (None, None, None), ("12.4", (2, 21, 5), None), ("12.8", (2, 26, 2), "1"), ("13.0", (2, 28, 9), "1"),
        ("13.0", (2, 31, 0), None),
    ):  # fmt: skip
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda version=version: version))
        config.order_launches_of_torch()
        assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == value, (cuda, version)


# ---- Names that are imported at their first use.


def test_submodules_are_attributes_and_only_public_names_are_listed():
    for name in ("elastic", "flight", "horovod", "kernels", "optim", "run", "sharded"):
        assert getattr(collectives, name).__name__ == f"collectives.{name}"
    listed = dir(collectives)
    assert set(collectives.__all__) <= set(listed)
    assert set(listed) - set(collectives.__all__) == {
        "__version__", "elastic", "flight", "horovod", "kernels", "optim", "run", "sharded",
    }  # fmt: skip
    assert "auto" not in listed  # its import changes DDP, and tools look at all names that are listed
    with pytest.raises(AttributeError, match="'collectives' has no attribute 'sharding'"):
        _ = collectives.sharding


def test_every_public_name_is_there():
    for name in collectives.__all__:
        assert getattr(collectives, name) is getattr(collectives, name), name
