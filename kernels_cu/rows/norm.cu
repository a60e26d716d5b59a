// RMSNorm of rows.
//
//   formula   out[t, c] = round(x[t, c] / sqrt(mean(x[t, :]^2) + eps) * weight[c])
//   operands  out, x (T, HIDDEN) scalar_t; weight (HIDDEN) scalar_t; row-major
//   constants HIDDEN: elements of a row, a multiple of 8
//   launch    grid T, block 256, 32 bytes of static shared memory
//   numerics  float32: each thread's squares in order, then lanes, then warps; rounded once
//   oracle    NumpyOps.rms_norm
//   source    arXiv 1910.07467
//   layout    one block for each row, which it holds in registers between its only read and its only write; 16 bytes a thread and turn
#if !defined(HIDDEN)
#error "a constant is not defined"
#endif
#include "norm_row.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(rms_norm)(scalar_t* __restrict__ out, const scalar_t* x, const scalar_t* __restrict__ weight, float eps) {
  pdl_begin();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * HIDDEN;
  normalise_row<HIDDEN>(out + start, x + start, weight, eps);
}
