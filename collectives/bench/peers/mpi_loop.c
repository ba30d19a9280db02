/* One rank of an MPI job that python -m collectives.bench measures: it waits on a socket for what to do, and sleeps there
 * while others are measured.
 *
 *     mpi_loop LIBRARY SOCKET        LIBRARY: path of libmpi.so; SOCKET: name of an abstract Unix socket
 *
 * No mpi.h is needed: the library is loaded at run time and the few things used are declared here, for both ABIs. Open
 * MPI's handles are addresses of objects that it exports; those of MPICH and of all that share its ABI (Intel MPI, MVAPICH)
 * are the integers below, in an int. Either is passed as intptr_t: a callee that takes an int reads the low half of the
 * register or of the 8-byte stack slot, on every 64-bit little-endian Linux ABI.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

typedef intptr_t handle;

static int (*mpi_init)(int *, char ***);
static int (*mpi_finalize)(void);
static int (*mpi_comm_rank)(handle, int *);
static int (*mpi_comm_size)(handle, int *);
static int (*mpi_library_version)(char *, int *);
static int (*mpi_barrier)(handle);
static int (*mpi_allreduce)(const void *, void *, int, handle, handle, handle);
static int (*mpi_reduce)(const void *, void *, int, handle, handle, int, handle);
static int (*mpi_reduce_scatter_block)(const void *, void *, int, handle, handle, handle);
static int (*mpi_allgather)(const void *, int, handle, void *, int, handle, handle);
static int (*mpi_alltoall)(const void *, int, handle, void *, int, handle, handle);
static int (*mpi_bcast)(void *, int, handle, int, handle);
static int (*mpi_gather)(const void *, int, handle, void *, int, handle, int, handle);
static int (*mpi_scatter)(const void *, int, handle, void *, int, handle, int, handle);
static int (*mpi_sendrecv)(const void *, int, handle, int, int, void *, int, handle, int, int, handle, void *);

static const struct { const char *name; void *at; } functions[] = {
    {"MPI_Init", &mpi_init}, {"MPI_Finalize", &mpi_finalize}, {"MPI_Comm_rank", &mpi_comm_rank},
    {"MPI_Comm_size", &mpi_comm_size}, {"MPI_Get_library_version", &mpi_library_version}, {"MPI_Barrier", &mpi_barrier},
    {"MPI_Allreduce", &mpi_allreduce}, {"MPI_Reduce", &mpi_reduce},
    {"MPI_Reduce_scatter_block", &mpi_reduce_scatter_block}, {"MPI_Allgather", &mpi_allgather},
    {"MPI_Alltoall", &mpi_alltoall}, {"MPI_Bcast", &mpi_bcast}, {"MPI_Gather", &mpi_gather},
    {"MPI_Scatter", &mpi_scatter}, {"MPI_Sendrecv", &mpi_sendrecv},
};

/* In the order of _TYPES and _REDUCTIONS of mpi.py. */
static const struct { const char *open_mpi; int mpich; } types[] = {
    {"ompi_mpi_int8_t", 0x4c000137},   {"ompi_mpi_uint8_t", 0x4c00013b}, {"ompi_mpi_int32_t", 0x4c000439},
    {"ompi_mpi_uint32_t", 0x4c00043d}, {"ompi_mpi_int64_t", 0x4c00083a}, {"ompi_mpi_uint64_t", 0x4c00083e},
    {"ompi_mpi_float", 0x4c00040a},    {"ompi_mpi_double", 0x4c00080b},
};
static const struct { const char *open_mpi; int mpich; } reductions[] = {
    {"ompi_mpi_op_sum", 0x58000003}, {"ompi_mpi_op_prod", 0x58000004},
    {"ompi_mpi_op_max", 0x58000001}, {"ompi_mpi_op_min", 0x58000002},
};
#define OPEN_MPI_IN_PLACE ((void *)1)
#define MPICH_IN_PLACE ((void *)-1)
#define OPEN_MPI_STATUS_IGNORE ((void *)0)
#define MPICH_STATUS_IGNORE ((void *)1)

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, SENDRECV };
enum { STOP, PREPARE, TURN, CHECK, RELEASE };

struct command { /* COMMAND of mpi_protocol.py; each rank gets its own */
    int32_t what, op, type, reduction, root, in_place, segments;
    int64_t count, send, recv, total, send_at, recv_at; /* elements */
    int64_t element; /* bytes */
    int64_t arrays; /* through which turns with fresh data go; all else is done in one */
};
struct plan { int64_t warmup, calls, batches, fresh; };
struct segment { int64_t start, length; };

static void *library;
static int channel, rank, size, is_open_mpi;
static handle world;
static void *in_place, *status_ignore;

