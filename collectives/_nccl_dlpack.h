// The part of DLPack 1.x by which the binding reads arrays, after dlpack.h (github.com/dmlc/dlpack, Apache-2.0):
// tensors of any library that has an exchange table, with nothing of that library at compile time.
#pragma once
#include <stdint.h>

enum { COLL_DL_MAJOR = 1 };  // of what is below; the table's first field says which one a library has
enum { collDLCPU = 1 };  // of the types of devices; 2 is CUDA
enum {
  collDLInt = 0,
  collDLUInt = 1,
  collDLFloat = 2,
  collDLBfloat = 4,
  collDLFloat8_e4m3fn = 10,
  collDLFloat8_e5m2 = 12
};

typedef struct {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;  // of the dtype, with the two fields that follow
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
} collDLTensor_t;

typedef struct collDLExchange {
  uint32_t major;
  uint32_t minor;
  struct collDLExchange* older;  // a table of an earlier major version, or NULL
  void* allocate;
  void* export_managed;
  void* import_managed;
  int (*tensor_of)(void* object, collDLTensor_t* out);  // 0, or -1 and a Python exception; nothing is allocated
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
} collDLExchange_t;
