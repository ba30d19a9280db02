"""Memory shared by use that one thread frees while another one forks: what is mapped there next stays as it is."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import numpy as np
import pytest

from tests.conformance.test_shared_by_use import is_shared, use
from tests.conformance.test_zero_copy import moves
from tests.ranks import run_ranks

BLOCKS, SIZE = 8, 16 << 20
pytestmark = moves

# A thread that needs no lock of Python's. It frees the blocks, and fills a new mapping after each.
SOURCE = """
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void **blocks;
static int count;
static size_t size;
static char *maps[64];
static volatile int begun;
static pthread_t thread;

static void *free_and_map(void *unused) {
  begun = 1;
  for (int i = 0; i < count; ++i) {
    usleep(2000);
    free(blocks[i]);
    maps[i] = mmap(0, size + 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(maps[i], 77, size + 8192);
  }
  return unused;
}

void *make(size_t nbytes) {
  void *memory = NULL;
  mallopt(M_MMAP_THRESHOLD, 65536);
  return posix_memalign(&memory, 64, nbytes) ? NULL : memory;
}

void start(void **which, int how_many, size_t nbytes) {
  blocks = which, count = how_many, size = nbytes;
  pthread_create(&thread, NULL, free_and_map, NULL);
  while (!begun) {}
}

int overwritten(void) {
  int found = 0;
  pthread_join(thread, NULL);
  for (int i = 0; i < count; ++i)
    for (size_t at = 0; at < size; at += 4096)
      if (maps[i][at] != 77) { ++found; break; }
  return found;
}
"""


def forks_and_frees(ctx, path):
    comm = ctx.new_communicator()
    other = ctypes.CDLL(path)
    other.make.restype, other.make.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    other.start.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    blocks = (ctypes.c_void_p * BLOCKS)(*(other.make(SIZE) for _ in range(BLOCKS)))
    for block in blocks:
        array = np.frombuffer((ctypes.c_char * SIZE).from_address(block), np.float32)
        array[:] = 1
        use(comm, array)
        assert is_shared(comm, array)
    other.start(ctypes.addressof(blocks), BLOCKS, SIZE)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert other.overwritten() == 0
    comm.close()


def test_freed_while_forking(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    path = tmp_path / "other_thread.so"
    command = ["gcc", "-O1", "-shared", "-fPIC", "-pthread", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCE, text=True, check=True, timeout=60)
    run_ranks(forks_and_frees, 2, str(path), fresh=True)
