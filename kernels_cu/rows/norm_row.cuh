// RMSNorm of a row by a block of 256 threads, which holds the row in registers between its only read and its only write.
#pragma once
#include "copy.cuh"
#include "norm_values.cuh"

constexpr int kThreads = 256;

// Returns the sum of the block's values to every thread, added in an order that only the block's size decides. `shared` has a float for
// each warp.
DEVICE float block_sum(float value, float* shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; warp++) total += shared[warp];
  __syncthreads();
  return total;
}

// Computes out[c] = round(x[c] / sqrt(mean(x^2) + eps) * weight[c]) for COLUMNS columns, a multiple of 8. All threads. x was written by
// an earlier kernel of the step, which the caller has waited for.
template <int COLUMNS>
DEVICE void normalise_row(scalar_t* out, const scalar_t* x, const scalar_t* weight, float eps) {
  constexpr int kTurns = (COLUMNS / 8 + kThreads - 1) / kThreads;
  __shared__ float shared[kThreads / 32];
  uint4 held[kTurns];
  float sum = 0.0f;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    held[turn] = column < COLUMNS ? load16(x + column) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    sum += squares(held[turn]);
  }
  const float scale = 1.0f / sqrtf(block_sum(sum, shared) / COLUMNS + eps);
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    if (column < COLUMNS) {
      const uint4 v = held[turn], w = load16(weight + column);
      store16(out + column, normalised(v, w, scale));
    }
  }
}
