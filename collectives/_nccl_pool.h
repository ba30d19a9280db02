// The two functions by which torch's CUDAPluggableAllocator makes the segments of a torch.cuda.MemPool: they call the
// ncclMemAlloc and ncclMemFree of a loaded library. torch finds them by name in this extension's file and calls them from
// any thread, mostly without the GIL: nothing here is Python's.
#ifndef COLLECTIVES_NCCL_POOL_H_
#define COLLECTIVES_NCCL_POOL_H_

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "coll/nccl_abi.h"

typedef ncclResult_t (*collMemAlloc_t)(void** ptr, size_t size);
typedef ncclResult_t (*collMemFree_t)(void* ptr);

typedef struct collSegment {
  char* base;
  size_t size;
  collMemFree_t free;  // of the library that made it
  struct collSegment* next;
} collSegment_t;

static pthread_mutex_t collPoolLock = PTHREAD_MUTEX_INITIALIZER;
static collMemAlloc_t collPoolMemAlloc = NULL;
static collMemFree_t collPoolMemFree = NULL;
static collSegment_t* collPoolSegments = NULL;

#define COLL_EXPORTED __attribute__((visibility("default")))

// The library of later segments.
static void collPoolUse(collMemAlloc_t alloc, collMemFree_t release) {
  pthread_mutex_lock(&collPoolLock);
  collPoolMemAlloc = alloc;
  collPoolMemFree = release;
  pthread_mutex_unlock(&collPoolLock);
}

// Whether an address lies in a segment.
static int collPoolHolds(const void* address) {
  const char* at = (const char*)address;
  int found = 0;
  pthread_mutex_lock(&collPoolLock);
  for (collSegment_t* each = collPoolSegments; each && !found; each = each->next) found = each->base <= at && at < each->base + each->size;
  pthread_mutex_unlock(&collPoolLock);
  return found;
}

// NULL, which torch takes for a GPU without memory, where the library gives none. device is the current one.
COLL_EXPORTED void* collPoolAlloc(ssize_t size, int device, void* stream) {
  (void)device, (void)stream;
  collSegment_t* segment = (collSegment_t*)malloc(sizeof *segment);
  void* base = NULL;
  if (!segment) return NULL;
  pthread_mutex_lock(&collPoolLock);
  collMemAlloc_t alloc = collPoolMemAlloc;
  segment->free = collPoolMemFree;
  pthread_mutex_unlock(&collPoolLock);
  if (!alloc || alloc(&base, (size_t)size) != ncclSuccess || !base) {
    free(segment);
    return NULL;
  }
  segment->base = (char*)base;
  segment->size = (size_t)size;
  pthread_mutex_lock(&collPoolLock);
  segment->next = collPoolSegments;
  collPoolSegments = segment;
  pthread_mutex_unlock(&collPoolLock);
  return base;
}

COLL_EXPORTED void collPoolFree(void* ptr, ssize_t size, int device, void* stream) {
  (void)size, (void)device, (void)stream;
  collSegment_t* found = NULL;
  pthread_mutex_lock(&collPoolLock);
  for (collSegment_t** each = &collPoolSegments; *each; each = &(*each)->next) {
    if ((*each)->base == (char*)ptr) {
      found = *each;
      *each = found->next;
      break;
    }
  }
  pthread_mutex_unlock(&collPoolLock);
  if (!found || found->free(ptr) != ncclSuccess) fprintf(stderr, "collectives: the pool's memory at %p could not be freed\n", ptr);
  free(found);
}

#endif
