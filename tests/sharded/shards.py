"""RaggedTensors for tests: of whole tensors that all ranks have, with several kinds of bounds."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from collectives.sharded.placement import RaggedShard
from collectives.sharded.ragged_tensor import RaggedTensor

# Matrices, vectors, a scalar, rows and elements; by 2 ranks one has nothing of some.
SHAPES = [(8, 6), (5,), (), (3, 4, 2), (40, 16), (1, 7), (16, 1), (9,)]


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),))


def placements(shape, index, ranks):
    """Return a placement of a tensor of this shape; odd indices are cut between any elements."""
    by_rows = index % 2 == 0 and len(shape) > 0
    count = shape[0] if by_rows else torch.Size(shape).numel()
    bounds = [0, *(min(count, count * rank // ranks + index % 3) for rank in range(1, ranks)), count]
    return RaggedShard([0] + [0] * (ranks - 1) + [count] if index % 5 == 4 else bounds, by_rows)


def sharded(values, mesh):
    """Return shards of whole tensors."""
    ranks = mesh.size(mesh.ndim - 1)
    return [
        RaggedTensor.from_full(value, mesh, placements(value.shape, index, ranks)) for index, value in enumerate(values)
    ]


def params_of(values):
    return [nn.Parameter(value.clone()) for value in values]


def values(seed, shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def set_grads(params, grads):
    """Give whole gradients to parameters: to sharded ones their part."""
    for param, grad in zip(params, grads, strict=True):
        if isinstance(param, RaggedTensor):
            param.grad = param.detach().like(param.ragged.cut(grad, param.shard_rank).clone())
        else:
            param.grad = grad.clone()


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
