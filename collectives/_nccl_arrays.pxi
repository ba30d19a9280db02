# Fast path for arrays, which allocates nothing: tensors are read through the DLPack exchange table
# of the library that made them, NumPy arrays by the buffer protocol. It takes only arrays that can
# be used where they lie. For every other one these classes return that they don't take it, and the
# caller's slow path reads the array or raises.

cdef extern from "_nccl_dlpack.h":
    enum:
        COLL_DL_MAJOR
        collDLCPU
        collDLInt
        collDLUInt
        collDLFloat
        collDLBfloat
        collDLFloat8_e4m3fn
        collDLFloat8_e5m2
    ctypedef struct collDLTensor_t:
        void* data
        int32_t device_type
        int32_t device_id
        int32_t ndim
        uint8_t code
        uint8_t bits
        uint16_t lanes
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset
    ctypedef struct collDLExchange_t:
        uint32_t major
        collDLExchange_t* older
        int (*tensor_of)(void* object, collDLTensor_t* out) noexcept
        int (*current_stream)(int32_t device_type, int32_t device_id, void** stream) noexcept


cdef const char* EXCHANGE_NAME = "dlpack_exchange_api"


cdef struct Span:
    void* ptr
    size_t count        # elements
    size_t nbytes
    int dtype           # NCCL's code


cdef int dtype_of_tensor(const collDLTensor_t* tensor) noexcept:
    """Return NCCL's code for the elements of a tensor, -1 if it has none."""
    cdef int code = tensor.code, bits = tensor.bits
    if tensor.lanes != 1:
        return -1
    if code == collDLFloat:
        return ncclFloat32 if bits == 32 else ncclFloat64 if bits == 64 else ncclFloat16 if bits == 16 else -1
    if code == collDLBfloat:
        return ncclBfloat16 if bits == 16 else -1
    if code == collDLInt:
        return ncclInt32 if bits == 32 else ncclInt64 if bits == 64 else ncclInt8 if bits == 8 else -1
    if code == collDLUInt:
        return ncclUint8 if bits == 8 else ncclUint32 if bits == 32 else ncclUint64 if bits == 64 else -1
    if code == collDLFloat8_e4m3fn:
        return ncclFloat8e4m3 if bits == 8 else -1
    if code == collDLFloat8_e5m2:
        return ncclFloat8e5m2 if bits == 8 else -1
    return -1


cdef int dtype_of_buffer(const Py_buffer* view) noexcept:
    """Return NCCL's code for the elements of a buffer, -1 if it has none.

    Formats are those of the struct module.
    """
    cdef const char* format = view.format
    cdef char kind
    cdef Py_ssize_t size = view.itemsize
    if format is NULL or format[0] == 0 or format[1] != 0:      # a second letter: a byte order, a record
        return -1
    kind = format[0]
    if kind == b"f":
        return ncclFloat32 if size == 4 else -1
    if kind == b"d":
        return ncclFloat64 if size == 8 else -1
    if kind == b"e":
        return ncclFloat16 if size == 2 else -1
    if kind == b"b" or kind == b"i" or kind == b"l" or kind == b"q":
        return ncclInt32 if size == 4 else ncclInt64 if size == 8 else ncclInt8 if size == 1 else -1
    if kind == b"B" or kind == b"I" or kind == b"L" or kind == b"Q":
        return ncclUint32 if size == 4 else ncclUint64 if size == 8 else ncclUint8 if size == 1 else -1
    return -1


