"""Which library an engine takes, and what is said where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import collectives
from collectives.comm import engine as module
from collectives.comm.engine import Engine, engines, get_engine
from collectives.errors import EngineUnavailable, InvalidArgument


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch):
    """Start each test with no library loaded, none of the variables, and no GPU."""
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("COLLECTIVES_ENGINE", "COLLECTIVES_NCCL_LIBRARY", "COLLECTIVES_HOST_LIBRARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.fixture
def nccl():
    """The path of the installed NCCL, found as the engine finds it."""
    paths = [path for path in module._nccl_candidates() if os.path.exists(path)]
    if not paths:
        pytest.skip("no NCCL is installed (nvidia-nccl-cu12)")
    return paths[0]


@pytest.fixture
def no_nccl(monkeypatch):
    monkeypatch.setattr(module, "_nccl_candidates", lambda: ["/nowhere/one/libnccl.so.2", "/nowhere/two/libnccl.so.2"])


def find(name):
    return next(info for info in engines() if info.name == name)


# ---- The host engine.


def test_host_engine():
    found = get_engine("host")
    assert isinstance(found, Engine)
    assert (found.name, found.device_type) == ("host", "cpu")
    assert os.path.isabs(found.path) and found.path.endswith("libcollectives_host.so") and os.path.exists(found.path)
    assert found.library.is_host and found.library.path == found.path
    assert found.version == "2.32.3" and found.library.version == 23203


def test_the_library_is_loaded_once(monkeypatch):
    opened = []
    real = module._nccl.Library
    monkeypatch.setattr(module._nccl, "Library", lambda path: opened.append(path) or real(path))
    results = []
    threads = [threading.Thread(target=lambda: results.append(get_engine("host"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(results) == 4 and len(opened) == 1
    assert all(result == results[0] and result.library is results[0].library for result in results)


def test_host_library_override(monkeypatch, tmp_path):
    plain, copy = get_engine("host"), tmp_path / "libother.so"
    shutil.copy(module.library_path(), copy)
    monkeypatch.chdir(tmp_path)
    for given in (str(copy), "libother.so"):  # which may be relative
        monkeypatch.setenv("COLLECTIVES_HOST_LIBRARY", given)
        assert get_engine("host").path == find("host").path == str(copy)
    monkeypatch.delenv("COLLECTIVES_HOST_LIBRARY")
    assert get_engine("host").library is plain.library


def test_no_host_library(monkeypatch, tmp_path):
    missing = str(tmp_path / "_lib" / "libcollectives_host.so")
    monkeypatch.setattr(module, "library_path", lambda: missing)
    with pytest.raises(EngineUnavailable, match="no such file") as caught:
        get_engine()
    assert missing in str(caught.value) and "COLLECTIVES_HOST_LIBRARY" in str(caught.value)
    assert isinstance(caught.value, ImportError)
    info = find("host")
    assert not info.available and info.version is None and info.path is None and missing in info.reason


@pytest.mark.parametrize("name", ["host", "nccl"])
def test_an_override_that_is_wrong_is_an_error_and_nothing_else_is_tried(monkeypatch, tmp_path, gpu, name):
    variable = f"COLLECTIVES_{name.upper()}_LIBRARY"
    garbage = tmp_path / "garbage.so"
    garbage.write_text("no library")
    for path, words in ((garbage, "garbage.so"), (tmp_path / "absent.so", "no such file")):
        monkeypatch.setenv(variable, str(path))
        with pytest.raises(EngineUnavailable, match=words) as caught:
            get_engine(name)
        assert str(path) in str(caught.value) and variable in str(caught.value)
        assert not find(name).available


def test_a_library_without_nccls_functions(monkeypatch):
    other = next(line.split()[-1] for line in open("/proc/self/maps") if "libm.so" in line)
    monkeypatch.setenv("COLLECTIVES_HOST_LIBRARY", other)
    with pytest.raises(EngineUnavailable, match="ncclGetVersion") as caught:
        get_engine("host")
    assert other in str(caught.value)


def test_nccl_is_not_the_host_engine(monkeypatch, nccl, gpu):
    ours = module.library_path()
    monkeypatch.setenv("COLLECTIVES_HOST_LIBRARY", nccl)
    with pytest.raises(EngineUnavailable, match="is not the host engine"):
        get_engine("host")
    monkeypatch.setenv("COLLECTIVES_NCCL_LIBRARY", ours)
    with pytest.raises(EngineUnavailable, match="is the host engine, not NCCL"):
        get_engine("nccl")


# ---- NCCL.


def test_nccl_without_a_gpu(nccl):
    info = find("nccl")
    assert not info.available and "no CUDA device" in info.reason
    assert info.path == nccl and info.version.startswith("2.")
    with pytest.raises(EngineUnavailable, match="no CUDA device") as caught:
        get_engine("nccl")
    assert nccl in str(caught.value)


def test_nccl_with_a_gpu(nccl, gpu):
    found = get_engine("nccl")
    assert (found.name, found.device_type, found.path) == ("nccl", "cuda", nccl)
    assert not found.library.is_host
    assert find("nccl") == ("nccl", True, found.version, nccl, "")


def test_nccl_library_override(monkeypatch, nccl, gpu, tmp_path):
    link = tmp_path / "mine.so"
    link.symlink_to(nccl)
    monkeypatch.setenv("COLLECTIVES_NCCL_LIBRARY", str(link))
    assert get_engine("nccl").path == str(link)


def test_no_nccl_names_every_path_that_was_tried(no_nccl, gpu):
    with pytest.raises(EngineUnavailable, match="(?s)/nowhere/one/libnccl.so.2.*/nowhere/two/libnccl.so.2") as caught:
        get_engine("nccl")
    assert "nvidia-nccl-cu12" in str(caught.value) and "COLLECTIVES_NCCL_LIBRARY" in str(caught.value)


def test_a_candidate_that_does_not_load_is_passed_over_and_named(monkeypatch, tmp_path, nccl, gpu):
    broken = tmp_path / "libnccl.so.2"
    broken.write_text("no library")
    monkeypatch.setattr(module, "_nccl_candidates", lambda: [str(broken), nccl])
    assert get_engine("nccl").path == nccl
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setattr(module, "_nccl_candidates", lambda: [str(broken), "/nowhere/libnccl.so.2"])
    with pytest.raises(EngineUnavailable) as caught:
        get_engine("nccl")
    assert str(broken) in str(caught.value) and "/nowhere/libnccl.so.2" in str(caught.value)


def test_candidates_are_absolute_and_searched_in_order(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/some/where:relative")
    monkeypatch.setenv("CONDA_PREFIX", "/conda")
    paths = module._nccl_candidates()
    assert all(os.path.isabs(path) for path in paths) and len(set(paths)) == len(paths)
    torch_copy = os.path.join(os.path.dirname(torch.__file__), "lib", "libnccl.so.2")
    order = [torch_copy, "/some/where/libnccl.so.2", "/conda/lib/libnccl.so.2", "/usr/lib64/libnccl.so.2"]
    positions = [paths.index(path) for path in order]
    assert positions == sorted(positions)
    wheel = [path for path in paths if path.endswith("nvidia/nccl/lib/libnccl.so.2")]
    assert all(paths.index(path) < paths.index(torch_copy) for path in wheel)


def test_a_library_that_is_in_the_process_already_is_a_candidate(tmp_path):
    """torch's CUDA builds load an NCCL of their own when torch is imported; another one comes behind it."""
    code = (
        "import ctypes, sys\n"
        "from collectives.comm import engine\n"
        "before = engine._mapped_nccl()\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "after = engine._mapped_nccl()\n"
        "print(sys.argv[1] in before, [p for p in after if p not in before] == [sys.argv[1]],\n"
        "      sys.argv[1] in engine._nccl_candidates())\n"
    )
    other = tmp_path.resolve() / "libnccl.so.2"
    shutil.copy(module.library_path(), other)
    root = os.path.dirname(os.path.dirname(collectives.__file__))
    command = [sys.executable, "-c", code, str(other)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


# ---- Which engine.


def test_default_without_a_gpu():
    assert get_engine().name == "host"


def test_with_a_gpu(monkeypatch, gpu, nccl):
    """The device decides where nothing is named; what the caller names comes before the environment."""
    assert get_engine().name == get_engine(None, "cuda").name == "nccl"
    assert get_engine(None, "cpu").name == get_engine("host", "cpu").name == "host"
    monkeypatch.setenv("COLLECTIVES_ENGINE", "host")
    assert get_engine().name == "host" and get_engine("nccl").name == "nccl"
    monkeypatch.setenv("COLLECTIVES_ENGINE", "nccl")
    assert get_engine().name == "nccl"
    monkeypatch.setenv("COLLECTIVES_ENGINE", "")
    assert get_engine(None, "cpu").name == "host"
    monkeypatch.setenv("COLLECTIVES_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    with pytest.raises(EngineUnavailable, match="COLLECTIVES_NCCL_LIBRARY"):
        get_engine()


def test_with_a_gpu_and_no_nccl(gpu, no_nccl):
    """The host engine takes NCCL's place with a warning, and never in secret for CUDA."""
    with pytest.warns(RuntimeWarning, match=r"NCCL can't be loaded.*/nowhere/one"):
        assert get_engine().name == "host"
    with pytest.raises(EngineUnavailable):
        get_engine(None, "cuda")


@pytest.mark.parametrize("name", ["NCCL", "gloo", "host "])
def test_unknown_engine(monkeypatch, name):
    with pytest.raises(InvalidArgument, match="'nccl', 'host'"):
        get_engine(name)
    monkeypatch.setenv("COLLECTIVES_ENGINE", "gloo")
    with pytest.raises(InvalidArgument, match="COLLECTIVES_ENGINE=gloo"):
        get_engine()


def test_engine_and_device_that_do_not_fit(monkeypatch):
    with pytest.raises(InvalidArgument, match="'host' works on device type 'cpu', not on 'cuda'"):
        get_engine("host", "cuda")
    with pytest.raises(InvalidArgument, match="'nccl' works on device type 'cuda', not on 'cpu'"):
        get_engine("nccl", "cpu")
    with pytest.raises(InvalidArgument, match="device type 'xla'"):
        get_engine(None, "xla")
    monkeypatch.setenv("COLLECTIVES_ENGINE", "host")
    with pytest.raises(InvalidArgument, match="COLLECTIVES_ENGINE=host works on device type 'cpu'"):
        get_engine(None, "cuda")


@pytest.mark.gpu
def test_nccl_on_this_machines_gpu(monkeypatch):
    monkeypatch.undo()
    info = find("nccl")
    assert info.available and info.reason == "" and os.path.exists(info.path)
    assert get_engine().name == "nccl"
