"""Assignment of parameters to gradient buckets, and the checks of parameters and of their
gradients' memory.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable

import torch

from ..arrays import kind_of
from ..errors import InvalidArgument
from ..torch_compat import is_traceable_wrapper_subclass
from .bucket import GradientBucket, grad_dtype, real_dtype

__all__ = ["assign_buckets", "check_no_overlap", "describe_param", "read_params"]

_OP = "GradientBuckets"
# Bytes. From this size on the copies to a flat buffer and back take longer than an operation of its
# own with the engine's staging: for 12 gradients of 4 MiB on 2 ranks 58 ms against 33 ms.
_OWN_BUCKET_BYTES = 1 << 20
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def read_params(params) -> list[tuple[str | None, torch.Tensor]]:
    """Return (name or None, parameter) pairs from all forms of `params`.

    Each parameter comes once; frozen ones are left out.
    """
    if isinstance(params, torch.nn.Module):
        raise InvalidArgument("params is a module: pass its parameters() or named_parameters()", op=_OP)
    if isinstance(params, (torch.Tensor, dict, str)) or not isinstance(params, Iterable):
        raise InvalidArgument(
            f"params must be parameters, (name, parameter) pairs or an optimizer's param_groups, not {kind_of(params)}",
            op=_OP,
        )
    entries: list = []
    for entry in params:
        if isinstance(entry, dict):
            if "params" not in entry:
                raise InvalidArgument('a param group must have "params", as an optimizer\'s do', op=_OP)
            inside = entry["params"]
            entries += [inside] if isinstance(inside, torch.Tensor) else inside
        else:
            entries.append(entry)
    found: dict[int, tuple] = {}
    for number, entry in enumerate(entries):
        name, param = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(param, torch.Tensor) or not isinstance(name, str | None):
            cure = "" if not isinstance(entry, Iterable) else ". Of several models: itertools.chain(one, other)"
            raise InvalidArgument(
                f"entry {number} of params is no parameter, nor (name, parameter): {kind_of(entry)}{cure}", op=_OP
            )
        if param.requires_grad and id(param) not in found:
            _check_param(name, number, param)
            found[id(param)] = (name, param)
    if not found:
        raise InvalidArgument("params holds no parameter that requires a gradient", op=_OP)
    return list(found.values())


def _check_param(name, number, param) -> None:
    wrong = None
    if torch.nn.parameter.is_lazy(param):
        wrong = "has no shape yet: run the model once, or give lazy modules their sizes"
    elif not param.is_leaf:
        wrong = "is no leaf: only leaves of the graph get a .grad"
    elif is_traceable_wrapper_subclass(param):
        wrong = f"is a {kind_of(param)}: only plain parameters can be averaged (sharded ones have their own reduction)"
    elif param.layout is not torch.strided or param.device.type not in ("cpu", "cuda"):
        wrong = f"is {str(param.layout).removeprefix('torch.')} on {param.device}: it must be dense, on the CPU or CUDA"
    elif real_dtype(grad_dtype(param)) not in _DTYPES:
        wrong = f"has gradients of {grad_dtype(param)}: fp32, fp64, fp16, bf16 and complex ones can be averaged"
    if wrong:
        raise InvalidArgument(f"{describe_param(name, number, param)} {wrong}", op=_OP)


def assign_buckets(members: list, caps: tuple[int, int]) -> list[GradientBucket]:
    """Assign parameters to buckets by dtype and device, last ones first.

    A large one on the host gets its own. `members`: (name, parameter) pairs; `caps`: bytes of the
    first bucket, and of the others.
    """
    filling: dict[tuple, list] = {}  # (dtype, device) -> members, bytes, number of full buckets, last position
    done = []  # position of the last member, members, key
    for place, (name, param) in enumerate(reversed(members)):
        key = real_dtype(grad_dtype(param)), param.device
        nbytes = param.numel() * grad_dtype(param).itemsize
        if nbytes >= _OWN_BUCKET_BYTES and param.device.type == "cpu":
            done.append((place, [(name, param)], key))
            continue
        entry = filling.setdefault(key, [[], 0, 0, place])
        if entry[0] and entry[1] + nbytes > caps[entry[2] > 0]:
            done.append((entry[3], entry[0], key))
            entry[:] = [], 0, entry[2] + 1, place
        entry[0].append((name, param))
        entry[1] += nbytes
        entry[3] = place
    done += [(entry[3], entry[0], key) for key, entry in filling.items()]
    done.sort(key=lambda each: each[0])  # a bucket is complete with its last member
    return [GradientBucket(index, inside, *key) for index, (_, inside, key) in enumerate(done)]


def check_no_overlap(buckets: list[GradientBucket]) -> None:
    """Raise `InvalidArgument` where gradients share memory: it would be averaged, or summed, twice."""
    spans = [bucket.spans() for bucket in buckets]
    starts = sorted(itertools.chain.from_iterable(each[0] for each in spans))
    ends = sorted(itertools.chain.from_iterable(each[1] for each in spans))
    # Of disjoint intervals the n-th end comes before the next begin, in sorted order.
    if not any(map(operator.gt, ends, itertools.islice(starts, 1, None))):
        return
    named = sorted(
        (start, end, name)
        for bucket, (starts, ends) in zip(buckets, spans, strict=True)
        for start, end, name in zip(starts, ends, bucket.names(), strict=True)
        if start < end
    )
    last, owner = 0, ""
    for start, end, name in named:
        if start < last:
            raise InvalidArgument(
                f"the gradients of {owner} and {name} share memory: give one of them a copy",
                op=_OP,
            )
        if end > last:
            last, owner = end, name


def describe_param(name, number, param) -> str:
    """Return a parameter's name, or its number, and its shape, for a message."""
    return f"parameter {name or number} of shape {tuple(param.shape) if not torch.nn.parameter.is_lazy(param) else '?'}"
