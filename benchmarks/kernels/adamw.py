"""Time AdamW and torch.optim.AdamW(fused=True), in turn, on the parameter lists of shapes.json.

    python benchmarks/kernels/adamw.py                     # host memory, one thread
    python benchmarks/kernels/adamw.py --device cuda       # one GPU

On the host both clip fp32 gradients by a factor, step fp32 parameters and write a bf16 copy of
them: torch by _foreach_mul_, the optimizer and _foreach_copy_, ours in one pass (the fp32
parameters are its masters). On a GPU both find the norm and clip by it as well: torch by
clip_grad_norm_, ours by packing the gradients into a flat shard with statistics, then stepping the
shard; the bf16 copy is left out of both. The first step of both, from equal states, is compared.
`ratio` is the peer's time by ours: the median over rounds of the two times of one round. One row a
case and list goes to benchmarks/results/kernels_adamw.jsonl.
"""

import argparse

import torch
from pack import SHAPES, tensors_of
from timing import add_options, prepare, rows_of_lists, write_rows

from collectives import kernels, optim

CLIP = 0.999
MAX_NORM = 1.0
OPTIONS = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def close(ours, theirs, atol=1e-8):
    """Compare parameters after a step; torch's fused form rounds in other places than its foreach
    form.
    """
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=atol)


def torch_side(name, device):
    """Return torch's parameters with gradients, and their optimizer."""
    params = [torch.nn.Parameter(each) for each in tensors_of(name, torch.float32, device)]
    for number, param in enumerate(params):
        generator = torch.Generator().manual_seed(number)
        param.grad = torch.randn(param.shape, generator=generator).mul_(0.01).to(device)
    return params, torch.optim.AdamW(params, fused=True, **OPTIONS)


def case_clip_copy(name, device):
    """AdamW with clipping by a factor and a bf16 copy, over the list."""
    params, optimizer = torch_side(name, device)
    grads = [param.grad for param in params]
    ours = [param.detach().clone() for param in params]
    means, squares = ([torch.zeros_like(each) for each in ours] for _ in range(2))
    halves, copies = ([torch.zeros_like(each, dtype=torch.bfloat16) for each in ours] for _ in range(2))
    done = torch.zeros((), device=device)
    table = kernels.ParameterTable("adam_step", halves, grads, means, ours, squares, steps_done=[done])

    def our_step():
        table.adam(decoupled=True, clip=CLIP, **OPTIONS)
        done.add_(1)

    def chain():
        torch._foreach_mul_(grads, CLIP)
        optimizer.step()
        torch._foreach_copy_(copies, params)

    our_step()
    chain()
    close(ours, [param.detach() for param in params])
    for master, half in zip(ours, halves, strict=True):
        assert torch.equal(half, master.bfloat16())
    calls = {"ours": our_step, "torch": chain, "torch_step_alone": optimizer.step}
    return calls, (4 * 4 + 3 * 4 + 2) * SHAPES[name]["parameters"]


def case_flat_clip_copy(name, device):
    """The same on flat shards: one parameter of as many elements."""
    count = SHAPES[name]["parameters"]
    generator = torch.Generator().manual_seed(1)
    param = torch.nn.Parameter(torch.randn(count, generator=generator).to(device))
    param.grad = torch.randn(count, generator=generator).mul_(0.01).to(device)
    optimizer = torch.optim.AdamW([param], fused=True, **OPTIONS)
    ours, mean, square = param.detach().clone(), torch.zeros_like(param), torch.zeros_like(param)
    half, copy = (torch.zeros(count, dtype=torch.bfloat16, device=device) for _ in range(2))
    done = [0]

    def our_step():
        done[0] += 1
        kernels.adam_step(
            half, param.grad, mean, square, master=ours, decoupled=True, clip=CLIP, step=done[0], **OPTIONS
        )

    def chain():
        param.grad.mul_(CLIP)
        optimizer.step()
        copy.copy_(param.detach())

    our_step()
    chain()
    close([ours], [param.detach()])
    assert torch.equal(half, ours.bfloat16())
    return {"ours": our_step, "torch": chain}, (4 * 4 + 3 * 4 + 2) * count


def case_optimizer(name, device):
    """collectives.optim.AdamW as it stands in a training loop, without clipping and copies."""
    params, optimizer = torch_side(name, device)
    twins = [torch.nn.Parameter(param.detach().clone()) for param in params]
    for param, twin in zip(params, twins, strict=True):
        twin.grad = param.grad
    ours = optim.AdamW(twins, **OPTIONS)
    ours.step()
    optimizer.step()
    close([twin.detach() for twin in twins], [param.detach() for param in params])
    return {"ours": ours.step, "torch": optimizer.step}, (4 * 4 + 3 * 4) * SHAPES[name]["parameters"]


def case_norm_clip(name, device):
    """AdamW with clipping by the norm: gradients are packed with statistics into a flat shard,
    which is stepped.
    """
    params, optimizer = torch_side(name, device)
    grads = [param.grad for param in params]
    table = kernels.Table(grads, torch.float32)
    flat_grad, flat = (torch.zeros(table.total, device=device) for _ in range(2))
    kernels.pack([param.detach() for param in params], flat)
    mean, square = torch.zeros_like(flat), torch.zeros_like(flat)
    found = kernels.Statistics(device)
    done = torch.zeros((), device=device)

    def step_alone():
        factor = optim.clip_factor(found, MAX_NORM)
        kernels.adam_step(
            flat, flat_grad, mean, square, decoupled=True, clip=factor, found_nonfinite=found, step=done, **OPTIONS
        )

    def our_step():
        done.add_(1)
        kernels.pack(table, flat_grad, statistics=found)
        step_alone()

    def chain():
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        optimizer.step()

    our_step()
    chain()
    stepped = [torch.empty_like(param) for param in params]
    kernels.unpack(flat, stepped)
    # torch's norm is summed in fp32, so the factors differ; where a gradient is as small as eps,
    # that shows.
    close(stepped, [param.detach() for param in params], atol=1e-2 * OPTIONS["lr"])
    calls = {"ours": our_step, "torch": chain, "ours_with_the_norm_at_hand": step_alone}
    return calls, (8 + 4 * 4 + 3 * 4) * SHAPES[name]["parameters"]


CASES = {
    "clip_copy": case_clip_copy,
    "flat_clip_copy": case_flat_clip_copy,
    "optimizer": case_optimizer,
    "norm_clip": case_norm_clip,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, "kernels_adamw.jsonl", 15)
    parser.add_argument("--lists", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    device, common = prepare(arguments)
    rows = rows_of_lists("kernels_adamw", CASES, device, arguments)
    write_rows([{**row, **common} for row in rows], arguments)


if __name__ == "__main__":
    main()
