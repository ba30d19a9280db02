"""The functions of a torch.cuda.MemPool over ncclMemAlloc, called as torch calls them, with the host engine's memory."""

from __future__ import annotations

import ctypes

import pytest
import torch

from collectives import _nccl
from collectives.comm.engine import get_engine
from collectives.comm.mem_pool import missing_pool_reason, use_mem_pool


def functions():
    library = ctypes.CDLL(_nccl.__file__)
    allocate, release = (getattr(library, name) for name in _nccl.POOL_FUNCTIONS)
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    release.restype = None
    release.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    return allocate, release


def test_segments_are_the_librarys_memory():
    library = get_engine("host").library
    allocate, release = functions()
    _nccl.use_in_pools(library)
    before = library.memory_in_use()
    segments = [allocate(nbytes, 0, None) for nbytes in (2 << 20, 5000, 4 << 20)]
    for address in segments:
        ctypes.memset(address, 7, 5000)
        assert library.memory_shared(address, 5000) and _nccl.pool_holds(address) and _nccl.pool_holds(address + 4999)
    assert library.memory_in_use() - before >= 6 << 20
    assert not _nccl.pool_holds(segments[1] + (1 << 30)) and not _nccl.pool_holds(0)
    assert allocate(1 << 62, 0, None) is None  # torch takes it for a GPU without memory
    for address in (segments[1], segments[0], segments[2]):
        release(address, 5000, 0, None)
        assert not _nccl.pool_holds(address)
    assert library.memory_in_use() == before


def test_memory_that_is_none_of_a_pools(capfd):
    _, release = functions()
    release(4096, 1, 0, None)
    assert "could not be freed" in capfd.readouterr().err


def test_without_cuda_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "no CUDA device" in missing_pool_reason() or "no library" in missing_pool_reason()
    with use_mem_pool(torch.device("cuda", 0)):
        pass
