# The fast path in front of the methods of `Communicator`: from the program's call to `ArrayCalls`
# without a Python function between. One with five keyword defaults takes a tenth of a microsecond by
# itself.


def with_fast_path(full, /):
    """Decorate a method of `Communicator` named as one of `ArrayCalls`.

    The method tries ``_fast_path`` of the communicator, and calls ``full`` for what that doesn't
    take. It has the signature and the documentation of ``full``.
    """
    return update_wrapper(FAST_METHODS[full.__name__](full), full)


cdef inline ArrayCalls calls_of(comm):
    """Return the fast path of a communicator; None where it has none."""
    calls = comm._fast_path
    return <ArrayCalls> calls if type(calls) is ArrayCalls else None


cdef inline bint is_native(algorithm):
    return algorithm is None or algorithm == "native"


def fast_all_reduce(full):
    def all_reduce(self, array, op="sum", *, async_op=False, algorithm=None, stream=None, share=None, out=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and share is None and calls is not None and is_native(algorithm):
            if calls.all_reduce(array, op, out):
                return None
        return full(self, array, op, async_op=async_op, algorithm=algorithm, stream=stream, share=share, out=out)
    return all_reduce


def fast_reduce(full):
    def reduce(self, array, root=0, op="sum", *, async_op=False, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and calls is not None and calls.reduce(array, root, op):
            return None
        return full(self, array, root, op, async_op=async_op, stream=stream)
    return reduce


def fast_reduce_scatter(full):
    def reduce_scatter(self, out, inp, op="sum", *, async_op=False, algorithm=None, stream=None, share=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and share is None and calls is not None and is_native(algorithm):
            if calls.reduce_scatter(out, inp, op):
                return None
        return full(self, out, inp, op, async_op=async_op, algorithm=algorithm, stream=stream, share=share)
    return reduce_scatter


def fast_all_gather(full):
    def all_gather(self, out, inp, *, async_op=False, algorithm=None, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and calls is not None and is_native(algorithm):
            if calls.all_gather(out, inp):
                return None
        return full(self, out, inp, async_op=async_op, algorithm=algorithm, stream=stream)
    return all_gather


def fast_broadcast(full):
    def broadcast(self, array, root=0, *, async_op=False, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and calls is not None and calls.broadcast(array, root):
            return None
        return full(self, array, root, async_op=async_op, stream=stream)
    return broadcast


def fast_all_to_all(full):
    def all_to_all(self, out, inp, output_split_sizes=None, input_split_sizes=None, *, async_op=False, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if output_split_sizes is None and input_split_sizes is None and not async_op and stream is None:
            if calls is not None and calls.all_to_all(out, inp):
                return None
        return full(self, out, inp, output_split_sizes, input_split_sizes, async_op=async_op, stream=stream)
    return all_to_all


def fast_gather(full):
    def gather(self, out, inp, root=0, *, async_op=False, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and calls is not None and calls.gather(out, inp, root):
            return None
        return full(self, out, inp, root, async_op=async_op, stream=stream)
    return gather


def fast_scatter(full):
    def scatter(self, out, inp, root=0, *, async_op=False, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and calls is not None and calls.scatter(out, inp, root):
            return None
        return full(self, out, inp, root, async_op=async_op, stream=stream)
    return scatter


def fast_send(full):
    def send(self, array, peer, *, async_op=False, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and calls is not None and calls.send(array, peer):
            return None
        return full(self, array, peer, async_op=async_op, stream=stream)
    return send


def fast_recv(full):
    def recv(self, array, peer, *, async_op=False, stream=None):
        cdef ArrayCalls calls = calls_of(self)
        if not async_op and stream is None and calls is not None and calls.recv(array, peer):
            return None
        return full(self, array, peer, async_op=async_op, stream=stream)
    return recv


FAST_METHODS = {
    "all_reduce": fast_all_reduce, "reduce": fast_reduce, "reduce_scatter": fast_reduce_scatter,
    "all_gather": fast_all_gather, "broadcast": fast_broadcast, "all_to_all": fast_all_to_all,
    "gather": fast_gather, "scatter": fast_scatter, "send": fast_send, "recv": fast_recv,
}


cdef class TagOfCalls:
    """The attribute ``tag`` of `Communicator`, which is that of its `Comm`: a property in Python takes
    longer than what it does.
    """

    def __get__(self, comm, owner):
        if comm is None:
            return self
        native = comm._native
        return (<Comm> native).tag if type(native) is Comm else native.tag

    def __set__(self, comm, tag):
        native = comm._native
        if type(native) is Comm:
            (<Comm> native).tag = tag
        else:
            native.tag = tag
