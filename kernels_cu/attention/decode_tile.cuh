// A tile of 16 query rows against 16 keys, by a warp: scores, softmax, weighted sum. Plain rows and those of trees go
// through the same operations in the same order.
#pragma once
#include "decode_cut.cuh"

// A warp's state for a tile of 16 query rows, of which a lane has two: lane / 4, and lane / 4 + 8.
struct WarpState {
  uint32_t q[kDimSteps][4];
  float out[kDimTiles][4];
  float max[2];  // maxima of scale * log2(e) * score
  float sum[2];  // this lane's part of the sums of weights
};

// Begins a run, with no key seen yet. The queries stay.
DEVICE void begin_run(WarpState& state) {
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[n][i] = 0.0f;
  state.max[0] = state.max[1] = kNoMaximum;
  state.sum[0] = state.sum[1] = 0.0f;
}

// The row of a tile of keys or values that a lane reads with ldmatrix.
struct TileRow {
  uint32_t start;
  int phase;

  DEVICE TileRow(uint32_t tile, int row) : start(tile + row * kRowBytes), phase(swizzle_phase(row)) {}
  DEVICE uint32_t chunk(int index) const { return start + ((index ^ phase) << 4); }
};

// Scores of 16 keys, in two tiles of 8; `k_row` is key lane_row_b. Even and odd k-steps have accumulators of their own,
// for four independent chains of products.
DEVICE void score_tile(float (&scores)[2][4], const WarpState& state, const TileRow& k_row) {
  const int lane = threadIdx.x & 31;
  float parts[2][2][4] = {};
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    uint32_t b[4];
    ldmatrix_x4(b, k_row.chunk(2 * step + lane_chunk_b(lane)));
    mma(parts[step & 1][0], state.q[step], {b[0], b[1]});
    mma(parts[step & 1][1], state.q[step], {b[2], b[3]});
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = parts[0][n][i] + parts[1][n][i];
}

// Hides keys that a row does not see. `keys` are those of rows 0 to 7 and of rows 8 to 15.
DEVICE void mask_tile(float (&scores)[2][4], int first_key, const Keys (&keys)[2]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!keys[i / 2].visible(first_key + n * 8 + (lane % 4) * 2 + i % 2)) scores[n][i] = kHiddenScore;
    }
  }
}

// Stores in `tops` the lane's largest score of each of its rows, of which ROW_HALVES count.
DEVICE void find_tops(float* tops, const float (&scores)[2][4]) {
#pragma unroll
  for (int half = 0; half < ROW_HALVES; ++half) {
    const int i = 2 * half;
    tops[half] = fmaxf(fmaxf(scores[0][i], scores[0][i + 1]), fmaxf(scores[1][i], scores[1][i + 1]));
  }
}

// Turns scores into weights 2^(factor * score - max); `tops` are the largest scores of the rows. Sums are brought to
// the new maximum here; `keep` becomes the factors that bring the output to it.
DEVICE void weigh_tile(float (&scores)[2][4], float* keep, WarpState& state, const float* tops, float factor) {
#pragma unroll
  for (int half = 0; half < ROW_HALVES; ++half) {
    const int i = 2 * half;
    const float max = fmaxf(state.max[half], tops[half] * factor);
    keep[half] = exp2_fast(state.max[half] - max);
    state.max[half] = max;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      scores[n][i] = exp2_fast(fmaf(scores[n][i], factor, -max));
      scores[n][i + 1] = exp2_fast(fmaf(scores[n][i + 1], factor, -max));
    }
    state.sum[half] = state.sum[half] * keep[half] +
                          ((scores[0][i] + scores[0][i + 1]) + (scores[1][i] + scores[1][i + 1]));
  }
}

// Brings the output to the new maximum.
DEVICE void scale_output(WarpState& state, const float* keep) {
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2 * ROW_HALVES; ++i) state.out[n][i] *= keep[i / 2];
}

// Turns the scores of a tile into weights, and brings sums and output to the new maximum.
DEVICE void softmax_tile(float (&scores)[2][4], WarpState& state, float factor) {
  float tops[ROW_HALVES], keep[ROW_HALVES];
  find_tops(tops, scores);
  quad_maxima(tops);
  weigh_tile(scores, keep, state, tops, factor);
  scale_output(state, keep);
}

// 16 values as operands of products. `v_row` is the value of row lane_row_a.
struct Values {
  uint32_t b[kDimSteps][4];

  DEVICE void load(const TileRow& v_row) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int pair = 0; pair < kDimSteps; ++pair) ldmatrix_x4_transposed(b[pair], v_row.chunk(2 * pair + lane_chunk_a(lane)));
  }
};

// out += weights v.
DEVICE void accumulate_values(WarpState& state, const float (&weights)[2][4], const Values& v) {
  const uint32_t a[4] = {pack2(weights[0][0], weights[0][1]), pack2(weights[0][2], weights[0][3]),
                         pack2(weights[1][0], weights[1][1]), pack2(weights[1][2], weights[1][3])};
#pragma unroll
  for (int pair = 0; pair < kDimSteps; ++pair) {
    mma(state.out[2 * pair], a, {v.b[pair][0], v.b[pair][1]});
    mma(state.out[2 * pair + 1], a, {v.b[pair][2], v.b[pair][3]});
  }
}

// out += weights v. `v_row` is the value of row lane_row_a.
DEVICE void accumulate_tile(WarpState& state, const float (&weights)[2][4], const TileRow& v_row) {
  const int lane = threadIdx.x & 31;
  const uint32_t a[4] = {pack2(weights[0][0], weights[0][1]), pack2(weights[0][2], weights[0][3]),
                           pack2(weights[1][0], weights[1][1]), pack2(weights[1][2], weights[1][3])};
#pragma unroll
  for (int pair = 0; pair < kDimSteps; ++pair) {
    uint32_t b[4];
    ldmatrix_x4_transposed(b, v_row.chunk(2 * pair + lane_chunk_a(lane)));
    mma(state.out[2 * pair], a, {b[0], b[1]});
    mma(state.out[2 * pair + 1], a, {b[2], b[3]});
  }
}
