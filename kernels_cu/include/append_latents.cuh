// Appending the latents of a step's rows to their KV pages, which a kernel does beside making the queries of latent attention.
#pragma once
#include "copy.cuh"

#if !defined(KV_RANK) || !defined(ROPE_DIM)
#error "a constant is not defined"
#endif

constexpr int kLatentSpans = KV_RANK / 256;  // spans of 256 columns in a latent, 8 columns a lane
constexpr int kRopePairs = ROPE_DIM / 2;
constexpr int kCached = KV_RANK + ROPE_DIM;
constexpr int kAngles = (kRopePairs + 31) / 32;        // the most pairs that a lane rotates

// Returns a pair rotated by an angle (cosine, sine). Contractions are written out, so that the compiler rounds in one way
// everywhere: a row's bits do not depend on the kernel.
DEVICE float2 rotated(float first, float second, float2 angle) {
  return make_float2(fmaf(first, angle.x, -__fmul_rn(second, angle.y)), fmaf(second, angle.x, __fmul_rn(first, angle.y)));
}

// Stores the latents of a step's rows in the pages. `latents` has rows of q_rank + kCached columns, of which the first q_rank make
// queries; a page holds of each token the latent normalised (KV_RANK), then the part of its key that is rotated (ROPE_DIM).
struct Append {
  scalar_t* pages;
  const scalar_t *latents, *norm, *rope;
  const int *positions, *locations, *slots, *block_tables;
  int num_rows, max_context, q_rank, pages_per_sequence;
  float eps;

  // Returns where a row goes in the pages, null if its slot is below 0, and reads the lane's angles of its position.
  DEVICE scalar_t* look_up(float2 (&angles)[kAngles], int row, int lane) const {
    const int slot = load_now(slots + row), position = load_now(positions + row);
    const int location = locations == nullptr ? position : load_now(locations + row);
    if (slot < 0) return nullptr;
    const int page = load_now(block_tables + static_cast<int64_t>(slot) * pages_per_sequence + location / kPageTokens);
#pragma unroll
    for (int i = 0; i < kAngles; i++) {
      if (i * 32 + lane >= kRopePairs) break;
      const scalar_t* cosine = rope + static_cast<int64_t>(position) * kRopePairs + i * 32 + lane;
      angles[i] = make_float2(to_float(load_now(cosine)), to_float(load_now(cosine + static_cast<int64_t>(max_context) * kRopePairs)));
    }
    return pages + (static_cast<int64_t>(page) * kPageTokens + location % kPageTokens) * kCached;
  }

  // Normalises and rotates a row's latent and stores it at `to`. All lanes of a warp call it.
  DEVICE void store(scalar_t* to, const uint4 (&weights)[kLatentSpans], const float2 (&angles)[kAngles], int row, int lane) const {
    const scalar_t* from = latents + static_cast<int64_t>(row) * (q_rank + kCached) + q_rank;
    uint4 held[kLatentSpans];
    float sum = 0.0f;
#pragma unroll
    for (int span = 0; span < kLatentSpans; span++) held[span] = load16_past_l1(from + span * 256 + lane * 8);
#pragma unroll
    for (int i = 0; i < kAngles; i++) {
      const int pair = i * 32 + lane;
      if (pair >= kRopePairs) break;
      const float first = to_float(load_now(from + KV_RANK + pair)), second = to_float(load_now(from + KV_RANK + kRopePairs + pair));
      const float2 turned = rotated(first, second, angles[i]);
      to[KV_RANK + pair] = from_float(turned.x);
      to[KV_RANK + kRopePairs + pair] = from_float(turned.y);
    }
#pragma unroll
    for (int span = 0; span < kLatentSpans; span++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float2 v = unpack2((&held[span].x)[e]);
        sum += v.x * v.x + v.y * v.y;
      }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    const float scale = 1.0f / sqrtf(sum / KV_RANK + eps);
#pragma unroll
    for (int span = 0; span < kLatentSpans; span++) {
      uint4 out;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float2 v = unpack2((&held[span].x)[e]), w = unpack2((&weights[span].x)[e]);
        (&out.x)[e] = pack2(v.x * scale * w.x, v.y * scale * w.y);
      }
      store16(to + span * 256 + lane * 8, out);
    }
  }

  // Stores the rows from first_row on, a warp each: a warp's next row is `step` further. It calls pdl_wait itself; the norm's weights, and
  // the place and the angles of the warp's first row, are read before that.
  DEVICE void run(int first_row, int step) const {
    const int lane = threadIdx.x % 32, first = first_row + threadIdx.x / 32;
    uint4 weights[kLatentSpans];
    float2 angles[kAngles];
#pragma unroll
    for (int span = 0; span < kLatentSpans; span++) weights[span] = load16_past_l1(norm + span * 256 + lane * 8);
    scalar_t* to = first < num_rows ? look_up(angles, first, lane) : nullptr;
    pdl_wait();
    for (int row = first; row < num_rows; row += step) {
      if (row > first) to = look_up(angles, row, lane);
      if (to != nullptr) store(to, weights, angles, row, lane);
    }
  }
};
