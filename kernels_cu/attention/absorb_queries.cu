// absorb_queries: brings the queries of latent attention into the space of the latents, for the rows of a step, and appends these rows' own
// latents to the pages.
//
// queries[t, h, :C] = q[t, h, :N] up[h, :N, :],  queries[t, h, C:] = rope(q[t, h, N:]) of the row's position (split halves),
// C = KV_RANK, N = NOPE_DIM, R = ROPE_DIM: then queries . page = q . key for a page row [latent | rotated] of C + R elements;
// page[0 : C] = rms_norm(latents[t, A : A + C]) kv_norm, page[C :] = rope(latents[t, A + C :]) of the row's position, A = q_rank,
// page being the row at location t of the pages of the row's slot
//
// queries        [T, heads, C + R] scalar_t row-major
// pages          [P, 1, 64, C + R] scalar_t
// q              [T, heads * (N + R)] scalar_t row-major
// up             [heads, N + VALUE_DIM, C] scalar_t row-major
// rope           [2, max_context, R / 2] scalar_t: cos, sin
// latents        [T, A + C + R] scalar_t row-major, or null: then nothing goes to the pages; kv_norm [C] scalar_t
// positions, locations (null: positions), slots [T] int32: a row of slot -1 has no position, and nothing of it goes to a page;
//                block_tables [B, pages_per_sequence] int32
// constants      KV_RANK: elements of a latent, a multiple of 256. NOPE_DIM: elements of a query before those that are rotated, a multiple
//                of 16. ROPE_DIM: elements that are rotated, at most 512. VALUE_DIM: elements of a value
// grid           (heads, or with latents heads + 1, b), b at most T: block y takes the rows
//                y, y + b and so on; block 256; 8 * C * 4 bytes of static shared memory
// launched after two products, of which the first releases the second only after its own wait, when all that earlier kernels have written
//                is there. So positions, slots and block tables are read before pdl_wait. latent_attention is released at once, and reads
//                old keys before its own wait
// numerics       float32 sums, over a warp's rows of up in order, then over the warps in order; the squares of a norm over a lane's
//                elements in order, then over the lanes; rounded once
// oracle         NumpyOps.decode_latent_attention
// source         arXiv 2405.04434; RMSNorm arXiv 1910.07467, RoPE arXiv 2104.09864
// layout         A block holds its head's part of up in registers, read before the wait: 16 bytes of each of N / 8 rows a thread, past the
//                L1, because ptxas moves reads of constants behind the wait. The blocks of x = heads append latents, a row for each warp at a time
#if !defined(KV_RANK) || !defined(NOPE_DIM) || !defined(ROPE_DIM) || !defined(VALUE_DIM)
#error "a constant is not defined"
#endif
#include "append_latents.cuh"

constexpr int kThreads = 256, kWarps = 8;
constexpr int kWarpRows = NOPE_DIM / kWarps;
constexpr int kSpans = KV_RANK / 256;  // spans of 256 columns, 8 for each lane
constexpr int kHalf = ROPE_DIM / 2;
static_assert(KV_RANK % 256 == 0 && NOPE_DIM % (2 * kWarps) == 0 && kHalf <= kThreads, "sizes that the kernel does not take");

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(absorb_queries)(scalar_t* __restrict__ queries, scalar_t* pages, const scalar_t* q, const scalar_t* __restrict__ up,
                           const scalar_t* __restrict__ rope, const scalar_t* latents, const scalar_t* __restrict__ kv_norm,
                           const int* positions, const int* locations, const int* slots, const int* block_tables,
                           int num_heads, int num_rows, int max_context, int q_rank, int pages_per_sequence, float eps) {
  __shared__ float sums[kWarps][KV_RANK];
  const int head = blockIdx.x;
  pdl_launch_dependents();
  if (head == num_heads) {
    Append{pages, latents, kv_norm, rope, positions, locations, slots, block_tables, num_rows, max_context, q_rank,
           pages_per_sequence, eps}.run(blockIdx.y * kWarps, gridDim.y * kWarps);
    return;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const scalar_t* own = up + (static_cast<int64_t>(head) * (NOPE_DIM + VALUE_DIM) + warp * kWarpRows) * KV_RANK + lane * 8;
  uint4 weights[kWarpRows][kSpans];
#pragma unroll
  for (int d = 0; d < kWarpRows; d++)
#pragma unroll
    for (int span = 0; span < kSpans; span++) weights[d][span] = load16_past_l1(own + d * KV_RANK + span * 256);
  // Returns cosine and sine of the row's position for the thread's pair, if it has one.
  const auto angle_of = [&](int row) {
    if (threadIdx.x >= kHalf) return make_float2(0.0f, 0.0f);
    const int slot = load_now(slots + row), position = load_now(positions + row);
    const int64_t place = static_cast<int64_t>(slot < 0 ? 0 : position) * kHalf + threadIdx.x;
    return make_float2(to_float(load_now(rope + place)), to_float(load_now(rope + static_cast<int64_t>(max_context) * kHalf + place)));
  };
  float2 angle = angle_of(blockIdx.y);
  pdl_wait();
  for (int row = blockIdx.y; row < num_rows; row += gridDim.y) {
    if (row > static_cast<int>(blockIdx.y)) angle = angle_of(row);
    const int64_t index = static_cast<int64_t>(row) * num_heads + head;
    const scalar_t* query = q + index * (NOPE_DIM + ROPE_DIM);
    scalar_t* out = queries + index * (KV_RANK + ROPE_DIM);
    uint32_t factors[kWarpRows / 2];
#pragma unroll
    for (int d = 0; d < kWarpRows / 2; d++) factors[d] = load_now(reinterpret_cast<const int*>(query + warp * kWarpRows) + d);
    if (threadIdx.x < kHalf) {
      const float first = to_float(load_now(query + NOPE_DIM + threadIdx.x));
      const float second = to_float(load_now(query + NOPE_DIM + kHalf + threadIdx.x));
      const float2 turned = rotated(first, second, angle);
      out[KV_RANK + threadIdx.x] = from_float(turned.x);
      out[KV_RANK + kHalf + threadIdx.x] = from_float(turned.y);
    }
#pragma unroll
    for (int span = 0; span < kSpans; span++) {
      float sum[8] = {};
#pragma unroll
      for (int d = 0; d < kWarpRows; d++) {
        const float2 two = unpack2(factors[d / 2]);
        const float factor = d % 2 == 0 ? two.x : two.y;
        const uint4 held = packed(weights[d][span]);
        const uint32_t* pairs = &held.x;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 w = unpack2(pairs[e]);
          sum[2 * e] = fmaf(factor, w.x, sum[2 * e]);
          sum[2 * e + 1] = fmaf(factor, w.y, sum[2 * e + 1]);
        }
      }
#pragma unroll
      for (int e = 0; e < 8; e += 4)
        *reinterpret_cast<float4*>(&sums[warp][span * 256 + lane * 8 + e]) = make_float4(sum[e], sum[e + 1], sum[e + 2], sum[e + 3]);
    }
    __syncthreads();
#pragma unroll
    for (int span = 0; span < kSpans; span++) {
      const int column = span * 256 + threadIdx.x;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; w++) total += sums[w][column];
      out[column] = from_float(total);
    }
    __syncthreads();
  }
}
