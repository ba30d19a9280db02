// A stand-in for CUDA's header: only what NVIDIA's nccl.h takes from it, so that it compiles where there is no CUDA.
#pragma once
#include <stddef.h>

#define CUDART_VERSION 12090
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
