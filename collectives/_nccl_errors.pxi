# Exceptions of the binding: the only place where an exception is made from a result code.

ErrorInfo = namedtuple("ErrorInfo", "code kind rank peers seq nbytes op text tag", defaults=(None,))
ErrorInfo.__doc__ = """Report of the host engine on a failed or a pending operation.

``code`` (ncclResult_t), ``kind`` ("timeout", "remote", ...), ``rank`` (who reports, or None),
``peers`` (ranks that it is about), ``seq`` (number of the collective on its communicator),
``nbytes``, ``op`` ("all_reduce", or None), ``text``, ``tag`` (the name of the operation's tag, or None).
"""

# The names of tags, by number: see `Comm.tag`.
tag_names = {}


cpdef name_of_tag(uint32_t tag):
    """Return the name of a tag, "tag N" where this process has none for it; None for 0, which is no tag."""
    return (<dict> tag_names).get(tag, f"tag {tag}") if tag else None


cdef str with_tag_names(str text):
    """Return a text of the engine, which has tags as numbers, with their names."""
    return re.sub(r"(?<= of )tag (\d+)", lambda found: name_of_tag(int(found[1])), text)

# Exception classes by collHostErrorKind_t, then by ncclResult_t.
cdef tuple KINDS = ("none", "argument", "usage", "mismatch", "timeout", "remote", "aborted", "interrupted", "memory",
                    "system", "internal")
cdef dict CLASS_OF_KIND = {
    "argument": errors.InvalidArgument,
    "usage": errors.InvalidUsage,
    "mismatch": errors.Mismatch,
    "timeout": errors.CollectiveTimeout,
    "remote": errors.RemoteError,
    "aborted": errors.Aborted,
    # Raised as the handler's own exception by the call that was interrupted; this is what later
    # calls get.
    "interrupted": errors.Aborted,
    "memory": errors.TransportError,
    "system": errors.TransportError,
    "internal": errors.InternalError,
}
cdef dict CLASS_OF_CODE = {
    ncclUnhandledCudaError: errors.CudaError,
    ncclSystemError: errors.TransportError,
    ncclInternalError: errors.InternalError,
    ncclInvalidArgument: errors.InvalidArgument,
    ncclInvalidUsage: errors.InvalidUsage,
    ncclRemoteError: errors.RemoteError,
    ncclTimeout: errors.CollectiveTimeout,
}


cdef str text_of(const char* text):
    return "" if text is NULL else text.decode("utf-8", "replace")


cdef str op_name(str function):
    """"ncclReduceScatterConfig" -> "reduce_scatter", "collHostQueueWait" -> "queue_wait"."""
    name = function.removeprefix("nccl").removeprefix("collHost").removesuffix("Config").replace("Allto", "AllTo")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


cdef object info_of(const collHostErrorInfo_t* info):
    op = text_of(info.op)
    return ErrorInfo(
        code=info.code,
        kind=KINDS[info.kind] if 0 <= info.kind < len(KINDS) else "internal",
        rank=info.rank if info.rank >= 0 else None,
        peers=tuple([info.peers[i] for i in range(info.npeers)]),
        seq=info.seq,
        nbytes=info.bytes,
        op=op_name(op) if op else None,
        text=with_tag_names(text_of(info.text)) if info.kind == collHostErrorMismatch else text_of(info.text),
        tag=name_of_tag(info.tag),
    )


cdef object exception_of(object info, str op, object rank):
    """Return the exception for a report of the host engine.

    ``op`` and ``rank`` are used if the report names none.
    """
    return CLASS_OF_KIND.get(info.kind, errors.InternalError)(
        info.text, code=info.code, op=info.op or op, rank=rank if info.rank is None else info.rank, peers=info.peers,
        seq=info.seq, nbytes=info.nbytes, tag=info.tag)


