// Activations for tensor core products of four warps together (multiply_tile of wgmma.cuh, sm_90a): weights in registers, x in
// shared memory as eight tokens x 8 k.
//
// The sums are the same, bit for bit, as those of mma.cuh's products; four times as many come out in the same time.
#pragma once
#include "wgmma.cuh"

// 16 k of x at `shared`: [2][token tile][8 tokens] 16 bytes. With IN_UNIFORM a shuffle tells the compiler that all lanes have the same
// address: it then keeps this and the descriptors after it in uniform registers, and adds nothing lane by lane.
template <int NT, bool IN_UNIFORM>
DEVICE uint64_t tokens_descriptor(uint32_t shared) {
  if (IN_UNIFORM) shared = __shfl_sync(0xFFFFFFFFu, shared, 0);
  return static_cast<uint64_t>(128 >> 4) << 32 | static_cast<uint64_t>(NT * 128 >> 4) << 16 | (shared & 0x3FFFF) >> 4;
}
