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
from .bucket import GradientBucket
from .grad_memory import grad_dtype, real_dtype

__all__ = [
    "assign_buckets",
    "check_devices",
    "check_no_overlap",
    "fill_buckets",
    "read_params",
    "split_by_bucket",
]

_OP = "GradientBuckets"
# A parameter of at least this size has a bucket alone on the host. The copies to a flat buffer and
# back take longer than an operation of its own with the engine's staging: for 12 gradients of 4 MiB
# on 2 ranks 58 ms against 33 ms.
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
        raise InvalidArgument(f"{_describe_param(name, number, param)} {wrong}", op=_OP)


def check_devices(members: list, comm) -> None:
    """Raise `InvalidArgument` for a parameter on another device than the communicator's."""
    for number, (name, param) in enumerate(members):
        if param.device != comm.device:
            raise InvalidArgument(
                f"{_describe_param(name, number, param)} is on {param.device}, the communicator on "
                f"{comm.device}: move the model there before you give its parameters, "
                f".to({str(comm.device)!r})",
                op=_OP,
            )


def assign_buckets(members: list, caps: tuple[int, int]) -> list[GradientBucket]:
    """Assign parameters to buckets by dtype and device, last ones first.

    A large parameter on the host gets a bucket of its own. `members`: (name, parameter) pairs; `caps`: bytes of the
    first bucket, and of the others.
    """
    sized = [
        (
            member,
            (real_dtype(grad_dtype(member[1])), member[1].device),
            member[1].numel() * grad_dtype(member[1]).itemsize,
        )
        for member in reversed(members)
    ]
    return [GradientBucket(index, inside, *key) for index, (key, inside) in enumerate(fill_buckets(sized, caps))]


def fill_buckets(members: list, caps: tuple[int, int], *, views: bool = False) -> list[tuple[tuple, list]]:
    """Fill buckets with neighbours of one dtype and device; return the key and the members of each.

    The buckets are in the order of their last members, with which they are complete. `members`:
    (member, key, bytes), in the order in which their gradients become ready; a key is a dtype and a
    device. `caps`: bytes of the first bucket of a key, and of the others; a larger member is alone.
    `views`: gradients are views of the buckets; else a large one on the host is alone.
    """
    filling: dict[tuple, list] = {}  # key -> members, bytes, number of full buckets, position of the last member
    done = []  # position of the last member, key, members
    for place, (member, key, nbytes) in enumerate(members):
        if nbytes >= _OWN_BUCKET_BYTES and key[1].type == "cpu" and not views:
            done.append((place, key, [member]))
            continue
        entry = filling.setdefault(key, [[], 0, 0, place])
        if entry[0] and entry[1] + nbytes > caps[entry[2] > 0]:
            done.append((entry[3], key, entry[0]))
            entry[:] = [], 0, entry[2] + 1, place
        entry[0].append(member)
        entry[1] += nbytes
        entry[3] = place
    done += [(entry[3], key, entry[0]) for key, entry in filling.items()]
    done.sort(key=lambda each: each[0])
    return [(key, inside) for _, key, inside in done]


def split_by_bucket(flags: list, buckets: list[GradientBucket]) -> list[list]:
    """Split flags, one for each parameter, in the buckets' order, by bucket."""
    rest = iter(flags)
    return [list(itertools.islice(rest, len(bucket.params))) for bucket in buckets]


def check_no_overlap(buckets: list[GradientBucket]) -> None:
    """Raise `InvalidArgument` where gradients share memory, which would be reduced twice."""
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


def _describe_param(name, number, param) -> str:
    """Return a parameter's name, or its number, and its shape, for a message."""
    return f"parameter {name or number} of shape {tuple(param.shape) if not torch.nn.parameter.is_lazy(param) else '?'}"
