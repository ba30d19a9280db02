# Sends and receives of plain arrays in a group: collected and issued without Python's objects of a
# call, which take longer than the data.

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

    cdef int issue(self) except -1:
        """Hand it to the library, inside of a group: nothing is waited for."""
        cdef Comm native = self.native
        cdef collTable_t* api = native.api
        cdef ncclResult_t code
        cdef ncclComm_t comm
        cdef collFlightRecord_t* record
        if self.sends:
            comm = native.enter(<void*> api.ncclSend, "ncclSend")
            record = native.note("ncclSend", FLIGHT_SEND, self.count, self.dtype, 0, self.peer)
            code = api.ncclSend(<const void*> self.address, self.count, <ncclDataType_t> self.dtype, self.peer, comm,
                                NULL)
            native.leave_op(code, "ncclSend", record)
        else:
            comm = native.enter(<void*> api.ncclRecv, "ncclRecv")
            record = native.note("ncclRecv", FLIGHT_RECV, self.count, self.dtype, 0, self.peer)
            code = api.ncclRecv(<void*> self.address, self.count, <ncclDataType_t> self.dtype, self.peer, comm, NULL)
            native.leave_op(code, "ncclRecv", record)
        return 0


def issue_transfers(list calls not None):
    """Issue a group that holds nothing but GroupedTransfers, and return True once they are done.

    False, with nothing done, where it holds another call or a communicator is closed. If anything
    is raised, Ctrl-C included, none of them is launched.
    """
    cdef GroupedTransfer transfer
    cdef Library library = None
    for call in calls:
        if type(call) is not GroupedTransfer:
            return False
        transfer = <GroupedTransfer> call
        if transfer.native.comm is NULL or transfer.native.forks != collForks:
            return False
        library = transfer.native.library
    if library is None:
        return False
    try:
        library.group_start()
        for call in calls:
            (<GroupedTransfer> call).issue()
        library.group_end()
    except BaseException:
        library.group_cancel()      # does nothing where the group has ended
        raise
    return True
