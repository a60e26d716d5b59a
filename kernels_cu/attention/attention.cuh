// What the attention kernels share: the shared-memory layout of rows of a head, page addressing, and the base-2
// softmax. Needs HEAD_DIM and GROUP.
#pragma once

#include "copy.cuh"
#include "mma.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 96 || HEAD_DIM == 128, "HEAD_DIM must be 64, 96 or 128");

constexpr int kRowBytes = HEAD_DIM * 2;
constexpr int kRowChunks = HEAD_DIM / 8;  // 16-byte chunks of a row
constexpr int kDimSteps = HEAD_DIM / 16;  // k-steps of q k
constexpr int kDimTiles = HEAD_DIM / 8;   // n-tiles of p v

constexpr float kLog2e = 1.4426950408889634f;
// The score of a hidden key, and the maximum of a row that has seen no key. Finite, so that no difference of two is
// NaN; far apart, so that a hidden key weighs 2^-huge = 0 even there.
constexpr float kHiddenScore = -1e30f;
constexpr float kNoMaximum = -1e25f;

// Byte offset of a 16-byte chunk in a tile of rows. The XOR spreads the same chunk of 8 consecutive rows over all 32
// banks, which is what an 8x8 ldmatrix reads. 96 elements are 1.5 times the banks: rows alternate between two halves,
// so there two row bits select among four chunks.
DEVICE int swizzle_phase(int row) { return HEAD_DIM == 96 ? (row >> 1) & 3 : row & 7; }
DEVICE int swizzled(int row, int chunk) { return row * kRowBytes + ((chunk ^ swizzle_phase(row)) << 4); }

// The 64 rows of one KV head in one page.
DEVICE const scalar_t* page_rows(const scalar_t* pages, int page, int num_kv_heads, int kv_head) {
  return pages + ((int64_t)page * num_kv_heads + kv_head) * (kPageTokens * HEAD_DIM);
}

// Whether a query does not see a key, both by position: the key comes after it, or before its window (0: it has none).
template <int KEYS>
DEVICE bool is_hidden(int key, int query) {
  return KEYS > 0 ? static_cast<uint32_t>(query - key) >= static_cast<uint32_t>(KEYS) : key > query;
}

DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Over the four lanes that hold one row of an accumulator tile.
DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// Rows of this lane's address in an ldmatrix.x4 over a 16 x 16 block. "A": matrices in the order (rows, dims) = (0, 0),
// (8, 0), (0, 1), (8, 1): the A operand, or with .trans the B operand of p v. "B": (0, 0), (0, 1), (8, 0), (8, 1): the
// B operand of q k for two key tiles.
DEVICE int lane_row_a(int lane) { return (lane & 7) + (lane & 8); }
DEVICE int lane_chunk_a(int lane) { return lane >> 4; }
DEVICE int lane_row_b(int lane) { return (lane & 7) + ((lane >> 1) & 8); }
DEVICE int lane_chunk_b(int lane) { return (lane >> 3) & 1; }
