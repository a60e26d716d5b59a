// Sums over a warp or a block, in an order fixed by the block size; every thread gets the result.
#pragma once
#include "types.cuh"

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  return value;
}

template <int WARPS>
DEVICE float block_sum(float value, float* shared) {
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) total += shared[warp];
  __syncthreads();
  return total;
}
