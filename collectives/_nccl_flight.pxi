# The flight recorder's rings: the last operations of a communicator, see coll/flight_record.h.

cdef extern from "coll/flight_record.h":
    enum:
        collFlightHeaderBytes
        collFlightCapacity
        collFlightLines
        collFlightLineBytes
        collFlightBlocking
        collFlightCollective
        collFlightMetaOffset
        collFlightMetaBytes
        collFlightOutcomeOffset
        collFlightOutcomeBytes
    collFlightRecord_t* collFlightAt(collFlightHeader_t* ring, uint64_t number) noexcept
    collFlightRecord_t* collFlightBegin(collFlightHeader_t* ring, int op, uint64_t count, int dtype, uint64_t stream,
                                        int peer, int flags, int line) noexcept
    void collFlightStart(collFlightRecord_t* record, uint64_t number) noexcept
    void collFlightEnd(collFlightRecord_t* record, uint64_t number, int code) noexcept


# The names of `collFlightRecord_t.op`, in the order of `FlightOp`.
FLIGHT_OPS = ("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "gather", "scatter",
              "send", "recv")
FLIGHT_LAYOUT = {
    "header_bytes": collFlightHeaderBytes, "record_bytes": sizeof(collFlightRecord_t), "capacity": collFlightCapacity,
    "lines": collFlightLines, "line_bytes": collFlightLineBytes, "meta_offset": collFlightMetaOffset,
    "meta_bytes": collFlightMetaBytes, "outcome_offset": collFlightOutcomeOffset,
    "outcome_bytes": collFlightOutcomeBytes,
}
FLIGHT_BYTES = collFlightHeaderBytes + collFlightCapacity * sizeof(collFlightRecord_t) + (
    collFlightLines * collFlightLineBytes)


cdef class FlightRing:
    """Ring of a communicator's last operations, in memory that is passed in.

    ``memory``: a writable buffer of FLIGHT_BYTES bytes, page-aligned, all zeros or an earlier
    ring's; it is held. ``find_line``: None, or a function that returns "file:line" of the program,
    which is called for each operation. ``on_error``: None, or a function that gets each error that
    a call of the communicator raises.
    """

    def __init__(self, memory, find_line=None, on_error=None):
        PyObject_GetBuffer_checked(memory, &self.view)
        if self.view.len < FLIGHT_BYTES or <size_t> self.view.buf % 64 != 0:
            PyBuffer_Release(&self.view)
            raise errors.InvalidArgument(f"a flight ring takes {FLIGHT_BYTES} aligned bytes")
        self.ring = <collFlightHeader_t*> self.view.buf
        self.find_line, self.on_error = find_line, on_error
        self.line_numbers = {}
        if self.ring.header_bytes != 0:     # an earlier ring's; else it is all zeros, and no page is touched
            memset(<void*> self.ring, 0, FLIGHT_BYTES)
        self.ring.header_bytes, self.ring.record_bytes = collFlightHeaderBytes, sizeof(collFlightRecord_t)
        self.ring.capacity, self.ring.lines = collFlightCapacity, collFlightLines
        memcpy(self.ring.magic, b"COLLFLT1", 8)

    def __dealloc__(self):
        if self.ring is not NULL:
            PyBuffer_Release(&self.view)

    @property
    def issued(self):
        """The number of operations so far."""
        return self.ring.issued

    def add(self, int op, size_t count, int dtype, size_t stream=0, int peer=-1, bint collective=True,
            uint32_t tag=0):
        """Record an operation, and return its number. ``op``: its place in FLIGHT_OPS; ``tag``: as `Comm.tag`."""
        self.begin(op, count, dtype, stream, peer, (collFlightCollective if collective else 0), tag)
        return self.ring.issued

    def start(self, uint64_t number):
        """Record that an operation has started."""
        collFlightStart(collFlightAt(self.ring, number), number)

    def end(self, uint64_t number, int code=0):
        """Record that an operation has ended. ``code``: ``ncclResult_t``."""
        collFlightEnd(collFlightAt(self.ring, number), number, code)

    def complete(self, uint64_t number, int64_t when):
        """Record that all operations up to a number have ended. ``when``: ns of CLOCK_MONOTONIC."""
        if number > self.ring.completed:
            self.ring.completed_at = when
            self.ring.completed = number

    cdef collFlightRecord_t* begin(self, int op, size_t count, int dtype, size_t stream, int peer, int flags,
                                   uint32_t tag) noexcept:
        cdef int line = 0
        if tag or self.find_line is not None:
            line = self.line_number(tag)
        return collFlightBegin(self.ring, op, count, dtype, stream, peer, flags, line)

    cdef int line_number(self, uint32_t tag) noexcept:
        """Return the number of a line name: the program's line, and behind a tab the tag's name."""
        try:
            key = tag if self.find_line is None else (self.find_line(), tag)
            number = self.line_numbers.get(key)
            if number is None:
                number = self.ring.lines_used + 1
                if number > collFlightLines:
                    return 0
                text = "" if self.find_line is None else key[0]
                name = f"\t{name_of_tag(tag)[:60]}" if tag else ""
                self.write_line(number, f"{text}{name}".encode("utf-8", "replace")[-(collFlightLineBytes - 1):])
                self.line_numbers[key] = number
            return number
        except Exception:       # of a frame's attributes; the operation itself must go on
            return 0

    cdef int write_line(self, int number, bytes text) except -1:
        cdef char* place = <char*> self.ring + collFlightHeaderBytes + collFlightCapacity * sizeof(collFlightRecord_t)
        memcpy(place + (number - 1) * collFlightLineBytes, <const char*> text, len(text))
        self.ring.lines_used = number
        return 0


cdef int PyObject_GetBuffer_checked(object memory, Py_buffer* view) except -1:
    if PyObject_GetBuffer(<PyObject*> memory, view, PyBUF_WRITABLE) != 0:
        raise errors.InvalidArgument("a flight ring takes a writable buffer")
    return 0
