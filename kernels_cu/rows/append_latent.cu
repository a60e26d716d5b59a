// Normalises the latents of rows, and stores those of keys and values with the rotated part of the key in the slot's pages.
//
//   formula   q_latent[t, :] = rms_norm(latents[t, :A]) q_norm, A = Q_RANK, C = KV_RANK, R = ROPE_DIM;
//             page[0 : C] = rms_norm(latents[t, A : A + C]) kv_norm, page[C :] = rope(latents[t, A + C :]) by the row's position,
//             in split halves; page stands for the row at locations[t] in the pages of the row's slot
//   operands  q_latent (T, A), latents (T, A + C + R), pages (P, 1, 64, C + R) scalar_t; q_norm (A), kv_norm (C) scalar_t; rope
//             (2, max_context, R / 2) scalar_t: cos, sin; positions, locations (null: positions), slots (T) int32, slot -1:
//             nothing goes to a page; block_tables (B, pages_per_sequence) int32
//   constants Q_RANK: elements of the queries' latent. KV_RANK: those of the keys' and values' latent. ROPE_DIM: rotated elements.
//             All multiples of 16
//   launch    grid (T, 2), block 256, at most 64 bytes of static shared memory
//   numerics  float32; each thread's squares in order, then lanes, then warps; rounded once
//   oracle    NumpyOps.append_latent
//   source    arXiv 2405.04434; RMSNorm arXiv 1910.07467, RoPE arXiv 2104.09864
//   layout    one block for each latent of a row, which it holds in registers between its only read and its only write
#if !defined(Q_RANK) || !defined(KV_RANK) || !defined(ROPE_DIM)
#error "a constant is not defined"
#endif
#include "norm_row.cuh"

static_assert(Q_RANK % 16 == 0 && KV_RANK % 16 == 0 && ROPE_DIM % 16 == 0, "the latents' sizes must be multiples of 16");

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(append_latent)(scalar_t* __restrict__ q_latent, scalar_t* __restrict__ pages, const scalar_t* latents,
                          const scalar_t* __restrict__ q_norm, const scalar_t* __restrict__ kv_norm,
                          const scalar_t* __restrict__ rope, const int* positions, const int* locations,
                          const int* slots, const int* block_tables, int pages_per_sequence, int max_context, float eps) {
  pdl_begin();
  constexpr int kCached = KV_RANK + ROPE_DIM, kHalf = ROPE_DIM / 2;
  const int64_t row = blockIdx.x;
  const scalar_t* from = latents + row * (Q_RANK + kCached);
  if (blockIdx.y == 0) {
    normalise_row<Q_RANK>(q_latent + row * Q_RANK, from, q_norm, eps);
    return;
  }
  const int slot = slots[row];
  if (slot < 0) return;
  const int position = positions[row], location = locations == nullptr ? position : locations[row];
  const int page = block_tables[static_cast<int64_t>(slot) * pages_per_sequence + location / kPageTokens];
  scalar_t* to = pages + (static_cast<int64_t>(page) * kPageTokens + location % kPageTokens) * kCached;
  normalise_row<KV_RANK>(to, from + Q_RANK, kv_norm, eps);
  if (threadIdx.x >= kHalf) return;
  const scalar_t* shared_key = from + Q_RANK + KV_RANK + threadIdx.x;
  const float first = to_float(shared_key[0]), second = to_float(shared_key[kHalf]);
  const int64_t angle = static_cast<int64_t>(position) * kHalf + threadIdx.x;
  const float c = to_float(rope[angle]), s = to_float(rope[static_cast<int64_t>(max_context) * kHalf + angle]);
  to[KV_RANK + threadIdx.x] = from_float(first * c - second * s);
  to[KV_RANK + kHalf + threadIdx.x] = from_float(second * c + first * s);
}
