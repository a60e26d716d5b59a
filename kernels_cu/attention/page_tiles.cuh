// One set of types and functions for pages in 16 bits and in fp8, and a warp's operations on a tile of them: 16 keys,
// 16 values.
#pragma once
#include "decode_cut.cuh"

#if FP8
#include "decode_tile_fp8.cuh"
typedef uint8_t page_t;
typedef CodeRow PageRow;
#else
#include "decode_tile.cuh"
typedef scalar_t page_t;
typedef TileRow PageRow;
constexpr int kTileBytes = kKeys * kRowBytes;
constexpr int kAtOnce = 1;  // pages that are taken together

// Keys and values in 16 bits have no scales: every factor is 1.
DEVICE float key_factor(float) { return 1.0f; }
DEVICE float value_factor(float) { return 1.0f; }
struct PageScales {
  DEVICE void load(int, int) {}
  DEVICE void load_node(int, int64_t) {}
  DEVICE void attend() {}
  DEVICE float of_keys(int) const { return 1.0f; }
  DEVICE float of_values(int) const { return 1.0f; }
  DEVICE void next() {}
};

// Byte offset of a row's 16-byte chunk in a tile that is copied from a page.
DEVICE int copied_place(int row, int chunk) { return swizzled(row, chunk); }

// Loads the warp's 16 query rows from their tile in shared memory.
DEVICE void load_query(WarpState& state, uint32_t tile) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    ldmatrix_x4(state.q[step], tile + swizzled(lane_row_a(lane), 2 * step + lane_chunk_a(lane)));
  }
}

// The rows of 16 keys that a lane reads. find(key) returns the row of one of them.
struct KeyRows {
  TileRow row;

  template <typename Find>
  DEVICE explicit KeyRows(Find find) : row(find(lane_row_b(threadIdx.x & 31))) {}
};

DEVICE void score_rows(float (&scores)[2][4], const WarpState& state, const KeyRows& keys, float) {
  score_tile(scores, state, keys.row);
}

DEVICE void softmax_at_once(float (&scores)[1][2][4], WarpState& state, float factor) {
  softmax_tile(scores[0], state, factor);
}

DEVICE void accumulate_row(WarpState& state, const float (&weights)[2][4], const TileRow& v_row, float) {
  accumulate_tile(state, weights, v_row);
}

// output_vector returns four elements of a query row that a lane holds in tiles 2 pair and 2 pair + 1 of the output:
// two from dimension first_element() on, and the two kSecondElements further on.
constexpr int kSecondElements = 8;
DEVICE int first_element(int pair, int lane) { return pair * 16 + lane % 4 * 2; }
DEVICE float4 output_vector(const WarpState& state, int pair, int half, float inverse) {
  const float *first = &state.out[2 * pair][2 * half], *second = &state.out[2 * pair + 1][2 * half];
  return make_float4(first[0] * inverse, first[1] * inverse, second[0] * inverse, second[1] * inverse);
}
#endif
constexpr int kCopiedChunks = HEAD_DIM * sizeof(page_t) / 16;  // 16-byte chunks of a row in a page
constexpr int kChunkElements = 16 / sizeof(page_t);

// score_rows and accumulate_row for a tile of 16 keys, or of 16 values, that lie one after another.
DEVICE void score_keys(float (&scores)[2][4], const WarpState& state, uint32_t k_tile, float k_scale) {
  score_rows(scores, state, KeyRows([&](int key) { return PageRow(k_tile, key); }), k_scale);
}

DEVICE void accumulate_values(WarpState& state, const float (&weights)[2][4], uint32_t v_tile, float v_scale) {
  accumulate_row(state, weights, PageRow(v_tile, lane_row_a(threadIdx.x & 31)), v_scale);
}