static struct command job;
static int64_t period; /* elements of a pattern */
static char *send_memory, *recv_memory, *input, *patterns;
static char *send_at, *recv_at; /* of the array in use */
static char *whole_at; /* what a reset poisons */
static int64_t whole_bytes, next, written; /* of the arrays: the next one, and how many have a result of a fresh turn */
static struct segment *segments;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "mpi_loop: %s: %s\n", what, why);
    _exit(1);
}

static void read_all(void *to, size_t n) {
    for (char *at = to; n;) {
        ssize_t got = read(channel, at, n);
        if (got <= 0) _exit(1); /* the bench has ended: so does the job */
        at += got, n -= got;
    }
}

static void write_all(const void *from, size_t n) {
    for (const char *at = from; n;) {
        ssize_t put = write(channel, at, n);
        if (put <= 0) _exit(1);
        at += put, n -= put;
    }
}

static void *memory(size_t n) {
    void *at = NULL;
    if (posix_memalign(&at, 64, n ? n : 1)) fail("memory", "there is none left"); /* as torch aligns */
    return at;
}

static void *symbol(const char *name) {
    void *at = dlsym(library, name);
    if (!at) fail(name, "is not in the library");
    return at;
}

static void load(const char *path) {
    library = dlopen(path, RTLD_NOW | RTLD_GLOBAL); /* Open MPI's plug-ins look for its symbols */
    if (!library) fail(path, dlerror());
    for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i) {
        void *at = symbol(functions[i].name);
        memcpy(functions[i].at, &at, sizeof at);
    }
    is_open_mpi = dlsym(library, "ompi_mpi_comm_world") != NULL;
    world = is_open_mpi ? (handle)symbol("ompi_mpi_comm_world") : 0x44000000;
    in_place = is_open_mpi ? OPEN_MPI_IN_PLACE : MPICH_IN_PLACE;
    status_ignore = is_open_mpi ? OPEN_MPI_STATUS_IGNORE : MPICH_STATUS_IGNORE;
}

static handle type_of(int i) { return is_open_mpi ? (handle)symbol(types[i].open_mpi) : types[i].mpich; }
static handle reduction_of(int i) { return is_open_mpi ? (handle)symbol(reductions[i].open_mpi) : reductions[i].mpich; }

static void call(handle type, handle op) {
    const int n = (int)job.count, root = job.root, alone = job.in_place, at_root = rank == root;
    int code;
    switch (job.op) {
        case ALL_REDUCE: code = mpi_allreduce(alone ? in_place : send_at, recv_at, n, type, op, world); break;
        case REDUCE: /* in place only the root has a result */
            code = alone && !at_root ? mpi_reduce(send_at, NULL, n, type, op, root, world)
                                     : mpi_reduce(alone ? in_place : send_at, recv_at, n, type, op, root, world);
            break;
        case REDUCE_SCATTER: /* MPI puts the part at the start of the buffer, where NCCL has it at part `rank` */
            code = mpi_reduce_scatter_block(alone ? in_place : send_at, recv_at, n, type, op, world);
            break;
        case ALL_GATHER: code = mpi_allgather(alone ? in_place : send_at, n, type, recv_at, n, type, world); break;
        case ALL_TO_ALL: code = mpi_alltoall(send_at, n, type, recv_at, n, type, world); break;
        case BROADCAST: code = mpi_bcast(recv_at, n, type, root, world); break;
        case GATHER: code = mpi_gather(alone && at_root ? in_place : send_at, n, type, recv_at, n, type, root, world); break;
        case SCATTER: code = mpi_scatter(send_at, n, type, alone && at_root ? in_place : recv_at, n, type, root, world); break;
        default:
            code = mpi_sendrecv(send_at, n, type, (rank + 1) % size, 0, recv_at, n, type, (rank + size - 1) % size, 0,
                                world, status_ignore);
    }
    if (code) fail("MPI", "a call failed");
}

static void release(void) {
    free(send_memory), free(recv_memory), free(input), free(patterns), free(segments);
    send_memory = recv_memory = input = patterns = NULL;
    segments = NULL;
}

static size_t stride_of(int64_t elements) { /* buffers.py's: whole cache lines, and one between */
    return job.arrays > 1 ? (elements * job.element + 63) / 64 * 64 + 64 : elements * job.element;
}

static void select_array(int64_t i) {
    whole_at = recv_memory + i * stride_of(job.in_place ? job.total : job.recv);
    whole_bytes = (job.in_place ? job.total : job.recv) * job.element;
    send_at = job.in_place ? whole_at + job.send_at * job.element : send_memory + i * stride_of(job.send);
    recv_at = whole_at + (job.in_place ? job.recv_at * job.element : 0);
}

static void write_input(void) {
    for (int64_t i = 0; i < job.send; i += period) {
        int64_t n = job.send - i < period ? job.send - i : period;
        memcpy(send_at + i * job.element, input, n * job.element);
    }
}