cdef class ArrayReader:
    """Fast reader of plain arrays on one device.

    It keeps no reference to an array, and raises nothing.

    ``tensors``: the exact types of tensors that are read, and ``exchange`` their capsule
    ``__dlpack_c_exchange_api__`` (None: tensors aren't read); ``is_lazy``: a function that returns
    whether the memory of a tensor holds other values than the tensor. ``buffer``: an exact type that
    is read by the buffer protocol, on the CPU alone. ``device_type`` and ``device_id`` as in DLPack:
    1 is the CPU, 2 is CUDA.
    """

    cdef const collDLExchange_t* table      # NULL: tensors aren't read
    cdef object tensor, parameter           # types, held
    cdef object is_lazy
    cdef object buffer
    cdef int device_type, device_id

    def __init__(self, int device_type, int device_id, *, exchange=None, tuple tensors=(), is_lazy=None, buffer=None):
        cdef const collDLExchange_t* table = NULL
        if exchange is not None:
            if not 1 <= len(tensors) <= 2 or is_lazy is None:
                raise errors.InvalidArgument("an exchange table needs one or two types of tensors, and is_lazy")
            if PyCapsule_IsValid(exchange, EXCHANGE_NAME):     # else the attribute is something else
                table = <const collDLExchange_t*> PyCapsule_GetPointer(exchange, EXCHANGE_NAME)
            while table is not NULL and table.major > COLL_DL_MAJOR:
                table = table.older
            if table is not NULL and (table.major != COLL_DL_MAJOR or table.tensor_of is NULL):
                table = NULL
        self.tensor, self.parameter = (tensors[0], tensors[-1]) if table is not NULL else (None, None)
        self.table = table
        self.is_lazy = is_lazy
        self.buffer = buffer if device_type == collDLCPU else None
        self.device_type, self.device_id = device_type, device_id

    @property
    def reads_tensors(self):
        """Whether tensors are read: there was an exchange table of a known version."""
        return self.table is not NULL

    def current_stream(self):
        """Return the stream on which the fast path would issue a call.

        0 on the CPU, None if it can't be read.
        """
        cdef void* current = NULL
        if self.device_type == collDLCPU:
            return 0
        if self.table is NULL or self.table.current_stream(self.device_type, self.device_id, &current) != 0:
            PyErr_Clear()
            return None
        return <size_t> current

    def read(self, array, bint writes=True):
        """Return (address, count, dtype code) of an array; None if it can't be used where it lies.

        ``writes``: it is to take a result, so a read-only one is None too.
        """
        cdef Span span
        if not self.fill(array, writes, &span):
            return None
        return <size_t> span.ptr, span.count, span.dtype

    cdef bint fill(self, object array, bint writes, Span* span) noexcept:
        cdef PyObject* kind = <PyObject*> Py_TYPE(array)
        if kind == <PyObject*> self.tensor or kind == <PyObject*> self.parameter:
            return self.fill_from_tensor(array, span)
        if kind == <PyObject*> self.buffer:
            return self.fill_from_buffer(array, writes, span)
        return False

    cdef bint fill_from_tensor(self, object array, Span* span) noexcept:
        cdef collDLTensor_t tensor
        cdef int64_t count = 1
        cdef bint packed = True
        cdef int i
        if self.table.tensor_of(<void*> array, &tensor) != 0:
            PyErr_Clear()       # sparse, nested, quantized, inside vmap, ...: the slow path raises the reason
            return False
        if tensor.device_type != self.device_type:
            return False
        if tensor.device_id != self.device_id and self.device_type != collDLCPU:
            return False
        span.dtype = dtype_of_tensor(&tensor)
        if span.dtype < 0:
            return False
        for i in range(tensor.ndim - 1, -1, -1):
            if tensor.shape[i] != 1 and tensor.strides[i] != count:
                packed = False
            count *= tensor.shape[i]
        if count != 0 and (not packed or tensor.data is NULL):
            return False
        if self.holds_other_values(array):
            return False
        span.ptr = <char*> tensor.data + tensor.byte_offset
        span.count = <size_t> count
        span.nbytes = span.count * (tensor.bits // 8)
        return True

    cdef inline bint holds_other_values(self, object tensor) noexcept:
        """Return whether the memory isn't the tensor's values, as x.conj().imag's, which holds the negatives."""
        cdef PyObject* lazy = PyObject_CallOneArg(<PyObject*> self.is_lazy, <PyObject*> tensor)
        if lazy is NULL:
            PyErr_Clear()
            return True
        Py_DECREF(<object> lazy)        # True and False outlive it
        return lazy != Py_False

    cdef bint fill_from_buffer(self, object array, bint writes, Span* span) noexcept:
        cdef Py_buffer view
        cdef int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (PyBUF_WRITABLE if writes else 0)
        if PyObject_GetBuffer(<PyObject*> array, &view, flags) != 0:
            PyErr_Clear()       # read-only, strided, of a dtype without a format
            return False
        span.dtype = dtype_of_buffer(&view)
        span.ptr = view.buf
        span.nbytes = view.len
        span.count = view.len // view.itemsize if view.itemsize > 0 else 0
        PyBuffer_Release(&view)
        return span.dtype >= 0


cdef int op_code(object op) noexcept:
    """Return the code of a built-in reduction by its name, else -1."""
    cdef PyObject* found
    if op is SUM:
        return ncclSum
    if not PyUnicode_CheckExact(op):
        return -1
    found = PyDict_GetItem(OPS_BY_NAME, op)
    return -1 if found is NULL else PyLong_AsLong(<object> found)


cdef dict OPS_BY_NAME = OPS
cdef str SUM = "sum"        # the same object as in a program's text


cdef bint apart(const Span* one, const Span* other) noexcept:
    return (one.nbytes == 0 or other.nbytes == 0 or <char*> one.ptr + one.nbytes <= <char*> other.ptr
            or <char*> other.ptr + other.nbytes <= <char*> one.ptr)


cdef bint is_part(const Span* whole, const Span* part, int size, int index) noexcept:
    """Return whether one array is ``size`` times the other, of one dtype.

    They must not overlap, or the other one is part ``index``.
    """
    if part.dtype != whole.dtype or size < 1 or part.count * <size_t> size != whole.count:
        return False
    return <char*> part.ptr == <char*> whole.ptr + index * part.nbytes or apart(whole, part)


@cython.final
cdef class ArrayCalls:
    """Fast path of a communicator's calls on arrays.

    Each method reads the arrays, checks them, makes the call, and returns whether it did. Where it
    returns False nothing was done: an array, an op or a root is not of the plain kind, the
    communicator is closed, its device isn't the current one, or ``groups``, a dict by thread of the
    groups that are being collected, isn't empty. A send and a receive on the host join this
    thread's group, where ``owner``, the Communicator, is known. The arrays must be held until the call returns, as a
    caller's arguments are. On CUDA the call goes to the exchange table's current stream.
    ``current_device``: a function that returns the number of the current CUDA device; without it no
    call is made on CUDA. ``rank_ordered``: all_reduce and reduce_scatter must reduce in rank order,
    which the library's don't, so only max and min are made here: they are exact in any order.
    """

    cdef Comm comm
    cdef ArrayReader reader
    cdef dict groups
    cdef object current_device
    cdef object owner
    cdef int rank, size
    cdef bint rank_ordered

    def __init__(self, Comm comm not None, ArrayReader reader not None, dict groups not None, current_device=None, *,
                 owner=None, bint rank_ordered=False):
        self.comm = comm
        self.reader = reader
        self.groups = groups
        self.current_device = current_device
        self.owner = owner
        self.rank_ordered = rank_ordered
        self.rank, self.size = comm.rank, comm.size

    cdef inline int code_of(self, object op) noexcept:
        """Return the code of a built-in reduction that the library makes as it must be made, else -1."""
        cdef int code = plain_op(self.comm, op_code(op))
        return -1 if self.rank_ordered and code != ncclMax and code != ncclMin else code

    cdef bint stream_of(self, void* function, size_t* stream) noexcept:
        """Return whether a call can be made now, and find its stream.

        Called last, right before the call.
        """
        cdef PyObject* device
        cdef void* current = NULL
        cdef long number
        cdef ArrayReader reader = self.reader
        stream[0] = 0
        if reader.device_type != collDLCPU:
            if self.current_device is None or reader.table is NULL:
                return False
            device = PyObject_CallNoArgs(<PyObject*> self.current_device)
            if device is NULL:
                PyErr_Clear()
                return False
            number = PyLong_AsLong(<object> device)
            Py_DECREF(<object> device)
            if number != reader.device_id:
                PyErr_Clear()   # of PyLong_AsLong, where it was no number
                return False
            if reader.table.current_stream(reader.device_type, reader.device_id, &current) != 0:
                PyErr_Clear()
                return False
            stream[0] = <size_t> current
        return (function is not NULL and self.comm.comm is not NULL and self.comm.forks == collForks
                and PyDict_GET_SIZE(self.groups) == 0)

    cdef int peer(self, object number) noexcept:
        """Return a rank that is a plain int, else -1."""
        cdef long value
        cdef int overflow = 0
        if not PyLong_CheckExact(number):
            return -1
        value = PyLong_AsLongAndOverflow(number, &overflow)
        return <int> value if overflow == 0 and 0 <= value < self.size else -1

    cpdef all_reduce(self, array, op, out=None):
        """Reduce an array over all ranks, in place or into ``out``. C: ``ncclAllReduce``."""
        cdef Span of, to
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        cdef int code = self.code_of(op)
        if code < 0 or not self.reader.fill(array, out is None, &of):
            return False
        to = of
        if out is not None:
            if not self.reader.fill(out, True, &to) or to.dtype != of.dtype or to.count != of.count:
                return False
            if not apart(&to, &of):
                return False
        if not self.stream_of(<void*> api.ncclAllReduce, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclAllReduce, "ncclAllReduce")
        record = self.comm.note("ncclAllReduce", FLIGHT_ALL_REDUCE, of.count, of.dtype, stream, -1)
        with nogil:
            result = api.ncclAllReduce(of.ptr, to.ptr, of.count, <ncclDataType_t> of.dtype, <ncclRedOp_t> code,
                                       comm, <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclAllReduce", record)
        return True

    cpdef reduce(self, array, root, op):
        """Reduce an array over all ranks, in place on ``root``. C: ``ncclReduce``."""
        cdef Span span
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        cdef int code = plain_op(self.comm, op_code(op)), c_root = self.peer(root)
        cdef bint mine = c_root == self.rank
        if code < 0 or c_root < 0 or not self.reader.fill(array, mine, &span) or not self.stream_of(
                <void*> api.ncclReduce, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclReduce, "ncclReduce")
        record = self.comm.note("ncclReduce", FLIGHT_REDUCE, span.count, span.dtype, stream, c_root)
        with nogil:
            result = api.ncclReduce(span.ptr, span.ptr if mine else NULL, span.count, <ncclDataType_t> span.dtype,
                                    <ncclRedOp_t> code, c_root, comm, <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclReduce", record)
        return True

    cpdef reduce_scatter(self, out, inp, op):
        """Reduce ``inp`` over all ranks, part r into rank r's ``out``. C: ``ncclReduceScatter``."""
        cdef Span to, of
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        cdef int code = self.code_of(op)
        if code < 0 or not self.reader.fill(out, True, &to) or not self.reader.fill(inp, False, &of):
            return False
        if not is_part(&of, &to, self.size, self.rank) or not self.stream_of(<void*> api.ncclReduceScatter, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclReduceScatter, "ncclReduceScatter")
        record = self.comm.note("ncclReduceScatter", FLIGHT_REDUCE_SCATTER, to.count, to.dtype, stream, -1)
        with nogil:
            result = api.ncclReduceScatter(of.ptr, to.ptr, to.count, <ncclDataType_t> to.dtype, <ncclRedOp_t> code,
                                           comm, <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclReduceScatter", record)
        return True

    cpdef all_gather(self, out, inp):
        """Gather every rank's ``inp`` into ``out``, in rank order. C: ``ncclAllGather``."""
        cdef Span to, of
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        if not self.reader.fill(out, True, &to) or not self.reader.fill(inp, False, &of):
            return False
        if not is_part(&to, &of, self.size, self.rank) or not self.stream_of(<void*> api.ncclAllGather, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclAllGather, "ncclAllGather")
        record = self.comm.note("ncclAllGather", FLIGHT_ALL_GATHER, of.count, of.dtype, stream, -1)
        with nogil:
            result = api.ncclAllGather(of.ptr, to.ptr, of.count, <ncclDataType_t> of.dtype, comm,
                                       <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclAllGather", record)
        return True

    cpdef broadcast(self, array, root):
        """Send ``root``'s array to all ranks, in place. C: ``ncclBroadcast``."""
        cdef Span span
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        cdef int c_root = self.peer(root)
        if c_root < 0 or not self.reader.fill(array, c_root != self.rank, &span) or not self.stream_of(
                <void*> api.ncclBroadcast, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclBroadcast, "ncclBroadcast")
        record = self.comm.note("ncclBroadcast", FLIGHT_BROADCAST, span.count, span.dtype, stream, c_root)
        with nogil:
            result = api.ncclBroadcast(span.ptr, span.ptr, span.count, <ncclDataType_t> span.dtype, c_root, comm,
                                       <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclBroadcast", record)
        return True

    cpdef all_to_all(self, out, inp):
        """Send equal part r of ``inp`` to rank r. C: ``ncclAlltoAll``."""
        cdef Span to, of
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        if not self.reader.fill(out, True, &to) or not self.reader.fill(inp, False, &of):
            return False
        if to.dtype != of.dtype or to.count != of.count or of.count % <size_t> self.size != 0 or not apart(&to, &of):
            return False
        if not self.stream_of(<void*> api.ncclAlltoAll, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclAlltoAll, "ncclAlltoAll")
        record = self.comm.note("ncclAlltoAll", FLIGHT_ALL_TO_ALL, of.count // <size_t> self.size, of.dtype, stream, -1)
        with nogil:
            result = api.ncclAlltoAll(of.ptr, to.ptr, of.count // <size_t> self.size, <ncclDataType_t> of.dtype, comm,
                                      <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclAlltoAll", record)
        return True

    cpdef gather(self, out, inp, root):
        """Gather every rank's ``inp`` into ``root``'s ``out``, in rank order. C: ``ncclGather``."""
        return self.between_all_and_root(inp, out, root, True)

    cpdef scatter(self, out, inp, root):
        """Send part r of ``root``'s ``inp`` to rank r's ``out``. C: ``ncclScatter``."""
        return self.between_all_and_root(out, inp, root, False)

    cdef between_all_and_root(self, part, whole, root, bint gathers):
        cdef Span each, total
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        cdef void* function = <void*> api.ncclGather if gathers else <void*> api.ncclScatter
        cdef const char* name = "ncclGather" if gathers else "ncclScatter"
        cdef int c_root = self.peer(root)
        if c_root < 0 or not self.reader.fill(part, not gathers, &each):
            return False
        total.ptr = NULL
        if c_root != self.rank:
            if whole is not None:
                return False
        elif not self.reader.fill(whole, gathers, &total) or not is_part(&total, &each, self.size, c_root):
            return False
        if not self.stream_of(function, &stream):
            return False
        comm = self.comm.enter(function, name)
        record = self.comm.note(name, FLIGHT_GATHER if gathers else FLIGHT_SCATTER, each.count, each.dtype, stream,
                                c_root)
        with nogil:
            if gathers:
                result = api.ncclGather(each.ptr, total.ptr, each.count, <ncclDataType_t> each.dtype, c_root, comm,
                                        <cudaStream_t> stream)
            else:
                result = api.ncclScatter(total.ptr, each.ptr, each.count, <ncclDataType_t> each.dtype, c_root, comm,
                                         <cudaStream_t> stream)
        self.comm.leave_op(result, name, record)
        return True

    cdef bint join_group(self, object array, const Span* span, int peer, bint sends) except -1:
        """Add a send or a receive to this thread's open group; False where there is none."""
        cdef GroupedTransfer transfer
        cdef GroupCalls group
        cdef PyObject* found
        if self.owner is None or self.reader.device_type != collDLCPU:
            return False
        if self.comm.comm is NULL or self.comm.forks != collForks:
            return False
        found = PyDict_GetItem(self.groups, PyThread_get_thread_ident())
        if found is NULL:
            return False
        group = <GroupCalls?> <object> found
        transfer = GroupedTransfer.__new__(GroupedTransfer)
        transfer.comm, transfer.native, transfer.array = self.owner, self.comm, array
        transfer.storage = array if <PyObject*> Py_TYPE(array) == <PyObject*> self.reader.buffer else (
            array.untyped_storage())
        transfer.address, transfer.count, transfer.nbytes = <size_t> span.ptr, span.count, span.nbytes
        transfer.dtype, transfer.peer, transfer.sends = span.dtype, peer, sends
        if group._comm is self.owner and (not group._calls or type(group._calls[0]) is GroupedTransfer):
            group._calls.append(transfer)       # nothing for `add` to check
        else:
            group.add(transfer)
        return True

    cpdef send(self, array, peer):
        """Send an array to another rank. C: ``ncclSend``."""
        cdef Span span
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        cdef int c_peer = self.peer(peer)
        if c_peer < 0 or c_peer == self.rank or not self.reader.fill(array, False, &span):
            return False
        if PyDict_GET_SIZE(self.groups) > 0:
            return self.join_group(array, &span, c_peer, True)
        if not self.stream_of(<void*> api.ncclSend, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclSend, "ncclSend")
        record = self.comm.note("ncclSend", FLIGHT_SEND, span.count, span.dtype, stream, c_peer)
        with nogil:
            result = api.ncclSend(span.ptr, span.count, <ncclDataType_t> span.dtype, c_peer, comm,
                                  <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclSend", record)
        return True

    cpdef recv(self, array, peer):
        """Receive an array from another rank. C: ``ncclRecv``."""
        cdef Span span
        cdef size_t stream
        cdef ncclResult_t result
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        cdef collTable_t* api = self.comm.api
        cdef int c_peer = self.peer(peer)
        if c_peer < 0 or c_peer == self.rank or not self.reader.fill(array, True, &span):
            return False
        if PyDict_GET_SIZE(self.groups) > 0:
            return self.join_group(array, &span, c_peer, False)
        if not self.stream_of(<void*> api.ncclRecv, &stream):
            return False
        comm = self.comm.enter(<void*> api.ncclRecv, "ncclRecv")
        record = self.comm.note("ncclRecv", FLIGHT_RECV, span.count, span.dtype, stream, c_peer)
        with nogil:
            result = api.ncclRecv(span.ptr, span.count, <ncclDataType_t> span.dtype, c_peer, comm,
                                  <cudaStream_t> stream)
        self.comm.leave_op(result, "ncclRecv", record)
        return True
