"""Reader of a saved state by torch.distributed.checkpoint's index, whatever its source: checks that it
is the model's, and reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ...errors import InvalidArgument
from .dist_wrapper import no_dist
from .fqns import NamedParam

__all__ = ["StateReader", "list_names", "load_error"]

load_error = functools.partial(InvalidArgument, op="load")
_NAMED = 5  # the most keys that an error names


def list_names(names: Iterable[str]) -> str:
    """Return the first names, sorted, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


class StateReader(StorageReader):
    """A saved state's index, and what is read by it: a subclass has DCP's `read_data`.

    `source`: how errors name it.
    """

    def __init__(self, source: str, metadata: Metadata):
        self.source = source
        self.metadata = metadata
        self.entries = metadata.state_dict_metadata
        self.paths: dict[str, tuple] = metadata.planner_data or {key: (key,) for key in self.entries}
        self._root = ""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        """Return the index, which is read once."""
        return self.metadata

    def check_source(self, rank: int, ranks: int) -> None:
        """Check that all of it is there, and that this rank's share is not damaged."""

    # ---- The model.

    def check_model(self, template: dict[str, Any], strict: bool) -> None:
        """Check that this is a checkpoint of a model, given by its own state dict."""
        self._root = self._find_root(template)
        problems = []
        missing = [name for name in template if self._root + name not in self.entries]
        empty = [name for name in missing if isinstance(template[name], torch.Tensor) and template[name].is_meta]
        if missing and (strict or empty or len(missing) == len(template)):
            problems.append(f"it has no {list_names(missing)}")
        known = {self._root + name for name in template}
        others = {key for key in self.entries if self._is_models(key)} - known
        if others and strict:
            problems.append(f"the model has no {list_names(key[len(self._root) :] for key in others)}")
        for name, value in template.items():
            entry = self.entries.get(self._root + name)
            if isinstance(entry, TensorStorageMetadata) != isinstance(value, torch.Tensor) and entry is not None:
                problems.append(f"{name} is a tensor in one of them only")
            elif isinstance(value, torch.Tensor) and entry is not None and entry.size != value.shape:
                problems.append(f"{name} is {list(entry.size)} there and {list(value.shape)} in the model")
        if problems:
            shown = "; ".join(problems[:_NAMED])
            raise load_error(f"{self.source} is a checkpoint of another model: {shown}")

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
            raise load_error(f"{self.source} has no optimizer state: load without optimizers")
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
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
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
            raise load_error(
                f"{self.source} has the optimizer state of another model, which has {list_names(unknown)}"
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
