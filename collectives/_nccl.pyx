"""Binding of NCCL's C API: a function table loaded from a path at run time.

The same classes drive NVIDIA's NCCL and this project's host engine, which exports the same C ABI.
Addresses, streams and queues are plain integers. The binding doesn't depend on torch: it gets the
DLPack exchange table, by which tensors are read (``_nccl_arrays.pxi``), at run time. Each method
converts its arguments, calls the library with the GIL released, and checks the result code.
``_nccl_errors.pxi`` makes the exception for a code.
"""

import re
import struct
import sys
from collections import namedtuple
from functools import update_wrapper
from math import copysign, frexp, isinf, isnan, ldexp
from operator import index
from os import fsdecode, fsencode
from time import monotonic
from warnings import warn

cimport cython
from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_WRITABLE, PyBuffer_Release
from cpython.exc cimport PyErr_CheckSignals, PyErr_Clear, PyErr_WriteUnraisable
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from cpython.pythread cimport PyThread_get_thread_ident
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, PyObject, PyTypeObject
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset
from posix.dlfcn cimport RTLD_LOCAL, RTLD_NOW, dlerror, dlopen, dlsym
from posix.unistd cimport usleep

from collectives import errors


cdef extern from "Python.h":
    PyObject* PyObject_CallNoArgs(PyObject* callable)
    PyObject* PyObject_CallOneArg(PyObject* callable, PyObject* argument)
    PyObject* Py_False
    PyTypeObject* Py_TYPE(object)
    bint PyUnicode_CheckExact(object)
    bint PyLong_CheckExact(object)
    # Declared as in C: on failure the Python error stays set, and the caller reads or clears it.
    int PyObject_GetBuffer(PyObject* exporter, Py_buffer* view, int flags)
    Py_ssize_t PyDict_GET_SIZE(object dictionary)
    PyObject* PyDict_GetItem(object dictionary, object key)
    long PyLong_AsLong(object number) noexcept
    long PyLong_AsLongAndOverflow(object number, int* overflow) noexcept
    int Py_IsInitialized() nogil


__all__ = [
    "ArrayCalls",
    "ArrayReader",
    "CONFIG_FIELDS",
    "Comm",
    "DTYPES",
    "ErrorInfo",
    "FLIGHT_BYTES",
    "FLIGHT_LAYOUT",
    "FLIGHT_OPS",
    "FUNCTIONS",
    "FlightRing",
    "GroupCalls",
    "GroupedTransfer",
    "HOST_FUNCTIONS",
    "Library",
    "OPS",
    "POOL_FUNCTIONS",
    "REFUSAL_BYTES",
    "QUEUE_CPU", "QUEUE_PENDING", "QUEUE_THREAD_ID",
    "Queue",
    "SHRINK_ABORT",
    "SPLIT_NOCOLOR",
    "STEP_KINDS",
    "StepList",
    "TagOfCalls",
    "UNDEF_INT",
    "UNIQUE_ID_BYTES",
    "VERSION",
    "check",
    "format_version",
    "issue_transfers",
    "name_of_tag",
    "open_groups",
    "pool_holds",
    "tag_names",
    "use_in_pools",
    "with_fast_path",
]

DTYPES = {
    "int8": ncclInt8,
    "uint8": ncclUint8,
    "int32": ncclInt32,
    "uint32": ncclUint32,
    "int64": ncclInt64,
    "uint64": ncclUint64,
    "float16": ncclFloat16,
    "float32": ncclFloat32,
    "float64": ncclFloat64,
    "bfloat16": ncclBfloat16,
    "float8e4m3": ncclFloat8e4m3,
    "float8e5m2": ncclFloat8e5m2,
}
OPS = {"sum": ncclSum, "prod": ncclProd, "max": ncclMax, "min": ncclMin, "avg": ncclAvg}

