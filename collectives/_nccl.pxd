# C declarations of the binding.
#
# The types that count are those of coll/nccl_abi.h, from which _nccl_table.h builds the struct of
# function pointers: a signature written here with another number of arguments or another pointer
# does not compile.

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "coll/nccl_abi.h" nogil:
    enum:
        NCCL_VERSION_CODE
        NCCL_UNIQUE_ID_BYTES
        NCCL_CONFIG_UNDEF_INT
        NCCL_SPLIT_NOCOLOR
        NCCL_SHRINK_DEFAULT
        NCCL_SHRINK_ABORT
        NCCL_WIN_DEFAULT
        NCCL_WIN_COLL_SYMMETRIC
        NCCL_API_MAGIC

    struct ncclComm:
        pass
    ctypedef ncclComm* ncclComm_t
    struct ncclWindow_vidmem:
        pass
    ctypedef ncclWindow_vidmem* ncclWindow_t
    struct CUstream_st:
        pass
    ctypedef CUstream_st* cudaStream_t
    ctypedef struct ncclUniqueId:
        char internal[128]

    ctypedef enum ncclResult_t:
        ncclSuccess
        ncclUnhandledCudaError
        ncclSystemError
        ncclInternalError
        ncclInvalidArgument
        ncclInvalidUsage
        ncclRemoteError
        ncclInProgress
        ncclTimeout

    ctypedef enum ncclRedOp_t:
        ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg

    ctypedef enum ncclDataType_t:
        ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64
        ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2
        ncclNumTypes

    ctypedef enum ncclScalarResidence_t:
        ncclScalarHostImmediate

    ctypedef struct ncclConfig_t:
        size_t size
        unsigned int magic
        unsigned int version


cdef extern from "coll/host_abi.h" nogil:
    enum:
        COLL_HOST_REFUSAL_BYTES
    struct collHostQueue:
        pass
    ctypedef collHostQueue* collHostQueue_t

    ctypedef enum collHostQueueAttribute_t:
        collHostQueuePending
        collHostQueueCpu
        collHostQueueThreadId

    ctypedef struct collHostShare_t:
        double sum_of_squares
        double nonfinite

    ctypedef enum collHostErrorKind_t:
        collHostErrorMismatch

    ctypedef struct collHostErrorInfo_t:
        size_t size
        int code
        int kind
        int rank
        int npeers
        uint64_t seq
        uint64_t bytes
        char op[32]
        char text[4096]
        int peers[1024]
        uint32_t tag


