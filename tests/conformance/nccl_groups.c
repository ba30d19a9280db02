/* NCCL's functions that a group needs, over the host engine, without its own ones: a group can't be cancelled here, as in
   NCCL itself. HOST is the engine's path. */
#include <dlfcn.h>
#include <stddef.h>

typedef struct {
  char internal[128];
} unique_id;

static void* host(const char* name) {
  static void* library;
  if (!library) library = dlopen(HOST, RTLD_NOW | RTLD_LOCAL);
  return dlsym(library, name);
}

#define FORWARD(name, parameters, arguments) \
  int name parameters { return ((int(*) parameters)host(#name))arguments; }

FORWARD(ncclGetVersion, (int* version), (version))
FORWARD(ncclGetUniqueId, (unique_id * id), (id))
FORWARD(ncclCommInitRank, (void** comm, int ranks, unique_id id, int rank), (comm, ranks, id, rank))
FORWARD(ncclCommDestroy, (void* comm), (comm))
FORWARD(ncclCommAbort, (void* comm), (comm))
FORWARD(ncclGroupStart, (void), ())
FORWARD(ncclGroupEnd, (void), ())
FORWARD(ncclAllReduce, (const void* send, void* recv, size_t count, int type, int op, void* comm, void* stream),
        (send, recv, count, type, op, comm, stream))

const char* ncclGetErrorString(int code) { return ((const char* (*)(int))host("ncclGetErrorString"))(code); }
const char* ncclGetLastError(void* comm) { return ((const char* (*)(void*))host("ncclGetLastError"))(comm); }
