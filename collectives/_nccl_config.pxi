# NCCL's versioned structs, filled from dicts for the version that is loaded.

# NCCL keeps the addresses of some strings, commName's for one, as long as a communicator or its
# children live: each text that was passed is kept, once.
cdef dict texts = {}


cdef size_t fill(char* base, size_t size, const collEntry_t* field, object settings, Library library,
                 str struct_name) except 0:
    """Set every field of a struct from ``settings``, or to "undefined"; return the struct's size.

    ``base``: the struct's address. The size is that of the struct in the loaded version, which ends
    where the first newer field begins.
    """
    cdef size_t end = size
    cdef bytes text
    cdef object value
    if not isinstance(settings, dict):
        raise errors.InvalidArgument(f"config must be a dict of {struct_name} fields, not {type(settings).__name__}")
    left = dict(settings)
    names = []
    while field.name is not NULL:
        name = field.name.decode()
        names.append(name)
        value = left.pop(name, None)
        if field.since > library.version:
            if value is not None:
                raise errors.InvalidArgument(
                    f"{struct_name}.{name} came with NCCL {format_version(field.since)}; the library at {library.path} "
                    f"is {format_version(library.version)}")
            end = min(end, (field.offset + 7) & ~<size_t> 7)
        try:
            if field.kind == c's':
                (<const char**> (base + field.offset))[0] = NULL
                if value is not None:
                    text = value.encode() if isinstance(value, str) else value
                    text = texts.setdefault(text, text)
                    (<const char**> (base + field.offset))[0] = text
            elif field.kind == c'u':
                (<uint64_t*> (base + field.offset))[0] = 0 if value is None else index(value)
            else:
                (<int*> (base + field.offset))[0] = NCCL_CONFIG_UNDEF_INT if value is None else index(value)
        except (TypeError, OverflowError) as error:
            raise errors.InvalidArgument(f"{struct_name}.{name} can't be {value!r}: {error}") from error
        field += 1
    if left:
        raise errors.InvalidArgument(
            f"{struct_name} has no field {', '.join(map(repr, left))}; its fields are {', '.join(names)}")
    return end


@cython.internal
cdef class _Config:
    """An ``ncclConfig_t``."""
    cdef ncclConfig_t c

    def __cinit__(self, Library library not None, settings):
        self.c.size = fill(<char*> &self.c, sizeof(self.c), collConfigFields, settings, library, "ncclConfig_t")
        self.c.magic = NCCL_API_MAGIC
        self.c.version = min(library.version, NCCL_VERSION_CODE)


@cython.internal
cdef class _CallConfig:
    """An ``ncclCollConfig_t`` for one call of a function that the library must have."""
    cdef ncclCollConfig_t c

    def __cinit__(self, Library library not None, settings):
        if isinstance(settings, dict):
            settings = {"forceAlgSelection": 1, **settings}     # as in NCCL_COLLCONFIG_INITIALIZER
        self.c.size = fill(<char*> &self.c, sizeof(self.c), collCollConfigFields, settings, library, "ncclCollConfig_t")
        self.c.magic = NCCL_API_MAGIC
        self.c.version = min(library.version, NCCL_VERSION_CODE)


cdef inline _CallConfig tuning(Comm comm, object config, void* function, const char* name):
    """Return the config of one call, None for none.

    ``function``: the Config variant of the C function, which takes it.
    """
    if config is None:
        return None
    comm.library.need(function, name)
    return _CallConfig(comm.library, config)