cdef extern from "_nccl_table.h" nogil:
    ctypedef struct collEntry_t:
        const char* name
        int since
        size_t offset
        char kind

    const collEntry_t* collFunctions
    const collEntry_t* collConfigFields
    const int collForks
    int collInsideInterrupt
    int collInterrupted
    int collInsideGroupEnd
    int collWatchForks()
    bint collIsMainThread()

    ctypedef struct collTable_t:
        ncclResult_t (*ncclMemAlloc)(void** ptr, size_t size) noexcept nogil
        ncclResult_t (*ncclMemFree)(void* ptr) noexcept nogil
        ncclResult_t (*ncclGetVersion)(int* version) noexcept nogil
        ncclResult_t (*ncclGetUniqueId)(ncclUniqueId* uniqueId) noexcept nogil
        ncclResult_t (*ncclCommInitRankConfig)(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank,
            ncclConfig_t* config) noexcept nogil
        ncclResult_t (*ncclCommInitRank)(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank) noexcept nogil
        ncclResult_t (*ncclCommDestroy)(ncclComm_t comm) noexcept nogil
        ncclResult_t (*ncclCommAbort)(ncclComm_t comm) noexcept nogil
        ncclResult_t (*ncclCommRevoke)(ncclComm_t comm, int revokeFlags) noexcept nogil
        ncclResult_t (*ncclCommSplit)(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t*
            config) noexcept nogil
        ncclResult_t (*ncclCommShrink)(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount, ncclComm_t*
            newcomm, ncclConfig_t* config, int shrinkFlags) noexcept nogil
        const char* (*ncclGetErrorString)(ncclResult_t result) noexcept nogil
        const char* (*ncclGetLastError)(ncclComm_t comm) noexcept nogil
        ncclResult_t (*ncclCommGetAsyncError)(ncclComm_t comm, ncclResult_t* asyncError) noexcept nogil
        ncclResult_t (*ncclCommCount)(ncclComm_t comm, int* count) noexcept nogil
        ncclResult_t (*ncclCommUserRank)(ncclComm_t comm, int* rank) noexcept nogil
        ncclResult_t (*ncclCommRegister)(ncclComm_t comm, void* buff, size_t size, void** handle) noexcept nogil
        ncclResult_t (*ncclCommDeregister)(ncclComm_t comm, void* handle) noexcept nogil
        ncclResult_t (*ncclCommWindowRegister)(ncclComm_t comm, void* buff, size_t size, ncclWindow_t* win, int
            winFlags) noexcept nogil
        ncclResult_t (*ncclCommWindowDeregister)(ncclComm_t comm, ncclWindow_t win) noexcept nogil
        ncclResult_t (*ncclRedOpCreatePreMulSum)(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
            ncclScalarResidence_t residence, ncclComm_t comm) noexcept nogil
        ncclResult_t (*ncclRedOpDestroy)(ncclRedOp_t op, ncclComm_t comm) noexcept nogil
        ncclResult_t (*ncclReduce)(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclBroadcast)(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int
            root, ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclAllReduce)(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclReduceScatter)(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t
            datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclAllGather)(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclAlltoAll)(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
            ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclGather)(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int
            root, ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclScatter)(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int
            root, ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclSend)(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
            cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclRecv)(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
            cudaStream_t stream) noexcept nogil
        ncclResult_t (*ncclGroupStart)() noexcept nogil
        ncclResult_t (*ncclGroupEnd)() noexcept nogil
        ncclResult_t (*collHostQueueCreate)(collHostQueue_t* queue) noexcept nogil
        ncclResult_t (*collHostQueueDestroy)(collHostQueue_t queue) noexcept nogil
        ncclResult_t (*collHostQueueRecord)(collHostQueue_t queue, uint64_t* ticket) noexcept nogil
        ncclResult_t (*collHostQueueWait)(collHostQueue_t queue, uint64_t ticket, int64_t timeout_ns) noexcept nogil
        ncclResult_t (*collHostQueueCall)(collHostQueue_t queue, void (*function)(void*) noexcept, void*
            argument) noexcept nogil
        ncclResult_t (*collHostQueueGet)(collHostQueue_t queue, collHostQueueAttribute_t attribute, int64_t*
            value) noexcept nogil
        ncclResult_t (*collHostQueueSet)(collHostQueue_t queue, collHostQueueAttribute_t attribute, int64_t
            value) noexcept nogil
        ncclResult_t (*collHostGetError)(ncclComm_t comm, collHostErrorInfo_t* info) noexcept nogil
        ncclResult_t (*collHostQueueGetError)(collHostQueue_t queue, uint64_t ticket, collHostErrorInfo_t*
            info) noexcept nogil
        ncclResult_t (*collHostCommPending)(ncclComm_t comm, collHostErrorInfo_t* info) noexcept nogil
        ncclResult_t (*collHostCommProbe)(ncclComm_t comm, int peer, int* waiting) noexcept nogil
        ncclResult_t (*collHostSetHeader)(const int64_t* header) noexcept nogil
        ncclResult_t (*collHostCommPeek)(ncclComm_t comm, int peer, int64_t* header) noexcept nogil
        ncclResult_t (*collHostCommSetTimeout)(ncclComm_t comm, int64_t timeout_ms) noexcept nogil
        ncclResult_t (*collHostCommSetStep)(ncclComm_t comm, uint64_t step) noexcept nogil
        ncclResult_t (*collHostSetInitTimeout)(int64_t timeout_ms) noexcept nogil
        ncclResult_t (*collHostSetInterruptCheck)(int (*check)() noexcept nogil) noexcept nogil
        ncclResult_t (*collHostGetNamedUniqueId)(const void* name, size_t nbytes, ncclUniqueId* uniqueId) noexcept nogil
        ncclResult_t (*collHostSetSecret)(const void* secret, size_t nbytes) noexcept nogil
        ncclResult_t (*collHostCommSequence)(ncclComm_t comm, uint64_t* sequence) noexcept nogil
        ncclResult_t (*collHostCommChunkBytes)(ncclComm_t comm, size_t* nbytes) noexcept nogil
        ncclResult_t (*collHostMemoryInUse)(uint64_t* nbytes) noexcept nogil
        ncclResult_t (*collHostMemoryShared)(const void* address, size_t nbytes, int* shared) noexcept nogil
        ncclResult_t (*collHostAllReduceCast)(const void* sendbuff, void* recvbuff, size_t count,
                                              ncclDataType_t datatype, ncclDataType_t wire, double scale,
                                              ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*collHostAllReduceShare)(const void* sendbuff, void* recvbuff, size_t count,
                                               ncclDataType_t datatype, ncclRedOp_t op, collHostShare_t* share,
                                               ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*collHostReduceScatterShare)(const void* sendbuff, void* recvbuff, size_t recvcount,
                                                   ncclDataType_t datatype, ncclRedOp_t op, collHostShare_t* share,
                                                   ncclComm_t comm, cudaStream_t stream) noexcept nogil
        ncclResult_t (*collHostCompareParts)(const void* own, void* all, size_t transfers, ncclComm_t comm,
                                             cudaStream_t stream) noexcept nogil
        ncclResult_t (*collHostCheckParts)(const void* all, int nranks, int rank) noexcept nogil
        ncclResult_t (*collHostLabel)(const char* op, const char* datatype) noexcept nogil
        ncclResult_t (*collHostTag)(uint32_t tag) noexcept nogil
        ncclResult_t (*collHostFlightRecord)(collFlightRecord_t* record) noexcept nogil
        ncclResult_t (*collHostGroupCancel)() noexcept nogil


