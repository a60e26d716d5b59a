// Rows of the embedding table, scaled.
//
//   formula   x[t, :] = round(table[token_ids[t], :] * scale); rows with slot -1 become 0
//   operands  x (T, HIDDEN) scalar_t; token_ids, slots (T) int32; table (V, HIDDEN) scalar_t; row-major
//   constants HIDDEN: elements of a row, a multiple of 8
//   launch    grid T, block 128, no shared memory
//   numerics  float32 product, rounded once
//   oracle    NumpyOps.embed
//   source    original
//   layout    a block a row, 16 bytes a thread: rows of the table lie anywhere, each is read whole
#if !defined(HIDDEN)
#error "a constant is not defined"
#endif
#include "copy.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

DEVICE uint32_t scaled(uint32_t pair, float scale) {
  const float2 v = unpack2(pair);
  return pack2(v.x * scale, v.y * scale);
}

extern "C" __global__ void __launch_bounds__(128)
    KERNEL(embed)(scalar_t* __restrict__ x, const int32_t* token_ids, const int32_t* slots,
                  const scalar_t* __restrict__ table, float scale) {
  pdl_begin();
  const int64_t row = blockIdx.x;
  const bool used = slots[row] >= 0;
  const scalar_t* source = table + static_cast<int64_t>(used ? token_ids[row] : 0) * HIDDEN;
  for (int column = threadIdx.x * 8; column < HIDDEN; column += 128 * 8) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (used) {
      v = load16_streamed(source + column);
      v = make_uint4(scaled(v.x, scale), scaled(v.y, scale), scaled(v.z, scale), scaled(v.w, scale));
    }
    store16(x + row * HIDDEN + column, v);
  }
}
