# cython: language_level=3
"""Binding of the host kernel library, which runs a kernel on a struct of arguments.

The library is ``libcollectives_host.so``, loaded by its path and never unloaded. Arguments are
opaque here: ``kernels/abi.py`` declares the structs, and their sizes are checked against the
library's.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer

import os

from .errors import EngineUnavailable, InternalError, InvalidArgument

cdef extern from "<dlfcn.h>" nogil:
    int RTLD_NOW
    int RTLD_LOCAL
    void* dlopen(const char* path, int flags)
    void* dlsym(void* handle, const char* name)
    char* dlerror()


cdef void* _symbol(void* handle, bytes name, str path) except NULL:
    cdef void* found = dlsym(handle, name)
    if found == NULL:
        raise EngineUnavailable(
            f"{path} has no {name.decode()}: it was built from another version; install this package again"
        )
    return found


cdef class Library:
    """The host kernels of one library file. Raises ``EngineUnavailable`` where it can't be loaded."""

    def __init__(self, path):
        self.path = os.fspath(path)
        cdef bytes encoded = os.fsencode(self.path)
        self._handle = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
        if self._handle == NULL:
            raise EngineUnavailable(f"host kernels: {dlerror().decode(errors='replace')}")
        self._run = <run_fn>_symbol(self._handle, b"collKernelRun", self.path)
        self._args_size = <args_size_fn>_symbol(self._handle, b"collKernelArgsSize", self.path)
        self._isa = <isa_fn>_symbol(self._handle, b"collKernelIsa", self.path)

    def run(self, int kernel, args, int threads):
        """Run a kernel on a struct of arguments, an object with a buffer.

        Blocks until it is done, without the GIL.
        """
        cdef Py_buffer view
        cdef int status
        PyObject_GetBuffer(args, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                status = self._run(kernel, view.buf, <size_t>view.len, threads)
            if status == 2:
                raise MemoryError("the system has no memory or no thread for the kernels' thread pool")
            if status != 0:
                raise InternalError(
                    f"kernel {kernel}: {self.path} doesn't have it or takes other arguments than these {view.len} bytes"
                )
        finally:
            PyBuffer_Release(&view)

    @property
    def run_address(self):
        """The address of collKernelRun, for C that runs kernels."""
        return <size_t><void*>self._run

    def args_size(self, int kernel):
        """Return the size in bytes of a kernel's arguments, 0 for a kernel that isn't there."""
        return self._args_size(kernel)

    def use_isa(self, name=None):
        """Use an instruction set's kernels from now on, and return its name.

        ``None``: COLLECTIVES_ISA's, else the widest.
        """
        cdef bytes encoded = b"" if name is None else name.encode()
        cdef const char* wanted = NULL
        if name is not None:
            wanted = encoded
        cdef const char* found = self._isa(wanted)
        if found == NULL:
            asked = f"instruction set {name!r}" if name else f"COLLECTIVES_ISA={os.environ.get('COLLECTIVES_ISA')}"
            raise InvalidArgument(f"{asked}: this machine or this build doesn't have it")
        return found.decode()
