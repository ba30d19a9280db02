"""Every symptom on docs/common-mistakes.md is made here, and is what the page says."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
from pathlib import Path
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
from collectives.horovod.optimizer import _read_names
from collectives.launcher import Identity
from collectives.rendezvous import world
from collectives.rendezvous.join import join_rendezvous
from collectives.rendezvous.peers import Participant, validate
from tests.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "common-mistakes.md").read_text()
BLOCKS = [" ".join(block.split()) for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)]
PORT = "29400"  # the page's


def check(text: str, shown: int = 1) -> None:
    """So many of the page's blocks are this text; what a block leaves out is "..."."""
    text = " ".join(text.split())
    found = [
        b
        for b in BLOCKS
        if re.search(
            ".*".join(
                map(re.escape, map(str.strip, b.split("..."))),
            ),
            text,
        )
    ]
    assert len(found) == shown, f"on the page {len(found)} times and not {shown}: {text}"


@contextlib.contextmanager
def symptom(kind):
    """What is raised inside is on the page."""
    with pytest.raises(kind) as caught:
        yield
    check(str(caught.value))


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
    for text in (*notes, stray):
        check(text)
    assert cured == [[3.0, 3.0]] * 2


def test_the_first_gpu_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.warns(RuntimeWarning) as caught:
        set_first_device(torch.device("cuda", 1))
    check(str(caught[0].message))


def test_arrays_on_another_device():
    with FakeTensorMode():
        array = torch.empty(3, device="cuda:0")
    with symptom(collectives.errors.InvalidArgument):
        Reader(torch.device("cpu"), 0).read(array, "all_reduce", writes=True)
    host = get_engine("host")
    with collectives.Communicator(host, host.library.get_unique_id(), 0, 1, device="cpu") as comm:
        with symptom(collectives.errors.InvalidArgument):
            collectives.GradientBuckets(on("cuda:0").named_parameters(), comm=comm)
        with symptom(collectives.errors.InvalidArgument):
            models = nn.Linear(4, 2), nn.Linear(4, 2)
            collectives.GradientBuckets([model.parameters() for model in models], comm=comm)


@pytest.mark.parametrize(("given", "device"), [([0], "cpu"), ([0, 1], "cuda:0"), ([0], "cuda:1"), (1, "cuda:1")])
def test_device_ids_that_do_not_fit(given, device):
    with symptom(collectives.errors.InvalidArgument):
        check_device_ids(given, on(device))


def test_device_ids_that_fit():
    for given, device in (
        (None, "cpu"), ([], "cpu"), ([1], "cuda:1"), (["cuda:1"], "cuda:1"), ((torch.device("cuda", 1),), "cuda:1"),
    ):  # fmt: skip
        check_device_ids(given, on(device))
    check_device_ids([0, 1], nn.ModuleList([on("cuda:0"), on("cuda:1")]))  # for torch to refuse
    check_device_ids([0], nn.Identity())


def test_device_ids_are_looked_at_before_torch_does():
    for arguments, options in ((([0],), {}), ((), {"device_ids": [0]})):
        with symptom(collectives.errors.InvalidArgument):
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

    with symptom(collectives.errors.InvalidUsage):
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
    with symptom(collectives.errors.InvalidArgument):
        world._select_device(engine, 2)


def test_a_port_in_use():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(collectives.errors.TransportError) as ours:
            identity = Identity(0, 2, 0, 2, "env", "127.0.0.1", port, b"job")
            join_rendezvous(identity, engine=get_engine("host"), timeout=5)
        with pytest.raises(RuntimeError) as torchs:
            dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    check(str(ours.value).replace(str(port), PORT))
    check(str(torchs.value))


def test_a_checkpoint_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "model.pt")
    monkeypatch.undo()
    if not torch.cuda.is_available():
        with symptom(RuntimeError):
            torch.load(tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", map_location="cpu")  # the cure
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


def test_several_models_of_a_horovod_optimizer():
    encoder, decoder = nn.Linear(4, 2), nn.Linear(4, 2)
    sgd = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    with symptom(ValueError):
        _read_names(sgd, [*encoder.named_parameters(), *decoder.named_parameters()])
    with symptom(ValueError):
        _read_names(sgd, encoder.named_parameters())
    cure = _read_names(sgd, [encoder.named_parameters(), decoder.named_parameters()])
    assert [name for name, _ in cure] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_no_symptom_is_left_out():
    """As many blocks as the tests above check."""
    assert len(BLOCKS) == 17
