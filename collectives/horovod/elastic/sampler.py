"""ElasticSampler: shares indices out over the ranks, and what is left of an epoch over those that remain."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import torch

from ...errors import InvalidUsage
from ..basics import current

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler):
    """Shares out the indices of an epoch that aren't processed yet, as many for each rank.

    As torch's DistributedSampler, and it knows what was processed: give it to `TorchState`, call `record_batch` after
    each batch and `set_epoch` at the end of each epoch. Each `TorchState.commit` tells all ranks what the others have
    processed; after a death the indices that the last commit doesn't know are shared out over the survivors.
    ``dataset``: anything with a constant len(). ``shuffle``: another order each epoch, the same on all ranks, by
    ``seed`` and the epoch. Where indices don't come out even, the first ones are given twice, so that all ranks have
    as many batches.
    """

    def __init__(self, dataset, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, of which nothing is processed. To be called at the end of the one before."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Take down that batch ``batch_idx`` (from 0) of the iteration under way was processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Take down that these indices of the dataset were processed."""
        self.processed_indices.update(map(int, indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Give the indices of batch ``batch_idx`` of the iteration under way."""
        if self.indices is None:
            raise InvalidUsage("nothing was drawn from the sampler since it was reset: there is no such batch")
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict:
        """Give the epoch and what was processed of it."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take a state, also one with ``processed_num`` in place of the indices, and share out what is left."""
        self.epoch = state_dict["epoch"]
        if "processed_indices" in state_dict:
            self.processed_indices = set(state_dict["processed_indices"])
        else:
            self.processed_indices = set(self._order()[: state_dict["processed_num"]])
        self.reset()

    def reset(self) -> None:
        """Share out what isn't processed over the ranks that there are now."""
        world = current()
        self.num_replicas, self.rank = world.size, world.rank
        self.remaining_indices = [index for index in self._order() if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices: list[int] | None = None

    def _order(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices

    def __iter__(self) -> Iterator[int]:
        # With fewer left than there are ranks, some come more than twice.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
