# The functions of a torch.cuda.MemPool over ncclMemAlloc, which are C alone: see _nccl_pool.h.

cdef extern from "_nccl_pool.h" nogil:
    ctypedef ncclResult_t (*collMemAlloc_t)(void** ptr, size_t size) noexcept nogil
    ctypedef ncclResult_t (*collMemFree_t)(void* ptr) noexcept nogil
    void collPoolUse(collMemAlloc_t alloc, collMemFree_t release)
    bint collPoolHolds(const void* address)


# Names of the exported functions in this extension's file, for CUDAPluggableAllocator.
POOL_FUNCTIONS = ("collPoolAlloc", "collPoolFree")


def use_in_pools(Library library not None):
    """Let the pools' later segments come from a library. C: ``ncclMemAlloc``, ``ncclMemFree``."""
    library.need(<void*> library.api.ncclMemAlloc, "ncclMemAlloc")
    library.need(<void*> library.api.ncclMemFree, "ncclMemFree")
    collPoolUse(library.api.ncclMemAlloc, library.api.ncclMemFree)


def pool_holds(size_t address):
    """Return whether an address lies in a segment of a pool."""
    return bool(collPoolHolds(<const void*> address))