VERSION = NCCL_VERSION_CODE             # the version of nccl.h that these declarations follow
UNIQUE_ID_BYTES = NCCL_UNIQUE_ID_BYTES
UNDEF_INT = NCCL_CONFIG_UNDEF_INT
SPLIT_NOCOLOR = NCCL_SPLIT_NOCOLOR
SHRINK_ABORT = NCCL_SHRINK_ABORT
REFUSAL_BYTES = COLL_HOST_REFUSAL_BYTES     # of the text that a record of parts begins with


cdef dict listed(const collEntry_t* entry, bint host):
    cdef dict names = {}
    while entry.name is not NULL:
        if (entry.since == 0) == host:
            names[entry.name.decode()] = entry.since
        entry += 1
    return names


FUNCTIONS = listed(collFunctions, False)            # function of NCCL -> the first version code that has it
HOST_FUNCTIONS = tuple(listed(collFunctions, True))  # functions that only the host engine has
CONFIG_FIELDS = listed(collConfigFields, False)     # field of ncclConfig_t -> the first version code that has it

if collWatchForks() != 0:
    raise MemoryError("no memory to register the fork handler")


def format_version(int code):
    """Return an NCCL version code as text: 22703 -> "2.27.3", 2708 -> "2.7.8"."""
    major, minor, patch = (code // 10000, code // 100 % 100, code % 100) if code >= 10000 else (
        code // 1000, code // 100 % 10, code % 100)
    return f"{major}.{minor}.{patch}" if patch else f"{major}.{minor}"


include "_nccl_errors.pxi"
include "_nccl_scalars.pxi"
include "_nccl_config.pxi"


cdef class Library:
    """Load an NCCL library, or the host engine, from a path into a function table of its own.

    ``path`` goes to ``dlopen(RTLD_NOW | RTLD_LOCAL)``: nothing is looked up in what else the
    process has loaded. A function that the library lacks costs nothing until it is called. The
    library stays loaded until the process ends. Raises ``EngineUnavailable`` with the path and the
    loader's own words.
    """

    def __cinit__(self, path):
        cdef const collEntry_t* entry = collFunctions
        cdef bytes encoded = fsencode(path)
        cdef const char* c_path = encoded
        cdef void* handle
        self.path = fsdecode(path)
        self.groups = {}
        self.unfinished = set()
        with nogil:
            handle = dlopen(c_path, RTLD_NOW | RTLD_LOCAL)
        if handle is NULL:
            raise errors.EngineUnavailable(f"cannot load {self.path}: {text_of(dlerror())}")
        while entry.name is not NULL:
            (<void**> (<char*> &self.api + entry.offset))[0] = dlsym(handle, entry.name)
            entry += 1
        if self.api.ncclGetVersion is NULL:
            raise errors.EngineUnavailable(f"{self.path} is no NCCL library: it has no ncclGetVersion")
        self.is_host = self.api.collHostQueueCreate is not NULL
        self.done(self.api.ncclGetVersion(&self.version), "ncclGetVersion")

    def __repr__(self):
        return f"<Library {self.path!r} {format_version(self.version)}{' host' if self.is_host else ''}>"

    # ---- functions of the library

    def has(self, str name not None):
        """Return whether the library has a C function, one of FUNCTIONS or HOST_FUNCTIONS."""
        cdef bytes encoded = name.encode()
        cdef const collEntry_t* entry = collFunctions
        while entry.name is not NULL:
            if encoded == entry.name:
                return (<void**> (<char*> &self.api + entry.offset))[0] is not NULL
            entry += 1
        raise errors.InvalidArgument(f"{name!r} is no function of the binding")

    cdef object missing(self, str name):
        since = FUNCTIONS.get(name)
        if self.is_host:
            return errors.EngineUnavailable(f"the host engine at {self.path} does not offer {name}", op=op_name(name))
        if since is None:
            return errors.EngineUnavailable(
                f"{name} is a function of the host engine; NCCL {format_version(self.version)} at {self.path} has none",
                op=op_name(name))
        return errors.EngineUnavailable(
            f"{name} came with NCCL {format_version(since)}; the library at {self.path} is "
            f"{format_version(self.version)} and has no such symbol. Install a newer nvidia-nccl package or name one "
            "in COLLECTIVES_NCCL_LIBRARY", op=op_name(name))

    cdef int need(self, void* function, const char* name) except -1:
        if function is NULL:
            raise self.missing(name.decode())
        return 0

    cdef int done(self, ncclResult_t code, const char* name) except -1:
        if (code != ncclSuccess and code != ncclInProgress) or collInterrupted:
            raise error_of(self, None, code, name)
        return 0

    # ---- communicators

    def get_unique_id(self):
        """Make a unique id (128 bytes), which one rank sends to all ranks of a new communicator.

        C: ``ncclGetUniqueId``.
        """
        cdef ncclUniqueId unique_id
        cdef ncclResult_t code
        self.need(<void*> self.api.ncclGetUniqueId, "ncclGetUniqueId")
        with nogil:
            code = self.api.ncclGetUniqueId(&unique_id)
        self.done(code, "ncclGetUniqueId")
        return (<char*> &unique_id)[:sizeof(unique_id)]

    def named_unique_id(self, bytes name not None):
        """Make the unique id of a name, the same in all processes of this user.

        Host engine only. C: ``collHostGetNamedUniqueId``.
        """
        cdef ncclUniqueId unique_id
        cdef const char* data = name
        cdef size_t nbytes = len(name)
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostGetNamedUniqueId, "collHostGetNamedUniqueId")
        with nogil:
            code = self.api.collHostGetNamedUniqueId(data, nbytes, &unique_id)
        self.done(code, "collHostGetNamedUniqueId")
        return (<char*> &unique_id)[:sizeof(unique_id)]

    def comm_init_rank(self, int nranks, bytes unique_id not None, int rank, *, config=None):
        """Open rank ``rank`` of a communicator of ``nranks``; waits for the other ranks.

        ``config``: a dict of ``ncclConfig_t`` fields; ``{"blocking": 0}`` returns at once, then
        poll ``async_error``. C: ``ncclCommInitRank``, ``ncclCommInitRankConfig``.
        """
        cdef ncclUniqueId c_id = c_unique_id(unique_id)
        cdef Comm comm = new_comm(self, rank, nranks)
        cdef ncclResult_t code
        cdef _Config settings
        if config is None:
            self.need(<void*> self.api.ncclCommInitRank, "ncclCommInitRank")
            with nogil:
                code = self.api.ncclCommInitRank(&comm.comm, nranks, c_id, rank)
            return self.opened(comm, code, "ncclCommInitRank")
        self.need(<void*> self.api.ncclCommInitRankConfig, "ncclCommInitRankConfig")
        settings = _Config(self, config)
        with nogil:
            code = self.api.ncclCommInitRankConfig(&comm.comm, nranks, c_id, rank, &settings.c)
        return self.opened(comm, code, "ncclCommInitRankConfig")

    cdef Comm opened(self, Comm comm, ncclResult_t code, const char* name):
        """Check the result of a function that opens a communicator.

        Keeps the object alive while the library may write its handle. In a group the handle is
        written at the group's end, and with ``blocking=0`` by a thread of the library.
        """
        cdef list group
        if code != ncclSuccess and code != ncclInProgress or collInterrupted:
            comm.comm = NULL
            comm.closed = True
            raise error_of(self, comm, code, name)
        group = self.groups.get(PyThread_get_thread_ident())
        if group is not None:
            group.append(comm)
        elif code == ncclInProgress:
            self.unfinished.add(comm)
        return comm

    # ---- groups

    def group_start(self):
        """Open a group on this thread: the calls up to ``group_end`` are issued as one.

        Groups nest. C: ``ncclGroupStart``.
        """
        cdef ncclResult_t code
        cdef list group
        self.need(<void*> self.api.ncclGroupStart, "ncclGroupStart")
        with nogil:
            code = self.api.ncclGroupStart()
        self.done(code, "ncclGroupStart")
        group = self.groups.setdefault(PyThread_get_thread_ident(), [0])
        group[0] += 1

    def group_end(self):
        """Close the group; the outermost end issues its calls.

        On stream 0 of the host engine it waits for them. C: ``ncclGroupEnd``.
        """
        cdef ncclResult_t code
        global collInsideGroupEnd
        self.need(<void*> self.api.ncclGroupEnd, "ncclGroupEnd")
        collInsideGroupEnd += 1
        with nogil:
            code = self.api.ncclGroupEnd()
        collInsideGroupEnd -= 1
        leave_group(self, code)
        self.done(code, "ncclGroupEnd")

    def group_cancel(self):
        """Drop the calls in this thread's open group, and leave all its levels.

        No-op if none is open. C: ``collHostGroupCancel``. NCCL has no such function: after a call
        that it refuses ``ncclGroupEnd`` launches nothing of the group, so one is made, on no
        communicator.
        """
        cdef ncclResult_t refused, code
        cdef list group = self.groups.pop(PyThread_get_thread_ident(), None)
        cdef int depth = 0 if group is None else group[0]
        global collInsideGroupEnd
        if self.api.collHostGroupCancel is not NULL:
            with nogil:
                code = self.api.collHostGroupCancel()
            self.done(code, "collHostGroupCancel")
            return
        if depth == 0:
            return
        self.need(<void*> self.api.ncclAllReduce, "ncclAllReduce")
        collInsideGroupEnd += 1
        with nogil:
            refused = self.api.ncclAllReduce(NULL, NULL, 0, <ncclDataType_t> 0, <ncclRedOp_t> 0, NULL, NULL)
            code = ncclSuccess
            while depth > 0:
                code = self.api.ncclGroupEnd()
                depth -= 1
        collInsideGroupEnd -= 1
        if refused == ncclSuccess or code == ncclSuccess or code == ncclInProgress:
            raise errors.InternalError("a group that was to be dropped has been launched", op="group_end")

    # ---- memory

    def mem_alloc(self, size_t nbytes):
        """Allocate memory that the engine uses with no staging copy; return its address.

        C: ``ncclMemAlloc``.
        """
        cdef void* address = NULL
        cdef ncclResult_t code
        self.need(<void*> self.api.ncclMemAlloc, "ncclMemAlloc")
        with nogil:
            code = self.api.ncclMemAlloc(&address, nbytes)
        self.done(code, "ncclMemAlloc")
        return <size_t> address

    def mem_free(self, size_t address):
        """Free memory of ``mem_alloc``. C: ``ncclMemFree``."""
        cdef ncclResult_t code
        self.need(<void*> self.api.ncclMemFree, "ncclMemFree")
        with nogil:
            code = self.api.ncclMemFree(<void*> address)
        self.done(code, "ncclMemFree")

    def memory_in_use(self):
        """Return the bytes that this process holds in the engine. Host engine only.

        C: ``collHostMemoryInUse``.
        """
        cdef uint64_t nbytes = 0
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostMemoryInUse, "collHostMemoryInUse")
        with nogil:
            code = self.api.collHostMemoryInUse(&nbytes)
        self.done(code, "collHostMemoryInUse")
        return nbytes

    def memory_shared(self, size_t address, size_t nbytes):
        """Return whether all of a range of memory is shared with the peers, and so used in place.

        Host engine only. C: ``collHostMemoryShared``.
        """
        cdef int shared = 0
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostMemoryShared, "collHostMemoryShared")
        with nogil:
            code = self.api.collHostMemoryShared(<const void*> address, nbytes, &shared)
        self.done(code, "collHostMemoryShared")
        return shared != 0

    # ---- functions of the host engine

    def queue_create(self):
        """Make a queue: a thread that runs what is put into it, in order.

        C: ``collHostQueueCreate``.
        """
        cdef Queue queue = Queue.__new__(Queue)
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostQueueCreate, "collHostQueueCreate")
        queue.library = self
        queue.forks = collForks
        with nogil:
            code = self.api.collHostQueueCreate(&queue.queue)
        self.done(code, "collHostQueueCreate")
        return queue

    def label(self, str op=None, str dtype=None):
        """Set the names of the calling thread's next operation and of its dtype, for reports.

        The dtype's name is for types that are sent as bytes. Ranks whose labels differ get
        ``Mismatch``. Host engine only. C: ``collHostLabel``.
        """
        cdef bytes op_text = b"" if op is None else op.encode()
        cdef bytes dtype_text = b"" if dtype is None else dtype.encode()
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostLabel, "collHostLabel")
        code = self.api.collHostLabel(op_text, dtype_text)
        self.done(code, "collHostLabel")

    def check_parts(self, size_t records, int nranks, int rank):
        """Raise ``Mismatch`` for rank ``rank`` unless the ranks' records of parts fit each other.

        ``records``: address of ``nranks`` of them; see `Comm.compare_parts`. Host engine only. C:
        ``collHostCheckParts``.
        """
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostCheckParts, "collHostCheckParts")
        with nogil:
            code = self.api.collHostCheckParts(<const void*> records, nranks, rank)
        self.done(code, "collHostCheckParts")

    def set_secret(self, secret):
        """Set the job's secret; None for none. Processes without it can't take part in communicators
        that this process opens from now on.

        Host engine only. C: ``collHostSetSecret``.
        """
        cdef bytes text
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostSetSecret, "collHostSetSecret")
        text = b"" if secret is None else secret
        code = self.api.collHostSetSecret(<const char*> text, len(text))
        self.done(code, "collHostSetSecret")

    def set_init_timeout(self, double seconds):
        """Limit how long the functions that open a communicator wait for other ranks.

        C: ``collHostSetInitTimeout``.
        """
        cdef int64_t limit = milliseconds(seconds)
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostSetInitTimeout, "collHostSetInitTimeout")
        with nogil:
            code = self.api.collHostSetInitTimeout(limit)
        self.done(code, "collHostSetInitTimeout")

    def set_interrupt_check(self, bint enable):
        """Set whether Python's signal handlers run while the main thread waits inside a call.

        What a handler raises (KeyboardInterrupt for Ctrl-C) ends the wait and comes out of the
        call. Host engine only. C: ``collHostSetInterruptCheck``.
        """
        cdef int (*callback)() noexcept nogil
        cdef ncclResult_t code
        self.need(<void*> self.api.collHostSetInterruptCheck, "collHostSetInterruptCheck")
        callback = NULL
        if enable:
            callback = interrupt_check
        with nogil:
            code = self.api.collHostSetInterruptCheck(callback)
        self.done(code, "collHostSetInterruptCheck")


cdef int leave_group(Library library, ncclResult_t code) except -1:
    """Count the levels of this thread's group down.

    Communicators that were opened in it have their handles when the outermost level ends.
    """
    cdef object thread = PyThread_get_thread_ident()
    cdef list group = library.groups.get(thread)
    if group is not None:
        group[0] -= 1
        if group[0] == 0:
            del library.groups[thread]
            if code == ncclInProgress:
                library.unfinished.update(group[1:])
    return 0


include "_nccl_flight.pxi"
include "_nccl_one_rank.pxi"
include "_nccl_comm.pxi"
include "_nccl_groups.pxi"
include "_nccl_arrays.pxi"
include "_nccl_methods.pxi"
include "_nccl_pool.pxi"
include "_nccl_queue.pxi"
include "_nccl_steps.pxi"
