# Sends and receives of plain arrays in a group: collected and issued without Python's objects of a
# call, which take longer than the data.

open_groups = {}        # by thread: the GroupCalls of its ``with`` block


cdef class GroupCalls:
    """The calls that a thread's ``with`` block collects: base of `collectives.comm.group.Group`.

    ``comm``: the Communicator that made it. ``_issue`` of the subclass gets the calls of a block
    that holds others than GroupedTransfers.
    """

    cdef readonly object _comm
    cdef readonly list _calls
    cdef GroupCalls outer
    cdef Py_ssize_t outer_length        # calls of the outer group when this one was entered
    cdef unsigned long thread           # that has entered it
    cdef bint entered

    def __init__(self, comm):
        cdef ArrayCalls fast = calls_of(comm)
        if fast is None or fast.comm.comm is NULL or fast.comm.forks != collForks:
            comm._check_open("group")
        self._comm = comm
        self._calls = []

    def __enter__(self):
        cdef object thread = PyThread_get_thread_ident()
        cdef PyObject* outer
        if self.entered:
            raise errors.InvalidUsage("this group is open already: make another one with comm.group()",
                                      rank=self._comm.rank)
        self.entered, self.thread = True, thread
        outer = PyDict_GetItem(open_groups, thread)
        if outer is NULL:
            (<dict> open_groups)[thread] = self
        else:
            self.outer = <GroupCalls> outer
            self.outer_length = len(self.outer._calls)
        return self

    def __exit__(self, kind, error, trace):
        cdef GroupCalls outer = self.outer
        cdef list calls
        if not self.entered:
            raise errors.InvalidUsage("this group isn't open", rank=self._comm.rank)
        self.entered = False
        if outer is not None:
            self.outer = None
            if kind is not None:
                del outer._calls[self.outer_length:]
            return
        # Not this thread's: a generator may be closed in another one than the one that it began in.
        (<dict> open_groups).pop(self.thread, None)
        calls, self._calls = self._calls, []
        if kind is None and self.thread != PyThread_get_thread_ident():
            raise errors.InvalidUsage("this group was entered in another thread, so nothing of it was started",
                                      rank=self._comm.rank)
        if kind is None and calls and not issue_transfers(calls):
            self._issue(calls)


@cython.freelist(16)
cdef class GroupedTransfer:
    """A send or a receive of a plain host array in a group, which is issued at the group's end.

    It has the attributes of ``collectives.comm.group.Call``, for groups that hold other calls too.
    """

    cdef readonly object comm       # the Communicator
    cdef Comm native
    cdef object array, storage      # held; the storage is what `tensor.data = other` would free
    cdef size_t address, count
    cdef readonly size_t nbytes
    cdef int dtype, peer
    cdef bint sends

    def __init__(self):
        raise TypeError("GroupedTransfer objects come from ArrayCalls")

    fingerprint = None
    scalar = None
    stream = 0
    work = None
    label = None
    record = None
    copies = ()

    @property
    def op(self):
        """The operation's name: "send" or "recv"."""
        return "send" if self.sends else "recv"

    @property
    def steps(self):
        """The binding's method and its arguments without the stream, as the one step of a call."""
        return ((self.op, (self.address, self.count, self.dtype, self.peer)),)

    @property
    def held(self):
        """The array, and what keeps its memory alive."""
        return self.array, self.storage

    cdef int collect(self) except -1:
        """Hand it to the library, inside of a group: nothing is waited for."""
        cdef Comm native = self.native
        cdef collTable_t* api = native.api
        cdef void* function = <void*> api.ncclSend if self.sends else <void*> api.ncclRecv
        cdef const char* name = "ncclSend" if self.sends else "ncclRecv"
        cdef ncclResult_t code
        cdef ncclComm_t comm = native.enter(function, name)
        cdef collFlightRecord_t* record = native.note(name, FLIGHT_SEND if self.sends else FLIGHT_RECV, self.count,
                                                      self.dtype, 0, self.peer, grouped=True)
        if self.sends:
            code = api.ncclSend(<const void*> self.address, self.count, <ncclDataType_t> self.dtype, self.peer, comm,
                                NULL)
        else:
            code = api.ncclRecv(<void*> self.address, self.count, <ncclDataType_t> self.dtype, self.peer, comm, NULL)
        native.leave_op(code, name, record)
        return 0


def issue_transfers(list calls not None):
    """Issue a group that holds nothing but GroupedTransfers, and return True once they are done.

    False, with nothing done, where it holds another call or a communicator is closed. If anything
    is raised, Ctrl-C included, none of them is launched.
    """
    cdef GroupedTransfer transfer
    cdef Library library = None
    cdef collTable_t* api
    cdef ncclResult_t code
    global collInsideGroupEnd
    for call in calls:
        if type(call) is not GroupedTransfer:
            return False
        transfer = <GroupedTransfer> call
        if transfer.native.comm is NULL or transfer.native.forks != collForks:
            return False
        library = transfer.native.library
    if library is None or PyDict_GET_SIZE(library.groups) > 0:
        return False
    api = &library.api
    if api.ncclGroupStart is NULL or api.ncclGroupEnd is NULL:
        return False
    try:        # as Library.group_start and group_end, which no other code can come between here
        library.done(api.ncclGroupStart(), "ncclGroupStart")
        for call in calls:
            (<GroupedTransfer> call).collect()
        collInsideGroupEnd += 1
        with nogil:
            code = api.ncclGroupEnd()
        collInsideGroupEnd -= 1
        library.done(code, "ncclGroupEnd")
    except BaseException:
        library.group_cancel()      # does nothing where the group has ended
        raise
    return True
