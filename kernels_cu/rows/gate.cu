// Normalises rows and multiplies them by the sigmoid of other rows, in place.
//
//   formula   out[t, c] = round(out[t, c] / sqrt(mean(out[t, :]^2) + eps) * norm[c] / (1 + exp(-gate[t, c])))
//   operands  out (T, HIDDEN) scalar_t, read and written; norm (HIDDEN) scalar_t or null: not normalised; gate (T, HIDDEN)
//             scalar_t or null: not multiplied; row-major
//   constants HIDDEN: elements of a row, a multiple of 8
//   launch    grid T, block 256, 32 bytes of static shared memory
//   numerics  float32: each thread's squares in order, then lanes, then warps; rounded once
//   oracle    NumpyOps.gate_rows
//   source    original
//   layout    one block for each row, which it holds in registers between its only read and its only write; 16 bytes a thread and turn
#if !defined(HIDDEN)
#error "a constant is not defined"
#endif
#include "gated.cuh"
#include "norm_row.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

// Returns a pair of elements normalised and gated, each only if it applies.
DEVICE uint32_t gate_pair(uint32_t pair, uint32_t weight, uint32_t gate, float scale, bool has_norm, bool has_gate) {
  float2 v = unpack2(pair);
  if (has_norm) {
    const float2 w = unpack2(weight);
    v.x = v.x * scale * w.x, v.y = v.y * scale * w.y;
  }
  if (has_gate) {
    const float2 g = unpack2(gate);
    v.x *= sigmoid(g.x), v.y *= sigmoid(g.y);
  }
  return pack2(v.x, v.y);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(gate_rows)(scalar_t* out, const scalar_t* __restrict__ norm, const scalar_t* gate, float eps) {
  constexpr int kTurns = (HIDDEN / 8 + kThreads - 1) / kThreads;
  __shared__ float shared[kThreads / 32];
  pdl_begin();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * HIDDEN;
  uint4 held[kTurns];
  float sum = 0.0f;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    held[turn] = column < HIDDEN ? load16(out + start + column) : make_uint4(0, 0, 0, 0);
    sum += squares(held[turn]);
  }
  const bool has_norm = norm != nullptr, has_gate = gate != nullptr;
  const float scale = has_norm ? 1.0f / sqrtf(block_sum(sum, shared) / HIDDEN + eps) : 1.0f;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    if (column >= HIDDEN) continue;
    const uint4 zero = make_uint4(0, 0, 0, 0), v = held[turn];
    const uint4 w = has_norm ? load16(norm + column) : zero, g = has_gate ? load16(gate + start + column) : zero;
    store16(out + start + column, make_uint4(gate_pair(v.x, w.x, g.x, scale, has_norm, has_gate),
                                             gate_pair(v.y, w.y, g.y, scale, has_norm, has_gate),
                                             gate_pair(v.z, w.z, g.z, scale, has_norm, has_gate),
                                             gate_pair(v.w, w.w, g.w, scale, has_norm, has_gate)));
  }
}
