"""Reader of torch.distributed.checkpoint's format: checks that a checkpoint is complete and the
model's, and reads it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...errors import InvalidArgument
from .dist_wrapper import no_dist
from .fqns import NamedParam

__all__ = ["METADATA", "PARTIAL", "CheckpointReader", "sha256_of"]

METADATA = ".metadata"
PARTIAL = ".partial"
_load_error = functools.partial(InvalidArgument, op="load")
_NAMED = 5  # the most keys that an error names


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _list_names(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class CheckpointReader(FileSystemReader):
    """A checkpoint's index, and what is read by it. Raises `InvalidArgument` for a folder that is
    no checkpoint.

    `checksums`: the name of its file of SHA-256 sums, where there may be one and it is to be
    compared. The index is a pickle, and is compared before it is read.
    """

    def __init__(self, folder: Path, checksums: str | None = None):
        super().__init__(folder)
        self.folder = folder
        self._checksums = checksums or ""
        if not (folder / METADATA).is_file():
            partial = folder.with_name(folder.name + PARTIAL)
            what = "is no checkpoint, or a part of one: it has no .metadata"
            if not folder.is_dir():
                what = f"was never completed: there is only {partial.name}" if partial.is_dir() else "is not there"
            raise _load_error(f"{folder} {what}")
        self._sums = self._read_sums()
        self._compare_sum(METADATA)
        try:
            metadata = super().read_metadata()
        except Exception as error:  # any error that damaged bytes make pickle raise
            if isinstance(error, OSError):
                raise
            raise _load_error(f"{folder / METADATA} is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None:
            raise _load_error(f"{folder / METADATA} is not of a checkpoint")
        self.metadata = metadata
        self.entries = metadata.state_dict_metadata
        self.paths: dict[str, tuple] = metadata.planner_data or {key: (key,) for key in self.entries}
        self._root = ""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Return the index, which is read once."""
        return self.metadata

    # ---- Completeness.

    def _read_sums(self) -> dict[str, str] | None:
        if not self._checksums or not (self.folder / self._checksums).is_file():
            return None
        lines = (self.folder / self._checksums).read_text(errors="replace").splitlines()
        return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}

    def _compare_sum(self, name: str) -> None:
        if self._sums is None:
            return
        if name not in self._sums:
            raise _load_error(f"{self.folder / self._checksums} is damaged: it has no {name}")
        if sha256_of(self.folder / name) != self._sums[name]:
            raise _load_error(f"{self.folder / name} is damaged: its checksum is not that in {self._checksums}")

    def check_files(self, rank: int, ranks: int) -> None:
        """Check that all files are there and long enough, and that this rank's share of them has
        the right checksums.
        """
        ends: dict[str, int] = {}
        try:
            for info in self.metadata.storage_data.values():
                ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        except (AttributeError, TypeError) as error:  # without checksums a pickle may have come to be any object
            raise _load_error(f"{self.folder / METADATA} is damaged: {type(error).__name__}: {error}") from error
        for name, end in sorted(ends.items()):
            path = self.folder / name
            if not path.is_file():
                raise _load_error(f"{path} is missing: the checkpoint is incomplete")
            if path.stat().st_size < end:
                raise _load_error(
                    f"{path} has {path.stat().st_size} bytes and must have {end}: the checkpoint is damaged"
                )
        for name in sorted(ends)[rank::ranks]:
            self._compare_sum(name)

    # ---- The model.

    def check_model(self, template: dict[str, Any], strict: bool) -> None:
        """Check that this is a checkpoint of a model, given by its own state dict."""
        self._root = self._find_root(template)
        problems = []
        missing = [name for name in template if self._root + name not in self.entries]
        empty = [name for name in missing if isinstance(template[name], torch.Tensor) and template[name].is_meta]
        if missing and (strict or empty or len(missing) == len(template)):
            problems.append(f"it has no {_list_names(missing)}")
        known = {self._root + name for name in template}
        others = {key for key in self.entries if self._is_models(key)} - known
        if others and strict:
            problems.append(f"the model has no {_list_names(key[len(self._root) :] for key in others)}")
        for name, value in template.items():
            entry = self.entries.get(self._root + name)
            if isinstance(entry, TensorStorageMetadata) != isinstance(value, torch.Tensor) and entry is not None:
                problems.append(f"{name} is a tensor in one of them only")
            elif isinstance(value, torch.Tensor) and entry is not None and entry.size != value.shape:
                problems.append(f"{name} is {list(entry.size)} there and {list(value.shape)} in the model")
        if problems:
            shown = "; ".join(problems[:_NAMED])
            raise _load_error(f"{self.folder} is a checkpoint of another model: {shown}")

    def _find_root(self, template: dict[str, Any]) -> str:
        """Return the prefix of the model's names."""
        counts: dict[str, int] = {}
        for key, path in self.paths.items():
            for at in range(len(path)):
                name = ".".join(map(str, path[at:]))
                if name in template and "state" not in path[:at] and "param_groups" not in path[:at]:
                    root = key[: len(key) - len(name)]
                    counts[root] = counts.get(root, 0) + 1
        return max(counts, key=lambda root: counts[root], default="model.")

    def _is_models(self, key: str) -> bool:
        if self._root:
            return key.startswith(self._root)
        return not {"state", "param_groups"} & set(self.paths.get(key, ())) and key != "extra"

    def read_model(self, template: dict[str, Any]) -> None:
        """Read the entries of a state dict that are there, in place."""
        reads = {
            self._root + name: value if isinstance(value, torch.Tensor) else None
            for name, value in template.items()
            if self._root + name in self.entries
        }
        self._read(reads)
        template.update({key[len(self._root) :]: value for key, value in reads.items()})

    # ---- Optimizers, and extra.

    def read_optimizers(self, parameters: Iterable[NamedParam]) -> dict[str, Any]:
        """Read optimizer state by names: this rank's part of each entry that has its parameter's
        shape.
        """
        by_name = {named.name: named for named in parameters}
        roots = {path[: path.index("param_groups")] for path in self.paths.values() if "param_groups" in path}
        if not roots:
            raise _load_error(f"{self.folder} has no optimizer state: load without optimizers")
        reads: dict[str, Any] = {}
        places: dict[str, tuple] = {}
        unknown = set()
        for key, path in self.paths.items():
            root = next((root for root in roots if path[: len(root)] == root), None)
            rest = () if root is None else path[len(root) :]
            if not rest or rest[0] not in ("state", "param_groups") or key not in self.entries:
                continue
            entry = self.entries[key]
            value: Any = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.empty(entry.size, dtype=entry.properties.dtype)
                if rest[0] == "state" and len(rest) == 3 and rest[2] != "step":
                    named = by_name.get(rest[1])
                    if named is not None and named.owned is not None and not named.has_state:
                        continue  # another rank has all of it
                    if named is not None and named.shape == entry.size:
                        here = torch.empty(named.param.shape, dtype=value.dtype, device=named.device)
                        value = named.as_entry(here)
            if rest[0] == "state" and rest[1] not in by_name and not str(rest[1]).isdigit():
                unknown.add(str(rest[1]))
            reads[key], places[key] = value, (root, *rest)
        if unknown:
            raise _load_error(
                f"{self.folder} has the optimizer state of another model, which has {_list_names(unknown)}"
            )
        self._read(reads)
        made: dict[str, Any] = {"state": {}, "param_groups": []}
        groups: dict[tuple, dict] = {}
        for key, (root, kind, *rest) in places.items():
            if kind == "state":
                made["state"].setdefault(rest[0], {})[".".join(map(str, rest[1:]))] = reads[key]
            elif len(rest) == 2:
                groups.setdefault((root, int(rest[0])), {})[rest[1]] = reads[key]
            elif not rest:  # a list that DCP has not flattened
                groups.update({(root, at): group for at, group in enumerate(reads[key])})
        made["param_groups"] = [groups[at] for at in sorted(groups, key=lambda at: (str(at[0]), at[1]))]
        return made

    def read_extra(self) -> Any:
        """Read what was saved as `extra`; None where there is none."""
        if "extra" not in self.entries:
            return None
        reads: dict[str, Any] = {"extra": None}
        self._read(reads)
        return reads["extra"][0] if isinstance(reads["extra"], tuple) else None

    def _read(self, reads: dict[str, Any]) -> None:
        """Read entries by their keys, tensors in place."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with no_dist():
            dcp.load(reads, storage_reader=self, planner=planner, no_dist=True)
