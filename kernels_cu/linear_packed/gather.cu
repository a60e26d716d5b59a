// Columns of a chunk's rows in the order of a permuted weight, before a dense product.
//
//   formula   out[t, j] = x[t, permutation[j]]
//   operands  out (T, K) scalar_t; x (T, K) scalar_t row-major; permutation (K) int32; 16-byte aligned, K a multiple of 8
//   launch    grid (ceil(K / 2048), T), block 256, no shared memory
//   numerics  none: the values are moved
//   oracle    reference/ops.py linear: x[:, perm]
//   source    original
//   layout    a thread stores 16 bytes; what it gathers lies in one row of x, which the L1 holds
#include "copy.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(gather_columns)(scalar_t* __restrict__ out, const scalar_t* x, const int* __restrict__ permutation, int K) {
  pdl_begin();
  const int first = (blockIdx.x * 256 + threadIdx.x) * 8;
  if (first >= K) return;
  const int4 low = *reinterpret_cast<const int4*>(permutation + first);
  const int4 high = *reinterpret_cast<const int4*>(permutation + first + 4);
  const int columns[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  const int64_t row = static_cast<int64_t>(blockIdx.y) * K;
  __align__(16) scalar_t values[8];
#pragma unroll
  for (int e = 0; e < 8; e++) values[e] = x[row + columns[e]];
  store16(out + row + first, *reinterpret_cast<const uint4*>(values));
}
