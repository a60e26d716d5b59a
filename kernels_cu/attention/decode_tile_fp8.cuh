// The tile of decode_tile.cuh with keys and values in fp8: 16 rows of e4m3 codes in shared memory, D bytes each.
//
// Scores are sums over dimensions, whose order is free: a lane takes eight neighbouring codes of a key for two k-steps.
// Of four codes in a word the even ones make one pair of the product's operand, the odd ones the other; the query is
// held in that order. ldmatrix moves two codes of values as one element: a lane gets even dimensions for one tile of
// the output and odd ones for the next. Codes become fp16 whatever scalar_t is: that is exact, and takes the fewest
// instructions. A page's scale is a power of two, by which scores are multiplied directly, and values through the
// weights.
#pragma once
#include "decode_tile.cuh"

constexpr int kTileBytes = kKeys * HEAD_DIM;
constexpr int kAtOnce = 2;  // pages taken together: half the bytes leave half the time, which one page's chain of operations exceeds
constexpr int kCodeChunks = HEAD_DIM / 16;  // 16-byte chunks of a row of codes

// Byte offset of a row's 16-byte chunk in a tile of codes. The same chunk of eight rows, which ldmatrix reads, lies in
// eight different 16-byte places modulo 128 bytes. So do two neighbouring chunks of four rows, of which each lane reads
// eight codes.
DEVICE int swizzled_codes(int row, int chunk) {
  const int pair = HEAD_DIM == 128 ? row & 3 : HEAD_DIM == 64 ? row >> 1 & 1 : 0;
  return row * HEAD_DIM + ((chunk ^ (pair << 1) ^ (row >> 2 & 1)) << 4);
}
// Byte offset of a row's 16-byte chunk in a tile that is copied from a page.
DEVICE int copied_place(int row, int chunk) { return swizzled_codes(row, chunk); }

// A row of codes of keys or values that a lane reads.
struct CodeRow {
  uint32_t start;
  int phase;

  DEVICE CodeRow(uint32_t tile, int row)
      : start(tile + row * HEAD_DIM), phase((swizzled_codes(row, 0) - row * HEAD_DIM) >> 4) {}
  DEVICE uint32_t chunk(int index) const { return start + ((index ^ phase) << 4); }
};

// Splits four codes in a word into the even and the odd ones, as pairs of fp16 times kCodeUnit.
#if __CUDA_ARCH__ >= 890
constexpr float kCodeUnit = 1.0f;
DEVICE void split_codes(uint32_t& even, uint32_t& odd, uint32_t codes) {
  const uint32_t pairs = __byte_perm(codes, 0, 0x3120);
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(even), "=r"(odd)
      : "r"(pairs));
}
#else
constexpr float kCodeUnit = 1.0f / 256.0f;  // the bits of e4m3, moved to where they stand in fp16, give so much of the value
DEVICE void split_codes(uint32_t& even, uint32_t& odd, uint32_t codes) {
  even = (codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u);
  odd = (codes & 0x80008000u) | (codes >> 1 & 0x3F803F80u);
}
#endif
// Weights are multiplied by kWeightUnit, since small ones would be subnormal in fp16. kOutputUnit takes this factor,
// and kCodeUnit, out of the sums of weighted codes.
constexpr float kWeightUnit = 256.0f;
constexpr float kOutputUnit = 1.0f / (kWeightUnit * kCodeUnit);

// The factors of the scores, and of the weights, for a page with this scale.
DEVICE float key_factor(float scale) { return scale / kCodeUnit; }
DEVICE float value_factor(float scale) { return scale * kWeightUnit; }

// Scales of the pages of a KV head for 32 consecutive steps of a block, a step in each lane: for the steps located last
// (`next_`), and for those that are attended to. They are read long before they are needed, past the L1, which may hold
// what was there before this step.
struct PageScales {
  const float *k_scales, *v_scales;  // scales of page 0
  int stride;
  const float *k_node_scales, *v_node_scales;  // scales of node 0, with TREE only
  int step;  // the step that is attended to
  float next_k[kAtOnce], next_v[kAtOnce], k[kAtOnce], v[kAtOnce];

  // Reads the scales of page i of the lane's step; a page that does not exist (-1) has 1.
  DEVICE void load(int i, int page_id) {
    next_k[i] = next_v[i] = 1.0f;
    if (page_id < 0) return;
    next_k[i] = __ldcg(k_scales + static_cast<int64_t>(page_id) * stride);
    next_v[i] = __ldcg(v_scales + static_cast<int64_t>(page_id) * stride);
  }
  // Reads the scales of a page whose first token is a node. `node`: the node's number times num_kv_heads.
  DEVICE void load_node(int i, int64_t node) {
    next_k[i] = __ldcg(k_node_scales + node);
    next_v[i] = __ldcg(v_node_scales + node);
  }
  // Takes over the scales located last, before the first of 32 steps. Called before each step.
  DEVICE void attend() {
    if (step % 32 != 0) return;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) k[i] = next_k[i], v[i] = next_v[i];
  }
  // Return the factor of the scores, and of the weights, for page i of the step. Called by whole warps.
  DEVICE float of_keys(int i) const { return key_factor(__shfl_sync(0xFFFFFFFFu, k[i], step % 32)); }
  DEVICE float of_values(int i) const { return value_factor(__shfl_sync(0xFFFFFFFFu, v[i], step % 32)); }
  DEVICE void next() { ++step; }
};

DEVICE uint32_t pack_fp16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Converts two neighbouring elements of the query to fp16. bf16 has fewer bits, but a wider range: larger values are
// clamped.
DEVICE uint32_t query_pair(uint32_t pair) {
#ifdef CPMRT_BF16
  constexpr float kLargest = 65504.0f;
  const float2 v = unpack2(pair);
  return pack_fp16(fminf(fmaxf(v.x, -kLargest), kLargest), fminf(fmaxf(v.y, -kLargest), kLargest));
#else
  return pair;
#endif
}

