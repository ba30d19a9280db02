# C API of the host kernels (kernels/include/coll/kernel_abi.h), called through pointers from the
# loaded library.
from libc.stddef cimport size_t

ctypedef int (*run_fn)(int kernel, const void* args, size_t nbytes, int threads) noexcept nogil
ctypedef size_t (*args_size_fn)(int kernel) noexcept nogil
ctypedef const char* (*isa_fn)(const char* name) noexcept nogil


cdef class Library:
    cdef void* _handle
    cdef run_fn _run
    cdef args_size_fn _args_size
    cdef isa_fn _isa
    cdef readonly str path
