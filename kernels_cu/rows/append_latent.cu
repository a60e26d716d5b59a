// append_latent: the latents of rows normalised; those of keys and values, with the rotated part of the key, go to their pages.
//
//   formula   q_latent[t, :] = rms_norm(latents[t, :A]) q_norm, A = Q_RANK, C = KV_RANK, R = ROPE_DIM;
//             page[0 : C] = rms_norm(latents[t, A : A + C]) kv_norm, page[C :] = rope(latents[t, A + C :]) of the row's position
//             in split halves, page being the row at location t of the pages of the row's slot
//   operands  q_latent (T, A), latents (T, A + C + R), pages (P, 1, 64, C + R) scalar_t; q_norm (A), kv_norm (C) scalar_t; rope
//             (2, max_context, R / 2) scalar_t: cos, sin; positions, locations (null: positions), slots (T) int32, slot -1:
//             nothing goes to a page; block_tables (B, pages_per_sequence) int32
//   constants Q_RANK: elements of the queries' latent. KV_RANK: of the keys' and values'. ROPE_DIM: elements that are rotated.
//             All multiples of 16, at most 2048, ROPE_DIM 512
//   launch    grid (T, 2), block 256, 32 bytes of static shared memory
//   numerics  float32; each thread's squares in order, then lanes, then warps; rounded once
//   oracle    NumpyOps.append_latent
//   source    arXiv 2405.04434; RMSNorm arXiv 1910.07467, RoPE arXiv 2104.09864
//   layout    a block for each latent of a row, 8 elements a thread, between their only read and their only write. In a step of at
//             most 64 rows (is_step) the product before lets this kernel start behind its own wait: what the rows are, and where
//             theirs lie, is read before pdl_wait
#if !defined(Q_RANK) || !defined(KV_RANK) || !defined(ROPE_DIM)
#error "a constant is not defined"
#endif
#include "norm_row.cuh"

static_assert(Q_RANK % 16 == 0 && KV_RANK % 16 == 0 && ROPE_DIM % 16 == 0, "the latents' sizes must be multiples of 16");
static_assert(Q_RANK <= 8 * kThreads && KV_RANK <= 8 * kThreads && ROPE_DIM <= 2 * kThreads, "a thread has 8 elements at most");

// Eight elements of a row a thread: out = rms_norm(x) norm, of which `norm` is the thread's part.
template <int COLUMNS>
DEVICE void normalise(scalar_t* out, const scalar_t* x, uint4 norm, float eps) {
  __shared__ float shared[kThreads / 32];
  const int column = threadIdx.x * 8;
  const uint4 v = column < COLUMNS ? load16(x + column) : make_uint4(0, 0, 0, 0);
  const float sum = squares(v.x) + squares(v.y) + squares(v.z) + squares(v.w);
  const float scale = 1.0f / sqrtf(block_sum(sum, shared) / COLUMNS + eps);
  if (column < COLUMNS)
    store16(out + column, make_uint4(normalised(v.x, norm.x, scale), normalised(v.y, norm.y, scale),
                                     normalised(v.z, norm.z, scale), normalised(v.w, norm.w, scale)));
}

DEVICE uint4 own_part(const scalar_t* norm, int columns) {
  return static_cast<int>(threadIdx.x) * 8 < columns ? load16_past_l1(norm + threadIdx.x * 8) : make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(append_latent)(scalar_t* __restrict__ q_latent, scalar_t* __restrict__ pages, const scalar_t* latents,
                          const scalar_t* __restrict__ q_norm, const scalar_t* __restrict__ kv_norm,
                          const scalar_t* __restrict__ rope, const int* positions, const int* locations,
                          const int* slots, const int* block_tables, int pages_per_sequence, int max_context, float eps,
                          int is_step) {
  pdl_launch_dependents();
  if (!is_step) pdl_wait();  // the kernel before this one may itself still wait
  constexpr int kCached = KV_RANK + ROPE_DIM, kHalf = ROPE_DIM / 2;
  const int64_t row = blockIdx.x;
  const scalar_t* from = latents + row * (Q_RANK + kCached);
  if (blockIdx.y == 0) {
    const uint4 norm = own_part(q_norm, Q_RANK);
    pdl_wait();
    normalise<Q_RANK>(q_latent + row * Q_RANK, from, norm, eps);
    return;
  }
  const uint4 norm = own_part(kv_norm, KV_RANK);
  const int slot = load_now(slots + row), position = load_now(positions + row);
  const int location = locations == nullptr ? position : load_now(locations + row);
  if (slot < 0) {
    pdl_wait();
    return;
  }
  const int page = load_now(block_tables + static_cast<int64_t>(slot) * pages_per_sequence + location / kPageTokens);
  scalar_t* to = pages + (static_cast<int64_t>(page) * kPageTokens + location % kPageTokens) * kCached;
  float c = 0.0f, s = 0.0f, first = 0.0f, second = 0.0f;
  if (threadIdx.x < kHalf) {
    const int64_t angle = static_cast<int64_t>(position) * kHalf + threadIdx.x;
    c = to_float(load_now(rope + angle)), s = to_float(load_now(rope + static_cast<int64_t>(max_context) * kHalf + angle));
  }
  pdl_wait();
  const scalar_t* shared_key = from + Q_RANK + KV_RANK + threadIdx.x;
  if (threadIdx.x < kHalf) first = to_float(load_now(shared_key)), second = to_float(load_now(shared_key + kHalf));
  normalise<KV_RANK>(to, from + Q_RANK, norm, eps);
  if (threadIdx.x >= kHalf) return;
  to[KV_RANK + threadIdx.x] = from_float(first * c - second * s);
  to[KV_RANK + kHalf + threadIdx.x] = from_float(second * c + first * s);
}
