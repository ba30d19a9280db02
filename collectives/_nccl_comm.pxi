# The communicator class: its life, its settings, and every call that moves data.

cdef Comm new_comm(Library library, int rank, int size):
    cdef Comm comm = Comm.__new__(Comm)
    comm.library = library
    comm.api = &library.api
    comm.forks = collForks
    comm.known_rank = rank
    comm.known_size = size
    return comm


cdef frozenset ALLOWED_IN_HANDLERS = frozenset(
    [b"ncclCommAbort", b"ncclCommGetAsyncError", b"collHostGetError", b"collHostCommPending"])


cdef class Comm:
    """A rank of a communicator.

    Made by ``Library.comm_init_rank``, and by ``split`` and ``shrink``. Addresses are
    integers; counts are elements; ``dtype`` and ``op`` are codes of DTYPES and OPS, ``op`` also one
    from ``create_premul_sum``; ``stream`` is a CUDA stream, or the ``handle`` of a Queue. Stream 0
    on the host engine means that the operation is done when the call returns. Inside a group, calls
    are only collected until its end.

    After ``destroy`` or ``abort`` every call raises ``InvalidUsage``, and so does every call in a
    forked child. Nothing is released when the object is freed: that would wait for other ranks.
    """

    def __init__(self):
        raise TypeError("Comm objects come from Library.comm_init_rank")

    def __del__(self):
        if self.comm is not NULL and self.forks == collForks:
            warn(f"communicator {self.handle:#x} was never destroyed: what it holds is held until the process ends",
                 ResourceWarning, source=self)

    def __repr__(self):
        state = "closed" if self.closed else f"{self.handle:#x}"
        return f"<Comm {state} rank {self.known_rank} of {self.known_size} on {self.library!r}>"

    # ---- entering and leaving the library
    # All of it runs under the GIL, so a handle that is read here stays valid until `leave`: destroy()
    # zeroes it first, then waits until the calls that took it have returned.

    cdef inline ncclComm_t enter(self, void* function, const char* name) except NULL:
        if self.comm is NULL or function is NULL or self.forks != collForks or collInsideInterrupt:
            self.refuse(function, name)
        self.calls += 1
        return self.comm

    cdef inline int leave(self, ncclResult_t code, const char* name) except -1:
        self.calls -= 1
        if code != ncclSuccess or collInterrupted:
            self.settle(code, name)
        return 0

    cdef inline int leave_op(self, ncclResult_t code, const char* name, collFlightRecord_t* record) except -1:
        if record is not NULL and (record.flags & collFlightBlocking or code != ncclSuccess):
            collFlightEnd(record, record.number, code)
        return self.leave(code, name)

    cdef inline collFlightRecord_t* note(self, const char* name, FlightOp op, size_t count, int dtype, size_t stream,
                                         int peer, bint grouped=False) noexcept:
        """Record the call that is issued; return its flight record, NULL where there is none.

        It is written under the GIL, so `issued` reads the values of one call. ``grouped``: it is in a
        group that the library's ``groups`` doesn't hold.
        """
        self.last_op, self.last_count, self.last_dtype, self.last_stream = name, count, dtype, stream
        self.last_tag = self.tag
        self.number += 1
        if self.tag and self.api.collHostTag is not NULL:
            self.api.collHostTag(self.tag)
        return NULL if self.ring is None else self.record(op, count, dtype, stream, peer, grouped)

    cdef collFlightRecord_t* record(self, FlightOp op, size_t count, int dtype, size_t stream, int peer,
                                    bint grouped) noexcept:
        cdef int flags = collFlightCollective if op < FLIGHT_SEND else 0
        cdef bint queued = stream != 0 or grouped or PyDict_GET_SIZE(self.library.groups) > 0
        cdef collFlightRecord_t* record
        if not queued and self.library.is_host:
            flags |= collFlightBlocking
        record = self.ring.begin(op, count, dtype, stream, peer, flags, self.tag)
        if queued and self.api.collHostFlightRecord is not NULL:    # the engine records its start and its end
            self.api.collHostFlightRecord(record)
        return record

    def attach_flight_ring(self, FlightRing ring):
        """Record the calls of this communicator from now on in a ring; None: no more."""
        self.ring = ring

    cdef int refuse(self, void* function, const char* name) except -1:
        """Raise the reason why this call can't be made.

        Returns if it can be, as some calls in signal handlers.
        """
        op = op_name(name.decode())
        rank = self.known_rank if self.known_rank >= 0 else None
        if self.forks != collForks:
            raise errors.InvalidUsage("this communicator belongs to the parent process; a forked child can't use it",
                                      op=op, rank=rank)
        if self.closed:
            raise errors.InvalidUsage("communicator is closed", op=op, rank=rank)
        if self.comm is NULL:
            raise errors.InvalidUsage("communicator is not open yet: it opens when its group ends", op=op, rank=rank)
        if function is NULL:
            raise self.library.missing(name.decode())
        if (self.calls > 0 or collInsideGroupEnd) and name not in ALLOWED_IN_HANDLERS:
            raise errors.InvalidUsage("a signal handler that interrupts a call can only abort the communicator or look "
                                      "at its state", op=op, rank=rank)
        return 0

    cdef int settle(self, ncclResult_t code, const char* name) except -1:
        """Finish a call on the slow path: raise its error."""
        if code == ncclInProgress and not collInterrupted:
            return 0
        error = error_of(self.library, self, code, name)
        if self.closed and isinstance(error, errors.Aborted):       # abort() had to revoke first: the error names abort
            error = errors.Aborted("abort() closed the communicator during the call", code=error.code, op=error.op,
                                   rank=error.rank, seq=error.seq, nbytes=error.nbytes, detail=error.detail,
                                   tag=error.tag)
        if self.ring is not None and self.ring.on_error is not None:
            self.ring.on_error(error)
        raise error

    cdef int drain(self) except -1:
        """Wait until no call is inside the library. A signal handler may end the wait."""
        while self.calls > 0:
            with nogil:
                usleep(50)
            PyErr_CheckSignals()
        return 0

    # ---- properties

    @property
    def handle(self):
        """The ``ncclComm_t`` as an integer; 0 once the communicator is closed."""
        return <size_t> self.comm

    @property
    def rank(self):
        """This rank's number. C: ``ncclCommUserRank``, if the call that opened it doesn't say."""
        if self.known_rank < 0:
            self.known_rank = self.ask(self.api.ncclCommUserRank, "ncclCommUserRank")
        return self.known_rank

    @property
    def size(self):
        """The number of ranks. C: ``ncclCommCount``, if the call that opened it doesn't say."""
        if self.known_size < 0:
            self.known_size = self.ask(self.api.ncclCommCount, "ncclCommCount")
        return self.known_size

    @property
    def issued(self):
        """The call that was issued last.

        (number of calls so far, its name such as "all_reduce", elements, dtype's code, stream).
        """
        if self.number == 0:
            return 0, "", 0, 0, 0
        return self.number, op_name(self.last_op.decode()), self.last_count, self.last_dtype, self.last_stream

    cdef int ask(self, ncclResult_t (*question)(ncclComm_t, int*) noexcept nogil, const char* name) except? -1:
        cdef int answer = -1
        cdef ncclComm_t comm = self.enter(<void*> question, name)
        cdef ncclResult_t code
        with nogil:
            code = question(comm, &answer)
        self.leave(code, name)
        return answer

    # ---- ending

    def destroy(self):
        """Close the communicator, once the calls of other threads on it have returned.

        C: ``ncclCommDestroy``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommDestroy, "ncclCommDestroy")
        cdef ncclResult_t code
        self.calls -= 1
        self.comm = NULL
        try:
            self.drain()
        except BaseException:
            self.comm = comm
            raise
        self.closed = True
        self.library.unfinished.discard(self)
        with nogil:
            code = self.api.ncclCommDestroy(comm)
        if code != ncclSuccess and code != ncclInProgress:
            raise error_of(self.library, self, code, "ncclCommDestroy")

    def wait_for_calls(self):
        """Wait until no other thread's call is inside the library.

        In a signal handler it is refused, as `destroy` is.
        """
        self.enter(<void*> self.api.ncclCommDestroy, "ncclCommDestroy")
        self.calls -= 1
        self.drain()

    def abort(self):
        """Close the communicator at once; calls that wait in other threads end with ``Aborted``.

        C: ``ncclCommAbort``. A signal handler that interrupts a call of this communicator may call
        it, too: the interrupted call ends and does the rest.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommAbort, "ncclCommAbort")
        cdef ncclResult_t code
        self.calls -= 1
        self.comm = NULL
        self.closed = True
        self.library.unfinished.discard(self)
        if collInsideInterrupt and (self.calls > 0 or collInsideGroupEnd):
            aborted_by_handlers.append((self, <size_t> comm))
            return
        code = self.abort_now(comm)
        if code != ncclSuccess and code != ncclInProgress:
            raise error_of(self.library, self, code, "ncclCommAbort")

    cdef ncclResult_t abort_now(self, ncclComm_t comm) except *:
        cdef ncclResult_t code
        if self.library.is_host and self.calls > 0:
            # A thread that is about to enter the library has the handle, and the library doesn't
            # know of it: end what runs, let every call return, and only then free. (NCCL itself
            # asks for ncclCommAbort right away.)
            with nogil:
                self.api.ncclCommRevoke(comm, 0)
            while self.calls > 0:
                with nogil:
                    usleep(50)
        with nogil:
            code = self.api.ncclCommAbort(comm)
        return code

    def async_error(self):
        """Return the communicator's state as a result code.

        0, 7 (in progress), or the code of its failure. C: ``ncclCommGetAsyncError``.
        """
        cdef ncclResult_t state = ncclSuccess
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommGetAsyncError, "ncclCommGetAsyncError")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclCommGetAsyncError(comm, &state)
        self.leave(code, "ncclCommGetAsyncError")
        if state != ncclInProgress:
            self.library.unfinished.discard(self)
        return <int> state

    # ---- new communicators made from this one

    def split(self, int color, int key, *, config=None):
        """Make a communicator of the ranks with this ``color``, in the order of ``key``.

        All ranks call it. Returns None for color SPLIT_NOCOLOR. C: ``ncclCommSplit``.
        """
        cdef _Config settings = None if config is None else _Config(self.library, config)
        cdef ncclConfig_t* c_config = NULL if settings is None else &settings.c
        cdef Comm child = new_comm(self.library, -1, -1)
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommSplit, "ncclCommSplit")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclCommSplit(comm, color, key, &child.comm, c_config)
        self.leave(code, "ncclCommSplit")
        self.library.opened(child, code, "ncclCommSplit")
        return None if color == NCCL_SPLIT_NOCOLOR else child

    def shrink(self, list exclude not None, *, int flags=0, config=None):
        """Make a communicator without the ranks in ``exclude``; the others call it.

        ``flags``: SHRINK_ABORT ends what is in progress first. C: ``ncclCommShrink``.
        """
        cdef _Config settings = None if config is None else _Config(self.library, config)
        cdef ncclConfig_t* c_config = NULL if settings is None else &settings.c
        cdef _Ints ranks = _Ints(exclude)
        cdef int count = len(exclude)
        cdef Comm child = new_comm(self.library, -1, -1)
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommShrink, "ncclCommShrink")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclCommShrink(comm, ranks.data, count, &child.comm, c_config, flags)
        self.leave(code, "ncclCommShrink")
        return self.library.opened(child, code, "ncclCommShrink")

    # ---- memory and operators

    def register(self, size_t address, size_t nbytes):
        """Register a buffer for use with no staging copy; return its handle.

        C: ``ncclCommRegister``.
        """
        cdef void* handle = NULL
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommRegister, "ncclCommRegister")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclCommRegister(comm, <void*> address, nbytes, &handle)
        self.leave(code, "ncclCommRegister")
        return <size_t> handle

    def deregister(self, size_t handle):
        """Undo ``register``. C: ``ncclCommDeregister``."""
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommDeregister, "ncclCommDeregister")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclCommDeregister(comm, <void*> handle)
        self.leave(code, "ncclCommDeregister")

    def window_register(self, size_t address, size_t nbytes, int flags=0):
        """Register a buffer as a window that all ranks can address; return the window.

        All ranks call it. Not inside a group, since the result comes only at the group's end. C:
        ``ncclCommWindowRegister``.
        """
        cdef ncclWindow_t window = NULL
        cdef ncclComm_t comm
        cdef ncclResult_t code
        if PyThread_get_thread_ident() in self.library.groups:
            raise errors.InvalidUsage("a window can't be registered inside a group", op="comm_window_register")
        comm = self.enter(<void*> self.api.ncclCommWindowRegister, "ncclCommWindowRegister")
        with nogil:
            code = self.api.ncclCommWindowRegister(comm, <void*> address, nbytes, &window, flags)
        self.leave(code, "ncclCommWindowRegister")
        return <size_t> window

    def window_deregister(self, size_t window):
        """Undo ``window_register``. C: ``ncclCommWindowDeregister``."""
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclCommWindowDeregister, "ncclCommWindowDeregister")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclCommWindowDeregister(comm, <ncclWindow_t> window)
        self.leave(code, "ncclCommWindowDeregister")

    def create_premul_sum(self, value, int dtype):
        """Make an op that multiplies by ``value``, stored as ``dtype``, then sums; return its code.

        For calls of this communicator on arrays of that dtype. Raises ``InvalidArgument`` where the
        dtype can't hold the value. C: ``ncclRedOpCreatePreMulSum``.
        """
        cdef bytes scalar = scalar_bytes(value, dtype)
        cdef void* data = <void*> <char*> scalar
        cdef ncclRedOp_t op = ncclSum
        check_factor_of_one(self, dtype)
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclRedOpCreatePreMulSum, "ncclRedOpCreatePreMulSum")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclRedOpCreatePreMulSum(&op, data, <ncclDataType_t> dtype, ncclScalarHostImmediate, comm)
        self.leave(code, "ncclRedOpCreatePreMulSum")
        return <int> op

    def destroy_op(self, int op):
        """Free an op of ``create_premul_sum``.

        Allowed once the last call that uses it has returned. C: ``ncclRedOpDestroy``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclRedOpDestroy, "ncclRedOpDestroy")
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclRedOpDestroy(<ncclRedOp_t> op, comm)
        self.leave(code, "ncclRedOpDestroy")

    # ---- collectives

    def all_reduce(self, size_t send, size_t recv, size_t count, int dtype, int op, size_t stream=0):
        """Reduce ``count`` elements over all ranks into ``recv`` on each.

        In place where ``send == recv``. C: ``ncclAllReduce``.
        """
        cdef ncclComm_t comm = enter_reduction(self, <void*> self.api.ncclAllReduce, "ncclAllReduce")
        cdef collFlightRecord_t* record = self.note("ncclAllReduce", FLIGHT_ALL_REDUCE, count, dtype, stream, -1)
        cdef OneRank how = one_rank(self, count, dtype, op)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclAllReduce(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype, how.op,
                                          comm, <cudaStream_t> stream)
            if how.rest and code == ncclSuccess:
                code = self.api.ncclAllReduce(<const void*> (send + how.done), <void*> (recv + how.done), how.rest,
                                              <ncclDataType_t> dtype, how.op, comm, <cudaStream_t> stream)
        self.leave_op(code, "ncclAllReduce", record)

    def all_reduce_cast(self, size_t send, size_t recv, size_t count, int dtype, int wire, int op, double scale=1.0,
                        size_t stream=0):
        """Reduce as ``all_reduce`` after a conversion to the type ``wire``.

        Each rank's elements are multiplied by ``scale`` and rounded once. ``dtype``: float32 or
        float64, in which the sum is taken and left; ``wire``: a floating type. Host engine only. C:
        ``collHostAllReduceCast``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostAllReduceCast, "collHostAllReduceCast")
        cdef collFlightRecord_t* record = self.note("collHostAllReduceCast", FLIGHT_ALL_REDUCE,
                                                    count, dtype, stream, -1)
        cdef ncclResult_t code
        with nogil:
            code = self.api.collHostAllReduceCast(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype,
                                                  <ncclDataType_t> wire, scale, <ncclRedOp_t> op, comm,
                                                  <cudaStream_t> stream)
        self.leave_op(code, "collHostAllReduceCast", record)

    def all_reduce_share(self, size_t send, size_t recv, size_t count, int dtype, int op, size_t share,
                         size_t stream=0):
        """Reduce as ``all_reduce``, and add the statistics of this rank's slice to ``share``.

        They are the sum of squares and the count of non-finite elements. ``share``: address of two
        doubles, valid until the operation is done; the shares of all ranks together have each
        element of the result once. ``dtype``: a floating type. Host engine only. C:
        ``collHostAllReduceShare``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostAllReduceShare, "collHostAllReduceShare")
        cdef collFlightRecord_t* record = self.note("collHostAllReduceShare", FLIGHT_ALL_REDUCE,
                                                    count, dtype, stream, -1)
        cdef ncclResult_t code
        with nogil:
            code = self.api.collHostAllReduceShare(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype,
                                                   <ncclRedOp_t> op, <collHostShare_t*> share, comm,
                                                   <cudaStream_t> stream)
        self.leave_op(code, "collHostAllReduceShare", record)

    def reduce_scatter_share(self, size_t send, size_t recv, size_t recvcount, int dtype, int op, size_t share,
                             size_t stream=0):
        """Reduce as ``reduce_scatter``, and add the statistics of ``recv`` to ``share``.

        They are the sum of squares and the count of non-finite elements. ``share``: address of two
        doubles, valid until the operation is done. ``dtype``: a floating type. Host engine only. C:
        ``collHostReduceScatterShare``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostReduceScatterShare, "collHostReduceScatterShare")
        cdef collFlightRecord_t* record = self.note("collHostReduceScatterShare", FLIGHT_REDUCE_SCATTER,
                                                    recvcount, dtype, stream, -1)
        cdef ncclResult_t code
        with nogil:
            code = self.api.collHostReduceScatterShare(<const void*> send, <void*> recv, recvcount,
                                                       <ncclDataType_t> dtype, <ncclRedOp_t> op,
                                                       <collHostShare_t*> share, comm, <cudaStream_t> stream)
        self.leave_op(code, "collHostReduceScatterShare", record)

    def compare_parts(self, size_t own, size_t all, size_t transfers, name, dtype_name, size_t count,
                      int dtype, size_t stream=0):
        """Compare what the ranks are about to send and receive; the next ``transfers`` sends and
        receives of the group are made where it succeeds.

        ``own``, ``all``: addresses of one record and of all ranks', see host_abi.h; ``name``,
        ``dtype_name``: of the operation that they are a part of, and ``count`` elements of ``dtype``,
        for the flight recorder. Host engine only.
        C: ``collHostCompareParts``.
        """
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef ncclResult_t code
        self.library.need(<void*> self.api.collHostCompareParts, "collHostCompareParts")
        self.library.label(name, dtype_name)
        comm = self.enter(<void*> self.api.collHostCompareParts, "collHostCompareParts")
        record = self.note("collHostCompareParts", FLIGHT_ALL_TO_ALL, count, dtype, stream, -1)
        with nogil:
            code = self.api.collHostCompareParts(<const void*> own, <void*> all, transfers, comm, <cudaStream_t> stream)
        self.leave_op(code, "collHostCompareParts", record)

    def reduce_scatter(self, size_t send, size_t recv, size_t recvcount, int dtype, int op, size_t stream=0):
        """Reduce ``size * recvcount`` elements; ``recv`` gets this rank's ``recvcount`` of them.

        C: ``ncclReduceScatter``.
        """
        cdef ncclComm_t comm = enter_reduction(self, <void*> self.api.ncclReduceScatter, "ncclReduceScatter")
        cdef collFlightRecord_t* record = self.note("ncclReduceScatter", FLIGHT_REDUCE_SCATTER,
                                                    recvcount, dtype, stream, -1)
        cdef OneRank how = one_rank(self, recvcount, dtype, op)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclReduceScatter(<const void*> send, <void*> recv, recvcount, <ncclDataType_t> dtype,
                                              how.op, comm, <cudaStream_t> stream)
            if how.rest and code == ncclSuccess:
                code = self.api.ncclReduceScatter(<const void*> (send + how.done), <void*> (recv + how.done), how.rest,
                                                  <ncclDataType_t> dtype, how.op, comm, <cudaStream_t> stream)
        self.leave_op(code, "ncclReduceScatter", record)

    def all_gather(self, size_t send, size_t recv, size_t sendcount, int dtype, size_t stream=0):
        """Gather ``sendcount`` elements of every rank into ``recv``, in rank order.

        C: ``ncclAllGather``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclAllGather, "ncclAllGather")
        cdef collFlightRecord_t* record = self.note("ncclAllGather", FLIGHT_ALL_GATHER, sendcount, dtype, stream, -1)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclAllGather(<const void*> send, <void*> recv, sendcount, <ncclDataType_t> dtype, comm,
                                          <cudaStream_t> stream)
        self.leave_op(code, "ncclAllGather", record)

    def broadcast(self, size_t send, size_t recv, size_t count, int dtype, int root, size_t stream=0):
        """Copy ``count`` elements from ``send`` of ``root`` to ``recv`` of every rank.

        C: ``ncclBroadcast``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclBroadcast, "ncclBroadcast")
        cdef collFlightRecord_t* record = self.note("ncclBroadcast", FLIGHT_BROADCAST, count, dtype, stream, root)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclBroadcast(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype, root,
                                          comm, <cudaStream_t> stream)
        self.leave_op(code, "ncclBroadcast", record)

    def reduce(self, size_t send, size_t recv, size_t count, int dtype, int op, int root, size_t stream=0):
        """Reduce ``count`` elements over all ranks into ``recv`` of ``root``.

        C: ``ncclReduce``.
        """
        cdef ncclComm_t comm = enter_reduction(self, <void*> self.api.ncclReduce, "ncclReduce")
        cdef collFlightRecord_t* record = self.note("ncclReduce", FLIGHT_REDUCE, count, dtype, stream, root)
        cdef OneRank how = one_rank(self, count, dtype, op)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclReduce(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype,
                                       how.op, root, comm, <cudaStream_t> stream)
            if how.rest and code == ncclSuccess:
                code = self.api.ncclReduce(<const void*> (send + how.done), <void*> (recv + how.done), how.rest,
                                           <ncclDataType_t> dtype, how.op, root, comm, <cudaStream_t> stream)
        self.leave_op(code, "ncclReduce", record)

    def all_to_all(self, size_t send, size_t recv, size_t count, int dtype, size_t stream=0):
        """Send the j-th ``count`` elements to rank j, and receive rank i's into the i-th.

        C: ``ncclAlltoAll``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclAlltoAll, "ncclAlltoAll")
        cdef collFlightRecord_t* record = self.note("ncclAlltoAll", FLIGHT_ALL_TO_ALL, count, dtype, stream, -1)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclAlltoAll(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype, comm,
                                         <cudaStream_t> stream)
        self.leave_op(code, "ncclAlltoAll", record)

    def gather(self, size_t send, size_t recv, size_t count, int dtype, int root, size_t stream=0):
        """Gather ``count`` elements of every rank into ``recv`` of ``root``, in rank order.

        C: ``ncclGather``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclGather, "ncclGather")
        cdef collFlightRecord_t* record = self.note("ncclGather", FLIGHT_GATHER, count, dtype, stream, root)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclGather(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype, root, comm,
                                       <cudaStream_t> stream)
        self.leave_op(code, "ncclGather", record)

    def scatter(self, size_t send, size_t recv, size_t count, int dtype, int root, size_t stream=0):
        """Send the i-th ``count`` elements of ``send`` of ``root`` to ``recv`` of rank i.

        C: ``ncclScatter``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclScatter, "ncclScatter")
        cdef collFlightRecord_t* record = self.note("ncclScatter", FLIGHT_SCATTER, count, dtype, stream, root)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclScatter(<const void*> send, <void*> recv, count, <ncclDataType_t> dtype, root, comm,
                                        <cudaStream_t> stream)
        self.leave_op(code, "ncclScatter", record)

    # ---- point to point

    def send(self, size_t buf, size_t count, int dtype, int peer, size_t stream=0):
        """Send ``count`` elements to rank ``peer``, which calls ``recv`` with the same count.

        C: ``ncclSend``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclSend, "ncclSend")
        cdef collFlightRecord_t* record = self.note("ncclSend", FLIGHT_SEND, count, dtype, stream, peer)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclSend(<const void*> buf, count, <ncclDataType_t> dtype, peer, comm,
                                     <cudaStream_t> stream)
        self.leave_op(code, "ncclSend", record)

    def recv(self, size_t buf, size_t count, int dtype, int peer, size_t stream=0):
        """Receive ``count`` elements from rank ``peer``. C: ``ncclRecv``."""
        cdef ncclComm_t comm = self.enter(<void*> self.api.ncclRecv, "ncclRecv")
        cdef collFlightRecord_t* record = self.note("ncclRecv", FLIGHT_RECV, count, dtype, stream, peer)
        cdef ncclResult_t code
        with nogil:
            code = self.api.ncclRecv(<void*> buf, count, <ncclDataType_t> dtype, peer, comm, <cudaStream_t> stream)
        self.leave_op(code, "ncclRecv", record)

    # ---- functions of the host engine

    def set_timeout(self, seconds):
        """Limit each operation to so many seconds (None: no limit).

        Past the limit the communicator can't be used any more. C: ``collHostCommSetTimeout``.
        """
        cdef int64_t limit = 0 if seconds is None else milliseconds(seconds)
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostCommSetTimeout, "collHostCommSetTimeout")
        cdef ncclResult_t code
        with nogil:
            code = self.api.collHostCommSetTimeout(comm, limit)
        self.leave(code, "collHostCommSetTimeout")

    def set_step(self, uint64_t step):
        """Set the program's step, 0 for none, which the ranks compare with each collective from now on.

        Ranks that are in different steps get ``Mismatch``. C: ``collHostCommSetStep``.
        """
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostCommSetStep, "collHostCommSetStep")
        cdef ncclResult_t code
        with nogil:
            code = self.api.collHostCommSetStep(comm, step)
        self.leave(code, "collHostCommSetStep")

    def sequence(self):
        """Return how many collectives were called on this communicator.

        C: ``collHostCommSequence``.
        """
        cdef uint64_t sequence = 0
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostCommSequence, "collHostCommSequence")
        cdef ncclResult_t code
        with nogil:
            code = self.api.collHostCommSequence(comm, &sequence)
        self.leave(code, "collHostCommSequence")
        return sequence

    def chunk_bytes(self):
        """Return the size of one staging chunk in bytes. C: ``collHostCommChunkBytes``."""
        cdef size_t nbytes = 0
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostCommChunkBytes, "collHostCommChunkBytes")
        cdef ncclResult_t code
        with nogil:
            code = self.api.collHostCommChunkBytes(comm, &nbytes)
        self.leave(code, "collHostCommChunkBytes")
        return nbytes

    def probe(self, int peer):
        """Return whether a rank has begun a send that this rank has not begun to receive, or has left.

        Never blocks. C: ``collHostCommProbe``.
        """
        cdef ncclResult_t code
        cdef int waiting = 0
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostCommProbe, "collHostCommProbe")
        with nogil:
            code = self.api.collHostCommProbe(comm, peer, &waiting)
        self.leave(code, "collHostCommProbe")
        return waiting != 0

    def set_header(self, int64_t a, int64_t b, int64_t c, int64_t d):
        """Set the numbers that go with this thread's next send, for `peek`. C: ``collHostSetHeader``."""
        cdef int64_t[4] header
        header[0], header[1], header[2], header[3] = a, b, c, d
        self.library.need(<void*> self.api.collHostSetHeader, "collHostSetHeader")
        self.api.collHostSetHeader(header)

    def peek(self, int peer):
        """Wait until a rank has begun a send that this rank has not begun to receive; return its header.

        Raises ``RemoteError`` where the rank has left, or given the send up.
        C: ``collHostCommPeek``.
        """
        cdef int64_t[4] header
        cdef ncclResult_t code
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostCommPeek, "collHostCommPeek")
        with nogil:
            code = self.api.collHostCommPeek(comm, peer, header)
        self.leave(code, "collHostCommPeek")
        return header[0], header[1], header[2], header[3]

    def pending(self):
        """Return an ErrorInfo of the operation in progress, None if there is none.

        Its ``peers`` are the ranks for which it waits. From any thread. C: ``collHostCommPending``.
        """
        cdef collHostErrorInfo_t info
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostCommPending, "collHostCommPending")
        cdef ncclResult_t code
        memset(&info, 0, sizeof(info))
        info.size = sizeof(info)
        with nogil:
            code = self.api.collHostCommPending(comm, &info)
        self.leave(code, "collHostCommPending")
        return info_of(&info) if info.op[0] != 0 else None

    def error(self):
        """Return an ErrorInfo of the error that broke the communicator, or None.

        C: ``collHostGetError``.
        """
        cdef collHostErrorInfo_t info
        cdef ncclComm_t comm = self.enter(<void*> self.api.collHostGetError, "collHostGetError")
        cdef ncclResult_t code
        memset(&info, 0, sizeof(info))
        info.size = sizeof(info)
        with nogil:
            code = self.api.collHostGetError(comm, &info)
        self.leave(code, "collHostGetError")
        return info_of(&info) if info.kind != 0 else None
