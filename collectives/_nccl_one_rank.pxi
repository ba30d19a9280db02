# NCCL's reductions over one rank, which are a copy or, with a factor, a kernel of their own
# (src/device/onerank.cu). That kernel knows no float8, and before NCCL 2.29.7 it leaves out the last
# elements of some counts: each of its blocks takes count // blocks elements, rounded up to 16 bytes,
# which misses up to 31 elements where nothing is left to round up.

cdef enum:
    ONE_RANK_WHOLE_SINCE = 22907
    ONE_RANK_BLOCK_BYTES = 16384
    ONE_RANK_BLOCKS = 32

cdef size_t* ITEMSIZES = [1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1]     # by ncclDataType_t


cdef inline int know_size(Comm comm) except -1:
    """Ask for the number of ranks where the call that opened the communicator didn't say it.

    A closed communicator isn't asked: the call that follows refuses it by its own name.
    """
    if comm.known_size < 0 and not comm.library.is_host and comm.comm is not NULL and comm.forks == collForks:
        comm.known_size = comm.ask(comm.api.ncclCommCount, "ncclCommCount")
    return 0


cdef inline ncclComm_t enter_reduction(Comm comm, void* function, const char* name) except NULL:
    """Enter a call that needs `one_rank`."""
    know_size(comm)
    return comm.enter(function, name)


cdef inline bint is_nccl_of_one(Comm comm) noexcept:
    return comm.known_size == 1 and not comm.library.is_host


cdef inline int plain_op(Comm comm, int op) noexcept:
    """Return the op to call NCCL with: the average over one rank is a sum, which NCCL copies."""
    return ncclSum if op == ncclAvg and is_nccl_of_one(comm) else op


cdef struct OneRank:
    ncclRedOp_t op      # to call NCCL with
    size_t rest         # how many of the last elements the call leaves out, which a second call makes
    size_t done         # bytes before these


cdef OneRank one_rank(Comm comm, size_t count, int dtype, int op) noexcept:
    """Return how a reduction is to be called; with several ranks, and on the host engine, as it is.

    After `enter_reduction`.
    """
    cdef OneRank how
    cdef size_t blocks, pack, each
    how.op, how.rest, how.done = <ncclRedOp_t> plain_op(comm, op), 0, 0
    if op <= ncclAvg or not is_nccl_of_one(comm) or comm.library.version >= ONE_RANK_WHOLE_SINCE or count == 0:
        return how
    if not 0 <= dtype <= ncclFloat8e5m2:
        return how
    blocks = (count * ITEMSIZES[dtype] + ONE_RANK_BLOCK_BYTES - 1) // ONE_RANK_BLOCK_BYTES
    if blocks > <size_t> ONE_RANK_BLOCKS:
        blocks = ONE_RANK_BLOCKS
    pack = 16 // ITEMSIZES[dtype]
    each = (count // blocks + pack - 1) // pack * pack
    if each * blocks < count:
        how.rest, how.done = count - each * blocks, each * blocks * ITEMSIZES[dtype]
    return how


cdef int check_factor_of_one(Comm comm, int dtype) except -1:
    """Raise for a pre-multiplied sum that NCCL refuses over one rank."""
    know_size(comm)
    if is_nccl_of_one(comm) and dtype in (ncclFloat8e4m3, ncclFloat8e5m2):
        raise errors.InvalidArgument("NCCL has no pre-multiplied sum of float8 over one rank: multiply the array",
                                     op="create_premul_sum", rank=0)
    return 0
