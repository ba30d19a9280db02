"""CUDA kernels from source to launch, as far as that goes without a GPU: texts, compiler, cache, the calls of CuPy."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
import threading
import types

import pytest
import torch

from collectives import kernels
from collectives.errors import CudaError, EngineUnavailable, InvalidUsage
from collectives.kernels import abi, cuda, execution
from collectives.kernels.rows import Rows

from . import shim


# ---- Texts.
def test_a_text_is_put_together_in_order_and_missing_files_are_named(tmp_path):
    for name in ("cuda", "include/coll"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "include/coll/a.h").write_text('#include "b.h"\na\n')
    (tmp_path / "include/coll/b.h").write_text("b\n")
    (tmp_path / "cuda/own.cuh").write_text('#include "coll/b.h"\nown\n')
    own = '#include <math.h>\n#include "coll/a.h"\n#include "own.cuh"\n#include "coll/a.h"\nk\n'
    (tmp_path / "cuda/k.cu").write_text(own)
    assert cuda.source_text("k.cu", tmp_path).split() == ["#include", "<math.h>", "b", "a", "own", "k"]
    with pytest.raises(EngineUnavailable, match=r"source .*cuda/none.cu isn't there"):
        cuda.source_text("none.cu", tmp_path)
    (tmp_path / "include/coll/b.h").unlink()
    with pytest.raises(EngineUnavailable, match=r"coll/a.h includes b.h, which isn't there"):
        cuda.source_text("k.cu", tmp_path)


def test_missing_folder_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "__file__", str(tmp_path / "collectives/kernels/cuda.py"))
    with pytest.raises(EngineUnavailable, match=f"neither {tmp_path}/collectives/_kernels_src nor {tmp_path}/kernels"):
        cuda.kernels_folder()
    (tmp_path / "collectives/_kernels_src/cuda").mkdir(parents=True)
    assert cuda.kernels_folder() == tmp_path / "collectives/_kernels_src"


# ---- The compiler.
def test_the_package_needs_no_cupy():
    script = (
        "import sys, torch; from collectives import kernels\n"
        "assert 'cupy' not in sys.modules; sys.modules['cupy'] = None\n"
        "flat = torch.zeros(4); kernels.pack([torch.ones(3)], flat); assert flat.tolist() == [1, 1, 1, 0]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.fixture
def fresh(monkeypatch):
    """Nothing known of NVRTC, nothing loaded."""
    cuda._nvrtc.cache_clear()
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setattr(cuda, "_modules", {})
    yield
    cuda._nvrtc.cache_clear()


def test_no_cupy(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EngineUnavailable, match="can't be imported: pip install cupy-cuda12x"):
        cuda.compile_source("cast.cu", "sm_80")


def test_no_nvrtc(fresh, monkeypatch):
    def missing():
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file")

    nvrtc = types.SimpleNamespace(getVersion=missing)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nvrtc=nvrtc))
    match = r"NVRTC, which CuPy can't load: .*nvidia-cuda-nvrtc-cu12.*libnvrtc.so.12"
    with pytest.raises(EngineUnavailable, match=match):
        cuda.compile_source("cast.cu", "sm_80")


def test_what_does_not_compile_tells_the_log(monkeypatch):
    monkeypatch.setattr(cuda, "source_text", lambda name: "__global__ void k() { nonsense; }")
    match = r"(?s)NVRTC \d+\.\d+ could not compile k.cu for sm_80 .*nonsense"
    with pytest.raises(EngineUnavailable, match=match) as caught:
        cuda.compile_source("k.cu", "sm_80")
    assert "k.cu(1): error" in caught.value.detail
    with pytest.raises(EngineUnavailable, match="could not compile k.cu for sm_1"):
        cuda.compile_source("k.cu", "sm_1")


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90"), ((19, 9), "compute_")])
def test_architecture(capability, arch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert cuda._arch(0).startswith(arch)


def test_architecture_that_is_too_old(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (2, 1))
    match = r"GPU 3 has compute capability 2.1; NVRTC .* knows .*, 80, .*older CUDA"
    with pytest.raises(EngineUnavailable, match=match):
        cuda._arch(3)


# ---- The cache on disk.
@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A list of what was compiled; the cache is an empty folder."""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setattr(cuda, "source_text", lambda name: f"text of {name}")
    names = []

    def compile_source(source, arch):
        names.append((source, arch))
        return f"{source} for {arch}, {len(names)}".encode(), ""

    monkeypatch.setattr(cuda, "compile_source", compile_source)
    return names


