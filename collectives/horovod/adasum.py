"""Adasum: sum of gradients whose common part counts once (Maleki et al., arXiv:2006.02924)."""

from __future__ import annotations

import torch

from ..comm.communicator import Communicator

__all__ = ["adasum_"]


def adasum_(comm: Communicator, tensors: list[torch.Tensor]) -> None:
    """Replace tensors by the ranks' Adasum of each, in place.

    Dtypes are floating, and the same on all ranks. Blocks. Adasum of two vectors is (1 - a.b /
    2|a|^2) a + (1 - a.b / 2|b|^2) b, with the products summed in fp64. n ranks combine pairs, then
    pairs of pairs and so on, as Horovod does. The number of ranks is any: those past the largest
    power of two are paired with the first ones beforehand. All ranks get the same bits. Elements
    are sent in fp32, or in fp64 where a tensor has fp64.
    """
    if comm.size == 1 or not tensors:
        return
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    own = torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])
    other = torch.empty_like(own)
    lengths = [tensor.numel() for tensor in tensors]
    even = 1 << (comm.size.bit_length() - 1)  # the largest power of two of ranks
    rank = comm.rank
    if rank >= even:
        comm.send(own, rank - even)
        comm.recv(own, rank - even)
    else:
        if rank + even < comm.size:
            comm.recv(other, rank + even)
            _combine(own, own, other, lengths)
        distance = 1
        while distance < even:
            partner = rank ^ distance
            with comm.group():
                comm.send(own, partner)
                comm.recv(other, partner)
            first, second = (own, other) if rank < partner else (other, own)
            _combine(own, first, second, lengths)
            distance *= 2
        if rank + even < comm.size:
            comm.send(own, rank + even)
    for tensor, part in zip(tensors, own.split(lengths), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _combine(out, first, second, lengths) -> None:
    """Write to ``out`` the Adasum of two flat vectors, tensor by tensor."""
    for to, a, b in zip(out.split(lengths), first.split(lengths), second.split(lengths), strict=True):
        wide_a, wide_b = a.double(), b.double()
        both, of_a, of_b = wide_a.dot(wide_b), wide_a.dot(wide_a), wide_b.dot(wide_b)
        # A zero vector has no common part with the other one.
        keep_a = torch.where(of_a > 0, 1 - both / (2 * of_a), 1.0)
        keep_b = torch.where(of_b > 0, 1 - both / (2 * of_b), 1.0)
        to.copy_(wide_a * keep_a + wide_b * keep_b)
