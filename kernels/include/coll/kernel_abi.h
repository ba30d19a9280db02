// Kernel arguments: one struct for each kernel, read by the launchers of the host and of CUDA.
//
// A kernel's work is cut into tiles, and any thread or block may do any tile: what a tile writes
// depends on nothing else. Plain types in a fixed layout; collectives/kernels/abi.py declares the
// same structs, and a test compares the two.
#ifndef COLL_KERNEL_ABI_H_
#define COLL_KERNEL_ABI_H_

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long size_t;
#else
#include <stddef.h>
#include <stdint.h>
#endif

#define COLL_TILE 4096   // elements of a tile; a tile never spans two tensors
#define COLL_LANES 1024  // partial sums in a tile, see tile.h

// Bytes of a CUDA kernel's arguments where it reads a table: the struct, and behind it the table's
// rows if there is room for all of them; the struct's pointer to them is NULL then. Every GPU and
// CUDA takes 4,096.
#define COLL_ARGUMENTS 4080

// Element types, with NCCL's numbers; COLL_OPAQUE + w: elements of w bytes that are only ever
// copied.
enum {
  COLL_I8 = 0, COLL_U8 = 1, COLL_I32 = 2, COLL_U32 = 3, COLL_I64 = 4, COLL_U64 = 5, COLL_F16 = 6, COLL_F32 = 7, COLL_F64 = 8,
  COLL_BF16 = 9, COLL_E4M3 = 10, COLL_E5M2 = 11, COLL_OPAQUE = 32
};

// Work of a kernel: the number of its tiles, and where each tile writes its statistics (NULL: none
// wanted).
typedef struct {
  int64_t tiles;
  double* sums;       // [tiles] sums of squares of the values before they are rounded
  uint32_t* bad;      // [tiles] counts of values that are not finite, or that overflow when they are rounded
} coll_work;

// The kernels, as collKernelRun numbers them.
typedef enum {
  collKernelCast = 0,        // coll_cast_args: pack and unpack
  collKernelFinish = 1,      // coll_finish_args: the tiles' statistics into one sum and one count
  collKernelReduce = 2,      // coll_reduce_args
  collKernelQuantize = 3,    // coll_quantize_args
  collKernelDequantize = 4,  // coll_dequantize_args
  collKernelRequantize = 5,  // coll_requantize_args
  collKernelSgd = 6,         // coll_sgd_args
  collKernelAdam = 7,        // coll_adam_args
  collKernelCount = 8
} coll_kernel;

// ---- Cast: the tensors of a table to or from one flat buffer.
typedef struct {
  void* data;
  int64_t count;       // elements; 0 is allowed, and has no tile
  int64_t offset;      // of the first element in the flat buffer, in its elements
  int64_t first_tile;  // tiles of all tensors before this one
  int32_t type;
  int32_t padding;     // elements of the flat buffer behind the last one that pack sets to 0
} coll_tensor;

enum {
  COLL_FROM_FLAT = 1,  // unpack
  COLL_ADD = 2,        // add to what is in the destination
  COLL_MEASURE = 4     // statistics of the tensors alone: there is no flat buffer, and nothing is written
};

typedef struct {
  coll_work work;
  const coll_tensor* tensors;
  int64_t count;          // tensors
  void* flat;
  const float* scale_at;  // NULL, or one more factor, read when the kernel runs
  double scale;
  int32_t flat_type;
  int32_t flags;
} coll_cast_args;

typedef struct {
  coll_work work;          // tiles == 1: the work is done by one block
  int64_t shares;          // the number of tiles that have written sums and bad
  double* sum_of_squares;  // one element
  int64_t* nonfinite;      // one element
} coll_finish_args;

// ---- Reduce: n arrays into one, in the order of the table.
enum { COLL_SUM = 0, COLL_PROD = 1, COLL_MAX = 2, COLL_MIN = 3, COLL_AVG = 4 };  // with NCCL's numbers

typedef struct {
  coll_work work;
  const void* const* sources;  // [n] addresses, in the memory of the device
  int64_t n;                   // from 1
  void* out;                   // may be one of the sources
  int64_t count;               // elements of out and of each source
  const float* scale_at;       // NULL, or one more factor, read when the kernel runs
  double scale;                // 1 for integers
  int32_t op;
  int32_t source_type;
  int32_t out_type;            // another one than source_type for floating types only
  int32_t unused;
} coll_reduce_args;

// ---- Quantize, dequantize, requantize. The layout of a wire buffer: quantize.h.

