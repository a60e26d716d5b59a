// One warp of decode_attention: where the keys of a row lie, and a warp's 16 keys of each page through its own ring.
//
// The including file defines kTileBytes, kStageBytes, STAGES, TREE and WINDOW.
#pragma once
#include "decode_tile.cuh"
#include "step_rows.cuh"

#if TREE
// Where the keys from place `base` on lie: elements from the first token of a KV head in page 0, in shared memory.
struct Path {
  int64_t* offsets;
  int base;

  // By the whole block: node i of the tree is at location first + i, and the path goes through the set bits of `mask`.
  __device__ __forceinline__ void locate(int first, uint64_t mask, const int* block_table, int64_t page_stride) const {
    const int node = threadIdx.x, location = first + node;
    if (node < kMaxNodes && (mask >> node & 1)) {
      offsets[__popcll(mask & ((1ull << node) - 1))] =
          __ldcg(block_table + location / kPageTokens) * page_stride + location % kPageTokens * HEAD_DIM;
    }
    __syncthreads();
  }
};
#else
struct Path {};
#endif

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
// The same of a tile that begins at position `before` with rows before `old` that are not before the base. `head`: the
// first token of page 0.
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
    if (before + old > path.base) {
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
  const int lane = threadIdx.x & 31;
  for (int page = 0; page < stream.num_pages; ++page) {
    const uint32_t k_tile = stream.k_tile(page), v_tile = k_tile + kTileBytes;
    const int first_key = stream.first_key + page * kPageTokens;
    const int64_t next = stream.locate(page + STAGES);
    float scores[2][4];
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
    score_tile(scores, state, TileRow(k_tile, lane_row_b(lane)));
    __syncwarp();
    stream.load(k_tile, stream.k_rows, next, page + STAGES, keys.length);
    if (!keys.all_visible(first_key)) mask_tile(scores, first_key, {keys, keys});
    softmax_tile(scores, state, factor);
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
    accumulate_tile(state, scores, TileRow(v_tile, lane_row_a(lane)));
    __syncwarp();
    stream.load(v_tile, stream.v_rows, next, page + STAGES, keys.length);
  }
}
