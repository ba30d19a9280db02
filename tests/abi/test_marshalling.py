"""What reaches the library when the binding is called: every argument in its place, structs fit for each version."""

from __future__ import annotations

import ctypes
import math
import struct
import subprocess

import numpy as np
import pytest

from tests import oracle
from tests.oracle import DTYPES
from tests.rank_process import ROOT, load_binding

nccl = load_binding()
from collectives import errors  # noqa: E402

UNIQUE_ID = bytes(range(128))


class Recorder:
    """The recording library, loaded by the binding and beside it by ctypes to be asked what it has noted."""

    def __init__(self, path):
        self.library = nccl.Library(path)
        self._asked = ctypes.CDLL(str(path))
        self._asked.recorder_noted.restype = ctypes.c_char_p
        for name in ("recorder_config", "recorder_scalar"):
            getattr(self._asked, name).restype = ctypes.c_void_p

    @property
    def noted(self) -> str:
        return self._asked.recorder_noted().decode()

    def bytes_of(self, what: str, count: int) -> bytes:
        return ctypes.string_at(getattr(self._asked, f"recorder_{what}")(), count)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorder")

    def built(version: int, ranks: int = 5) -> Recorder:
        path = folder / f"librecorder-{version}-{ranks}.so"
        if not path.exists():
            source = str(ROOT / "tests" / "abi" / "recorder.c")
            flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-DVERSION={version}", f"-DRANKS={ranks}"]
            command = ["gcc", *flags, f"-I{ROOT / 'kernels/include'}", source, "-o", str(path)]
            subprocess.run(command, check=True, timeout=60)
        return Recorder(path)

    return built


@pytest.fixture
def recorder(build):
    return build(nccl.VERSION)


@pytest.fixture
def comm(recorder):
    opened = recorder.library.comm_init_rank(4, UNIQUE_ID, 2)
    yield opened
    if opened.handle:
        opened.abort()


CALLS = [
    ("all_reduce", (1, 2, 3, 7, 4), "AllReduce 1 2 3 7 op=4"),
    ("reduce_scatter", (1, 2, 3, 7, 4), "ReduceScatter 1 2 3 7 op=4"),
    ("all_gather", (1, 2, 3, 7), "AllGather 1 2 3 7"),
    ("all_to_all", (1, 2, 3, 7), "AlltoAll 1 2 3 7"),
    ("broadcast", (1, 2, 3, 7, 9), "Broadcast 1 2 3 7 root=9"),
    ("gather", (1, 2, 3, 7, 9), "Gather 1 2 3 7 root=9"),
    ("scatter", (1, 2, 3, 7, 9), "Scatter 1 2 3 7 root=9"),
    ("reduce", (1, 2, 3, 7, 4, 9), "Reduce 1 2 3 7 op=4 root=9"),
    ("send", (1, 3, 7, 9), "Send 1 3 7 peer=9"),
    ("recv", (2, 3, 7, 9), "Recv 2 3 7 peer=9"),
]


@pytest.mark.parametrize(("method", "arguments", "noted"), CALLS, ids=[row[0] for row in CALLS])
def test_operations(method, arguments, noted, comm, recorder):
    getattr(comm, method)(*arguments, stream=0xABC)
    assert recorder.noted == f"{noted} c=100 s=abc"
    getattr(comm, method)(*arguments)
    assert recorder.noted == f"{noted} c=100 s=0"


def test_communicators(comm, recorder):
    library = recorder.library
    assert recorder.noted == "init n=4 rank=2 id=0,127"
    assert (comm.rank, comm.size, comm.handle) == (2, 4, 0x100)
    assert comm.library is library
    assert comm.async_error() == 7
    child = comm.split(3, 5)
    assert recorder.noted == "split 100 3 5 inherit"
    assert (child.handle, child.rank, child.size) == (0x200, 3, 5)
    child.destroy()
    assert recorder.noted == "destroy 200"
    assert comm.split(nccl.SPLIT_NOCOLOR, 5, config={"splitShare": 1}) is None
    assert recorder.noted == "split 100 -1 5 config"
    child = comm.shrink([1, 3], flags=nccl.SHRINK_ABORT)
    assert recorder.noted == "shrink 100 n=2 last=3 inherit flags=1"
    child.abort()


