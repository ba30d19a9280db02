"""The optimizers' part of mutant_rows.py."""

from __future__ import annotations

import torch

from collectives import kernels

from .mutants import Arena, Case, Mutant

__all__ = ["rows"]

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
COUNTS = (5, 0, 4096, 4097, 8201, 1, 0, 4099, 3)
# The dtypes of parameter and gradient, and whether there is a master.
KINDS = (
    (F32, F32, False),
    (BF16, BF16, True),
    (F64, BF16, False),
    (BF16, F32, False),
    (F32, BF16, False),
    (F64, F64, False),
)


def some(arena: Arena, states: int, counts=COUNTS, kinds=KINDS):
    """Parameters, gradients, states and masters, at all offsets in a pack; every buffer between guard zones."""
    params, grads, masters = [], [], []
    state = [[] for _ in range(states)]
    for i, count in enumerate(counts):
        param, grad, master = kinds[i % len(kinds)]
        params.append(arena.normal(count, param, skip=i % 4))
        grads.append(arena.normal(count, grad, skip=(i + 1) % 4))
        masters.append(arena.normal(count, F32, skip=(i + 2) % 3) if master else None)
        for number, each in enumerate(state):
            values = torch.rand(count, generator=arena.random) + 0.1
            each.append(arena.put(values.to(F64 if param == F64 else F32), (i + number) % 3))
    return params, grads, masters, state


def sgd(arena: Arena) -> None:
    params, grads, masters, (momentum,) = some(arena, 1)
    steps = [1 + i % 2 for i in range(len(params))]
    how = dict(lr=0.1, momentum_factor=0.9, dampening=0.25, weight_decay=0.01, step=steps, seed=3, position=2)
    kernels.sgd_step(params, grads, momentum, master=masters, clip=0.5, **how)
    params, grads, masters, _ = some(arena, 0)
    kernels.sgd_step(params, grads, master=masters, lr=0.1)


def adam(arena: Arena) -> None:
    params, grads, masters, (mean, square, largest) = some(arena, 3)
    steps = [torch.tensor(1.0 + i) for i in range(len(params))]
    how = dict(lr=0.1, weight_decay=0.01, step=steps, grad_scale=torch.tensor([0.5]), max_exp_avg_sq=largest)
    kernels.adam_step(params, grads, mean, square, master=masters, **how)


def adamw(arena: Arena) -> None:
    """Aligned, so that whole packs are moved; one parameter, whose row travels with the arguments."""
    for kind in KINDS:
        params, grads, masters, (mean, square) = some(arena, 2, (8_501,), (kind,))
        seed = 5 if kind[0] == BF16 else None
        how = dict(lr=0.1, weight_decay=0.1, decoupled=True, step=7, seed=seed, position=1001)
        kernels.adam_step(params, grads, mean, square, master=masters, **how)


def left_out(arena: Arena) -> None:
    params, grads, masters, (mean, square) = some(arena, 2)
    kernels.adam_step(params, grads, mean, square, master=masters, lr=0.1, step=1, found_nonfinite=torch.tensor([1]))


CASES: tuple[Case, ...] = (sgd, adam, adamw, left_out)

ON_CUDA = (
    # Tiles, blocks and rows.
    ("int64_t tile = a.work.tiles * (int64_t)blockIdx.x / gridDim.x", "int64_t tile = 0"),
    ("a.work.tiles * ((int64_t)blockIdx.x + 1)", "(a.work.tiles - 1) * ((int64_t)blockIdx.x + 1)"),
    ("|| coll_left_out(a.update)", ""),
    ("coll_tensor_of(rows, a.update.count, tile)", "coll_tensor_of(rows, a.update.count, tile + 1)"),
    ("++at) {\n    __syncthreads();", "++at) {"),
    ("    }\n    __syncthreads();\n    int64_t end", "    }\n    int64_t end"),
    ("plan.row = rows[at];", "plan.row = rows[0];"),
    ("if (end > last) end = last;", ""),
    ("tile < end; ++tile", "tile < last; ++tile"),
    ("tile < end; ++tile", "tile < end - 1; ++tile"),
    ("plan.narrow = coll_rounded<float>(rule);", ""),
    ("plan.row.param_type == COLL_F64", "plan.row.grad_type == COLL_F64"),
    # Packs.
    ("int i = threadIdx.x * kPack; i < tile.count", "int i = threadIdx.x; i < tile.count"),
    ("i < tile.count; i += blockDim.x * kPack", "i < tile.count; i += COLL_BLOCK * kPack"),
    ("i < tile.count; i +=", "i + kPack <= tile.count; i +="),
    ("tile.first + i, tile.count - i", "i, tile.count - i"),
    ("tile.count - i < kPack ? tile.count - i : kPack", "kPack"),
    ("n == kPack && (uint64_t)from % sizeof(coll_pack_of<S, kPack>) == 0", "n == kPack"),
    ("n == kPack && (uint64_t)to % sizeof(coll_pack_of<D, kPack>) == 0", "n == kPack"),
    ("n == kPack && (uint64_t)to %", "(uint64_t)to %"),
    ("if (j < n) to[j] = coll_element<D>", "if (j <= n) to[j] = coll_element<D>"),
    ("if (j < n) to[j] = rounded[j];", "to[j] = rounded[j];"),
    ("n == 4 && (uint64_t)to %", "(uint64_t)to %"),
    # What is read and written.
    ("if (row.master) load_pack(p, (const float*)row.master + i, n);\n  else ", ""),
    ("if (row.master) store_pack((float*)row.master + i, p, n);", ""),
    ("seed, (uint64_t)(row.position + i)", "seed, (uint64_t)i"),
    ("if (flags & COLL_STOCHASTIC) store_at_random", "if (flags & COLL_DIVIDE) store_at_random"),
    ("coll_philox_pack(seed, first)", "coll_philox_pack(seed, first / 4 * 4)"),
    ("if (rule.has_momentum) store_pack", "if (rule.nesterov) store_pack"),
    ("if (rule.amsgrad) load_pack", "if (rule.ends) load_pack"),
    ("if (rule.amsgrad) store_pack", "if (rule.ends) store_pack"),
    ("store_pack((A*)row.second + i, v, n);", "store_pack((A*)row.second + i, m, n);"),
)  # fmt: skip

