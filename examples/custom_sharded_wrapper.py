"""A sharded layer of one's own: frozen int8 weights, in shards on the ranks, and a small adapter that is trained.

    torchrun --nproc-per-node 2 examples/custom_sharded_wrapper.py

The weights are all-gathered as int8 for each product, forward and backward, and freed after it.
docs/custom-wrappers.md explains the API. The last line on stdout is one JSON object; exit status 1
where training has not helped.
"""

import json
import sys

import torch
from torch import nn

import collectives
from collectives.sharded import Unit


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        with layer.unit.unsharded():  # an all-gather of int8
            return x @ layer.weight().t()

    @staticmethod
    def backward(ctx, grad):
        with ctx.layer.unit.unsharded():
            return grad @ ctx.layer.weight(), None


class Int8Linear(nn.Module):
    def __init__(self, linear, comm, rank=8):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        whole = (linear.weight.detach() / scale).round().to(torch.int8)
        self.base = nn.ParameterDict({"int8": nn.Parameter(whole, False), "scale": nn.Parameter(scale, False)})
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features)
        nn.init.zeros_(self.up.weight)
        self.unit = Unit(self.base, comm)  # from here on self.base holds this rank's shards

    def weight(self):
        return self.base["int8"] * self.base["scale"]

    def forward(self, x):
        return Product.apply(x, self) + self.up(self.down(x))


def main():
    comm = collectives.init()
    torch.manual_seed(1)
    teacher, frozen = nn.Linear(256, 256), nn.Linear(256, 256)
    frozen.load_state_dict(teacher.state_dict())
    teacher.weight.data += torch.outer(torch.randn(256), torch.randn(256)) / 64  # what the adapter is to learn
    model = nn.Sequential(Int8Linear(frozen, comm), nn.Identity())
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer, buckets = torch.optim.Adam(trained, 0.01), collectives.GradientBuckets(trained, comm=comm)
    losses = []
    for step in range(60):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step * comm.size + comm.rank))
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        optimizer.zero_grad()
        loss.backward()
        buckets.all_reduce()
        optimizer.step()
        losses.append(loss.item())
    held = sum(param.to_local().nbytes for param in model[0].unit.pieces())
    result = {"ranks": comm.size, "first_loss": losses[0], "last_loss": losses[-1], "base_bytes_on_a_rank": held}
    if comm.rank == 0:
        print(json.dumps(result), flush=True)
    comm.close()
    return 0 if losses[-1] < 0.1 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
