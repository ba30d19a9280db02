"""Parameters of a bucket that no rank has used in a backward.

The hook's optimizer doesn't step these.
"""

from __future__ import annotations

import itertools

import torch

__all__ = ["find_unused_parameters"]


def find_unused_parameters(comm, bucket) -> tuple[set, dict | None]:
    """Find a bucket's parameters that have a gradient on no rank. A collective.

    Returns (indices, None) on the host. On CUDA, where nobody waits for the answer, returns an
    empty set and the indices that this rank has not used, each with an fp32 tensor of one element:
    1 if no rank has used it, else 0.
    """
    used_here = [param.grad is not None for param in bucket.params]
    used = torch.ones(len(used_here), dtype=torch.uint8, device=comm.device)
    begin = 0
    for is_used, run in itertools.groupby(used_here):  # filled by value: a copy from the host would wait
        end = begin + len(list(run))
        if not is_used:
            used[begin:end].zero_()
        begin = end
    comm.all_reduce(used, "max")
    if comm._on_host:
        return {at for at, each in enumerate(used.tolist()) if not each}, None
    unused = (used == 0).to(torch.float32)
    return set(), {at: unused[at : at + 1] for at, each in enumerate(used_here) if not each}