def test_a_source_is_compiled_once(compiled, tmp_path, monkeypatch):
    first = cuda._cached("cast.cu", "sm_80")
    assert cuda._cached("cast.cu", "sm_80") == first == b"cast.cu for sm_80, 1"
    cuda._cached("cast.cu", "sm_90")
    cuda._cached("reduce.cu", "sm_80")
    monkeypatch.setattr(cuda, "source_text", lambda name: f"another text of {name}")  # a header has changed
    cuda._cached("cast.cu", "sm_80")
    assert compiled == [("cast.cu", "sm_80"), ("cast.cu", "sm_90"), ("reduce.cu", "sm_80"), ("cast.cu", "sm_80")]
    monkeypatch.setattr(cuda, "OPTIONS", (*cuda.OPTIONS, "-G"))
    cuda._cached("cast.cu", "sm_80")
    assert len(compiled) == 5
    assert len(list((tmp_path / "cache").iterdir())) == 5  # no temporary file is left


def test_a_damaged_file_is_compiled_again(compiled, tmp_path):
    good = cuda._cached("cast.cu", "sm_80")
    (path,) = (tmp_path / "cache").iterdir()
    kept = path.read_bytes()
    assert kept == hashlib.sha256(good).digest() + good
    for damaged in (b"", kept[:40], kept[:-1] + b"?"):
        path.write_bytes(damaged)
        again = cuda._cached("cast.cu", "sm_80")
        assert again == f"cast.cu for sm_80, {len(compiled)}".encode()
    assert len(compiled) == 4


