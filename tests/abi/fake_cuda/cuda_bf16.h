// nccl.h up to 2.23 has bfloat16 only where this is defined, and uses nothing else of CUDA's header.
#pragma once
#define __CUDA_BF16_TYPES_EXIST__
