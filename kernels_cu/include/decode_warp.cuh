// One warp of decode_attention: which keys a row sees, and a warp's 16 keys of each page through its own ring.
//
// The including file defines kKeys, kTileBytes, kStageBytes and STAGES.
#pragma once
#include "attention.cuh"

// Keys below `full` are visible, and full + i for every set bit i of mask; none from `length` on. Those below `old` were
// in the cache before this step.
struct Keys {
  int full, length, old;
  uint64_t mask;

  __device__ __forceinline__ bool visible(int key) const {
    return key < full || (key - full < 64 && ((mask >> (key - full)) & 1));
  }
};

// The smallest position of the step's rows of `slot`, to be called by whole warps.
__device__ __forceinline__ int first_written(const int* positions, const int* slots, int slot, int num_rows) {
  int first = 0x7FFFFFFF;
#pragma unroll 1
  for (int row = threadIdx.x & 31; row < num_rows; row += 32) {
    const int other = __ldcg(slots + row), position = __ldcg(positions + row);
    if (other == slot) first = min(first, position);
  }
  return __reduce_min_sync(0xFFFFFFFFu, first);
}

// `first` is the first position that this step writes in the row's slot; that of a tree is its base.
__device__ __forceinline__ Keys keys_of_row(int position, int first, const uint64_t* tree_masks, const int* tree_base,
                                            int row) {
  if (tree_masks == nullptr) return {position + 1, position + 1, first, 0};
  const int full = __ldcg(tree_base + row);
  const uint64_t mask = __ldcg(tree_masks + row);
  return {full, full + 64 - __clzll(static_cast<int64_t>(mask)), full, mask};
}

struct WarpState {
  uint32_t q[kDimSteps][4];
  float out[kDimTiles][4];
  float max[2];  // of scale * log2(e) * score
  float sum[2];  // this lane's part
};

// 16 rows; those from `valid` on are zeroed: they were never written and 0 * NaN would stay. Valid rows from `old` on are
// left out.
__device__ __forceinline__ void load_tile(uint32_t dst, const scalar_t* rows, int valid, int old = kKeys) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kKeys * kRowChunks / 32; ++i) {
    const int index = lane + i * 32, row = index / kRowChunks, chunk = index % kRowChunks;
    if (row < old || row >= valid) cp_async16(dst + swizzled(row, chunk), rows + index * 8, row < valid ? 16 : 0);
  }
}

// Two key tiles; even and odd k-steps in accumulators of their own, for four independent chains of products.
__device__ __forceinline__ void score_tile(float (&scores)[2][4], const WarpState& state, uint32_t k_tile) {
  const int lane = threadIdx.x & 31;
  float parts[2][2][4] = {};
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    uint32_t b[4];
    ldmatrix_x4(b, k_tile + swizzled(lane_row_b(lane), 2 * step + lane_chunk_b(lane)));
    mma(parts[step & 1][0], state.q[step], {b[0], b[1]});
    mma(parts[step & 1][1], state.q[step], {b[2], b[3]});
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = parts[0][n][i] + parts[1][n][i];
  }
}

__device__ __forceinline__ void mask_tile(float (&scores)[2][4], int first_key, const Keys& keys) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!keys.visible(first_key + n * 8 + (lane % 4) * 2 + i % 2)) scores[n][i] = kHiddenScore;
    }
  }
}

// Scores become weights 2^(factor * score - max); output and sums are brought to the new maximum.
__device__ __forceinline__ void softmax_tile(float (&scores)[2][4], WarpState& state, float factor) {
  float keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = 2 * half;
    const float top = fmaxf(fmaxf(scores[0][i], scores[0][i + 1]), fmaxf(scores[1][i], scores[1][i + 1]));
    const float max = fmaxf(state.max[half], quad_max(top) * factor);
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
#pragma unroll
  for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[n][i] *= keep[i / 2];
  }
}

// out += weights v.
__device__ __forceinline__ void accumulate_tile(WarpState& state, const float (&weights)[2][4], uint32_t v_tile) {
  const int lane = threadIdx.x & 31;
  const uint32_t a[4] = {pack2(weights[0][0], weights[0][1]), pack2(weights[0][2], weights[0][3]),
                           pack2(weights[1][0], weights[1][1]), pack2(weights[1][2], weights[1][3])};
#pragma unroll
  for (int pair = 0; pair < kDimSteps; ++pair) {
    uint32_t b[4];
    ldmatrix_x4_transposed(b, v_tile + swizzled(lane_row_a(lane), 2 * pair + lane_chunk_a(lane)));
    mma(state.out[2 * pair], a, {b[0], b[1]});
    mma(state.out[2 * pair + 1], a, {b[2], b[3]});
  }
}

