"""The mistakes of docs/common-mistakes.md: each raises a message that says what is wrong and what to do.

A port in use: tests/rendezvous/test_rendezvous.py. Several models of a Horovod optimizer: tests/horovod.
"""

from __future__ import annotations

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import collectives
from collectives import optim
from collectives.arrays import Reader
from collectives.comm.engine import Engine, get_engine
from collectives.cuda_state import set_first_device
from collectives.ddp.devices import check_device_ids
from collectives.rendezvous import world
from collectives.rendezvous.peers import Participant, validate
from tests.ranks import run_ranks


def raises(kind, text: str):
    """A context in which an error of this kind is raised, whose message has this text."""
    return pytest.raises(kind, match=re.escape(text))


def on(device: str) -> nn.Module:
    """A module whose parameters say that they are on a device, which needn't be there."""
    module = nn.Module()
    with FakeTensorMode():
        module.weight = nn.Parameter(torch.empty(2, 4, device=device))
    return module


def in_a_group(ctx):
    """On a rank of a world of one with a process group: what is raised where DDP is needed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        model = collectives.DistributedDataParallel(nn.Linear(4, 2))
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = torch.empty(3, 4, device="cuda:0")
        try:
            model(inputs)
        except RuntimeError as error:
            found += getattr(error, "__notes__", [])
        one, other = nn.Linear(4, 2), nn.Linear(4, 2)
        optimizer = optim.AdamW([*one.parameters(), *other.parameters()], lr=0.1)
        first = collectives.DistributedDataParallel(one)
        first.register_comm_hook(collectives.HookState(optimizer=optimizer), collectives.fused_allreduce)
        (first(torch.ones(3, 4)).sum() + other(torch.ones(3, 4)).sum()).backward()
        try:
            optimizer.step()
        except collectives.errors.InvalidUsage as error:
            found.append(str(error))
        both = [collectives.DistributedDataParallel(nn.Linear(4, 2)) for _ in range(2)]
        state = collectives.HookState()
        for ddp in both:
            ddp.register_comm_hook(state, collectives.fused_allreduce)
        sum(ddp(torch.ones(3, 4)).sum() for ddp in both).backward()  # the cure
        found.append([ddp.module.bias.grad.tolist() for ddp in both])
        return found
    finally:
        dist.destroy_process_group()


def test_inputs_on_another_device_and_an_optimizer_of_two_models():
    ((*notes, stray, cured),) = run_ranks(in_a_group, 1)
    assert len(notes) == (sys.version_info >= (3, 11))
    for note in notes:
        assert "the module's parameters are on cpu, its inputs on cuda:0. Move the inputs, .to('cpu')" in note
    assert stray.startswith("parameter 2 of group 0 (shape (2, 4)) has a gradient but was in no bucket of the HookSt")
    assert cured == [[3.0, 3.0]] * 2


def test_the_first_gpu_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.warns(RuntimeWarning, match="this rank's device is cuda:1, but torch's current one is cuda:0"):
        set_first_device(torch.device("cuda", 1))


def test_arrays_on_another_device():
    with FakeTensorMode():
        array = torch.empty(3, device="cuda:0")
    with raises(collectives.errors.InvalidArgument, "the array is on cuda:0, the communicator on cpu: use .to('cpu')"):
        Reader(torch.device("cpu"), 0).read(array, "all_reduce", writes=True)
    host = get_engine("host")
    with collectives.Communicator(host, host.library.get_unique_id(), 0, 1, device="cpu") as comm:
        with raises(collectives.errors.InvalidArgument, "parameter weight of shape (2, 4) is on cuda:0, the comm"):
            collectives.GradientBuckets(on("cuda:0").named_parameters(), comm=comm)
        with raises(collectives.errors.InvalidArgument, "Of several models: itertools.chain(one, other)"):
            models = nn.Linear(4, 2), nn.Linear(4, 2)
            collectives.GradientBuckets([model.parameters() for model in models], comm=comm)


def test_device_ids():
    for given, device, cure in (
        ([0], "cpu", "leave device_ids out, or move the module to this rank's GPU first"),
        ([0, 1], "cuda:0", "a rank has one device, which its own process names: device_ids=[0], or leave it out"),
        ([0], "cuda:1", "device_ids=[1], or leave it out"),
        (1, "cuda:1", "it takes a list of one device: device_ids=[1], or leave it out"),
    ):
        text = f"device_ids={given}, and the module's parameters are on {device}: {cure}"
        with raises(collectives.errors.InvalidArgument, text):
            check_device_ids(given, on(device))
    for given, device in ((None, "cpu"), ([], "cpu"), (["cuda:1"], "cuda:1"), ((torch.device("cuda", 1),), "cuda:1")):
        check_device_ids(given, on(device))  # these fit
    check_device_ids([0, 1], nn.ModuleList([on("cuda:0"), on("cuda:1")]))  # for torch to refuse
    check_device_ids([0], nn.Identity())
    for arguments, options in ((([0],), {}), ((), {"device_ids": [0]})):  # before torch looks at them
        with raises(collectives.errors.InvalidArgument, "DistributedDataParallel: device_ids=[0]"):
            collectives.DistributedDataParallel(nn.Linear(4, 2), *arguments, **options)


def test_two_ranks_on_one_gpu(monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    engine = Engine(
        "nccl", "cuda", "2.32.3", "/nowhere", SimpleNamespace(is_host=False, get_unique_id=lambda: bytes(128))
    )

    def validate_gpus(gpus, **fields):
        records = []
        for rank, gpu in enumerate(gpus):
            participant = Participant(rank, len(gpus), engine, torch.device("cuda", gpu))
            own = json.loads(participant.make_record()) | {"host": "node1"}
            records.append(json.dumps(own | {"device": "cuda:0"} | fields.get(str(rank), {})).encode())
        return validate(records, Participant(1, len(gpus), engine))

    with raises(collectives.errors.InvalidUsage, "ranks 0, 1 are all on one GPU, cuda:0 (GPU-7) of node1"):
        validate_gpus([7, 7])
    with pytest.raises(collectives.errors.InvalidArgument, match="device is cuda:8, and this process has 8 GPUs"):
        Participant(0, 2, engine, torch.device("cuda", 8)).make_record()
    assert [peer.gpu for peer in validate_gpus([6, 7]).peers] == ["GPU-6", "GPU-7"]  # both cuda:0 to their processes
    assert validate_gpus([7, 7], **{"1": {"boot_id": "of another node"}}).local_size == 1
    assert validate_gpus([7, 7], **{str(rank): {"gpu": None} for rank in range(2)}).local_size == 2  # not known
    with pytest.raises(collectives.errors.InvalidUsage, match="ranks 0, 2 are all on one GPU") as caught:
        validate_gpus([7, 6, 7], **{"2": {"namespace": "net:[7]"}})  # containers on one node
    assert caught.value.peers == (0, 2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert validate_gpus([7, 7]).local_size == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with raises(collectives.errors.InvalidArgument, "local rank 2 has no GPU of its own, there are 2: pass device="):
        world._select_device(engine, 2)