def test_memory(comm, recorder):
    assert comm.register(0x10, 64) == 0x300 and recorder.noted == "register 100 10 64"
    comm.deregister(0x300)
    assert recorder.noted == "deregister 100 300"
    assert comm.window_register(0x10, 64, 1) == 0x400 and recorder.noted == "window 100 10 64 1"
    comm.window_deregister(0x400)
    assert recorder.noted == "unwindow 100 400"
    assert recorder.library.mem_alloc(2**33) == 0x500 and recorder.noted == f"alloc {2**33}"
    recorder.library.mem_free(0x500)
    assert recorder.noted == "free 500"


def test_groups(comm, recorder):
    library = recorder.library
    library.group_start()
    with pytest.raises(errors.InvalidUsage, match="inside a group"):
        comm.window_register(0x10, 64)  # its answer would be written when this call is long over
    library.group_end()
    assert recorder.noted == "group_end"
    comm.window_register(0x10, 64)


def test_addresses_are_whole_numbers_of_64_bits(comm, recorder):
    comm.send(2**64 - 1, 2**64 - 1, 7, 0)
    assert recorder.noted.startswith(f"Send {'f' * 16} {2**64 - 1} ")
    for wrong in (-1, 2**64, "1", None):
        with pytest.raises((OverflowError, TypeError)):
            comm.send(wrong, 1, 7, 0)


# ---- a single rank


@pytest.mark.parametrize("child_of", [lambda comm: comm.split(0, 0), lambda comm: comm.shrink([0, 1, 3])])
def test_a_child_of_one_rank_is_known_before_its_size_is_read(child_of, build):
    """NCCL before 2.29.7 averages wrongly over one rank: an average goes as a sum, a factor's rest in a second call."""
    recorder, floats = build(22800, ranks=1), nccl.DTYPES["float32"]
    parent = recorder.library.comm_init_rank(4, UNIQUE_ID, 2)
    for name in ("all_reduce", "reduce_scatter", "reduce"):
        for op, noted in ((nccl.OPS["avg"], "100 200 262145 7 op=0"), (11, "100100 100200 1 7 op=11")):
            child = child_of(parent)
            root = (0,) if name == "reduce" else ()
            getattr(child, name)(0x100, 0x200, 262145, floats, op, *root)
            assert recorder.noted.split(" ", 1)[1].startswith(noted), (name, op)
            child.abort()
            with pytest.raises(errors.InvalidUsage, match=f"^{name}: communicator is closed"):
                getattr(child, name)(0x100, 0x200, 262145, floats, op, *root)
    child = child_of(parent)
    with pytest.raises(errors.InvalidArgument, match="float8 over one rank"):
        child.create_premul_sum(2.0, nccl.DTYPES["float8e4m3"])
    child.abort()
    parent.abort()


# ---- structs of several versions

# sizeof(ncclConfig_t) in the nccl.h of each version
SIZES = {21605: 24, 21701: 40, 21801: 48, 22602: 48, 22703: 72, 22803: 80, 22902: 88, 23004: 96, 23102: 112}


@pytest.mark.parametrize(("version", "size"), [*SIZES.items(), (nccl.VERSION, 120), (23300, 120)])
def test_a_config_has_the_size_of_its_version(version, size, build):
    recorder = build(version)
    recorder.library.comm_init_rank(2, UNIQUE_ID, 1, config={"blocking": False}).abort()
    seen = struct.unpack("<QIIi", recorder.bytes_of("config", 20))
    assert seen == (size, 0xCAFEBEEF, min(version, nccl.VERSION), 0)


def test_config_fields(build):
    recorder = build(nccl.VERSION)
    config = {"minCTAs": 2, "netName": "Socket", "commName": b"mine", "nvlsHostMode": 1}
    comm = recorder.library.comm_init_rank(2, UNIQUE_ID, 1, config=config)
    assert recorder.noted == "init_config n=2 rank=1 net=Socket"
    ints = struct.unpack("<30i", recorder.bytes_of("config", 120))
    assert ints[4:8] == (nccl.UNDEF_INT, nccl.UNDEF_INT, 2, nccl.UNDEF_INT)
    assert ints[27:29] == (nccl.UNDEF_INT, 1)
    assert config == {"minCTAs": 2, "netName": "Socket", "commName": b"mine", "nvlsHostMode": 1}
    comm.abort()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"blockin": 0}, "ncclConfig_t has no field 'blockin'; its fields are blocking, cgaClusterSize"),
        ({"blocking": "no"}, "ncclConfig_t.blocking can't be 'no'"),
        ({"minCTAs": 2**40}, "ncclConfig_t.minCTAs can't be"),
        ({"netName": 5}, "ncclConfig_t.netName can't be 5"),
        ([("blocking", 0)], "config must be a dict of ncclConfig_t fields, not list"),
    ],
)
def test_wrong_configs(config, words, recorder):
    with pytest.raises(errors.InvalidArgument, match=words.replace("(", r"\(")):
        recorder.library.comm_init_rank(2, UNIQUE_ID, 1, config=config)