cdef class Library:
    cdef collTable_t api
    cdef readonly str path
    cdef readonly int version
    cdef readonly bint is_host
    cdef dict groups            # thread -> [depth of its open group, communicators opened in it]
    cdef set unfinished         # communicators that the library may still write the handle of
    cdef int need(self, void* function, const char* name) except -1
    cdef int done(self, ncclResult_t code, const char* name) except -1
    cdef Comm opened(self, Comm comm, ncclResult_t code, const char* name)
    cdef object missing(self, str name)


cdef extern from "coll/flight_record.h":
    ctypedef struct collFlightRecord_t:
        uint64_t number
        uint8_t flags
    ctypedef struct collFlightHeader_t:
        char magic[8]
        uint32_t header_bytes, record_bytes, capacity, lines
        uint64_t issued, completed
        int64_t completed_at
        uint32_t lines_used


cdef enum FlightOp:     # the order of FLIGHT_OPS
    FLIGHT_ALL_REDUCE
    FLIGHT_REDUCE
    FLIGHT_REDUCE_SCATTER
    FLIGHT_ALL_GATHER
    FLIGHT_BROADCAST
    FLIGHT_ALL_TO_ALL
    FLIGHT_GATHER
    FLIGHT_SCATTER
    FLIGHT_SEND
    FLIGHT_RECV


cdef class FlightRing:
    cdef Py_buffer view
    cdef collFlightHeader_t* ring
    cdef dict line_numbers      # by tag, or (text, tag)
    cdef object find_line
    cdef readonly object on_error
    cdef collFlightRecord_t* begin(self, int op, size_t count, int dtype, size_t stream, int peer, int flags,
                                   uint32_t tag) noexcept
    cdef int line_number(self, uint32_t tag) noexcept
    cdef int write_line(self, int number, bytes text) except -1


cdef class Comm:
    cdef object __weakref__
    cdef readonly Library library
    cdef collTable_t* api       # the library's
    cdef ncclComm_t comm        # NULL: closed, or not open yet
    cdef int calls              # calls that are with the library now
    cdef int forks              # of which process it is
    cdef bint closed
    cdef int known_rank, known_size     # -1: ask the library
    # The call that was issued last, and the number of calls. The watchdog's thread reads them.
    cdef const char* last_op
    cdef size_t number, last_count, last_stream
    cdef int last_dtype
    cdef readonly uint32_t last_tag
    # Of all calls from now on, 0 for none: a number of `tag_names`.
    cdef public uint32_t tag
    cdef FlightRing ring        # None: not recorded
    cdef ncclComm_t enter(self, void* function, const char* name) except NULL
    cdef int leave(self, ncclResult_t code, const char* name) except -1
    cdef inline collFlightRecord_t* note(self, const char* name, FlightOp op, size_t count, int dtype, size_t stream,
                                         int peer, bint grouped=*) noexcept
    cdef inline int leave_op(self, ncclResult_t code, const char* name, collFlightRecord_t* record) except -1
    cdef collFlightRecord_t* record(self, FlightOp op, size_t count, int dtype, size_t stream, int peer,
                                    bint grouped) noexcept
    cdef int refuse(self, void* function, const char* name) except -1
    cdef int settle(self, ncclResult_t code, const char* name) except -1
    cdef int drain(self) except -1
    cdef ncclResult_t abort_now(self, ncclComm_t comm) except *
    cdef int ask(self, ncclResult_t (*question)(ncclComm_t, int*) noexcept nogil, const char* name) except? -1


cdef class Queue:
    cdef readonly Library library
    cdef collHostQueue_t queue  # NULL: closed
    cdef int calls
    cdef int forks
    cdef collHostQueue_t enter(self) except NULL
    cdef ncclResult_t outcome(self, uint64_t ticket, double timeout) except *
    cdef bint settled(self, uint64_t ticket, double timeout) except *
