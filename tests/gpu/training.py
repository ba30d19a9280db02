"""What the tests of every device train: models whose gradients have the same bits wherever they are computed."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["SHAPES", "Term", "Terms", "alone", "batches", "make_terms", "run_backward_on_two_streams"]

SHAPES = ((40, 12), (40,), (30, 40), (30,), (33, 30), (7,), (5, 30))
STEPS = 3
RATE = 2.0**-4  # its products are exact, so that an optimizer may fuse them with the sum or not


class Term(nn.Module):
    """A weight w and, for a batch c, the sum of c * w * w. Its gradient is made element by element, with no rounding
    that a device may do in another way, as it does in matrix products."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(shape) + 0.5)

    def forward(self, c):
        return (c * self.weight * self.weight).sum()


class Terms(nn.Module):
    """The sum of several terms."""

    def __init__(self, shapes=SHAPES):
        super().__init__()
        self.terms = nn.ModuleList(Term(shape) for shape in shapes)

    def forward(self, batch):
        total = None
        for term, c in zip(self.terms, batch, strict=True):
            value = term(c)
            total = value if total is None else total + value
        return total


def make_terms(device="cpu", shapes=SHAPES) -> Terms:
    torch.manual_seed(11)
    return Terms(shapes).to(device)


def batches(step: int, rank: int, device="cpu", shapes=SHAPES) -> list[torch.Tensor]:
    """Give what a rank trains with in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def alone(ranks: int, steps: int = STEPS, *, make=None, average: bool = True, shapes=SHAPES):
    """Train as so many ranks would, in this process and with torch alone: gradients summed in rank order, divided once.

    Give the gradients of each step and the parameters at the end. `make`: the optimizer of parameters.
    """
    model = make_terms(shapes=shapes)
    optimizer = torch.optim.SGD(model.parameters(), RATE) if make is None else make(model.parameters())
    seen = []
    for step in range(steps):
        total = None
        for rank in range(ranks):
            model.zero_grad()
            model(batches(step, rank, shapes=shapes)).backward()
            grads = [param.grad.clone() for param in model.parameters()]
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        for param, grad in zip(model.parameters(), total, strict=True):
            param.grad = grad / ranks if average else grad
        seen.append([param.grad.clone() for param in model.parameters()])
        optimizer.step()
    return seen, [param.detach().clone() for param in model.parameters()]


def run_backward_on_two_streams(rank, models, step: int) -> None:
    """Run a forward of two models, the first on a stream of its own, and one backward of both."""
    data, side = batches(step, rank.rank, rank.device), rank.new_stream()
    with rank.use(side):
        first = models[0](data)
    rank.join(side)
    if side is not None:
        first.record_stream(torch.cuda.current_stream())
        for each in data:
            each.record_stream(side)
    (first + models[1](data)).backward()
