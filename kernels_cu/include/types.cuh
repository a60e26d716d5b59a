// The storage type of a compile unit, its conversions, kernel names, and the edges between dependent launches.
//
// One of CPMRT_BF16 and CPMRT_FP16 is defined by the compiler's command line. bf16 and fp16 are both 2 bytes.
#pragma once

// NVRTC has no <stdint.h>.
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef int int32_t;
typedef long long int64_t;

// The qualifiers of every function that kernels call.
#define DEVICE __device__ __forceinline__

// Sizes that the host knows too (a test compares them): tokens of a page of keys and values, which is also a block that
// sparse attention chooses; rows of a step; nodes of a draft tree.
constexpr int kPageTokens = 64;
constexpr int kMaxRows = 64;
constexpr int kMaxNodes = 64;

#define CPMRT_PASTE(name, suffix) name##_##suffix

// KERNEL(embed) is embed_bf16 or embed_fp16.
#if defined(CPMRT_BF16)
#include <cuda_bf16.h>
typedef __nv_bfloat16 scalar_t;
typedef __nv_bfloat162 scalar2_t;
#define KERNEL(name) CPMRT_PASTE(name, bf16)
#elif defined(CPMRT_FP16)
#include <cuda_fp16.h>
typedef __half scalar_t;
typedef __half2 scalar2_t;
#define KERNEL(name) CPMRT_PASTE(name, fp16)
#else
#error "CPMRT_BF16 or CPMRT_FP16 must be defined"
#endif

DEVICE float to_float(scalar_t x) {
#ifdef CPMRT_BF16
  return __bfloat162float(x);
#else
  return __half2float(x);
#endif
}

// Rounds to nearest even; fp16 overflow becomes infinity.
DEVICE scalar_t from_float(float x) {
#ifdef CPMRT_BF16
  return __float2bfloat16_rn(x);
#else
  return __float2half_rn(x);
#endif
}

// Unpacks a word that holds two neighbours in memory: .x is the one at the lower address.
DEVICE float2 unpack2(uint32_t word) {
#ifdef CPMRT_BF16
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
#else
  return __half22float2(reinterpret_cast<const scalar2_t&>(word));
#endif
}

DEVICE uint32_t pack2(float low, float high) {
#ifdef CPMRT_BF16
  const scalar2_t pair = __floats2bfloat162_rn(low, high);
#else
  const scalar2_t pair = __floats2half2_rn(low, high);
#endif
  return reinterpret_cast<const uint32_t&>(pair);
}

// Programmatic dependent launch: lets the next kernel of the stream start its prologue. Does nothing below sm_90. Called
// after pdl_wait, it also tells the next kernel that all before this one have finished and their writes are visible.
DEVICE void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when every kernel before this one has finished and its writes are visible; at once below sm_90, where this kernel starts no earlier.
// Pointers to what those kernels wrote must not be __restrict__: the compiler may move a load that it takes for constant before the wait.
DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Begins a kernel that has nothing to do before the wait.
DEVICE void pdl_begin() {
  pdl_launch_dependents();
  pdl_wait();
}
