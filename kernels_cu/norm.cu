// RMSNorm of the rows of a prefill chunk.
//
//   formula   out[t, c] = round(x[t, c] / sqrt(mean(x[t, :]^2) + eps) * weight[c])
//   operands  out, x (T, HIDDEN) scalar_t; weight (HIDDEN) scalar_t; row-major
//   launch    grid T, block 256, 32 bytes of static shared memory
//   numerics  float32: each thread's squares in order, then lanes, then warps; rounded once
//   oracle    reference/ops.py rms_norm, rounded
//   source    arXiv 1910.07467
//   layout    a block a row, held in registers between its only read and its only write, 16 bytes a thread and turn
#include "copy.cuh"
#include "reduce.cuh"

#ifndef HIDDEN
#error "HIDDEN must be defined: elements of a row, a multiple of 8"
#endif
static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

constexpr int kThreads = 256;
constexpr int kTurns = (HIDDEN / 8 + kThreads - 1) / kThreads;

__device__ __forceinline__ float squares(uint32_t pair) {
  const float2 v = unpack2(pair);
  return v.x * v.x + v.y * v.y;
}

__device__ __forceinline__ uint32_t normalised(uint32_t pair, uint32_t weight, float scale) {
  const float2 v = unpack2(pair), w = unpack2(weight);
  return pack2(v.x * scale * w.x, v.y * scale * w.y);
}

// What an earlier kernel of the step wrote is not __restrict__: the compiler may move a load that it takes for one of
// a constant before pdl_wait.
extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(rms_norm)(scalar_t* __restrict__ out, const scalar_t* x, const scalar_t* __restrict__ weight,
                     float eps) {
  __shared__ float shared[kThreads / 32];
  pdl_launch_dependents();
  pdl_wait();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * HIDDEN;
  uint4 held[kTurns];
  float sum = 0.0f;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    held[turn] = column < HIDDEN ? load16(x + start + column) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    sum += squares(held[turn].x) + squares(held[turn].y) + squares(held[turn].z) + squares(held[turn].w);
  }
  const float scale = 1.0f / sqrtf(block_sum<kThreads / 32>(sum, shared) / HIDDEN + eps);
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    if (column < HIDDEN) {
      const uint4 v = held[turn], w = load16(weight + column);
      store16(out + start + column, make_uint4(normalised(v.x, w.x, scale), normalised(v.y, w.y, scale),
                                               normalised(v.z, w.z, scale), normalised(v.w, w.w, scale)));
    }
  }
}