def test_a_field_newer_than_the_library_is_refused(build):
    with pytest.raises(errors.InvalidArgument, match=r"ncclConfig_t.nvlsCTAs came with NCCL 2\.27\.3; .* is 2\.18\.3"):
        build(21803).library.comm_init_rank(2, UNIQUE_ID, 1, config={"nvlsCTAs": 1})


@pytest.mark.parametrize("unique_id", [b"", bytes(127), bytes(129), bytearray(128), "x" * 128])
def test_a_unique_id_is_128_bytes(unique_id, recorder):
    with pytest.raises((errors.InvalidArgument, TypeError)):
        recorder.library.comm_init_rank(2, unique_id, 1)


# ---- scalars of every dtype


def stored(comm, recorder, value, name: str) -> bytes:
    op = comm.create_premul_sum(value, nccl.DTYPES[name])
    assert op == 11 and recorder.noted == f"premul {nccl.DTYPES[name]} where=1 100"
    comm.destroy_op(op)
    assert recorder.noted == "destroy_op 11 100"
    return recorder.bytes_of("scalar", 8)


@pytest.mark.parametrize("name", DTYPES)
def test_scalars(name, comm, recorder):
    """Of the small floats every value, and between neighbours: nearest, ties to even."""
    dtype = DTYPES[name]
    if not dtype.is_float:
        kind = np.iinfo(dtype.storage)
        values = [0, 1, 2.0, np.int32(5), kind.min, kind.max]
        bits = [dtype.storage.type(value) for value in values]
    elif dtype.itemsize > 2:
        values = [0.0, -0.0, 1.0, 1 / 3, -2.5, 1e-7, 6e-8, 65504.0, math.inf, -math.inf]
        bits = [dtype.storage.type(value) for value in values]
    else:
        codes = np.arange(0, 1 << (8 * dtype.itemsize - 1), 1 if dtype.itemsize == 1 else 37)
        below, above = (oracle.decode(dtype, (codes + more).astype(dtype.storage)) for more in (0, 1))
        below, above = below[np.isfinite(above)], above[np.isfinite(above)]
        middle = (below + above) / 2
        close = np.concatenate([below, middle, np.nextafter(middle, -np.inf), np.nextafter(middle, np.inf)])
        values = [*np.append(close, -close), math.nan, *([math.inf, -math.inf] if name != "float8e4m3" else [])]
        bits = oracle.encode(dtype, np.array(values))
        if name == "float8e5m2":
            bits[-2:] = [0x7C, 0xFC]  # a scalar keeps its infinity, which a cast makes the largest number
    for value, want in zip(values, bits, strict=True):
        got = np.frombuffer(stored(comm, recorder, value, name), dtype.storage)[:1]
        assert oracle.same(dtype, got, np.array([want], dtype.storage)).all(), value


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (300, "int8"),
        (-1, "uint64"),
        (0.5, "int32"),
        (math.nan, "int64"),
        (65520.0, "float16"),
        (1e39, "float32"),
        (3.4e38 * 1.01, "bfloat16"),
        (465.0, "float8e4m3"),
        (math.inf, "float8e4m3"),
        (61440.0, "float8e5m2"),
        ("1", "float32"),
        (None, "float16"),
    ],
)
def test_scalars_that_do_not_fit_are_refused(value, name, comm):
    with pytest.raises(errors.InvalidArgument, match=f"can't be stored as {name}"):
        comm.create_premul_sum(value, nccl.DTYPES[name])


def test_a_scalar_of_no_dtype(comm):
    with pytest.raises(errors.InvalidArgument, match="99 is no dtype code"):
        comm.create_premul_sum(1.0, 99)


def test_objects_are_not_made_by_hand():
    for cls, maker in ((nccl.Comm, "Library.comm_init_rank"), (nccl.Queue, "Library.queue_create")):
        with pytest.raises(TypeError, match=maker):
            cls()
