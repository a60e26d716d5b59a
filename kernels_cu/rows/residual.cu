// Adds the output of a projection to the residual stream.
//
//   formula   x[t, c] = round(x[t, c] + scale * (y[t, c] + bias[c]))
//   operands  x, y (T, HIDDEN) scalar_t; bias (HIDDEN) scalar_t or null; row-major
//   constants HIDDEN: elements of a row, a multiple of 8
//   launch    grid ceil(T * HIDDEN / 8 / 256), block 256, no shared memory
//   numerics  float32, rounded once
//   oracle    NumpyOps.project_residual after its product
//   source    original
//   layout    16 bytes a thread: memory-bound, each element is touched once
#if !defined(HIDDEN)
#error "a constant is not defined"
#endif
#include "copy.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

DEVICE uint32_t added(uint32_t pair, uint32_t addend, uint32_t bias, float scale) {
  const float2 v = unpack2(pair), y = unpack2(addend), b = unpack2(bias);
  return pack2(v.x + scale * (y.x + b.x), v.y + scale * (y.y + b.y));
}

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(residual_add)(scalar_t* x, const scalar_t* y, const scalar_t* __restrict__ bias, int num_rows, float scale) {
  pdl_begin();
  constexpr int kPieces = HIDDEN / 8;
  const int64_t piece = blockIdx.x * static_cast<int64_t>(256) + threadIdx.x;
  if (piece >= static_cast<int64_t>(num_rows) * kPieces) return;
  const uint4 v = load16(x + piece * 8), w = load16_streamed(y + piece * 8);
  uint4 b = make_uint4(0, 0, 0, 0);
  if (bias) b = load16(bias + piece % kPieces * 8);
  store16(x + piece * 8, make_uint4(added(v.x, w.x, b.x, scale), added(v.y, w.y, b.y, scale),
                                    added(v.z, w.z, b.z, scale), added(v.w, w.w, b.w, scale)));
}
