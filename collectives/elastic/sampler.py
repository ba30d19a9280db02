"""ElasticSampler: distributes an epoch's indices, and the rest of them after ranks die or join."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import torch

from ..errors import InvalidUsage
from .channel import Channel, CommChannel

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler):
    """Distributes the indices of an epoch that aren't processed yet, the same number to each rank.

    It is torch's DistributedSampler with a record of what was processed: pass it to `TorchState`,
    call `record_batch` after each batch and `set_epoch` at the end of each epoch. Each
    `TorchState.commit` exchanges what the ranks have processed. After a rank's death the indices
    that the last commit doesn't have are distributed over the survivors. Where indices can't be
    split evenly, the first ones occur twice, so that all ranks have the same number of batches.

    Args:
        dataset: Any object with a constant len().
        shuffle: Take another order each epoch, the same on all ranks, from ``seed`` and the epoch.
        seed: The seed of the order.
    """

    channel: Channel = CommChannel()

    def __init__(self, dataset, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch, of which nothing is processed.

        Call it at the end of the previous one.
        """
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that a batch of the current iteration was processed.

        Args:
            batch_idx: The number of the batch, from 0.
            batch_size: The number of indices in a batch.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Record that these indices of the dataset were processed."""
        self.processed_indices.update(map(int, indices))

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Return the indices of a batch of the current iteration.

        Args:
            batch_idx: The number of the batch, from 0.
            batch_size: The number of indices in a batch.
        """
        if self.indices is None:
            raise InvalidUsage("nothing was drawn from the sampler since it was reset: there is no such batch")
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict:
        """Return the epoch and its processed indices."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state, also one with ``processed_num`` in place of the indices, and distribute the
        other indices.
        """
        self.epoch = state_dict["epoch"]
        if "processed_indices" in state_dict:
            self.processed_indices = set(state_dict["processed_indices"])
        else:
            self.processed_indices = set(self._ordered_indices()[: state_dict["processed_num"]])
        self.reset()

    def reset(self) -> None:
        """Distribute the indices that aren't processed over the current ranks."""
        self.num_replicas, self.rank = self.channel.size, self.channel.rank
        self.remaining_indices = [index for index in self._ordered_indices() if index not in self.processed_indices]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self.indices: list[int] | None = None

    def _ordered_indices(self) -> list[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        return indices

    def __iter__(self) -> Iterator[int]:
        # Where fewer are left than there are ranks, some occur more than twice.
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(padded)[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