// The product of mma() in fp16, whatever scalar_t is.
DEVICE void mma_fp16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads the warp's query from its tile of rows of scalar_t, in the order of dimensions that codes have.
DEVICE void load_query(WarpState& state, uint32_t tile) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int unit = 0; unit < kDimSteps / 2; ++unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 v = load_shared(tile + swizzled(lane / 4 + half * 8, 4 * unit + lane % 4));  // eight dimensions of a row
      v = make_uint4(query_pair(v.x), query_pair(v.y), query_pair(v.z), query_pair(v.w));
      state.q[2 * unit][half] = __byte_perm(v.x, v.y, 0x5410);
      state.q[2 * unit][half + 2] = __byte_perm(v.x, v.y, 0x7632);
      state.q[2 * unit + 1][half] = __byte_perm(v.z, v.w, 0x5410);
      state.q[2 * unit + 1][half + 2] = __byte_perm(v.z, v.w, 0x7632);
    }
  }
}

// The rows of 16 keys that a lane reads. find(key) returns the row of one of them.
struct KeyRows {
  CodeRow rows[2];

  template <typename Find>
  DEVICE explicit KeyRows(Find find) : rows{find((threadIdx.x & 31) / 4), find(8 + (threadIdx.x & 31) / 4)} {}
};

// Scores of 16 keys for the warp's query rows, multiplied by `k_scale`.
DEVICE void score_rows(float (&scores)[2][4], const WarpState& state, const KeyRows& keys, float k_scale) {
  const int lane = threadIdx.x & 31;
  float parts[2][2][4] = {};
#pragma unroll
  for (int unit = 0; unit < kDimSteps / 2; ++unit) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const uint2 words = load_shared_words(keys.rows[n].chunk(2 * unit + (lane >> 1 & 1)) + (lane & 1) * 8);
      const uint32_t codes[2] = {words.x, words.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t b[2];
        split_codes(b[0], b[1], codes[i]);
        mma_fp16(parts[i][n], state.q[2 * unit + i], b);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = (parts[0][n][i] + parts[1][n][i]) * k_scale;
}

// Does what softmax_tile does, for the tiles of all pages together. Most of them leave every maximum as it is: then the
// output is not multiplied.
DEVICE void softmax_at_once(float (&scores)[kAtOnce][2][4], WarpState& state, float factor) {
  float keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = kHiddenScore;
#pragma unroll
    for (int n = 0; n < 2 * kAtOnce; ++n) {
      const float* pair = &scores[n / 2][n % 2][2 * half];
      top = fmaxf(top, fmaxf(pair[0], pair[1]));
    }
    const float max = fmaxf(state.max[half], quad_max(top) * factor);
    keep[half] = exp2_fast(state.max[half] - max);
    state.max[half] = max;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 2 * kAtOnce; ++n) {
      float* pair = &scores[n / 2][n % 2][2 * half];
      pair[0] = exp2_fast(fmaf(pair[0], factor, -max));
      pair[1] = exp2_fast(fmaf(pair[1], factor, -max));
      sum += pair[0] + pair[1];
    }
    state.sum[half] = fmaf(state.sum[half], keep[half], sum);
  }
  if (!__any_sync(0xFFFFFFFFu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[n][i] *= keep[i / 2];
}

// out += weights v, of 16 values. Output tile 2 c has the even dimensions of chunk c, tile 2 c + 1 the odd ones.
DEVICE void accumulate_row(WarpState& state, const float (&weights)[2][4], const CodeRow& v_row, float v_scale) {
  const int lane = threadIdx.x & 31;
  uint32_t a[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = pack_fp16(weights[i / 2][i % 2 * 2] * v_scale, weights[i / 2][i % 2 * 2 + 1] * v_scale);
  }
#pragma unroll
  for (int pair = 0; pair < kCodeChunks / 2; ++pair) {
    uint32_t codes[4];
    ldmatrix_x4_transposed(codes, v_row.chunk(2 * pair + lane_chunk_a(lane)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float (&even)[4] = state.out[2 * (2 * pair + i)], (&odd)[4] = state.out[2 * (2 * pair + i) + 1];
      uint32_t b_even[2], b_odd[2];
      split_codes(b_even[0], b_odd[0], codes[2 * i]);
      split_codes(b_even[1], b_odd[1], codes[2 * i + 1]);
      mma_fp16(even, a, b_even);
      mma_fp16(odd, a, b_odd);
    }
  }
}

// output_vector returns four elements of a query row that a lane holds in tiles 2 pair and 2 pair + 1 of the output:
// two from dimension first_element() on, and the two kSecondElements further on.
constexpr int kSecondElements = 2;
DEVICE int first_element(int pair, int lane) { return pair * 16 + lane % 4 * 4; }
DEVICE float4 output_vector(const WarpState& state, int pair, int half, float inverse) {
  const float *even = &state.out[2 * pair][2 * half], *odd = &state.out[2 * pair + 1][2 * half];
  const float factor = inverse * kOutputUnit;
  return make_float4(even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor);
}

// Stores the normalised output of one of the lane's rows; to(vector) is the shared address of four elements. The lane
// has two dimensions of each tile, so that tiles 2 c and 2 c + 1 give four neighbours.
template <typename To>
DEVICE void publish_row(const WarpState& state, int half, float inverse, To to) {
#pragma unroll
  for (int c = 0; c < kCodeChunks; ++c) {
    const float4 v = output_vector(state, c, half, inverse);
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to(4 * c + static_cast<int>(threadIdx.x & 3))), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
  }
}