static void reset(void) {
    memset(whole_at, 0xFE, whole_bytes);
    write_input();
}

/* After the job: PERIOD, the input's pattern, and each segment of the result with its pattern. */
static void prepare(void) {
    release();
    read_all(&period, sizeof period);
    size_t bytes = period * job.element;
    input = memory(bytes);
    read_all(input, bytes);
    segments = memory(job.segments * sizeof *segments);
    patterns = memory(job.segments * bytes);
    for (int i = 0; i < job.segments; ++i) {
        read_all(&segments[i], sizeof *segments);
        read_all(patterns + i * bytes, bytes);
    }
    recv_memory = memory(job.arrays * stride_of(job.in_place ? job.total : job.recv));
    send_memory = job.in_place ? NULL : memory(job.arrays * stride_of(job.send));
    for (int64_t i = job.arrays; i-- > 0;) select_array(i), reset();
    next = written = 0;
}

static int64_t wrong(void) { /* of the array in use */
    int64_t found = 0;
    for (int s = 0; s < job.segments; ++s) {
        const char *pattern = patterns + s * period * job.element;
        for (int64_t j = 0; j < segments[s].length; j += period) {
            int64_t n = segments[s].length - j < period ? segments[s].length - j : period;
            const char *got = recv_at + (segments[s].start + j) * job.element;
            if (!memcmp(got, pattern, n * job.element)) continue;
            for (int64_t k = 0; k < n; ++k)
                found += memcmp(got + k * job.element, pattern + k * job.element, job.element) != 0;
        }
    }
    return found;
}

static double now(void) { /* us */
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e6 + at.tv_nsec * 1e-3;
}

static void next_array(void) { /* of a turn with fresh data: written, not timed */
    select_array(next);
    if (written < ++next) written = next;
    if (next == job.arrays) next = 0;
    write_input();
}

static int64_t check(void) {
    int64_t found = 0;
    for (int64_t i = 0; i < written; ++i) select_array(i), found += wrong();
    written = 0;
    select_array(next);
    reset();
    mpi_barrier(world); /* a rank may not send into an array that its owner still poisons: one-sided transports */
    call(type_of(job.type), reduction_of(job.reduction));
    return found + wrong();
}

static void turn(void) {
    struct plan plan;
    read_all(&plan, sizeof plan);
    double *times = memory(plan.batches * sizeof *times);
    handle type = type_of(job.type), op = reduction_of(job.reduction);
    mpi_barrier(world);
    if (plan.fresh) {
        for (int64_t i = 0; i < plan.warmup; ++i) next_array(), mpi_barrier(world), call(type, op);
        for (int64_t b = 0; b < plan.batches; ++b) {
            times[b] = 0;
            for (int64_t i = 0; i < plan.calls; ++i) {
                next_array(), mpi_barrier(world);
                double before = now();
                call(type, op);
                times[b] += (now() - before) / plan.calls;
            }
        }
        write_all(times, plan.batches * sizeof *times);
        free(times);
        return;
    }
    for (int64_t i = 0; i < plan.warmup; ++i) call(type, op);
    double before = now();
    for (int64_t b = 0; b < plan.batches; ++b) {
        for (int64_t i = 0; i < plan.calls; ++i) call(type, op);
        double after = now();
        times[b] = (after - before) / plan.calls;
        before = after;
    }
    write_all(times, plan.batches * sizeof *times);
    free(times);
}

int main(int argc, char **argv) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct { int32_t rank, size; char version[256]; } hello = {0};
    char version[8192] = "";
    int length;
    if (argc != 3 || strlen(argv[2]) > sizeof address.sun_path - 2) fail("usage", "mpi_loop LIBRARY SOCKET");
    load(argv[1]);
    if (mpi_init(&argc, &argv)) fail("MPI_Init", "failed");
    mpi_comm_rank(world, &rank);
    mpi_comm_size(world, &size);
    mpi_library_version(version, &length);
    channel = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memcpy(address.sun_path + 1, argv[2], strlen(argv[2]));
    if (connect(channel, (struct sockaddr *)&address, sizeof(sa_family_t) + 1 + strlen(argv[2])))
        fail(argv[2], "nobody listens");
    hello.rank = rank, hello.size = size;
    memcpy(hello.version, version, sizeof hello.version - 1);
    write_all(&hello, sizeof hello);
    for (;;) {
        struct command got;
        int64_t answer = 0;
        read_all(&got, sizeof got);
        if (got.what == STOP) break;
        if (got.what == PREPARE) job = got, prepare();
        if (got.what == TURN) { turn(); continue; }
        if (got.what == RELEASE) release();
        if (got.what == CHECK) answer = check();
        write_all(&answer, sizeof answer);
    }
    return mpi_finalize() != 0;
}
