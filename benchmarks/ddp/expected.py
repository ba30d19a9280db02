"""Expected gradients after a sync, and their comparison with the results of a way."""

import torch
import torch.distributed as dist

BF16 = 2.0**-8  # the most that one rounding to bf16 loses, relatively


class Wrong(SystemExit):
    """A result that isn't what it must be; ends the program with a message."""


class Expected:
    """The ranks' own gradients, put together.

    ``mean``: their rank-ordered sum by their number; ``size``: the mean of their absolute values,
    or that of the step before if it is larger, whose rounding error comes back with error feedback;
    by parameter.
    """

    def __init__(self, own, before=None):
        self.own = [gradient.clone() for gradient in own]
        self.mean, self.size = [], []
        for mine in self.own:
            parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, mine)
            total, size = parts[0].clone(), parts[0].abs()
            for part in parts[1:]:
                total += part
                size += part.abs()
            self.mean.append(total.div_(len(parts)))
            self.size.append(size.div_(len(parts)))
        if before is not None:
            self.size = [torch.maximum(now, then) for now, then in zip(self.size, before.size, strict=True)]
        self.largest = max(size.max().item() for size in self.size) * dist.get_world_size()
        self.norm = torch.stack([mean.double().norm() for mean in self.mean]).norm().item()

    def clipped(self, max_norm):
        """Return the mean as ``clip_grad_norm_`` leaves it."""
        factor = min(1.0, max_norm / (self.norm + 1e-6))
        return [mean * factor for mean in self.mean]


def check(name, kind, found, expected, max_norm=None):
    """Compare a list of gradients with what is expected of a kind of sync; raise `Wrong` where they
    aren't that.

    ``kind``: "own" (not synced), "mean" (bit for bit), "close", "clipped", or a wire's name.
    """
    wanted = {"own": expected.own, "clipped": expected.clipped(max_norm) if max_norm else None}.get(kind, expected.mean)
    for index, (gradient, right) in enumerate(zip(found, wanted, strict=True)):
        if not torch.isfinite(gradient).all():
            raise Wrong(f"{name}: gradient {index} isn't finite")
        if kind in ("own", "mean"):
            good = torch.equal(gradient, right)
        elif kind in ("close", "clipped"):
            # clip_grad_norm_ adds up millions of squares in fp32.
            rtol = 1e-3 if name == "gloo_clip" else 1e-5
            good = torch.allclose(gradient, right, rtol=rtol, atol=1e-9)
        elif kind == "bf16":  # of each rank's part and of the sum, now and before; torch divides in bf16, too
            bound = 4 * (BF16 * expected.size[index] + 1e-37)
            good = bool(((gradient - right).abs() <= bound).all())
        else:  # int8: half a step of each rank's part and of the sum; and once more, from the step before
            lost = (gradient - right).abs()
            good = lost.max().item() <= 2.2 * expected.largest / 127
            good = good and (right.dim() < 2 or lost.norm().item() <= 0.05 * right.norm().item())
        if not good:
            raise Wrong(f"{name}: gradient {index} isn't what is expected of {kind!r}")
    if kind != "own":
        same_everywhere(name, found)


def same_everywhere(name, tensors):
    """Raise `Wrong` where the ranks' tensors differ."""
    # Sums of the bits, which wrap; one number a tensor.
    mine = torch.stack([(t.contiguous().view(torch.int32).long() * 2654435761 % 2**40).sum() for t in tensors])
    most, least = mine.clone(), mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    if not torch.equal(most, least):
        raise Wrong(f"{name}: the ranks' results differ")