ON_HOST = (
    # Tiles and rows.
    ("if (first >= last || coll_left_out(a.update)) return;", "if (first >= last) return;"),
    ("= a.update.parameters;", "= a.update.parameters + 1;"),
    ("coll_tensor_of(rows, a.update.count, first)", "coll_tensor_of(rows, a.update.count, first + 1)"),
    ("if (end > last) end = last;", ""),
    ("for (; tile < end; ++tile)", "for (; tile < end - 1; ++tile)"),
    ("if (row.param_type == COLL_F64) step_tile", "if (row.grad_type == COLL_F64) step_tile"),
    # Blocks.
    ("start < tile.count; start += kBlock", "start < tile.count - 1; start += kBlock"),
    ("int64_t at = tile.first + start;", "int64_t at = start;"),
    ("tile.count - start < kBlock ? tile.count - start : kBlock", "kBlock"),
    ("at * coll_width(row.grad_type)", "at * coll_width(row.param_type)"),
    ("if (row.grad_type != kTypeOf<A>)", "if (row.grad_type == COLL_BF16 && !row.master)"),
    ("static_cast<A*>(row.master) + at", "static_cast<A*>(row.master) + start"),
    ("static_cast<A*>(row.first) + at", "static_cast<A*>(row.first)"),
    ("static_cast<A*>(row.largest) + at", "static_cast<A*>(row.second) + at"),
    ("if (row.param_type == kTypeOf<A>) continue;", "if (row.master) continue;"),
    ("(uint64_t)(row.position + at)", "(uint64_t)at"),
    ("dst[i].bits = coll_float_to_bf16_at_random(values[i], words[i])", "dst[i].bits = coll_float_to_bf16(values[i])"),
    # Loops.
    ("? r.decays | 2 | r.begins << 2 | r.nesterov << 3", "? r.decays | 2 | r.nesterov << 3"),
    ("r.decays | r.amsgrad << 1 | r.ends << 2", "r.amsgrad << 1 | r.ends << 2"),
    ("if (kShape & 2) b.first[i] = m;", "if (kShape & 4) b.first[i] = m;"),
    ("if (kShape & 2) b.largest[i] = x;", ""),
    ("b.second[i] = v;", "b.second[i] = m;"),
)  # fmt: skip

RULES = (
    ("if (n & 1) {", "if (n & 2) {"),
    ("r.begins = coll_value(row.step) == 1.0", "r.begins = false"),
    ("return u.flags & COLL_MAXIMIZE ? -factor : factor;", "return -factor;"),
    ("double factor = u.flags & COLL_DIVIDE ? clip / scale : clip * scale;", "double factor = clip;"),
    ("r.keep = decoupled ?", "r.keep = !decoupled ?"),
    ("coll_fma(r.lerp, g - mean, r.ends ? g : mean)", "coll_fma(r.lerp, g - mean, r.ends ? mean : g)"),
    ("(tile - row.first_tile) * COLL_TILE", "tile * COLL_TILE"),
    ("left < COLL_TILE ? left : COLL_TILE", "COLL_TILE"),
    ("seed + (uint64_t)step * 0x9e3779b97f4a7c15u", "seed"),
)


def rows() -> list[tuple[Mutant, tuple[Case, ...]]]:
    found = []
    for file, source, changes in (
        ("cuda/optim.cu", "", ON_CUDA),
        ("host/optim.cpp", "", ON_HOST),
        ("include/coll/optim.h", "host/optim.cpp", RULES),
    ):
        found += [(Mutant(file, before, after, source), CASES) for before, after in changes]
    return found
