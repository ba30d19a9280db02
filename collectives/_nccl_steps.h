// The recorded steps of a collective over several nodes, run one after the other without Python: the engine's collectives
// inside of the node, messages over the connections to other nodes, and the kernels that reduce what has come.
#ifndef COLLECTIVES_NCCL_STEPS_H_
#define COLLECTIVES_NCCL_STEPS_H_

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

#include "_nccl_table.h"
#include "coll/kernel_abi.h"

#ifndef POLLRDHUP  // needs _GNU_SOURCE before the first header
#define POLLRDHUP 0x2000
#endif

enum {
  collStepReduceScatter,
  collStepReduce,
  collStepAllGather,
  collStepBroadcast,
  collStepGroupStart,
  collStepGroupEnd,
  collStepBeginMessages,  // send and receive as far as it is possible at once
  collStepEndMessages,    // wait until all of them have come
  collStepKernel,
  collStepKinds
};

// An address is one of the run's bases, by its number in the upper 8 bits, and an offset; base 0 is 0.
typedef struct {
  int kind, dtype, op, root;  // of a kernel: `op` is its number, `root` the place of its arguments
  size_t count;
  uint64_t from, to;
  int first, end;  // its messages; of a kernel: its sources
} collStep_t;

typedef struct {
  int flow;  // the number of its connection
  int receives;
  uint64_t at;
  size_t nbytes;
} collMessage_t;

// What the messages of one exchange are doing on a connection.
typedef struct {
  int socket;
  int sending, receiving;  // the messages that are under way, -1: none is left
  size_t sent, received;   // bytes of them
  int hung_up;             // the peer sends nothing more
  int lost;                // why nothing can be sent while there may be more to receive, or why it failed
} collFlow_t;

typedef int (*collKernelRun_t)(int kernel, const void* args, size_t nbytes, int threads);

typedef struct {
  collStep_t* steps;
  collMessage_t* messages;
  coll_reduce_args* kernels;
  uint64_t* sources;        // addresses as in steps
  const void** at_sources;  // the same in this run
  collFlow_t* flows;
  struct pollfd* polls;
  int num_steps, num_messages, num_kernels, num_sources, num_flows;
  // Of this run.
  const collTable_t* api;
  ncclComm_t comm;
  collKernelRun_t run_kernel;
  int threads;
  uint64_t bases[4];
  int64_t limit_ns;     // of a wait for messages; negative: none
  int64_t deadline_ns;  // of the wait that is under way, 0: none is
  int64_t look_ns;      // when to look for signals again, between steps
  int now, end;         // steps
  int open;             // messages [first, end) of the exchange under way
  int open_end;
  // Why it stopped.
  ncclResult_t code;
  int flow;
} collSteps_t;

// How `collRunSteps` ends.
enum { collStepsDone, collStepsEngine, collStepsKernel, collStepsLost, collStepsTimeout, collStepsSignals };

#define COLL_SIGNALS_NS 100000000  // between looks for signals
#define COLL_CLOSED (-1)              // in place of an errno: the peer has closed the connection

