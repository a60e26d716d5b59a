// Takes a head of one row's queries to the space of the latents, in the block of 16 warps that has made the head: as absorb_queries.cu
// does, with the same order of sums.
#pragma once
#include "append_latents.cuh"

#if !defined(NOPE_DIM) || !defined(VALUE_DIM)
#error "a constant is not defined"
#endif

constexpr int kHeadTiles = (NOPE_DIM + ROPE_DIM) / 16;   // tiles of a head in the weight that makes queries
static_assert((NOPE_DIM + ROPE_DIM) % 16 == 0 && NOPE_DIM % 8 == 0 && kRopePairs <= 512, "sizes that the kernel does not take");

DEVICE uint2 load8_past_l1(const void* source) {
  uint2 v;
  asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(source) : "memory");
  return v;
}

// The epilogue that keeps a head of q, rounded, in shared memory (`query`), and `absorb`, which takes it to the space of the latents. Two
// warps have an eighth of the head's rows of `up`, each half of the columns. The last threads rotate pairs, because runs that have no
// slices leave the last warps free.
struct QueryEpilogue {
  static constexpr int kEighth = NOPE_DIM / 8, kSumBytes = 8 * KV_RANK * 4;
  float* query;
  const scalar_t *up, *rope;
  const int *positions, *slots;
  int head, max_context;
  uint2 weights[kEighth][kLatentSpans];
  float2 angle;

  DEVICE static int eighth() { return threadIdx.x / 64; }
  DEVICE static int column() { return threadIdx.x % 64 * 4; }
  DEVICE static int pair() { return static_cast<int>(threadIdx.x) - (512 - kRopePairs); }
  // Loads the thread's part of the head's rows of `up`, and the angle of its pair. Called before pdl_wait, behind the first copies of the
  // product's weights.
  DEVICE void look_up() {
    int slot = 0, position = 0;
    if (pair() >= 0) slot = load_now(slots), position = load_now(positions);
    const scalar_t* own = up + (static_cast<int64_t>(head) * (NOPE_DIM + VALUE_DIM) + eighth() * kEighth) * KV_RANK + column();
#pragma unroll
    for (int d = 0; d < kEighth; d++)
#pragma unroll
      for (int span = 0; span < kLatentSpans; span++) weights[d][span] = load8_past_l1(own + d * KV_RANK + span * 256);
    if (pair() < 0) return;
    const scalar_t* cosine = rope + static_cast<int64_t>(slot < 0 ? 0 : position) * kRopePairs + pair();
    angle = make_float2(to_float(load_now(cosine)), to_float(load_now(cosine + static_cast<int64_t>(max_context) * kRopePairs)));
  }

  DEVICE void settle() const {}
  DEVICE void prefetch(int, int, int, int, int) const {}
  DEVICE void store(int, int, int tile, int row, int, float lo, float hi) const {
    float* const to = query + tile % kHeadTiles * 16 + row;
    to[0] = to_float(from_float(lo)), to[8] = to_float(from_float(hi));
  }

  // Writes to `out` the head in the space of the latents, then its rotated part. A barrier must come before it. sums: shared memory of
  // kSumBytes.
  DEVICE void absorb(scalar_t* out, uint32_t sums) const {
#pragma unroll
    for (int span = 0; span < kLatentSpans; span++) {
      float sum[4] = {};
#pragma unroll
      for (int d = 0; d < kEighth; d++) {
        const float factor = query[eighth() * kEighth + d];
        const float2 low = unpack2(weights[d][span].x), high = unpack2(weights[d][span].y);
        sum[0] = fmaf(factor, low.x, sum[0]), sum[1] = fmaf(factor, low.y, sum[1]);
        sum[2] = fmaf(factor, high.x, sum[2]), sum[3] = fmaf(factor, high.y, sum[3]);
      }
      const uint4 words = make_uint4(__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3]));
      store_shared(sums + (eighth() * KV_RANK + span * 256 + column()) * 4, words);
    }
    if (pair() >= 0) {
      const float2 turned = rotated(query[NOPE_DIM + pair()], query[NOPE_DIM + kRopePairs + pair()], angle);
      out[KV_RANK + pair()] = from_float(turned.x);
      out[KV_RANK + kRopePairs + pair()] = from_float(turned.y);
    }
    __syncthreads();
    for (int first = threadIdx.x * 2; first < KV_RANK; first += 1024) {
      float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int part = 0; part < 8; part++) {
        const float2 v = load_shared2(sums + (part * KV_RANK + first) * 4);
        total.x += v.x, total.y += v.y;
      }
      *reinterpret_cast<uint32_t*>(out + first) = pack2(total.x, total.y);
    }
  }
};
