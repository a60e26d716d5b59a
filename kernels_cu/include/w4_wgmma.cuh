// Tensor core products of four warps together (wgmma, sm_90a): weights in registers, x in shared memory as eight tokens x 8 k.
//
// The sums are the same, bit for bit, as those of mma.cuh's products; four times as many come out in the same time.
#pragma once
#include "wgmma.cuh"

#define WGMMA_COMMA ,
#define W4_WGMMA(N, REGISTERS, SUMS, A, B, C, D, E, F)                                                              \
  __device__ __forceinline__ void multiply_tile(float (&c)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" F ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                \
                 "k16.f32." WGMMA_TYPES " {" REGISTERS "}, {%" A ", %" B ", %" C ", %" D "}, %" E                   \
                 ", p, 1, 1, 0;\n}"                                                                                 \
                 : SUMS                                                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));          \
  }
W4_WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", WGMMA_SUMS4(c, 0) WGMMA_COMMA WGMMA_SUMS4(c, 4), "8", "9", "10", "11", "12", "13")
W4_WGMMA(32, WGMMA_R0, WGMMA_SUMS16(c, 0), "16", "17", "18", "19", "20", "21")
W4_WGMMA(64, WGMMA_R0 ", " WGMMA_R1, WGMMA_SUMS32(c, 0), "32", "33", "34", "35", "36", "37")
#undef W4_WGMMA

// 16 k of x at `shared`: [2][token tile][8 tokens] 16 bytes. With IN_UNIFORM a shuffle tells the compiler that all lanes have the same
// address: it then keeps this and the descriptors after it in uniform registers, and adds nothing lane by lane.
template <int NT, bool IN_UNIFORM>
__device__ __forceinline__ uint64_t tokens_descriptor(uint32_t shared) {
  if (IN_UNIFORM) shared = __shfl_sync(0xFFFFFFFFu, shared, 0);
  return static_cast<uint64_t>(128 >> 4) << 32 | static_cast<uint64_t>(NT * 128 >> 4) << 16 | (shared & 0x3FFFF) >> 4;
}