static int64_t collStepsNow(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static char* collStepAddress(const collSteps_t* run, uint64_t at) {
  return (char*)(uintptr_t)(run->bases[at >> 56 & 3] + (at & (((uint64_t)1 << 56) - 1)));
}

// The first of the exchange's messages from a place on that goes this way over a connection, -1: none.
static int collNextMessage(const collSteps_t* run, int from, int flow, int receives) {
  for (int i = from; i < run->open_end; ++i)
    if (run->messages[i].flow == flow && run->messages[i].receives == receives && run->messages[i].nbytes) return i;
  return -1;
}

static int collFlowDone(const collFlow_t* flow) { return flow->sending < 0 && flow->receiving < 0; }

static void collSend(collSteps_t* run, collFlow_t* flow, int number, int* moved) {
  while (flow->sending >= 0) {
    const collMessage_t* message = &run->messages[flow->sending];
    ssize_t sent = -1;
    if (flow->hung_up) errno = COLL_CLOSED;
    else sent = send(flow->socket, collStepAddress(run, message->at) + flow->sent, message->nbytes - flow->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      // What the peer has sent before can be received yet.
      flow->lost = errno;
      flow->sending = -1;
      return;
    }
    *moved = 1;
    flow->sent += (size_t)sent;
    if (flow->sent < message->nbytes) continue;
    flow->sent = 0;
    flow->sending = collNextMessage(run, flow->sending + 1, number, 0);
  }
}

static void collReceive(collSteps_t* run, collFlow_t* flow, int number, int* moved) {
  while (flow->receiving >= 0) {
    const collMessage_t* message = &run->messages[flow->receiving];
    ssize_t received = recv(flow->socket, collStepAddress(run, message->at) + flow->received, message->nbytes - flow->received, MSG_DONTWAIT);
    if (received <= 0) {
      if (received < 0 && errno == EINTR) continue;
      if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (!flow->lost) flow->lost = received < 0 ? errno : COLL_CLOSED;
      flow->receiving = -1;
      return;
    }
    *moved = 1;
    flow->received += (size_t)received;
    if (flow->received < message->nbytes) continue;
    flow->received = 0;
    flow->receiving = collNextMessage(run, flow->receiving + 1, number, 1);
  }
}

// Send and receive on all connections what can be without blocking. Returns whether one of them is lost: run->flow.
static int collMoveFlows(collSteps_t* run, int* moved) {
  for (int i = 0; i < run->num_flows; ++i) {
    collFlow_t* flow = &run->flows[i];
    if (collFlowDone(flow)) continue;
    collSend(run, flow, i, moved);
    collReceive(run, flow, i, moved);
    if (!flow->lost || flow->receiving >= 0) continue;
    run->flow = i;
    return 1;
  }
  return 0;
}

static int collBeginMessages(collSteps_t* run, const collStep_t* step) {
  int moved = 0;
  run->open = step->first;
  run->open_end = step->end;
  for (int i = 0; i < run->num_flows; ++i) {
    collFlow_t* flow = &run->flows[i];
    flow->sent = flow->received = 0;
    flow->sending = collNextMessage(run, run->open, i, 0);
    flow->receiving = collNextMessage(run, run->open, i, 1);
    flow->hung_up = flow->lost = 0;
    struct pollfd look = {flow->socket, POLLRDHUP, 0};
    // It has left this call: it can't have all from this rank.
    if (flow->sending >= 0 && poll(&look, 1, 0) > 0) flow->hung_up = 1;
  }
  return collMoveFlows(run, &moved) ? collStepsLost : collStepsDone;
}

static int collWaitForFlows(collSteps_t* run, int64_t* now) {
  int count = 0;
  for (int i = 0; i < run->num_flows; ++i) {
    collFlow_t* flow = &run->flows[i];
    if (collFlowDone(flow)) continue;
    run->polls[count].fd = flow->socket;
    run->polls[count].revents = 0;
    run->polls[count++].events = (short)((flow->receiving >= 0 ? POLLIN : 0) | (flow->sending >= 0 ? POLLOUT | POLLRDHUP : 0));
  }
  int64_t slice = COLL_SIGNALS_NS;
  if (run->limit_ns >= 0 && run->deadline_ns - *now < slice) slice = run->deadline_ns > *now ? run->deadline_ns - *now : 0;
  int found = poll(run->polls, (nfds_t)count, (int)((slice + 999999) / 1000000));
  for (int i = 0, k = 0; found > 0 && i < run->num_flows; ++i) {
    if (collFlowDone(&run->flows[i])) continue;
    if (run->polls[k++].revents & (POLLHUP | POLLERR | POLLRDHUP)) run->flows[i].hung_up = 1;
  }
  *now = collStepsNow();
  return found;
}

static int collEndMessages(collSteps_t* run) {
  int64_t now = collStepsNow();
  if (!run->deadline_ns) run->deadline_ns = now + (run->limit_ns > 0 ? run->limit_ns : 0);
  for (;;) {
    int moved = 0, left = 0;
    if (collMoveFlows(run, &moved)) return collStepsLost;
    for (int i = 0; i < run->num_flows; ++i) left += !collFlowDone(&run->flows[i]);
    if (!left) break;
    if (moved || collWaitForFlows(run, &now) > 0) continue;
    if (run->limit_ns < 0 || now < run->deadline_ns) return collStepsSignals;  // look for them, and go on
    run->flow = -1;
    for (int i = 0; i < run->num_flows; ++i) {  // the first that hasn't sent all
      if (collFlowDone(&run->flows[i])) continue;
      if (run->flow < 0 || (run->flows[i].receiving >= 0 && run->flows[run->flow].receiving < 0)) run->flow = i;
    }
    return collStepsTimeout;
  }
  run->deadline_ns = 0;
  return collStepsDone;
}

static ncclResult_t collCallEngine(const collSteps_t* run, const collStep_t* step) {
  const collTable_t* api = run->api;
  const void* from = collStepAddress(run, step->from);
  void* to = collStepAddress(run, step->to);
  ncclDataType_t dtype = (ncclDataType_t)step->dtype;
  ncclRedOp_t op = (ncclRedOp_t)step->op;
  switch (step->kind) {
    case collStepReduceScatter: return api->ncclReduceScatter(from, to, step->count, dtype, op, run->comm, NULL);
    case collStepReduce: return api->ncclReduce(from, to, step->count, dtype, op, step->root, run->comm, NULL);
    case collStepAllGather: return api->ncclAllGather(from, to, step->count, dtype, run->comm, NULL);
    case collStepBroadcast: return api->ncclBroadcast(from, to, step->count, dtype, step->root, run->comm, NULL);
    case collStepGroupStart: return api->ncclGroupStart();
    default: return api->ncclGroupEnd();
  }
}

static int collRunKernel(collSteps_t* run, const collStep_t* step) {
  coll_reduce_args args = run->kernels[step->root];
  args.sources = run->at_sources + step->first;
  args.out = collStepAddress(run, step->to);
  return run->run_kernel(step->op, &args, sizeof args, run->threads);
}

// Run the steps from `now` to `end`. What stopped it is where `now` is; after collStepsSignals it can be called again.
static int collRunSteps(collSteps_t* run, const int* interrupted) {
  int in_group = 0, how;
  for (; run->now < run->end; ++run->now) {
    const collStep_t* step = &run->steps[run->now];
    if (!in_group && collStepsNow() >= run->look_ns) {
      run->look_ns = collStepsNow() + COLL_SIGNALS_NS;
      return collStepsSignals;
    }
    switch (step->kind) {
      case collStepBeginMessages:
        if ((how = collBeginMessages(run, step)) != collStepsDone) return how;
        break;
      case collStepEndMessages:
        if ((how = collEndMessages(run)) != collStepsDone) return how;
        break;
      case collStepKernel:
        if ((run->code = (ncclResult_t)collRunKernel(run, step)) != 0) return collStepsKernel;
        break;
      default:
        run->code = collCallEngine(run, step);
        if (step->kind == collStepGroupStart) in_group = 1;
        if (step->kind == collStepGroupEnd) in_group = 0;
        // What is refused inside of a group fails the group, at its end.
        if (!in_group && (run->code != ncclSuccess || *interrupted)) return collStepsEngine;
    }
  }
  return collStepsDone;
}

// Begin a run: its bases are set. Sources are looked up here, once.
static void collBeginSteps(collSteps_t* run, int first, int end) {
  for (int i = 0; i < run->num_sources; ++i) run->at_sources[i] = collStepAddress(run, run->sources[i]);
  run->now = first;
  run->end = end;
  run->deadline_ns = 0;
  run->look_ns = collStepsNow() + COLL_SIGNALS_NS;
}

#endif
