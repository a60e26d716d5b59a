// Shared by the attention kernels whose pages have keys and values for each KV head: tiles of rows in shared memory,
// page addresses, masking. Needs HEAD_DIM and GROUP.
#pragma once

#include "warp_tile.cuh"

static_assert(HEAD_DIM == 64 || HEAD_DIM == 96 || HEAD_DIM == 128, "HEAD_DIM must be 64, 96 or 128");

constexpr int kRowBytes = HEAD_DIM * 2;
constexpr int kRowChunks = HEAD_DIM / 8;  // 16-byte chunks of a row
constexpr int kDimSteps = HEAD_DIM / 16;  // k-steps of q k
constexpr int kDimTiles = HEAD_DIM / 8;   // n-tiles of p v

// Byte offset of a row's 16-byte chunk in a tile of rows. The chunk's number is XORed with the row's swizzle_phase,
// which spreads the same chunk of 8 consecutive rows over all 32 banks: that is what an 8x8 ldmatrix reads. Rows of 96
// elements are 1.5 times as wide as the banks and alternate between two halves of them, so there two bits of the row
// select among the four chunks of a half.
DEVICE int swizzle_phase(int row) { return HEAD_DIM == 96 ? (row >> 1) & 3 : row & 7; }
DEVICE int swizzled(int row, int chunk) { return row * kRowBytes + ((chunk ^ swizzle_phase(row)) << 4); }

// Returns where the 64 rows of one KV head begin in page `page`; `pages` are those of one layer.
DEVICE const scalar_t* page_rows(const scalar_t* pages, int page, int num_kv_heads, int kv_head) {
  return pages + ((int64_t)page * num_kv_heads + kv_head) * (kPageTokens * HEAD_DIM);
}

// Whether the query at position `query` does not see the key at position `key`, which comes after it or before its
// window of KEYS keys (0: it has no window).
template <int KEYS>
DEVICE bool is_hidden(int key, int query) {
  return KEYS > 0 ? static_cast<uint32_t>(query - key) >= static_cast<uint32_t>(KEYS) : key > query;
}
