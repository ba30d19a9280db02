# Recorded steps of a collective over several nodes, run without the GIL: see _nccl_steps.h.

cdef extern from "_nccl_steps.h" nogil:
    enum:
        collStepReduceScatter
        collStepReduce
        collStepAllGather
        collStepBroadcast
        collStepGroupStart
        collStepGroupEnd
        collStepBeginMessages
        collStepEndMessages
        collStepKernel
        collStepsDone
        collStepsEngine
        collStepsKernel
        collStepsLost
        collStepsTimeout
        collStepsSignals
    ctypedef struct collStep_t:
        int kind, dtype, op, root
        size_t count
        uint64_t start "from"
        uint64_t to
        int first, end
    ctypedef struct collMessage_t:
        int flow, receives
        uint64_t at
        size_t nbytes
    ctypedef struct collFlow_t:
        int socket, sending, receiving, lost
    ctypedef struct coll_reduce_args:
        pass
    ctypedef int (*collKernelRun_t)(int kernel, const void* args, size_t nbytes, int threads) noexcept nogil
    struct pollfd:
        pass
    ctypedef struct collSteps_t:
        collStep_t* steps
        collMessage_t* messages
        coll_reduce_args* kernels
        uint64_t* sources
        const void** at_sources
        collFlow_t* flows
        pollfd* polls
        int num_steps, num_messages, num_kernels, num_sources, num_flows
        const collTable_t* api
        ncclComm_t comm
        collKernelRun_t run_kernel
        int threads
        uint64_t bases[4]
        int64_t limit_ns, deadline_ns
        int now
        ncclResult_t code
        int flow
    void collBeginSteps(collSteps_t* run, int first, int end)
    int collRunSteps(collSteps_t* run, const int* interrupted)


STEP_KINDS = {
    "reduce_scatter": collStepReduceScatter, "reduce": collStepReduce, "all_gather": collStepAllGather,
    "broadcast": collStepBroadcast, "group_start": collStepGroupStart, "group_end": collStepGroupEnd,
    "begin_messages": collStepBeginMessages, "end_messages": collStepEndMessages, "kernel": collStepKernel,
}
cdef list STEP_NAMES = [b"ncclReduceScatter", b"ncclReduce", b"ncclAllGather", b"ncclBroadcast", b"ncclGroupStart",
                        b"ncclGroupEnd"]


cdef double LONGEST_S = 1e9      # 30 years: as nanoseconds it fits into 64 bits


cdef void* allocate_array(list rows, size_t size) except NULL:
    cdef void* memory = calloc(max(1, len(rows)), size)
    if memory is NULL:
        raise MemoryError
    return memory


