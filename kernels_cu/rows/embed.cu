// Copies the tokens' rows of the embedding table, scaled.
//
//   formula   x[t, :] = round(table[token_ids[t], :] * scale); rows with slot -1 become 0
//   operands  x (T, HIDDEN) scalar_t; token_ids, slots (T) int32; table (V, HIDDEN) scalar_t; row-major
//   constants HIDDEN: elements of a row, a multiple of 8
//   launch    grid T, block 128, no shared memory
//   numerics  float32 product, rounded once
//   oracle    NumpyOps.embed
//   source    original
//   layout    one block for each row, 16 bytes for each thread: rows of the table lie anywhere, each is read whole
#if !defined(HIDDEN)
#error "a constant is not defined"
#endif
#include "copy.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

constexpr int kThreads = 128;

DEVICE uint32_t scaled(uint32_t pair, float scale) {
  const float2 v = unpack2(pair);
  return pack2(v.x * scale, v.y * scale);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(embed)(scalar_t* __restrict__ x, const int32_t* token_ids, const int32_t* slots,
                  const scalar_t* __restrict__ table, float scale) {
  pdl_wait();
  pdl_launch_dependents();  // after the wait: qkv_attention reads early what the kernels before this one wrote
  const int64_t row = blockIdx.x;
  const int slot = load_now(slots + row), token = load_now(token_ids + row);  // both loads are in flight together
  const bool used = slot >= 0;
  const scalar_t* source = table + static_cast<int64_t>(used ? token : 0) * HIDDEN;
  constexpr int kPieces = (HIDDEN / 8 + kThreads - 1) / kThreads;
  uint4 pieces[kPieces];  // all loads start before the first store, since each takes the latency of memory
#pragma unroll
  for (int i = 0; i < kPieces; i++) {
    const int column = (threadIdx.x + i * kThreads) * 8;
    pieces[i] = make_uint4(0, 0, 0, 0);
    if (used && column < HIDDEN) pieces[i] = load16_streamed(source + column);
  }
#pragma unroll
  for (int i = 0; i < kPieces; i++) {
    const int column = (threadIdx.x + i * kThreads) * 8;
    const uint4 v = pieces[i];
    if (column >= HIDDEN) continue;
    store16(x + row * HIDDEN + column, make_uint4(scaled(v.x, scale), scaled(v.y, scale), scaled(v.z, scale), scaled(v.w, scale)));
  }
}
