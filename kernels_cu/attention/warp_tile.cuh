// Parts of attention kernels that do not depend on the sizes of heads: the base-2 softmax over a warp's tiles of
// scores, and the rows that a lane addresses for an ldmatrix.
#pragma once

#include "copy.cuh"
#include "fast_math.cuh"
#include "mma.cuh"

constexpr float kLog2e = 1.4426950408889634f;
// The score of a hidden key, and the maximum of a row that has seen no key. Finite, so that no difference of two is
// NaN; far apart, so that a hidden key weighs 2^-huge = 0 even there.
constexpr float kHiddenScore = -1e30f;
constexpr float kNoMaximum = -1e25f;

// Returns the maximum of `x` over the four lanes that hold one row of an accumulator tile.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// Replaces each value by its quad_max. All of them take each step together, so that their shuffles do not wait for each
// other.
template <int COUNT>
DEVICE void quad_maxima(float (&x)[COUNT]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = fmaxf(x[i], __shfl_xor_sync(0xFFFFFFFFu, x[i], distance));
}

// Returns the sum of `x` over the four lanes that hold one row of an accumulator tile.
DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// The row, and the 16-byte chunk, whose address this lane gives to an ldmatrix.x4 over a 16 x 16 block. The four 8 x 8
// matrices begin at (row, chunk), in this order. "a": (0, 0), (8, 0), (0, 1), (8, 1): the A operand, or with .trans the
// B operand of p v. "b": (0, 0), (0, 1), (8, 0), (8, 1): the B operand of q k for two tiles of 8 keys.
DEVICE int lane_row_a(int lane) { return (lane & 7) + (lane & 8); }
DEVICE int lane_chunk_a(int lane) { return lane >> 4; }
DEVICE int lane_row_b(int lane) { return (lane & 7) + ((lane >> 1) & 8); }
DEVICE int lane_chunk_b(int lane) { return (lane >> 3) & 1; }
