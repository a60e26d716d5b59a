// What the attention kernels of heads share: the shared-memory layout of rows of a head, and page addressing. Needs HEAD_DIM
// and GROUP.
#pragma once

#include "warp_tile.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 96 || HEAD_DIM == 128, "HEAD_DIM must be 64, 96 or 128");

constexpr int kRowBytes = HEAD_DIM * 2;
constexpr int kRowChunks = HEAD_DIM / 8;  // 16-byte chunks of a row
constexpr int kDimSteps = HEAD_DIM / 16;  // k-steps of q k
constexpr int kDimTiles = HEAD_DIM / 8;   // n-tiles of p v

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
