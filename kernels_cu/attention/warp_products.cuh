// Products of one warp with its own 16 of a warpgroup's rows, over a page in the layout of wgmma_attention.cuh. Sums
// have the order, and the bits, of the warpgroup's products; a warp alone leaves the other 48 rows out.
#pragma once
#include "wgmma_attention.cuh"

// Returns the sums of column tile `column_tile` (eight columns) in the form in which mma takes an accumulator.
DEVICE float (&tile_of(float* sums, int column_tile))[4] {
  return *reinterpret_cast<float(*)[4]>(sums + 4 * column_tile);
}

// The shared addresses that a lane gives to ldmatrix for the 16 x 16 blocks of a tile. `row` and `chunk` are the lane's
// in the first block; at(r, c) is its address in the block that lies 16 r rows and 2 c chunks further on.
struct Fragments {
  uint32_t first;

  DEVICE Fragments(uint32_t tile, int row, int chunk) : first(tile + query_offset(row, chunk)) {}
  DEVICE uint32_t at(int row_step, int chunk_step) const {
    const int panel = 2 * chunk_step / kPanelChunks, within = 2 * chunk_step % kPanelChunks;
    return (first ^ (within * 16)) + panel * (kPageTokens * kSwizzle) + row_step * (16 * kSwizzle);
  }
};

// The operands of one k-step of the scores: the warp's queries and all keys of the page.
struct ScoreOperands {
  uint32_t q[4], k[kPageTokens / 16][4];

  DEVICE void load(const Fragments& queries, const Fragments& keys, int step) {
    ldmatrix_x4(q, queries.at(0, step));
#pragma unroll
    for (int pair = 0; pair < kPageTokens / 16; ++pair) ldmatrix_x4(k[pair], keys.at(pair, step));
  }
};

// scores = q k of the warp's 16 rows.
DEVICE void score_alone(float (&scores)[kPageTokens / 2], uint32_t query_tile, uint32_t key_tile) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  const Fragments queries(query_tile, warp * 16 + lane_row_a(lane), lane_chunk_a(lane));
  const Fragments keys(key_tile, lane_row_b(lane), lane_chunk_b(lane));
  ScoreOperands operands[2];
  operands[0].load(queries, keys, 0);
#pragma unroll
  for (int i = 0; i < kPageTokens / 2; ++i) scores[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    if (step + 1 < kDimSteps) operands[(step + 1) % 2].load(queries, keys, step + 1);
    const ScoreOperands& now = operands[step % 2];
#pragma unroll
    for (int pair = 0; pair < kPageTokens / 16; ++pair) {
      mma(tile_of(scores, 2 * pair), now.q, {now.k[pair][0], now.k[pair][1]});
      mma(tile_of(scores, 2 * pair + 1), now.q, {now.k[pair][2], now.k[pair][3]});
    }
  }
}

// out += weights v, for the warp's 16 rows.
DEVICE void sum_alone(Rows& rows, const uint32_t (&weights)[kPageTokens / 16][4], uint32_t value_tile) {
  constexpr int kAtOnce = kDimSteps / 2, kLoads = 2 * kPageTokens / 16;
  const int lane = threadIdx.x & 31;
  const Fragments values(value_tile, lane_row_a(lane), lane_chunk_a(lane));
  uint32_t v[2][kAtOnce][4];
  const auto load = [&](int number) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      ldmatrix_x4_transposed(v[number % 2][i], values.at(number / 2, number % 2 * kAtOnce + i));
    }
  };
  load(0);
#pragma unroll
  for (int number = 0; number < kLoads; ++number) {
    if (number + 1 < kLoads) load(number + 1);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t(&b)[4] = v[number % 2][i];
      const int pair = number % 2 * kAtOnce + i;
      mma(tile_of(rows.out, 2 * pair), weights[number / 2], {b[0], b[1]});
      mma(tile_of(rows.out, 2 * pair + 1), weights[number / 2], {b[2], b[3]});
    }
  }
}
