"""Checkpoints of sharded modules, by torch.distributed.checkpoint: saved by n ranks, loaded by m, or unsharded.

A checkpoint is a directory with DCP's files and `manifest.json`: the step, and the size and SHA-256 of each file. It is
written under another name, flushed to the disk, and renamed when it is complete. With COLLECTIVES_SECRET the manifest
carries an HMAC, and is read only with the same secret.

Loading unpickles what DCP unpickles, its index and objects that aren't tensors, and so can run code: load only what you
trust. The files are compared with the manifest before anything is unpickled.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from ..errors import CollectivesError, InvalidArgument, InvalidUsage, RemoteError, TransportError
from ..json_records import parse_json, parse_text
from ..secret import read_secret, seal, unseal
from ..torch_compat import set_nested, tree_map_only
from .managed_params import device_of
from .optimizer_state import local_optimizer_state, optimizer_state, optimizers_of
from .ragged_tensor import RaggedTensor
from .state import clean_name, get_model_state_dict, inner_module, set_model_state_dict

__all__ = ["Checkpointer", "LoadedCheckpoint", "load", "save"]

MANIFEST, _INDEX = "manifest.json", ".metadata"
_PARTIAL, _REPLACED, _REMOVED = ".partial", ".replaced", ".removed"
_NAME = re.compile(rf"step_(\d{{9,}})({_REPLACED})?")
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,200}")  # DCP's own names
_PURPOSE = "manifest of a checkpoint"


# ---- Files.


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _write_file(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digests(folder: Path, names) -> dict[str, tuple[str, int]]:
    return {name: (_sha256_of(folder / name), (folder / name).stat().st_size) for name in sorted(names)}


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of one file for each rank, into a directory that gets its name when it is complete.

    DCP calls `prepare_global_plan` and `finish` on one rank, while the others wait, and raises on all ranks what is
    raised on one. `done`: called on that rank once the checkpoint is there.
    """

    def __init__(self, target: Path, *, step: int | None = None, overwrite: bool = True, done: Callable = lambda: None):
        self._partial = target.with_name(target.name + _PARTIAL)
        super().__init__(self._partial)
        self._target, self._step, self._may_replace, self._done = target, step, overwrite, done

    def stage(self, state_dict):
        # torch's copies no DTensor of 0 dimensions, and would write what it has later.
        state = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state_dict)
        return {**state, "extra": copy.deepcopy(state["extra"])} if "extra" in state else state

    def prepare_local_plan(self, plan):
        return plan  # the directory is made in `prepare_global_plan`

    def prepare_global_plan(self, plans):
        if self._target.exists() and not self._may_replace:
            raise InvalidUsage(f"{self._target} exists: take another name, or overwrite=True", op="save")
        if self._partial.exists():  # left by a job that was killed
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan, planner):
        written = super().write_data(plan, planner)
        files = _digests(self._partial, {result.storage_data.relative_path for result in written.wait()})
        record = self._partial / f"{plan.storage_data.prefix}digests"
        _write_file(record, seal(json.dumps(files).encode(), _PURPOSE))
        return written

    def finish(self, metadata, results) -> None:
        super().finish(metadata, results)
        files = _digests(self._partial, [_INDEX])
        for path in self._partial.glob("*digests"):
            files.update(parse_json(unseal(path.read_bytes(), _PURPOSE)))
            path.unlink()
        record = json.dumps({"step": self._step, "files": files}, indent=1).encode()
        _write_file(self._partial / MANIFEST, seal(record, _PURPOSE))
        _flush_folder(self._partial)
        replaced = self._target.with_name(self._target.name + _REPLACED)
        if self._target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            self._target.rename(replaced)  # `Checkpointer` loads it from there while there is no other
        self._partial.rename(self._target)
        _flush_folder(self._target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
        self._done()


def _problem_of(folder: Path, step: int | None, rank: int, ranks: int) -> str | None:
    """Return why a checkpoint isn't whole, as far as the manifest and this rank's share of the files say; or None.

    Nothing is unpickled.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return f"it has no {MANIFEST}, so it was never completed"
    try:
        record = parse_json(unseal(path.read_bytes(), _PURPOSE))
        files = {name: (parse_text(digest), size) for name, (digest, size) in record["files"].items()}
        if (step is not None and record["step"] != step) or _INDEX not in files or not all(map(_FILE.fullmatch, files)):
            raise ValueError("it is another checkpoint's")
    except TransportError as error:
        return f"its {MANIFEST}: {error.message}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} is damaged: {type(error).__name__}: {error}"
    for name, (_, size) in files.items():
        if not (folder / name).is_file():
            return f"its {name} is missing"
        if (folder / name).stat().st_size != size:
            return f"its {name} has {(folder / name).stat().st_size} bytes and must have {size}"
    for name in sorted(files)[rank::ranks]:
        try:
            if _sha256_of(folder / name) != files[name][0]:
                return f"its {name} is damaged: its checksum is not that in {MANIFEST}"
        except OSError as error:
            return f"its {name} can't be read: {error}"
    return None


# ---- Saving.


def _place(group=None) -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _state_of(model: nn.Module, optimizers, extra: Any) -> dict[str, Any]:
    """Return the entries of a checkpoint that this rank has, in shards. A local call."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizers is not None:
        state["optimizer"] = optimizer_state(model, optimizers)
    if extra is not None and _place()[0] == 0:
        state["extra"] = (extra,)  # DCP takes dictionaries and lists apart, and tuples as they are
    return state


def _planner() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # buffers are rank 0's


@contextlib.contextmanager
def _reporting(what: str, op: str) -> Iterator[None]:
    """Raise what DCP and its messages raise as this package's errors; leave out its warning of one process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load).*")
            yield
    except dcp.CheckpointException as error:
        raise _as_error(error, what, op) from error
    except CollectivesError:
        raise
    except RuntimeError as error:  # Gloo's or NCCL's
        text = f"this rank could not {what}, since other ranks have ended, or don't make the call: {error}"
        raise RemoteError(text, op=op, rank=_place()[0]) from error


def _as_error(error: dcp.CheckpointException, what: str, op: str) -> Exception:
    """Return the error that this rank raises where DCP reports those of several ranks."""
    rank, _ = _place()
    failures = {number: failure[0] for number, failure in error.failures.items()}
    own = failures.get(rank)
    if isinstance(own, Exception):
        return own
    number, first = min(failures.items())
    if isinstance(first, (InvalidUsage, InvalidArgument)):
        return first
    text = f"rank {number} could not {what}: {type(first).__name__}: {first}"
    return RemoteError(text, op=op, rank=rank, peers=sorted(failures))


def save(
    path: str | os.PathLike, model: nn.Module, optimizers=None, extra: Any = None, *, overwrite: bool = False
) -> None:
    """Save a model, and its optimizers, one or several, to a directory. A collective of all ranks of torch.distributed,
    which blocks until it is there.

    Each rank writes its shards; buffers are rank 0's. The entries are "model", "optimizer" and "extra", so that
    ``torch.distributed.checkpoint.load({"model": ...}, checkpoint_id=path)`` reads the model without this package. All
    ranks must share the file system. A failure leaves nothing at `path`, and with `overwrite` what was there before.

    Args:
        extra: Any further object, rank 0's, saved by pickle.
        overwrite: Replace what is at `path`, once the new one is complete.

    Raises:
        InvalidUsage: Something is at `path`, unless `overwrite`.
        OSError: Writing failed; `RemoteError`, which names it, on the other ranks.
    """
    target = Path(os.path.abspath(path))
    state = _state_of(model, optimizers, extra)
    writer = _Writer(target, overwrite=overwrite)
    try:
        with _reporting(f"write {target}", "save"):
            dcp.save(state, storage_writer=writer, planner=_planner(), no_dist=not dist.is_initialized())
    except BaseException:
        _remove(target)
        raise


def _remove(target: Path) -> None:
    """Remove what there is of a checkpoint that was not completed; rank 0 does."""
    if _place()[0] == 0:
        shutil.rmtree(target.with_name(target.name + _PARTIAL), ignore_errors=True)


# ---- Loading.


def load(
    path: str | os.PathLike, model: nn.Module, optimizers=None, *, strict: bool = True, verify: bool = True
) -> Any:
    """Load a model, and its optimizers, from a directory that `save` or torch.distributed.checkpoint wrote.

    A collective of all ranks of torch.distributed, which blocks. The ranks may be others than those that saved, and
    more or fewer. Each reads what it needs. Returns what was saved as `extra`, or None. Units on the meta device are
    allocated. The model is found by its names, under "model" or any other key; the optimizers' state by names, or by
    numbers as of an unsharded optimizer. DCP unpickles: load only what you trust.

    Args:
        strict: All of the model must be there, and no more.
        verify: Compare the files with the manifest first, each file on one of the ranks. torch's own checkpoints have
            none, and are loaded unless COLLECTIVES_SECRET is set.

    Raises:
        InvalidArgument: On all ranks, for what is no checkpoint, is damaged or incomplete, or is of another model.
            Nothing has been loaded then.
    """
    folder = Path(os.path.abspath(path))
    has_manifest = (folder / MANIFEST).is_file()
    if not (folder / _INDEX).is_file() and not has_manifest:
        raise InvalidArgument(f"{folder} is no checkpoint: it has no {_INDEX}", op="load")
    if verify and (has_manifest or read_secret() is not None):
        problem = _first_problem(_problem_of(folder, None, *_place()))
        if problem is not None:
            raise InvalidArgument(f"{folder} is no whole checkpoint: {problem}", op="load")
    return _Reader(folder).load(model, optimizers, strict)


def _first_problem(problem: str | None, group=None) -> str | None:
    """Return the first problem that a rank has; a collective."""
    if not dist.is_initialized():
        return problem
    problems: list = [None] * dist.get_world_size(group)
    with _reporting("check a checkpoint", "load"):
        dist.all_gather_object(problems, problem, group=group)
    return next((each for each in problems if each is not None), None)


class _Reader:
    """The entries of a checkpoint by their paths, tuples of keys, and how to load some of them."""

    def __init__(self, folder: Path):
        self._storage = dcp.FileSystemReader(folder)
        self._folder = folder
        try:
            index = self._storage.read_metadata()
            self._entries = index.state_dict_metadata
            paths = index.planner_data or {}
            self._names = {tuple(paths.get(name, (name,))): name for name in self._entries}
        except Exception as error:
            raise self._refuse(f"its {_INDEX} is damaged: {type(error).__name__}: {error}") from error

    def _refuse(self, text: str) -> InvalidArgument:
        return InvalidArgument(f"{self._folder}: {text}", op="load")

    def load(self, model: nn.Module, optimizers, strict: bool) -> Any:
        """Load a model and optimizers; return `extra`. Nothing is changed where something is of another model."""
        optimizers = [] if optimizers is None else optimizers_of(optimizers)
        entries = self._model_entries(model, strict)
        if optimizers:
            state = self._read_optimizers(model, optimizers)
            loads = [local_optimizer_state(model, optimizer, state) for optimizer in optimizers]
        extra = self._read({("extra",): None})[("extra",)] if ("extra",) in self._names else None
        loaded = self._read(entries)
        set_model_state_dict(model, {path[-1]: value for path, value in loaded.items()}, strict=strict)
        for optimizer, local in zip(optimizers, loads if optimizers else (), strict=True):
            optimizer.load_state_dict(local)
        return extra[0] if isinstance(extra, tuple) else extra

    def _read(self, wanted: dict[tuple, Any]) -> dict[tuple, Any]:
        """Return the values at paths; tensors are read into those that are given. A collective."""
        flat = {self._names[path]: value for path, value in wanted.items()}
        with _reporting(f"read {self._folder}", "load"):
            dcp.load(flat, storage_reader=self._storage, no_dist=not dist.is_initialized())
        return {path: flat[self._names[path]] for path in wanted}

    # ---- The model.

    def _model_entries(self, model: nn.Module, strict: bool) -> dict[tuple, Any]:
        """Return what the model's entries are to be read into, by their paths."""
        _check_buffers(model)
        own = get_model_state_dict(model)
        roots = Counter(path[:-1] for path in self._names if path[-1] in own)
        if not roots:
            raise self._refuse(f"it is of another model: it has no {', no '.join(list(own)[:3])}")
        root = roots.most_common(1)[0][0]
        there = {path[-1] for path in self._names if path[:-1] == root}
        problems = []
        if strict:
            problems += [f"it has no {name}" for name in own if name not in there]
            problems += [f"the model has no {name}" for name in sorted(map(str, there - own.keys()))]
        for name in [name for name in own if name in there]:
            size = getattr(self._entries[self._names[(*root, name)]], "size", None)
            if size is not None and isinstance(own[name], torch.Tensor) and size != own[name].shape:
                problems.append(f"{name} is {list(size)} there and {list(own[name].shape)} in the model")
        if problems:
            raise self._refuse(f"it is of another model: {'; '.join(problems[:8])}")
        device = device_of(model)
        return {
            (*root, name): torch.empty_like(value, device=device) if getattr(value, "is_meta", False) else value
            for name, value in own.items()
            if name in there
        }

    # ---- Optimizers.

    def _read_optimizers(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return the optimizers' state dict, in shards where the model has shards."""
        roots = {path[: path.index("param_groups")] for path in self._names if "param_groups" in path}
        if len(roots) != 1:
            places = " and ".join(".".join(map(str, root)) for root in sorted(roots))
            raise self._refuse(f"it has optimizer state at {places}" if roots else "it has no optimizer state")
        root = roots.pop()
        params = {clean_name(name): param for name, param in inner_module(model).named_parameters()}
        in_order = [param for each in optimizers for group in each.param_groups for param in group["params"]]
        params |= {str(number): param for number, param in enumerate(in_order)}
        device = device_of(model)
        wanted = {}
        for path, name in self._names.items():
            kind, *rest = path[len(root) :] or (None,)
            if path[: len(root)] == root and kind in ("state", "param_groups"):
                param = params.get(rest[0]) if kind == "state" else None
                wanted[path] = _place_for(self._entries[name], param, device)
        made: dict[str, Any] = {"state": {}, "param_groups": []}
        for path, value in self._read(wanted).items():
            set_nested(made, path[len(root) :], value)
        numbered = any(isinstance(number, int) for group in made["param_groups"] for number in group["params"])
        if numbered:
            made["state"] = {int(number): entries for number, entries in made["state"].items()}
        return made


def _place_for(entry, param: torch.Tensor | None, device: torch.device):
    """Return a tensor to read an entry of a parameter's optimizer state into; None for what is no tensor."""
    if isinstance(entry, BytesStorageMetadata):
        return None
    size, dtype = entry.size, entry.properties.dtype
    if not isinstance(param, RaggedTensor) or size.numel() <= 1:
        return torch.empty(size, dtype=dtype, device="cpu")
    device = device if param.is_meta else param.device
    if size == param.shape:
        return torch.empty_like(param.detach(), dtype=dtype, device=device)
    whole = torch.empty(size, dtype=dtype, device=device)  # as an operation on the whole parameter makes it
    return DTensor.from_local(whole, param.device_mesh, (Replicate(),) * param.device_mesh.ndim, run_check=False)


def _check_buffers(model: nn.Module) -> None:
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                raise InvalidUsage(
                    f"buffer {prefix}{'.' if prefix else ''}{name} is on the meta device, and no checkpoint has it: "
                    "give it values first",
                    op="load",
                )


# ---- A directory of checkpoints.


class LoadedCheckpoint(NamedTuple):
    """What `Checkpointer.load_latest` has loaded: of which step, from where, what was saved as `extra`, and why newer
    checkpoints were skipped, by their names.
    """

    step: int
    path: Path
    extra: Any
    skipped: dict[str, str]


class Checkpointer:
    """Saves a model and its optimizers to a directory while the training goes on; loads the newest whole checkpoint.

    A checkpoint is a directory ``step_000001000``, which `load` and torch.distributed.checkpoint read, too. It gets its
    name when all of it is on the disk, so a writer that is killed leaves no checkpoint that looks whole. A writer is
    torch.distributed.checkpoint's thread, with a process group of its own; nothing but the copy at the call touches
    parameters or state. All ranks of torch.distributed call each method but `latest`; they share the file system, and
    one job at a time writes to a directory. Call `wait` before ``destroy_process_group()``.

    Args:
        directory: Where the checkpoints are.
        keep: How many of the newest are kept.
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3):
        if not isinstance(keep, int) or keep < 1:
            raise InvalidArgument(f"keep must be a number of checkpoints, at least 1, not {keep!r}")
        self.directory = Path(os.path.abspath(directory))
        self.keep = keep
        self._group, self._world = None, None
        self._pending = None  # the future of the checkpoint that is being written, and its directory
        self._damaged: set[str] = set()  # names, as `load_latest` has found them

    def _open_group(self):
        """Return a group of all ranks for the writers' messages. A collective where the ranks are new."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not self._world:
            self._group = None if world is None else dist.new_group(backend="gloo")
            self._world = world
        return self._group

    # ---- Saving.

    def save(self, step: int, model: nn.Module, optimizers=None, *, extra: Any = None, block: bool = False) -> None:
        """Save a model, and its optimizers, one or several, as the checkpoint of a step. A collective.

        Returns once the state is copied to host memory. Waits first until the checkpoint before is on the disk. A
        checkpoint of the same step is replaced.

        Args:
            extra: Any further object, rank 0's, saved by pickle.
            block: Return once the checkpoint is on the disk.

        Raises:
            OSError, RemoteError: What has failed in writing the one before, as `wait` does.
        """
        if not isinstance(step, int) or step < 0:
            raise InvalidArgument(f"step must be an int of at least 0, not {step!r}", op="Checkpointer.save")
        self.wait()
        group = self._open_group()
        target = self.directory / f"step_{step:09}"
        writer = _Writer(target, step=step, done=self._remove_old)
        with _reporting(f"write {target}", "Checkpointer.save"):
            state = _state_of(model, optimizers, extra)
            future = dcp.async_save(state, storage_writer=writer, planner=_planner(), process_group=group)
        self._pending = future, target, self._world
        if block:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Blocks; all ranks call it.

        Raises:
            OSError: Writing failed on this rank; nothing is left of the checkpoint, and the ones before stay.
            RemoteError: The same, on the other ranks; it names the rank. In an elastic job with other ranks than those
                that have begun the checkpoint, a warning.
        """
        if self._pending is None:
            return
        (future, target, world), self._pending = self._pending, None
        try:
            with _reporting(f"write {target}", "Checkpointer.save"):
                future.result()
        except Exception as error:
            _remove(target)
            if not dist.is_initialized() or dist.group.WORLD is world:
                raise
            warnings.warn(f"{target} was not written: {error}", RuntimeWarning, stacklevel=2)

    def _remove_old(self) -> None:
        """Remove all checkpoints but the newest, and what killed jobs have left; called on one rank's thread."""
        for path in self.directory.glob("step_*"):
            if path.suffix in (_REMOVED, _PARTIAL):
                shutil.rmtree(path, ignore_errors=True)
        kept = 0
        for _, path in self._list():
            if kept < self.keep:
                kept += path.name not in self._damaged
                continue
            removed = path.with_name(path.name + _REMOVED)
            with contextlib.suppress(OSError):  # one that can't be removed doesn't make the new one a failure
                path.rename(removed)  # a removal that is killed leaves no checkpoint that looks whole
                shutil.rmtree(removed)

    # ---- Loading.

    def _list(self) -> list[tuple[int, Path]]:
        """Return the (step, directory) of the checkpoints, whole or damaged, the newest first."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        found = [(match, path) for path in paths if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
        ordered = sorted(((int(match[1]), not match[2], path) for match, path in found), reverse=True)
        return [(step, path) for step, _, path in ordered]

    def latest(self) -> Path | None:
        """Return the directory of the newest whole checkpoint; None where there is none. Reads all of its files, and
        blocks. A local call.
        """
        return next((path for step, path in self._list() if _problem_of(path, step, 0, 1) is None), None)

    def load_latest(self, model: nn.Module, optimizers=None, *, strict: bool = True) -> LoadedCheckpoint | None:
        """Load a model, and its optimizers, from the newest whole checkpoint. A collective, which blocks.

        Returns None where there is no checkpoint at all, as when a training begins.
        The ranks may be others than those that saved, and more or fewer. Torn, truncated, changed or incomplete
        checkpoints are skipped, with a warning that says which and why. `strict`: as of `load`.

        Raises:
            InvalidArgument: There are checkpoints and none is whole, or the newest whole one is of another model.
        """
        self.wait()
        group = self._open_group()
        listed = [self._list()]
        if group is not None:
            with _reporting("list the checkpoints", "Checkpointer.load_latest"):
                dist.broadcast_object_list(listed, src=0, group=group)
        skipped: dict[str, str] = {}
        for step, path in listed[0]:
            problem = _first_problem(_problem_of(path, step, *_place(group)), group)
            if problem is not None:
                skipped[path.name] = problem
                continue
            self._damaged |= skipped.keys()
            if skipped and _place()[0] == 0:
                text = f"resuming from {path}, since newer ones are not whole: {_describe(skipped)}"
                warnings.warn(text, stacklevel=2)
            return LoadedCheckpoint(step, path, _Reader(path).load(model, optimizers, strict), skipped)
        if skipped:
            text = f"no checkpoint in {self.directory} is whole: {_describe(skipped)}"
            raise InvalidArgument(text, op="Checkpointer.load_latest", rank=_place()[0])
        return None


def _describe(skipped: dict[str, str]) -> str:
    return "; ".join(f"{name}: {problem}" for name, problem in skipped.items())
