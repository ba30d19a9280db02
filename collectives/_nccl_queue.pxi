# Queues of the host engine.

QUEUE_PENDING = collHostQueuePending
QUEUE_CPU = collHostQueueCpu
QUEUE_THREAD_ID = collHostQueueThreadId

cdef enum:
    WAIT_SLICE_NS = 100_000_000     # between two checks of Python's signal handlers while a thread waits


cdef class Queue:
    """Queue of the host engine: a thread that runs its tasks in order.

    Made by ``Library.queue_create``. Pass ``handle`` as the stream of a call on a ``Comm``. Each
    task gets a ticket, counted up by one from 1.
    """

    def __init__(self):
        raise TypeError("Queue objects come from Library.queue_create")

    def __del__(self):
        if self.queue is not NULL and self.forks == collForks:
            warn(f"queue {self.handle:#x} was never closed: its thread lives on", ResourceWarning, source=self)

    @property
    def handle(self):
        """The queue as an integer, to be passed as a stream; 0 once it is closed."""
        return <size_t> self.queue

    cdef collHostQueue_t enter(self) except NULL:
        if self.queue is NULL:
            raise errors.InvalidUsage("queue is closed")
        if self.forks != collForks:
            raise errors.InvalidUsage("this queue belongs to the parent process; a forked child can't use it")
        self.calls += 1
        return self.queue

    def record(self):
        """Return the ticket of the newest task, 0 if there was none. C: ``collHostQueueRecord``."""
        cdef uint64_t ticket = 0
        cdef ncclResult_t code
        cdef collHostQueue_t queue = self.enter()
        with nogil:
            code = self.library.api.collHostQueueRecord(queue, &ticket)
        self.calls -= 1
        self.library.done(code, "collHostQueueRecord")
        return ticket

    cdef ncclResult_t outcome(self, uint64_t ticket, double timeout) except *:
        """Wait up to ``timeout`` seconds (negative: no limit); return the task's result code.

        Signal handlers run meanwhile.
        """
        cdef ncclResult_t code
        cdef int64_t part = WAIT_SLICE_NS
        cdef double left = timeout
        cdef double deadline = monotonic() + timeout if timeout > 0 else 0
        cdef collHostQueue_t queue = self.enter()
        try:
            while True:
                if timeout >= 0:
                    part = min(<int64_t> (min(left, 1.0) * 1e9), <int64_t> WAIT_SLICE_NS)
                with nogil:
                    code = self.library.api.collHostQueueWait(queue, ticket, part)
                if code != ncclInProgress:
                    return code
                PyErr_CheckSignals()
                if timeout >= 0:
                    left = deadline - monotonic() if timeout > 0 else 0
                    if left <= 0:
                        return code
        finally:
            self.calls -= 1

    cdef bint settled(self, uint64_t ticket, double timeout) except *:
        """Wait as ``outcome`` does, raise a task's error, and return whether it has ended."""
        cdef collHostErrorInfo_t info
        cdef ncclResult_t code = self.outcome(ticket, timeout)
        cdef collHostQueue_t queue
        if code == ncclSuccess or code == ncclInProgress:
            return code == ncclSuccess
        memset(&info, 0, sizeof(info))
        info.size = sizeof(info)
        queue = self.enter()
        with nogil:
            self.library.api.collHostQueueGetError(queue, ticket, &info)
        self.calls -= 1
        if info.code == <int> code and info.kind != 0:
            raise exception_of(info_of(&info), "queue_wait", None)
        raise error_of(self.library, None, code, "collHostQueueWait")

    def wait(self, uint64_t ticket, timeout=None):
        """Wait until a task has ended; return False if ``timeout`` ran out first.

        ``timeout``: seconds, None for no limit. Raises the error that the task failed with. Signal
        handlers run about ten times a second meanwhile, so Ctrl-C raises KeyboardInterrupt. C:
        ``collHostQueueWait``.
        """
        if timeout is not None and not timeout >= 0:
            raise errors.InvalidArgument(f"timeout must be None or at least 0 seconds, not {timeout!r}")
        return self.settled(ticket, -1.0 if timeout is None else timeout)

    def done(self, uint64_t ticket):
        """Return whether a task has ended; raises the error that it failed with. Never waits."""
        return self.settled(ticket, 0.0)

    def call(self, function not None):
        """Have the queue's thread call a Python function, after what is queued before it.

        What it raises goes to ``sys.unraisablehook``. It must not wait for the queue. C:
        ``collHostQueueCall``.
        """
        cdef ncclResult_t code
        cdef collHostQueue_t queue
        if not callable(function):
            raise errors.InvalidArgument(f"{function!r} can't be called")
        queue = self.enter()
        Py_INCREF(function)
        with nogil:
            code = self.library.api.collHostQueueCall(queue, run_python, <void*> function)
        self.calls -= 1
        if code != ncclSuccess:
            Py_DECREF(function)
        self.library.done(code, "collHostQueueCall")

    def get(self, int attribute):
        """Return an attribute: QUEUE_PENDING, QUEUE_CPU or QUEUE_THREAD_ID.

        C: ``collHostQueueGet``.
        """
        cdef int64_t value = 0
        cdef ncclResult_t code
        cdef collHostQueue_t queue = self.enter()
        with nogil:
            code = self.library.api.collHostQueueGet(queue, <collHostQueueAttribute_t> attribute, &value)
        self.calls -= 1
        self.library.done(code, "collHostQueueGet")
        return value

    def set(self, int attribute, int64_t value):
        """Set an attribute: QUEUE_CPU, the core that the thread is bound to (-1: none).

        C: ``collHostQueueSet``.
        """
        cdef ncclResult_t code
        cdef collHostQueue_t queue = self.enter()
        with nogil:
            code = self.library.api.collHostQueueSet(queue, <collHostQueueAttribute_t> attribute, value)
        self.calls -= 1
        self.library.done(code, "collHostQueueSet")

    def close(self):
        """Run what is queued to its end, then end the thread. Closing twice is a no-op.

        C: ``collHostQueueDestroy``.
        """
        cdef ncclResult_t code
        cdef collHostQueue_t queue
        if self.queue is NULL:
            return
        self.outcome(self.record(), -1.0)       # here a signal handler may end the wait and the queue stays open
        queue = self.enter()
        self.queue = NULL
        while self.calls > 1:                   # other threads that are leaving wait() or another call
            with nogil:
                usleep(50)
        with nogil:
            code = self.library.api.collHostQueueDestroy(queue)
        self.calls -= 1
        self.library.done(code, "collHostQueueDestroy")


cdef void run_python(void* argument) noexcept nogil:
    """Call a Python function in a queue's thread, and drop ``Queue.call``'s reference to it."""
    cdef PyObject* result
    if not Py_IsInitialized():      # the interpreter has ended, and can't call the function
        return
    with gil:
        result = PyObject_CallNoArgs(<PyObject*> argument)
        if result is NULL:
            PyErr_WriteUnraisable(<object> argument)
        Py_XDECREF(result)
        Py_DECREF(<object> argument)
