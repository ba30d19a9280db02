"""Ordinary memory that becomes shared memory by use: when it does, when it stops, and what its owner may do with it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import numpy as np
import pytest
import torch

from collectives.comm.malloc import allocate_with_mmap
from collectives.environment import check_variables
from collectives.errors import InvalidArgument
from tests.conformance.test_zero_copy import moves
from tests.programs import FORKING, run_forked
from tests.ranks import run_ranks

COUNT = 1 << 20  # floats: 4 MiB
USES = 3  # before an allocation is shared
pytestmark = moves


def mapped(make):
    """What a function makes, in a mapping of its own."""
    made = []
    allocate_with_mmap(lambda: made.append(make()))
    return made[0]


def ones(count=COUNT):
    return mapped(lambda: torch.ones(count))


def is_shared(comm, array):
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return comm.engine.library.memory_shared(address, array.nbytes)


def use(comm, array, times=USES):
    for _ in range(times):
        comm.all_reduce(array)


def at_the_third_use(ctx):
    comm = ctx.new_communicator()
    library = comm.engine.library
    before = library.memory_in_use()
    array = ones()
    address = array.data_ptr()
    for done in range(USES):
        assert not is_shared(comm, array), done
        comm.all_reduce(array)
    assert is_shared(comm, array)
    use(comm, array)
    assert array[0] == array[COUNT // 2] == array[-1] == ctx.size ** (2 * USES)
    # A view is used in place as well, and does no harm beside it.
    half = array[1 : COUNT // 2]
    comm.all_reduce(half)
    assert half[0] == half[-1] == ctx.size ** (2 * USES + 1) and array[0] == array[-1] == ctx.size ** (2 * USES)
    del array, half
    gc.collect()
    assert not library.memory_shared(address, 4 * COUNT)  # asking finds out that it is freed
    assert library.memory_in_use() == before
    part = ones()
    use(comm, part[: COUNT // 2], 2 * USES)  # others may write to the rest
    assert not is_shared(comm, part)
    unaligned = mapped(lambda: np.ones(COUNT, np.float32))  # malloc leaves no byte of its mapping unused
    use(comm, unaligned, 2 * USES)
    assert not is_shared(comm, unaligned)
    comm.close()


@pytest.mark.parametrize("n", [2, 3])
def test_at_the_third_use(n):
    run_ranks(at_the_third_use, n, fresh=True)


def many_in_turn(ctx):
    comm = ctx.new_communicator()
    arrays = [ones(COUNT // 4) for _ in range(40)]
    for _ in range(USES):
        for array in arrays:
            comm.all_reduce(array)
    assert all(is_shared(comm, array) for array in arrays)
    comm.close()


def test_many_in_turn():
    run_ranks(many_in_turn, 2, fresh=True)


def beside_a_view(ctx):
    """What an allocation holds behind the array that calls use stays as it is, to the last byte that malloc has."""
    comm = ctx.new_communicator()
    whole = mapped(lambda: np.ones(COUNT + 1018, np.float32))
    use(comm, whole[:-4])
    assert whole[-4:].tolist() == [1.0] * 4
    whole[-4:] = whole[0]
    use(comm, ones())
    assert (whole == whole[0]).all()
    comm.close()


def test_beside_a_view():
    run_ranks(beside_a_view, 2, fresh=True)


def results(comm, make):
    """Results of the operations on large arrays, each called more often than it takes to be shared."""
    n, rank, found = comm.size, comm.rank, {}
    whole = torch.arange(n * COUNT, dtype=torch.float32) % 977 + rank

    def keep(name, call, inp, out, elements):
        for _ in range(USES + 2):
            inp.copy_(whole[: inp.numel()])
            call(out, inp)
        found[name] = out[:elements].clone()

    part, full, result, gathered = make(COUNT), make(n * COUNT), make(COUNT), make(n * COUNT)
    keep("all_reduce", lambda out, inp: comm.all_reduce(inp, out=out), part, result, COUNT)
    keep("all_reduce in place", lambda _, inp: comm.all_reduce(inp, "avg"), part, part, COUNT)
    keep("reduce_scatter", comm.reduce_scatter, full, result, COUNT)
    keep("all_gather", comm.all_gather, part, gathered, n * COUNT)
    for _ in range(USES + 2):
        gathered.copy_(whole)
        comm.all_gather(gathered, gathered.view(n, COUNT)[rank])
    found["all_gather in place"] = gathered.clone()
    keep("all_to_all", comm.all_to_all, full, gathered, n * COUNT)
    keep("broadcast", lambda _, inp: comm.broadcast(inp, n - 1), part, part, COUNT)
    keep("reduce", lambda _, inp: comm.reduce(inp, 0), part, part, COUNT)
    root = n - 1
    keep("gather", lambda out, inp: comm.gather(out if rank == root else None, inp, root), part, gathered,
         n * COUNT if rank == root else 0)  # fmt: skip
    keep("scatter", lambda out, inp: comm.scatter(out, inp if rank == root else None, root), full, result, COUNT)
    for _ in range(USES + 2):
        gathered.copy_(whole)
        comm.gather(gathered if rank == root else None, gathered.view(n, COUNT)[rank], root)
        found["gather in place"] = gathered.clone()
        comm.scatter(gathered.view(n, COUNT)[rank], gathered if rank == root else None, root)
    found["scatter in place"] = gathered.clone()
    return found


def same_everywhere(ctx):
    """Shared by use, by some of the ranks only, reachable only by the system, and staged: the same bits."""
    comm = ctx.new_communicator()
    heap = ctypes.CDLL(None).mallopt
    assert heap(-3, 1 << 30)  # M_MMAP_THRESHOLD: the next arrays are no mappings of their own, and stay ordinary

    def in_heap(count):
        return torch.empty(count)

    def in_mapping(count):
        array = mapped(lambda: torch.empty(count))
        assert heap(-3, 1 << 30)
        return array

    want = results(comm, in_heap)
    for name, make in {
        "in mappings": in_mapping,
        "in a mapping on rank 0 alone": in_mapping if ctx.rank == 0 else in_heap,
        "in the engine's memory on rank 0 alone": comm.empty if ctx.rank == 0 else in_heap,
        "in the engine's memory but for rank 0": comm.empty if ctx.rank else in_mapping,
    }.items():
        for operation, tensor in results(comm, make).items():
            assert torch.equal(tensor, want[operation]), f"{operation}, {name}"
    comm.close()
    return {name: float(tensor.double().sum()) for name, tensor in want.items()}


@pytest.mark.parametrize("reads", ["reads", "stages"])
@pytest.mark.parametrize("n", [2, 3])
def test_same_as_staged(n, reads):
    env = {"COLLECTIVES_CMA": "0"} if reads == "stages" else {}
    found = run_ranks(same_everywhere, n, fresh=True, env=[env] * n)
    total = sum((torch.arange(COUNT, dtype=torch.float64) % 977 + rank) for rank in range(n))
    assert all(each["all_reduce"] == total.sum() for each in found)
    assert all(abs(each["all_reduce in place"] - total.sum() / n) < 1e-3 * COUNT for each in found)


def forked(ctx):
    """A child has the values of the fork; what either writes stays with it; then the memory is shared again."""
    comm = ctx.new_communicator()
    array, stop = ones(), threading.Event()
    counter = ones()
    use(comm, array)
    use(comm, counter)
    assert is_shared(comm, array) and is_shared(comm, counter)
    want = float(ctx.size**USES)

    def count():  # another thread writes meanwhile, and none of it may be lost
        number = 0
        while not stop.is_set():
            number += 1
            counter.fill_(number)
            assert bool((counter == number).all()), "a write was lost"
        written.append(number)

    # Torch sets an operator up in its first call: a child forked while another thread does so waits for that for ever.
    assert bool((array == want).all()) and bool((counter.clone().fill_(2) == 2).all())
    written = []
    thread = threading.Thread(target=count)
    thread.start()
    read_end, write_end = os.pipe()
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os.read(read_end, 1)
            good = bool((array == want).all())
            array.fill_(7)
            os._exit(0 if good and bool((array == 7).all()) else 1)
        children.append(child)
    assert not is_shared(comm, array)
    array.fill_(3)
    os.write(write_end, b"xxx")
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    stop.set()
    thread.join()
    assert len(written) == 1 and bool((counter == written[0]).all()) and bool((array == 3).all())
    array.fill_(1)
    use(comm, array)
    assert is_shared(comm, array) and array[9] == want
    comm.close()


def test_forked_child():
    run_ranks(forked, 2, fresh=True)


class Aligned:
    """Memory of malloc's with an alignment of 64 bytes, as a tensor's, that can be resized."""

    def __init__(self, count):
        self.libc = ctypes.CDLL(None)
        self.libc.realloc.restype = ctypes.c_void_p
        self.libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.address = ctypes.c_void_p()
        assert self.libc.posix_memalign(ctypes.byref(self.address), 64, 4 * count) == 0
        self.count = count

    def array(self):
        return np.frombuffer((ctypes.c_float * self.count).from_address(self.address.value), np.float32)

    def resize(self, count):
        self.address = ctypes.c_void_p(self.libc.realloc(self.address, 4 * count))
        self.count = count
        return self.array()

    def free(self):
        self.libc.free(self.address)


def resized(ctx, new_count):
    """realloc moves a mapping where it can, which must not show; or it cuts its end off, or leaves it as it is."""
    comm = ctx.new_communicator()
    memory, other = mapped(lambda: Aligned(COUNT)), ones()
    before = comm.engine.library.memory_in_use()
    array = memory.array()
    array[:] = 1
    use(comm, array)
    use(comm, other)
    assert is_shared(comm, array) and is_shared(comm, other)
    other.fill_(5)
    array, least = memory.resize(new_count), min(new_count, COUNT)
    assert (array[:least] == ctx.size**USES).all()
    array[least:] = ctx.size**USES
    stays = new_count <= COUNT + 900
    for value in (ctx.size**USES, 2):
        assert is_shared(comm, array) == stays and (array == value).all() and bool((other == 5).all())
        array[:] = 2
    array = memory.resize(new_count + COUNT)
    assert (array[:new_count] == 2).all()
    array[:] = 2
    assert bool((other == 5).all())
    use(comm, array, 2 * USES)
    use(comm, other)
    assert (array == 2 * ctx.size ** (2 * USES)).all() and bool((other == 5 * ctx.size**USES).all())
    memory.free()
    del array, other
    gc.collect()
    used = comm.empty(COUNT)  # notes what was freed
    assert comm.engine.library.memory_in_use() == before + used.nbytes
    del used
    comm.close()


@pytest.mark.parametrize("new_count", [3 * COUNT, COUNT + 900, COUNT - 2000, COUNT // 2])
def test_resized(new_count):
    run_ranks(resized, 2, new_count, fresh=True)


def in_the_place_of_others(ctx):
    """The engine's own memory at the address of memory that was shared by use and freed."""
    comm = ctx.new_communicator()
    library = comm.engine.library
    before, same = library.memory_in_use(), 0
    for _ in range(4):
        array = mapped(lambda: torch.ones(COUNT // 4 + 1000))
        base = array.data_ptr() - 64
        use(comm, array, 64)
        assert is_shared(comm, array)
        del array
        own = comm.empty(COUNT // 4 + 2000)
        same += own.data_ptr() == base
        assert is_shared(comm, own)
        del own
        gc.collect()
    comm.close()
    return same, library.memory_in_use() - before


def test_in_the_place_of_others():
    for same, in_use in run_ranks(in_the_place_of_others, 2, fresh=True):
        assert same and in_use <= 0


def registered_too(ctx):
    """Registering what is shared by use makes it shared until it is deregistered."""
    comm = ctx.new_communicator()
    array = ones()
    use(comm, array)
    registration = comm.register(array)
    assert registration.zero_copy
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert is_shared(comm, array)
    comm.deregister(registration)
    assert not is_shared(comm, array)
    use(comm, array)
    assert is_shared(comm, array) and array[5] == ctx.size ** (2 * USES)
    comm.close()


def test_registered_too():
    run_ranks(registered_too, 2, fresh=True)


def short_lived(ctx):
    """Where memory is freed soon after it was shared, it takes more uses the next time."""
    comm = ctx.new_communicator()
    shared = []
    for _ in range(20):
        array = ones()
        use(comm, array, 2 * USES)
        shared.append(is_shared(comm, array))
        del array
    comm.close()
    return shared


def test_short_lived():
    for shared in run_ranks(short_lived, 2, fresh=True):
        assert shared[0] and shared[1] and sum(shared) < 7, shared


PROGRAM = """
import torch, collectives
from collectives.comm.malloc import allocate_with_mmap
comm, made = collectives.init(), []
allocate_with_mmap(lambda: made.append(torch.ones(1 << 20)))
for use in range(1, 11):
    comm.all_reduce(made[0])
    if comm.engine.library.memory_shared(made[0].data_ptr(), 4 << 20):
        break
else:
    use = "never"
if comm.rank == 0:
    print("shared:", use)
"""


@pytest.mark.parametrize(("after", "want"), [("0", "never"), ("1", "1"), ("5", "5"), (None, "3")])
def test_variable(after, want, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if name != "COLLECTIVES_SHARE_AFTER"}
    env |= {} if after is None else {"COLLECTIVES_SHARE_AFTER": after}
    done = run_forked([FORKING, "-m", "collectives.run", "-n", "2", str(program)], env, 120)
    assert f"shared: {want}\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("value", ["-1", "many", "1.5", "2000"])
def test_wrong_variable(value, monkeypatch):
    monkeypatch.setenv("COLLECTIVES_SHARE_AFTER", value)
    with pytest.raises(InvalidArgument, match="COLLECTIVES_SHARE_AFTER must be a number from 0 to 1024"):
        check_variables()