cdef object error_of(Library library, Comm comm, ncclResult_t code, const char* function):
    """Return the exception for a call of this thread that returned ``code``.

    To be called before another call fails.
    """
    cdef collHostErrorInfo_t info
    cdef ncclComm_t handle = NULL if comm is None else comm.comm
    cdef ncclComm_t asked = NULL
    cdef str op = None if function is NULL else op_name(function.decode())
    cdef object rank = None if comm is None or comm.known_rank < 0 else comm.known_rank
    if collInterrupted:
        return take_interrupt(op, rank)
    if library.api.collHostGetError is not NULL:
        for attempt in range(2):        # the thread's newest error, else the communicator's
            memset(&info, 0, sizeof(info))
            info.size = sizeof(info)
            with nogil:
                library.api.collHostGetError(asked, &info)
            if info.code == <int> code and info.kind != 0:
                found = exception_of(info_of(&info), op, rank)
                if isinstance(found, errors.RemoteError):
                    let_signals_win("was interrupted" in found.message)
                return found
            if handle is NULL:
                break
            asked = handle
    detail = text_of(library.api.ncclGetLastError(NULL)) if library.api.ncclGetLastError is not NULL else ""
    sentence = text_of(library.api.ncclGetErrorString(code)) if library.api.ncclGetErrorString is not NULL else ""
    sentence = sentence or f"result code {<int> code}"
    return CLASS_OF_CODE.get(code, errors.InternalError)(
        f"{sentence}; the library's last error: {detail}" if detail else sentence, code=<int> code, op=op,
        rank=rank, detail=detail or sentence, tag=None if comm is None else name_of_tag(comm.last_tag))


cdef int let_signals_win(bint interrupted) except -1:
    """Raise what a signal handler of this process raises, if a signal comes soon.

    Ctrl-C reaches all ranks. A rank that has seen another one end should report its own signal, and
    not the other's end. The signal gets 0.1 s to come, and 0.5 s where the other rank is known to
    have been ``interrupted``.
    """
    cdef int rounds = 50 if interrupted else 10
    if collInsideInterrupt or not collIsMainThread():
        return 0
    PyErr_CheckSignals()
    while rounds > 0:
        with nogil:
            usleep(10000)
        PyErr_CheckSignals()
        rounds -= 1
    return 0


def check(int code, Library library not None, Comm comm=None):
    """Raise the exception for a result code that a call of this thread returned.

    Success and "in progress" are no errors. ``comm``: whose error to report where this thread has
    none, for instance with a code from ``async_error``.
    """
    if code != ncclSuccess and code != ncclInProgress or collInterrupted:
        raise error_of(library, comm, <ncclResult_t> code, NULL)


# ---- signal handlers that run while a call waits

# Handlers run in the main thread alone, so one of each is enough.
cdef object raised_by_handler = None        # until the interrupted call raises it
cdef list aborted_by_handlers = []          # (Comm, handle), until the interrupted call has left the library


cdef int interrupt_check() noexcept nogil:
    if not collIsMainThread():
        return 0
    with gil:
        return run_signal_handlers()


cdef int run_signal_handlers() noexcept:
    global collInsideInterrupt, collInterrupted, raised_by_handler
    collInsideInterrupt += 1
    try:
        PyErr_CheckSignals()
    except BaseException as error:
        raised_by_handler = error
        collInterrupted = 1
    if aborted_by_handlers:     # not before: the handler's own calls aren't interrupted
        collInterrupted = 1
    collInsideInterrupt -= 1
    return collInterrupted


cdef object take_interrupt(str op, object rank):
    """Return the exception for a call that a signal handler has ended.

    Aborts the communicators that the handler could not; in a handler only those that the call which
    it has interrupted doesn't use.
    """
    global collInterrupted, raised_by_handler
    cdef list left = []
    collInterrupted = 0
    error, raised_by_handler = raised_by_handler, None
    while aborted_by_handlers:
        comm, handle = aborted_by_handlers.pop()
        if collInsideInterrupt and (<Comm> comm).calls > 0:
            left.append((comm, handle))
        else:
            (<Comm> comm).abort_now(<ncclComm_t> <size_t> handle)
    aborted_by_handlers.extend(left)
    return error or errors.Aborted("a signal handler called abort() during the call", op=op, rank=rank)
