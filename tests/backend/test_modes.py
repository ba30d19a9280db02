"""Every operation of torch.distributed on the backend, however it is waited for and in whatever mode of torch's.

The modes: eager, inside of a function that torch.compile compiles, in inference mode, under another default
device. The forms: blocking, waited for inside of the mode or outside, by the future, by a callback of it.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor

from tests.backend.groups import over
from tests.ranks import run_ranks

RANKS = 2
CPU = torch.device("cpu")


def ones(*shape, factor=1.0):
    return torch.full(shape, factor * (dist.get_rank() + 1), device=CPU)


def zeros(*shape):
    return torch.zeros(shape, device=CPU)


def numbers(*values):
    return torch.tensor(values, device=CPU)


class Started:
    """Works and the tensors that they fill, as one."""

    def __init__(self, works, outputs):
        self.works = [work for work in (works if isinstance(works, list) else [works]) if work is not None]
        self.outputs = outputs


OPERATIONS = {}


def operation(function):
    """Add an operation: called with async_op, it returns a Started."""
    OPERATIONS[function.__name__] = function
    return function


@operation
def all_reduce(a):
    tensor = ones(6)
    return Started(dist.all_reduce(tensor, async_op=a), [tensor])


@operation
def all_reduce_strided(a):
    tensor = ones(2, 3).t()
    return Started(dist.all_reduce(tensor, async_op=a), [tensor])


@operation
def all_reduce_bitwise(a):
    bits, flags = numbers(dist.get_rank() + 1), numbers(True)
    works = [
        dist.all_reduce(bits, dist.ReduceOp.BOR, async_op=a),
        dist.all_reduce(flags, dist.ReduceOp.BXOR, async_op=a),
    ]
    return Started(works, [bits, flags])


@operation
def all_reduce_sparse(a):
    tensor = torch.sparse_coo_tensor(numbers(0, dist.get_rank())[None], ones(2), (3,), device=CPU)
    work = dist.all_reduce(tensor, async_op=a)
    return Started(work, [tensor])


@operation
def all_reduce_coalesced(a):
    tensors = [ones(3), ones(2, 2).t()]
    return Started(dist.all_reduce_coalesced(tensors, async_op=a), tensors)


@operation
def broadcast(a):
    tensors = ones(6), ones(2, 3).t()
    return Started([dist.broadcast(each, 1, async_op=a) for each in tensors], list(tensors))


@operation
def reduce(a):
    tensor = ones(2, 3).t()
    work = dist.reduce(tensor, 0, async_op=a)
    return Started(work, [tensor] if dist.get_rank() == 0 else [])


@operation
def all_gather(a):
    parts, uneven = [zeros(4) for _ in range(RANKS)], [zeros(rank + 1) for rank in range(RANKS)]
    mine = ones(dist.get_rank() + 1)
    works = [dist.all_gather(parts, ones(4), async_op=a), dist.all_gather(uneven, mine, async_op=a)]
    return Started(works, parts + uneven)


@operation
def all_gather_into_tensor(a):
    out, strided = zeros(8), zeros(4, 4).t()
    works = [
        dist.all_gather_into_tensor(out, ones(4), async_op=a),
        dist.all_gather_into_tensor(strided, ones(2, 4), async_op=a),
    ]
    return Started(works, [out, strided])


@operation
def gather(a):
    parts = [zeros(3) for _ in range(RANKS)] if dist.get_rank() == 0 else None
    return Started(dist.gather(ones(3), parts, 0, async_op=a), parts or [])


@operation
def scatter(a):
    out = zeros(3, 2).t()
    parts = [ones(2, 3, factor=each + 2.0) for each in range(RANKS)] if dist.get_rank() == 1 else None
    return Started(dist.scatter(out, parts, 1, async_op=a), [out])


@operation
def reduce_scatter(a):
    out, strided = zeros(3), zeros(2, 2).t()
    works = [
        dist.reduce_scatter(out, [ones(3, factor=each + 1.0) for each in range(RANKS)], async_op=a),
        dist.reduce_scatter_tensor(strided, ones(4, 2), async_op=a),
    ]
    return Started(works, [out, strided])


@operation
def all_to_all(a):
    parts = [zeros(2), zeros(4)[::2]]
    return Started(dist.all_to_all(parts, [ones(2), ones(2, factor=5.0)], async_op=a), parts)


@operation
def all_to_all_single(a):
    even, uneven = zeros(4, 2).t()[0], zeros(3)
    mine, other = (1, 2) if dist.get_rank() == 0 else (2, 1)
    splits = ([1, 2], [1, 2]) if dist.get_rank() == 0 else ([2, 1], [2, 1])
    works = [
        dist.all_to_all_single(even, ones(4), async_op=a),
        dist.all_to_all_single(uneven, ones(mine + other), *splits, async_op=a),
    ]
    return Started(works, [even, uneven])


@operation
def barrier(a):
    return Started(dist.barrier(async_op=a), [])


@operation
def send_and_receive(a):
    rank, got = dist.get_rank(), zeros(3, 2).t()
    if a:
        works = [dist.isend(ones(2, 3), 1 - rank, tag=4), dist.irecv(got, 1 - rank, tag=4)]
        return Started(works, [got])
    for sender in range(RANKS):
        if rank == sender:
            dist.send(ones(2, 3), 1 - rank)
        else:
            dist.recv(got)
    return Started(None, [got])


@operation
def batch_isend_irecv(a):
    got, peer = zeros(3), 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(3), peer), dist.P2POp(dist.irecv, got, peer)])
    if not a:
        for work in works:
            work.wait()
        works = []
    return Started(works, [got])


@operation
def coalesced(a):
    tensors = [ones(3), ones(2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=a) as manager:
        for each in tensors:
            dist.all_reduce(each)
    return Started(manager if a else None, tensors)


@operation
def functional(a):
    gathered = all_gather_tensor(ones(2), 0, dist.group.WORLD)
    return Started(None, [gathered + 0.0])


@operation
def objects(a):
    rank, sent, everyone = dist.get_rank(), [("of", dist.get_rank())], [None] * RANKS
    dist.broadcast_object_list(sent, 1)
    dist.all_gather_object(everyone, rank)
    out = [None]
    dist.scatter_object_list(out, [7, 8] if rank == 0 else None, 0)
    dist.monitored_barrier()
    return Started(None, [numbers(sent[0][1], out[0], *everyone)])


def blocking(start):
    return start(False)


def waited(start):
    started = start(True)
    for work in started.works:
        work.wait()
    return started


def by_future(start):
    started = start(True)
    for work in started.works:
        if hasattr(work, "get_future"):  # a coalescing manager has none
            work.get_future().wait()
        else:
            work.wait()
    return started


def by_callback(start):
    started, seen = start(True), []
    for work in started.works:
        if hasattr(work, "get_future"):
            work.get_future().then(lambda future: seen.append(future.value())).wait()
        else:
            work.wait()
            seen.append(None)
    assert len(seen) == len(started.works)
    return started


FORMS = {"blocking": blocking, "waited": waited, "future": by_future, "callback": by_callback}


def in_mode(mode, form):
    """Run an operation in a form and a mode, and return its outputs."""

    def run(start):
        if mode == "compiled":
            torch._dynamo.reset()
            return torch.compile(form, backend="eager")(start).outputs
        context = {
            "eager": contextlib.nullcontext, "inference": torch.inference_mode, "meta": lambda: torch.device("meta"),
        }[mode]()  # fmt: skip
        with context:
            if form is not FORMS["waited"]:
                return form(start).outputs
            started = start(True)
        for work in started.works:  # outside of the mode
            work.wait()
        return started.outputs

    return run


COMBINATIONS = [(mode, form) for mode in ("eager", "compiled", "inference", "meta") for form in FORMS]
COMBINATIONS.remove(("compiled", "future"))  # after a break of the graph the same as eager, and slow to compile
COMBINATIONS.remove(("compiled", "callback"))


def equal(got, expected):
    return torch.equal(*(each.to_dense() if each.is_sparse else each for each in (got, expected)))


@over("collectives")
def in_all_modes(ctx):
    """Return what is wrong. What is right in the eager program, blocking, is held by test_collectives."""
    wrong = []
    for name, start in OPERATIONS.items():
        expected = blocking(start).outputs
        for mode, form in COMBINATIONS:
            case = f"{name}, {mode}, {form}"
            try:
                got = in_mode(mode, FORMS[form])(start)
            except Exception as error:  # all cases are tried, and the ranks stay together
                wrong.append(f"{case}: {type(error).__name__}: {str(error)[:300]}")
            else:
                if len(got) != len(expected) or not all(map(equal, got, expected)):
                    wrong.append(f"{case}: {got}, not {expected}")
    return wrong


def test_every_operation_in_all_modes_and_forms(tmp_path):
    for wrong in run_ranks(in_all_modes, RANKS, tmp_path / "store", timeout=300):
        assert not wrong, "\n".join(wrong)