def test_a_cache_that_cannot_be_written(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert cuda._cached("cast.cu", "sm_80") == b"cast.cu for sm_80, 1"
    assert cuda._cached("cast.cu", "sm_80") == b"cast.cu for sm_80, 2"


def test_no_cache(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    cuda._cached("cast.cu", "sm_80")
    cuda._cached("cast.cu", "sm_80")
    assert len(compiled) == 2 and not (tmp_path / "cache").exists()


# ---- Launching, with CuPy and torch.cuda faked: "GPUs" that are host memory, on which the shim runs the texts.
class DriverError(RuntimeError):
    pass


class Machine:
    """Two GPUs of 3 processors each."""

    def __init__(self):
        self.current = 0
        self.capturing = False
        self.launches = []
        self.loads = []
        self.failure = None
        self.slow = threading.Event()
        self.slow.set()

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before

    def install(self, monkeypatch):
        for name, value in {
            "device": self.device,
            "current_device": lambda: self.current,
            "current_stream": lambda index: types.SimpleNamespace(cuda_stream=1000 + index),
            "is_current_stream_capturing": lambda: self.capturing,
            "get_device_capability": lambda index: (9, 0),
            "get_device_properties": lambda index: types.SimpleNamespace(multi_processor_count=3),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
        machine = self

        class Module:
            def load(self, binary):
                machine.slow.wait()
                if machine.failure:
                    raise machine.failure
                self.source = binary.decode()
                self.index = machine.current
                machine.loads.append((self.source, machine.current))

            def get_function(self, name):
                return Function(self, name)

        class Function:
            def __init__(self, module, name):
                self.module, self.name, self.ptr = module, name, 77

            def __call__(self, grid, block, args, shared_mem, stream):
                if machine.failure:
                    raise machine.failure
                assert shared_mem == 0 and len(grid) == len(block) == len(args) == 1
                assert args[0].size == 1
                assert machine.current == self.module.index
                machine.launches.append((self.name, machine.current, grid[0], block[0], stream.ptr))
                shim.text_of(self.module.source).run(self.name, args[0].tobytes(), grid[0], block[0])

        fake = types.ModuleType("cupy")
        fake.cuda = types.SimpleNamespace(
            Device=self.device,
            Module=Module,
            driver=types.SimpleNamespace(
                CUDADriverError=DriverError,
                occupancyMaxActiveBlocksPerMultiprocessor=lambda function, block, shared: 8,
            ),
            runtime=types.SimpleNamespace(CUDARuntimeError=DriverError, getDevice=lambda: self.current),
        )
        monkeypatch.setitem(sys.modules, "cupy", fake)
        monkeypatch.setattr(cuda, "_cached", lambda source, arch: source.encode())
        monkeypatch.setattr(cuda, "_arch", lambda index: "sm_90")


@pytest.fixture
def machine(fresh, monkeypatch):
    machine = Machine()
    machine.install(monkeypatch)
    return machine


def pack_on(index, monkeypatch, tensors, **options):
    """kernels.pack with its kernels started by `cuda.launch`."""
    device = torch.device("cuda") if index is None else torch.device("cuda", index)
    flat = torch.zeros(kernels.Table(tensors, torch.float32).total)
    with monkeypatch.context() as patch:
        patch.setattr(execution, "run_on_host", lambda kernel, args, rows=None: cuda.launch(kernel, args, device, rows))
        kernels.pack(tensors, flat, **options)
    return flat


def test_launch(machine, monkeypatch):
    tensors = [torch.randn(count) for count in (1, 5000, 0, 4096 * 30)]
    statistics, expected = kernels.Statistics(), kernels.Statistics()
    flat = pack_on(1, monkeypatch, tensors, scale=0.3, statistics=statistics)
    same = torch.zeros_like(flat)
    kernels.pack(tensors, same, scale=0.3, statistics=expected)
    assert torch.equal(flat, same) and statistics.sum_of_squares.equal(expected.sum_of_squares)
    # 33 tiles, but 3 processors take 24 blocks; finish is one block.
    assert machine.launches == [("coll_cast_f32_f32", 1, 24, 256, 1001), ("coll_finish", 1, 1, 256, 1001)]
    assert machine.loads == [("cast_pairs.cu", 1), ("cast.cu", 1)]
    assert machine.current == 0


def test_a_long_table_is_read_where_it_was_copied(machine, monkeypatch):
    """A short one goes with the launch: nothing is copied for it."""
    copies = []

    def on_device(rows):
        copies.append(torch.from_numpy(rows.array.view("u1").copy()))
        rows.array["count"] = -1  # what lies on the host isn't what the kernel reads
        return copies[-1]

    monkeypatch.setattr(Rows, "on_device", on_device)
    for count, copied in ((100, 0), (101, 1)):
        flat = pack_on(1, monkeypatch, [torch.full((4,), float(i)) for i in range(count)], scale=0.5)
        assert flat.view(-1, 4)[:, 0].tolist() == [i / 2 for i in range(count)] and len(copies) == copied


@pytest.mark.parametrize("count", [3, 101])
def test_kept_arguments_are_renewed(machine, monkeypatch, count):
    """Launches that keep the memory of their arguments read these as they are at each call."""
    monkeypatch.setattr(Rows, "on_device", lambda rows: torch.from_numpy(rows.array.view("u1").copy()))
    kept: dict[str, cuda.KeptArguments] = {}

    def run(kernel, args, rows=None):
        cuda.launch(kernel, args, torch.device("cuda", 1), rows, kept.setdefault(kernel.name, cuda.KeptArguments()))

    monkeypatch.setattr(execution, "run_on_host", run)
    tensors = [torch.full((4,), float(i)) for i in range(count)]
    for scale in (0.5, 2.0, 0.25):
        flat = torch.zeros(4 * count)
        kernels.pack(tensors, flat, scale=scale)
        assert flat.view(-1, 4)[:, 0].tolist() == [i * scale for i in range(count)]
    assert list(kept) == ["coll_cast_f32_f32"] and len(machine.launches) == 3


def test_a_source_is_loaded_once_a_gpu(machine, monkeypatch):
    tensors = [torch.ones(3)]
    for index in (0, 1, 0, None):
        pack_on(index, monkeypatch, tensors)
    machine.current = 1
    pack_on(None, monkeypatch, tensors)
    assert machine.loads == [("cast_pairs.cu", 0), ("cast_pairs.cu", 1)]
    assert [launch[1] for launch in machine.launches] == [0, 1, 0, 0, 1]


def test_threads_load_once(machine):
    machine.slow.clear()
    args = abi.CastArgs()
    call = (abi.CAST, args, torch.device("cuda", 0))
    threads = [threading.Thread(target=cuda.launch, args=call, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    machine.slow.set()
    for thread in threads:
        thread.join(30)
    assert machine.loads == [("cast.cu", 0)] and len(machine.launches) == 4


def test_errors_name_the_kernel(machine, monkeypatch):
    args = abi.CastArgs()
    machine.failure = DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(CudaError, match="coll_cast: could not be loaded into GPU 1: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        cuda.launch(abi.CAST, args, torch.device("cuda", 1))
    machine.failure = None
    cuda.launch(abi.CAST, args, torch.device("cuda", 1))
    machine.failure = DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")
    match = r"coll_cast: could not be started on GPU 1 \(CUDA_ERROR_ILLEGAL_ADDRESS\)"
    with pytest.raises(CudaError, match=match) as caught:
        cuda.launch(abi.CAST, args, torch.device("cuda", 1))
    assert caught.value.op == "coll_cast" and machine.current == 0


def test_graph_capture(machine):
    """Compiling inside of a capture would spoil it; what is loaded is launched with nothing but the launch."""
    args = abi.CastArgs()
    machine.capturing = True
    with pytest.raises(InvalidUsage, match="coll_cast: the kernel is not compiled yet.*once before the capture"):
        cuda.launch(abi.CAST, args, torch.device("cuda", 0))
    machine.capturing = False
    cuda.launch(abi.CAST, args, torch.device("cuda", 0))
    machine.capturing = True
    cuda.launch(abi.CAST, args, torch.device("cuda", 0))
    assert len(machine.launches) == 2
