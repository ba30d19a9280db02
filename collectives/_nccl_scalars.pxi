# Conversion of small values to C: unique ids, lists of ints, time limits, scalars of every dtype.

cdef ncclUniqueId c_unique_id(object unique_id) except *:
    cdef ncclUniqueId c_id
    cdef bytes data
    if not isinstance(unique_id, bytes) or len(unique_id) != NCCL_UNIQUE_ID_BYTES:
        raise errors.InvalidArgument(
            f"a unique id is {NCCL_UNIQUE_ID_BYTES} bytes, not "
            + (f"{len(unique_id)}" if isinstance(unique_id, bytes) else type(unique_id).__name__))
    data = unique_id
    memcpy(&c_id, <const char*> data, sizeof(c_id))
    return c_id


@cython.internal
cdef class _Ints:
    """C array of ints made from a list; never NULL."""
    cdef int* data

    def __cinit__(self, list values not None):
        cdef Py_ssize_t i
        self.data = <int*> malloc((len(values) + 1) * sizeof(int))
        if self.data is NULL:
            raise MemoryError(f"{len(values)} ints")
        for i in range(len(values)):
            self.data[i] = values[i]

    def __dealloc__(self):
        free(self.data)


cdef int64_t milliseconds(double seconds) except? -1:
    """Return whole milliseconds, at least 1 for any positive time."""
    if not 0 < seconds < 1e12:
        raise errors.InvalidArgument(f"a time limit must be positive and finite, not {seconds!r} seconds")
    return <int64_t> (seconds * 1000 + 0.999)


# dtype code -> (bits of the exponent, bits of the mantissa, the largest finite pattern)
cdef dict SMALL_FLOATS = {
    ncclFloat16: (5, 10, 0x7BFF),
    ncclBfloat16: (8, 7, 0x7F7F),
    ncclFloat8e4m3: (4, 3, 0x7E),       # the "fn" kind: no infinity, 0x7F is NaN
    ncclFloat8e5m2: (5, 2, 0x7B),
}
# dtype code -> the struct module's letter, in the standard form: the native one lets a float
# overflow to infinity
cdef dict WIDE_TYPES = {
    ncclInt8: "=b", ncclUint8: "=B", ncclInt32: "=i", ncclUint32: "=I", ncclInt64: "=q", ncclUint64: "=Q",
    ncclFloat32: "=f", ncclFloat64: "=d",
}


cdef int small_float_bits(double value, int exponent_bits, int mantissa_bits, int largest) except -1:
    """Return the bits of a float64 rounded to a narrow format, to nearest, ties to even.

    It is rounded once, since two roundings could differ. Subnormals included. Raises OverflowError
    for a finite value past the largest, and for an infinity where the format has none.
    """
    cdef int bias = (1 << (exponent_bits - 1)) - 1
    cdef int sign = (1 << (exponent_bits + mantissa_bits)) if copysign(1.0, value) < 0 else 0
    cdef bint has_infinity = largest & ((1 << mantissa_bits) - 1) == (1 << mantissa_bits) - 1
    if isnan(value):
        return sign | ((1 << (exponent_bits + mantissa_bits)) - 1)
    if isinf(value):
        if not has_infinity:
            raise OverflowError("no infinity")
        return sign | (largest + 1)
    exponent = max(frexp(value)[1] - 1, 1 - bias) if value else 1 - bias
    # For normal numbers the rounded integer holds the hidden bit, which counts the exponent up by
    # one.
    bits = ((exponent + bias - 1) << mantissa_bits) + round(ldexp(abs(value), mantissa_bits - exponent))
    if bits > largest:
        raise OverflowError("too large")
    return sign | bits


cdef bytes scalar_bytes(object value, int dtype):
    """Return the bytes of a number in a dtype, as NCCL reads a host-immediate scalar."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("it is no number")
        if dtype in SMALL_FLOATS:
            exponent_bits, mantissa_bits, largest = SMALL_FLOATS[dtype]
            bits = small_float_bits(float(value), exponent_bits, mantissa_bits, largest)
            return bits.to_bytes(2 if exponent_bits + mantissa_bits > 7 else 1, sys.byteorder)
        if dtype in (ncclFloat32, ncclFloat64):
            return struct.pack(WIDE_TYPES[dtype], float(value))
        if dtype in WIDE_TYPES:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            return struct.pack(WIDE_TYPES[dtype], index(value))
    except (OverflowError, struct.error, TypeError, ValueError) as error:
        name = next(name for name, code in DTYPES.items() if code == dtype)
        raise errors.InvalidArgument(f"{value!r} can't be stored as {name}: {error}") from error
    raise errors.InvalidArgument(f"{dtype} is no dtype code; they are 0 to {ncclNumTypes - 1}")