// How one wire buffer is written.
typedef struct {
  void* wire;
  void* residual;   // NULL: none; else `count` elements, read, and overwritten with what the wire doesn't carry
  int64_t count;    // elements
  uint64_t seed;
  int64_t position;  // of the first element in the tensor whose part this is: picks the random bits
  int32_t format;    // element type of the payload: COLL_I8, COLL_E4M3, COLL_E5M2 (scaled), COLL_F16 or COLL_BF16
  int32_t block;     // elements a scale: 128, 256 or 512
  int32_t residual_type;  // COLL_F32 or COLL_BF16
  int32_t stochastic;     // 0: round to nearest even, 1: at random
} coll_encoder;

// Which wire buffers are summed, in order, and what becomes of the sum.
typedef struct {
  const void* const* wires;  // NULL: only `wire`
  const void* wire;
  int64_t wire_count;
  int64_t count;          // elements of each
  const float* scale_at;  // NULL, or one more factor, read when the kernel runs
  double scale;
  int32_t format;
  int32_t block;
  int32_t average_over;  // > 0: the sum is divided by it, before it is scaled
  int32_t unused;
} coll_decoder;

typedef struct {
  coll_work work;
  coll_encoder to;
  const void* source;
  const float* scale_at;
  double scale;
  int32_t source_type;
  int32_t unused;
} coll_quantize_args;

typedef struct {
  coll_work work;
  coll_decoder from;
  void* out;
  int32_t out_type;
  int32_t flags;  // COLL_ADD
} coll_dequantize_args;

typedef struct {
  coll_work work;
  coll_decoder from;
  coll_encoder to;  // of as many elements; its wire may be one of those that are read
} coll_requantize_args;

// ---- Optimizers.
// A number that may be a device scalar: `value`, plus what lies at `at` when the kernel runs (NULL:
// nothing).
typedef struct {
  const void* at;
  double value;
  int64_t type;  // of what lies at `at`: COLL_F32, COLL_F64 or COLL_I64
} coll_number;

// A parameter with its gradient and state. All arrays have `count` elements; states and masters are
// fp32, fp64 where the parameter is fp64.
typedef struct {
  void* param;
  const void* grad;
  void* master;        // NULL, or the values of which the parameter is a rounded copy that is only written
  void* first;         // the momentum buffer (NULL: no momentum), or exp_avg
  void* second;        // exp_avg_sq
  void* largest;       // max_exp_avg_sq; NULL: no amsgrad
  coll_number step;    // this step's number, from 1
  int64_t count;       // elements; 0 is allowed, and has no tile
  int64_t first_tile;  // tiles of all parameters before this one
  int64_t position;    // of the first element, for the random bits
  int32_t param_type;
  int32_t grad_type;
} coll_parameter;

enum {
  COLL_MAXIMIZE = 1,
  COLL_DIVIDE = 2,      // by grad_scale
  COLL_STOCHASTIC = 4,  // rounding to bf16
  COLL_NESTEROV = 8,
  COLL_DECOUPLED = 16   // AdamW's weight decay
};

// Arguments that all optimizers have. The gradient's factor is clip * grad_scale. Where `nonfinite` isn't 0
// nothing is written.
typedef struct {
  const coll_parameter* parameters;
  int64_t count;                     // parameters
  coll_number lr;
  coll_number grad_scale;
  coll_number clip;
  coll_number nonfinite;
  double weight_decay;
  uint64_t seed;
  int64_t flags;
} coll_update;

typedef struct {
  coll_work work;
  coll_update update;
  double momentum;
  double dampening;
} coll_sgd_args;

typedef struct {
  coll_work work;
  coll_update update;
  double beta1;
  double beta2;
  double eps;
} coll_adam_args;

#if !defined(__CUDACC_RTC__)
#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)
// Run a kernel on host memory. threads > 0: a big one is shared out over that many threads, the
// caller among them; < 0: over at most -threads, and no more than there are cores idle at this
// moment. Blocks until it is done. Returns 0; 1 for a kernel that isn't there or arguments of
// another size than this library was built with; 2 where the system refused memory.
int collKernelRun(int kernel, const void* args, size_t nbytes, int threads);
// sizeof the arguments of a kernel, 0 for one that isn't there.
size_t collKernelArgsSize(int kernel);
// Use the kernels of an instruction set from now on: "baseline", "avx2", "avx512", or NULL for
// COLLECTIVES_ISA and else the widest there is. Returns its name, or NULL where this processor
// doesn't have it. The host engine chooses by the variable, too, each time that a communicator is
// made; the choice is the process's.
const char* collKernelIsa(const char* name);
#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
#endif
#endif
