// One warp of decode_attention: which keys a row sees and where they lie, and a warp's 16 keys of each page through its
// own ring.
//
// The including file defines kKeys, kTileBytes, kStageBytes, STAGES, TREE and WINDOW.
#pragma once
#include "attention.cuh"
#include "step_rows.cuh"

// The keys of a row, by position, or by their place among those of the blocks that it chose: none from `length` on, none before the window. Those below `old` were in the cache
// before this step.
struct Keys {
  int length, old;

  __device__ __forceinline__ int first() const { return WINDOW > 0 ? max(length - WINDOW, 0) : 0; }
  __device__ __forceinline__ bool all_visible(int from) const {
    return from + kKeys <= length && (WINDOW == 0 || from >= first());
  }
  __device__ __forceinline__ bool visible(int key) const { return key < length && (WINDOW == 0 || key >= first()); }
};

#if TREE
constexpr int kMaxNodes = 64;

// Where the keys from place `base` on lie: elements from the first token of a KV head in page 0, in shared memory.
struct Path {
  const int64_t* offsets;
  int base;

  // By the whole block: node i of the tree is at location first + i, and the path goes through the set bits of `mask`.
  // `skipped`: by how much the positions there exceed the places.
  __device__ __forceinline__ Path(int64_t (&table)[kMaxNodes], int first, int skipped, uint64_t mask,
                                  const int* block_table, int64_t page_stride)
      : offsets(table), base(first - skipped) {
    const int node = threadIdx.x, location = first + node;
    if (node < kMaxNodes && (mask >> node & 1)) {
      table[__popcll(mask & ((1ull << node) - 1))] =
          __ldcg(block_table + location / kPageTokens) * page_stride + location % kPageTokens * HEAD_DIM;
    }
    __syncthreads();
  }
};
#else
struct Path {};
#endif

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

#if TREE
// The same of a tile that begins at position `before` and goes on past the base. `head`: the first token of page 0.
__device__ __forceinline__ void load_path_tile(uint32_t dst, const scalar_t* rows, const scalar_t* head,
                                               const Path& path, int before, int valid, int old) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kKeys * kRowChunks / 32; ++i) {
    const int index = lane + i * 32, row = index / kRowChunks, chunk = index % kRowChunks;
    const int step = before + row - path.base;
    const scalar_t* source = rows + index * 8;
    if (step >= 0 && row < valid) source = head + path.offsets[step] + chunk * 8;
    if (row < old || row >= valid) cp_async16(dst + swizzled(row, chunk), source, row < valid ? 16 : 0);
  }
}
#endif

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
  Path path;
  const int* block_table;  // of the run
  uint32_t ring;
  int first_key;  // of this warp in the run's first page
  int num_pages;
  int page_ids;  // of 32 consecutive pages of the run, one a lane
  const int* chosen = nullptr;  // the run's blocks, if it is of chosen ones; then block_table is the slot's

  __device__ __forceinline__ int64_t locate(int page) {
    const int lane = threadIdx.x & 31;
    if (page % 32 == 0) page_ids = page + lane < num_pages ? page_id(page + lane) : 0;
    return offset_of(page);
  }
  __device__ __forceinline__ int page_id(int page) const {
    if (chosen) page = __ldcg(chosen + page);
    return __ldcg(block_table + page);
  }
  // Of one of the 32 pages located last.
  __device__ __forceinline__ int64_t offset_of(int page) const {
    return __shfl_sync(0xFFFFFFFFu, page_ids, page % 32) * page_stride;
  }
  __device__ __forceinline__ uint32_t k_tile(int page) const { return ring + page % STAGES * kStageBytes; }
  // Of `rows`, all keys' or all values', the warp's in the page at `offset`, whose first one has position `before`.
  __device__ __forceinline__ void copy(uint32_t tile, const scalar_t* rows, int64_t offset, int before, int valid,
                                       int old = kKeys) const {
#if TREE
    if (before + kKeys > path.base) {
      load_path_tile(tile, rows + offset, rows - (threadIdx.x >> 5) * (kKeys * HEAD_DIM), path, before, valid, old);
      return;
    }
#endif
    load_tile(tile, rows + offset, valid, old);
  }
  __device__ __forceinline__ void load(uint32_t tile, const scalar_t* rows, int64_t offset, int page, int length) const {
    const int before = first_key + page * kPageTokens;
    if (page < num_pages) copy(tile, rows, offset, before, length - before);
    cp_async_commit();
  }

  // The ring's first pages but for keys from keys.old on: all that is older than the kernel before this one, which lets
  // this one start only after its own pdl_wait. The loops stay loops: short code starts soon.
  __device__ __forceinline__ void fill(const Keys& keys) {
#pragma unroll 1
    for (int page = 0; page < STAGES; ++page) {
      const int before = first_key + page * kPageTokens, valid = keys.length - before, old = keys.old - before;
      const int64_t offset = locate(page);
      if (page < num_pages) copy(k_tile(page), k_rows, offset, before, valid, old);
      cp_async_commit();
      if (page < num_pages) copy(k_tile(page) + kTileBytes, v_rows, offset, before, valid, old);
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
      load_new_rows(k_tile(page), offset_of(page), before, first, end);
    }
    return has_new;
  }

  // Rows of a page of the ring, k and v together: a row of each is a chunk for each lane.
  __device__ __forceinline__ void load_new_rows(uint32_t tile, int64_t offset, int before, int first, int end) const {
    const int lane = threadIdx.x & 31, chunk = lane % kRowChunks;
    const bool is_v = lane >= kRowChunks;
    const scalar_t* rows = (is_v ? v_rows : k_rows) + offset + chunk * 8;
    if (lane >= 2 * kRowChunks) return;
#pragma unroll 1
    for (int row = first; row < end; ++row) {
      const scalar_t* source = rows + row * HEAD_DIM;
#if TREE
      const int step = before + row - path.base;
      if (step >= 0) source = rows - offset - (threadIdx.x >> 5) * (kKeys * HEAD_DIM) + path.offsets[step];
#endif
      cp_async16(tile + (is_v ? kTileBytes : 0) + swizzled(row, chunk), source);
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
    stream.load(k_tile, stream.k_rows, next, page + STAGES, keys.length);
    if (!keys.all_visible(first_key)) mask_tile(scores, first_key, keys);
    softmax_tile(scores, state, factor);
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
    accumulate_tile(state, scores, v_tile);
    __syncwarp();
    stream.load(v_tile, stream.v_rows, next, page + STAGES, keys.length);
  }
}