// Where a warp's tiles come from and go to. K and V of a page are cp.async groups of their own: at every wait exactly
// the 2 * STAGES - 1 youngest groups may still be in flight.
struct Stream {
  const scalar_t *k_rows, *v_rows;  // of this KV head in page 0
  int64_t page_stride;
  const int* block_table;  // of the run
  uint32_t ring;
  int first_key;  // of this warp in the run's first page
  int num_pages;
  int page_ids;  // of 32 consecutive pages of the run, one a lane

  __device__ __forceinline__ int64_t locate(int page) {
    const int lane = threadIdx.x & 31;
    if (page % 32 == 0) page_ids = page + lane < num_pages ? __ldcg(block_table + page + lane) : 0;
    return offset_of(page);
  }
  // Of one of the 32 pages located last.
  __device__ __forceinline__ int64_t offset_of(int page) const {
    return __shfl_sync(0xFFFFFFFFu, page_ids, page % 32) * page_stride;
  }
  __device__ __forceinline__ uint32_t k_tile(int page) const { return ring + page % STAGES * kStageBytes; }
  __device__ __forceinline__ void load(uint32_t tile, const scalar_t* rows, int page, int length) const {
    if (page < num_pages) load_tile(tile, rows, length - first_key - page * kPageTokens);
    cp_async_commit();
  }

  // The ring's first pages but for keys from keys.old on: all that is older than the kernel before this one, which lets
  // this one start only after its own pdl_wait. The loops stay loops: short code starts soon.
  __device__ __forceinline__ void fill(const Keys& keys) {
#pragma unroll 1
    for (int page = 0; page < STAGES; ++page) {
      const int before = first_key + page * kPageTokens, valid = keys.length - before, old = keys.old - before;
      const int64_t offset = locate(page);
      if (page < num_pages) load_tile(k_tile(page), k_rows + offset, valid, old);
      cp_async_commit();
      if (page < num_pages) load_tile(k_tile(page) + kTileBytes, v_rows + offset, valid, old);
      cp_async_commit();
    }
  }

  // After pdl_wait: the rest of those pages, not committed. True if there is any: then cp_async_wait_all must follow.
  __device__ __forceinline__ bool fill_new(const Keys& keys) const {
    bool has_new = false;
#pragma unroll 1
    for (int page = 0; page < min(STAGES, num_pages); ++page) {
      const int before = first_key + page * kPageTokens;
      const int first = max(keys.old - before, 0), end = min(keys.length - before, kKeys);
      if (first >= end) continue;
      has_new = true;
      load_new_rows(k_tile(page), offset_of(page), first, end);
    }
    return has_new;
  }

  // Rows of a page of the ring, k and v together: a row of each is a chunk for each lane.
  __device__ __forceinline__ void load_new_rows(uint32_t tile, int64_t offset, int first, int end) const {
    const int lane = threadIdx.x & 31, chunk = lane % kRowChunks;
    const bool is_v = lane >= kRowChunks;
    const scalar_t* rows = (is_v ? v_rows : k_rows) + offset + chunk * 8;
    if (lane >= 2 * kRowChunks) return;
#pragma unroll 1
    for (int row = first; row < end; ++row) {
      cp_async16(tile + (is_v ? kTileBytes : 0) + swizzled(row, chunk), rows + row * HEAD_DIM);
    }
  }
};

__device__ __forceinline__ void attend(WarpState& state, Stream& stream, const Keys& keys, float factor) {
  for (int page = 0; page < stream.num_pages; ++page) {
    const uint32_t k_tile = stream.k_tile(page), v_tile = k_tile + kTileBytes;
    const int first_key = stream.first_key + page * kPageTokens;
    const int64_t next = stream.locate(page + STAGES);
    float scores[2][4];
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
    score_tile(scores, state, k_tile);
    __syncwarp();
    stream.load(k_tile, stream.k_rows + next, page + STAGES, keys.length);
    if (first_key + kKeys > keys.full) mask_tile(scores, first_key, keys);
    softmax_tile(scores, state, factor);
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
    accumulate_tile(state, scores, v_tile);
    __syncwarp();
    stream.load(v_tile, stream.v_rows + next, page + STAGES, keys.length);
  }
}
