"""Checkpoints of sharded modules in torch.distributed.checkpoint's format: saved by n ranks, loaded
by m, or unsharded.

A checkpoint is a directory: DCP's ``.metadata`` and ``__<rank>_0.distcp``, and `CHECKSUMS`, for
``sha256sum -c``. It is written under another name, flushed to the disk, and renamed when it is
complete.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ...errors import InvalidUsage
from ..managed_params import units_in
from .checkpoint_reader import PARTIAL, CheckpointReader
from .checkpoint_writer import CHECKSUMS, ChecksumWriter, RanksSavePlanner
from .dist_wrapper import DistWrapper, get_module_scheduler, no_dist
from .fqns import params_by_id
from .manifest import flush_folder
from .model import get_model_state_dict, set_model_state_dict
from .optimizer import local_state_dict, optimizers_of, sharded_state

__all__ = ["load", "save"]


# ---- Saving.


def save(
    path: str | os.PathLike, model: nn.Module, optimizers=None, *, extra: Any = None, overwrite: bool = False
) -> None:
    """Save a model, and its optimizers, one or several, to a directory. A collective, which blocks
    until it is there.

    Each rank writes its shards. `extra`: any further object, rank 0's, saved by pickle. The entries
    are "model", "optimizer" and "extra", so that ``torch.distributed.checkpoint.load({"model":
    ...}, checkpoint_id=path)`` reads the model without this package. All ranks must share the file
    system. While it is written the directory's name ends in ``.partial``. A failure leaves nothing
    at `path`, and with `overwrite` what was there before.

    Raises `InvalidUsage` where something is at `path`, unless `overwrite`, and where the ranks
    don't all call this; ``OSError`` where writing failed, and `RemoteError`, which names it, on the
    other ranks.
    """
    target = Path(os.path.abspath(path))
    scheduler = get_module_scheduler(model)
    if scheduler is None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise InvalidUsage("nothing in this model is sharded: save it by torch.distributed.checkpoint.save", op="save")
    ranks = DistWrapper(scheduler, "save", str(target))
    partial = target.with_name(target.name + PARTIAL)

    def begin() -> None:
        if target.exists() and not overwrite:
            raise InvalidUsage(f"{target} exists: take another name, or overwrite=True", op="save")
        if partial.exists():  # left by a job that was killed
            shutil.rmtree(partial)
        partial.mkdir(parents=True)

    ranks.run_on_rank0("begin the checkpoint", begin)
    try:
        _write(ranks, partial, model, optimizers, extra)

        def end() -> None:
            flush_folder(partial)
            before = None
            if target.exists():
                before = target.with_name(target.name + ".replaced")
                target.rename(before)
            partial.rename(target)
            flush_folder(target.parent)
            if before is not None:
                shutil.rmtree(before)

        ranks.run_on_rank0("end the checkpoint", end)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if ranks.failed:
            ranks.barrier()  # wait until rank 0 has removed it
        raise


def _write(ranks: DistWrapper, partial: Path, model, optimizers, extra) -> None:
    def write() -> None:
        state: dict[str, Any] = {"model": get_model_state_dict(model)}
        if optimizers is not None:
            state["optimizer"] = sharded_state(model, optimizers_of(optimizers))
        if extra is not None and ranks.rank == 0:
            state["extra"] = (extra,)  # DCP takes dictionaries and lists apart, and tuples as they are
        with no_dist():
            dcp.save(
                state, storage_writer=ChecksumWriter(partial, ranks), planner=RanksSavePlanner(ranks), no_dist=True
            )

    ranks.run_on_all("write its part of the checkpoint", write)


# ---- Loading.


def load(
    path: str | os.PathLike, model: nn.Module, optimizers=None, *, strict: bool = True, verify: bool = True
) -> Any:
    """Load a model, and its optimizers, from a directory that `save` or
    torch.distributed.checkpoint wrote.

    A collective, which blocks; the ranks may be others than those that saved, and more or fewer.
    Each reads what it needs. Returns what was saved as `extra`, or None. Units on the meta device
    are allocated. The model is found by its names, under "model" or any other key; the optimizers'
    state by names, or by numbers as of an unsharded optimizer. `strict`: all of the model must be
    there, and no more. `verify`: compare the files with their checksums, each file on one of the
    ranks; torch's own checkpoints have none. Like torch's it unpickles: load only what you trust.

    Raises, on all ranks, `InvalidArgument` for what is no checkpoint, is damaged or incomplete, or
    is of another model; nothing has been loaded then.
    """
    folder = Path(os.path.abspath(path))
    scheduler = get_module_scheduler(model)
    ranks = DistWrapper(scheduler, "load", str(folder))
    optimizers = [] if optimizers is None else optimizers_of(optimizers)
    reader: list[CheckpointReader] = []
    states: list[dict[str, Any]] = []
    others: dict[str, Any] = {}

    def open_reader() -> None:
        reader.append(CheckpointReader(folder, CHECKSUMS if verify else None))

    def check() -> None:
        found = reader[0]
        found.check_files(ranks.rank, ranks.size)
        found.check_model(get_model_state_dict(model), strict)
        _check_buffers(model)

    def read_optimizers() -> None:
        found = reader[0]
        others["extra"] = found.read_extra()
        if optimizers:
            state = found.read_optimizers(params_by_id(model, optimizers).values())
            states.extend(local_state_dict(model, each, state) for each in optimizers)

    def read() -> None:
        device = None if scheduler is None else scheduler.comm.device
        _allocate_meta(model, device)
        template = get_model_state_dict(model)
        reader[0].read_model(template)
        set_model_state_dict(model, template, strict=strict)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    ranks.run_on_all("read the checkpoint's index", open_reader)
    ranks.run_on_all("find the model in the checkpoint", check)
    ranks.run_on_all("read the optimizers' state", read_optimizers)
    ranks.run_on_all("read the model", read)
    return others["extra"]


def _check_buffers(model: nn.Module) -> None:
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                raise InvalidUsage(
                    f"buffer {prefix}{'.' if prefix else ''}{name} is on the meta device, and no checkpoint has it: "
                    "give it values first, by materialize()",
                    op="load",
                )


def _allocate_meta(model: nn.Module, device: torch.device | None) -> None:
    """Allocate what is on the meta device, uninitialised."""
    for unit in units_in(model):
        unit.reshard()
        for group in unit.groups:
            group.allocate()
    device = torch.device("cpu") if device is None else device
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