cdef class StepList:
    """Steps of a collective over several nodes, which run one after the other without Python.

    Addresses are one of a run's three bases, by its number from 1 in the upper 8 bits, and an
    offset; with number 0 they are addresses. ``steps``: (kind of STEP_KINDS, dtype, op, root,
    count, from, to, first, end); of "begin_messages" [first, end) are its ``messages``, which
    "end_messages" waits for; of a "kernel" they are its ``sources``, op is its number, root the
    place of its arguments. ``messages``: (place of its socket, whether it is received, address,
    bytes); ``kernels``: the bytes of each one's arguments; ``sources``: addresses; ``sockets``: file
    descriptors. One run at a time.
    """

    cdef collSteps_t c
    cdef Comm comm

    def __init__(self, Comm comm not None, size_t run_kernel, list steps not None, list messages not None,
                 list kernels not None, list sources not None, list sockets not None):
        cdef int i
        cdef const char* arguments
        self.comm = comm
        self.c.api = comm.api
        self.c.run_kernel = <collKernelRun_t> <void*> run_kernel
        self.c.steps = <collStep_t*> allocate_array(steps, sizeof(collStep_t))
        self.c.messages = <collMessage_t*> allocate_array(messages, sizeof(collMessage_t))
        self.c.kernels = <coll_reduce_args*> allocate_array(kernels, sizeof(coll_reduce_args))
        self.c.sources = <uint64_t*> allocate_array(sources, sizeof(uint64_t))
        self.c.at_sources = <const void**> allocate_array(sources, sizeof(void*))
        self.c.flows = <collFlow_t*> allocate_array(sockets, sizeof(collFlow_t))
        self.c.polls = <pollfd*> allocate_array(sockets, sizeof(pollfd))
        self.c.num_steps, self.c.num_messages, self.c.num_kernels = len(steps), len(messages), len(kernels)
        self.c.num_sources, self.c.num_flows = len(sources), len(sockets)
        for i, (kind, dtype, op, root, count, start, to, first, end) in enumerate(steps):
            limit = len(sources) if kind == collStepKernel else len(messages)
            if not 0 <= first <= end <= limit or (kind == collStepKernel and not 0 <= root < len(kernels)):
                raise errors.InvalidArgument(f"step {i} uses messages, sources or a kernel that aren't there")
            self.c.steps[i].kind, self.c.steps[i].dtype, self.c.steps[i].op = kind, dtype, op
            self.c.steps[i].root, self.c.steps[i].count = root, count
            self.c.steps[i].start, self.c.steps[i].to = start, to
            self.c.steps[i].first, self.c.steps[i].end = first, end
        for i, (flow, receives, at, nbytes) in enumerate(messages):
            if not 0 <= flow < len(sockets):
                raise errors.InvalidArgument(f"message {i} has no socket")
            self.c.messages[i].flow, self.c.messages[i].receives = flow, receives
            self.c.messages[i].at, self.c.messages[i].nbytes = at, nbytes
        for i, each in enumerate(kernels):
            if len(each) != sizeof(coll_reduce_args):
                raise errors.InvalidArgument(f"kernel {i} takes {sizeof(coll_reduce_args)} bytes of arguments")
            arguments = each
            memcpy(&self.c.kernels[i], arguments, sizeof(coll_reduce_args))
        for i, each in enumerate(sources):
            self.c.sources[i] = each
        for i, each in enumerate(sockets):
            self.c.flows[i].socket = each
            self.c.flows[i].sending = self.c.flows[i].receiving = -1

    def __dealloc__(self):
        free(self.c.steps)
        free(self.c.messages)
        free(self.c.kernels)
        free(self.c.sources)
        free(<void*> self.c.at_sources)
        free(self.c.flows)
        free(self.c.polls)

    @property
    def waiting(self):
        """While a run waits for messages: the places of the sockets over which some are still to be
        sent or received. Else the run waits for nobody, or for a rank of the node.
        """
        if not self.c.deadline_ns:
            return []
        return [i for i in range(self.c.num_flows) if self.c.flows[i].sending >= 0 or self.c.flows[i].receiving >= 0]

    def run(self, int first, int end, tuple bases not None, seconds, int threads):
        """Run the steps [first, end); blocks. ``bases``: addresses of up to 3 arrays.

        ``seconds``: limit of each wait for messages, None: no limit; ``threads``: of a kernel, as
        ``kernels.Library.run`` takes it. Returns None, or what has ended it: (place of the socket,
        whether the time was over, errno, 0 where the peer has closed the connection). Raises the
        engine's errors, and what a signal handler raises.
        """
        cdef int how
        cdef list unfinished
        if not 0 <= first <= end <= self.c.num_steps or len(bases) > 3:
            raise errors.InvalidArgument(f"steps {first} to {end} of {self.c.num_steps}, {len(bases)} bases")
        for how in range(len(bases)):
            self.c.bases[how + 1] = bases[how]
        self.c.limit_ns = -1 if seconds is None else <int64_t> (min(seconds, LONGEST_S) * 1e9)
        self.c.threads = threads
        self.c.comm = self.comm.enter(<void*> self.c.api.ncclGroupEnd, "ncclGroupEnd")
        collBeginSteps(&self.c, first, end)
        while True:
            with nogil:
                how = collRunSteps(&self.c, &collInterrupted)
            if how != collStepsSignals or (collIsMainThread() and run_signal_handlers()):
                break
        if how == collStepsEngine:
            self.comm.leave(self.c.code, STEP_NAMES[self.c.steps[self.c.now].kind])
        else:
            self.comm.leave(ncclSuccess, "ncclGroupEnd")    # raises what a signal handler has
        if how == collStepsKernel and <int> self.c.code == 2:     # as `_kernels.Library.run` has it
            raise MemoryError("the system has no memory or no thread for the kernels' thread pool")
        if how == collStepsKernel:
            raise errors.InternalError(f"a kernel of a recorded collective failed with status {<int> self.c.code}")
        if how == collStepsDone:
            return None
        for first in range(self.c.num_flows):
            if first != self.c.flow:
                self.c.flows[first].sending = self.c.flows[first].receiving = -1
        return self.c.flow, how == collStepsTimeout, max(0, self.c.flows[self.c.flow].lost)
