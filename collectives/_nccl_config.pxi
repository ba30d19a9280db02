# NCCL's versioned struct of a communicator's settings, filled from a dict for the version that is loaded.

# NCCL keeps the addresses of some strings, commName's for one, as long as a communicator or its
# children live: each text that was passed is kept, once.
cdef dict texts = {}


cdef size_t fill_config(ncclConfig_t* config, object settings, Library library) except 0:
    """Set every field of a config from ``settings``, or to "undefined"; return the struct's size.

    It is the size in the loaded version, where the struct ends at the first newer field.
    """
    cdef char* base = <char*> config
    cdef size_t end = sizeof(config[0])
    cdef const collEntry_t* field = collConfigFields
    cdef bytes text
    cdef object value
    if not isinstance(settings, dict):
        raise errors.InvalidArgument(f"config must be a dict of ncclConfig_t fields, not {type(settings).__name__}")
    left = dict(settings)
    names = []
    while field.name is not NULL:
        name = field.name.decode()
        names.append(name)
        value = left.pop(name, None)
        if field.since > library.version:
            if value is not None:
                raise errors.InvalidArgument(
                    f"ncclConfig_t.{name} came with NCCL {format_version(field.since)}; the library at {library.path} "
                    f"is {format_version(library.version)}")
            end = min(end, (field.offset + 7) & ~<size_t> 7)
        try:
            if field.kind == c's':
                (<const char**> (base + field.offset))[0] = NULL
                if value is not None:
                    text = value.encode() if isinstance(value, str) else value
                    text = texts.setdefault(text, text)
                    (<const char**> (base + field.offset))[0] = text
            else:
                (<int*> (base + field.offset))[0] = NCCL_CONFIG_UNDEF_INT if value is None else index(value)
        except (TypeError, OverflowError) as error:
            raise errors.InvalidArgument(f"ncclConfig_t.{name} can't be {value!r}: {error}") from error
        field += 1
    if left:
        raise errors.InvalidArgument(
            f"ncclConfig_t has no field {', '.join(map(repr, left))}; its fields are {', '.join(names)}")
    return end


@cython.internal
cdef class _Config:
    """An ``ncclConfig_t``."""
    cdef ncclConfig_t c

    def __cinit__(self, Library library not None, settings):
        self.c.size = fill_config(&self.c, settings, library)
        self.c.magic = NCCL_API_MAGIC
        self.c.version = min(library.version, NCCL_VERSION_CODE)
