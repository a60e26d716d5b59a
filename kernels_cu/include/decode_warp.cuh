// One warp of decode_attention: where the keys of a row lie, and a warp's 16 keys of each page through its own ring.
//
// The including file defines kTileBytes, kStageBytes, STAGES, TREE and WINDOW.
#pragma once
#include "decode_tile.cuh"

constexpr int kAllKeys = 0x7FFFFFFF;

#if TREE
struct PathNode {
  int step, page, token;  // step -1: of no path
};

// The keys of a row from place `base` on: node i of the tree is at location first + i, and the path goes through the set
// bits of `mask`. Elements from the first token of a KV head in page 0 to each, in shared memory.
struct Path {
  int64_t* offsets;
  int first, base;
  uint64_t mask;

  // By the whole block, a node a thread.
  __device__ __forceinline__ PathNode look_up(const int* block_table) const {
    const int node = threadIdx.x, location = first + node;
    if (node >= kMaxNodes || !(mask >> node & 1)) return {-1, 0, 0};
    return {__popcll(mask & ((1ull << node) - 1)), __ldcg(block_table + location / kPageTokens), location % kPageTokens};
  }
  __device__ __forceinline__ void keep(const PathNode& node, int64_t page_stride) const {
    if (node.step >= 0) offsets[node.step] = node.page * page_stride + node.token * HEAD_DIM;
    __syncthreads();
  }
};
#else
struct Path {};
#endif

// 16 rows; those from `valid` on are zeroed: they were never written and 0 * NaN would stay. Valid rows from `old` on are
// left out. Most tiles are whole; what the others need is a loop, since short code starts soon.
__device__ __forceinline__ void load_tile(uint32_t dst, const scalar_t* rows, int valid, int old) {
  const int lane = threadIdx.x & 31;
  if (min(valid, old) >= kKeys) {
#pragma unroll
    for (int i = 0; i < kKeys * kRowChunks / 32; ++i) {
      const int index = lane + i * 32;
      cp_async16(dst + swizzled(index / kRowChunks, index % kRowChunks), rows + index * 8);
    }
    return;
  }
#pragma unroll 1
  for (int index = lane; index < kKeys * kRowChunks; index += 32) {
    const int row = index / kRowChunks, chunk = index % kRowChunks;
    if (row < old || row >= valid) cp_async16(dst + swizzled(row, chunk), rows + index * 8, row < valid ? 16 : 0);
  }
}

#if TREE
// The same of a tile that begins at position `before` with rows before `old` that are not before the base. `head`: the
// first token of page 0.
__device__ __forceinline__ void load_path_tile(uint32_t dst, const scalar_t* rows, const scalar_t* head,
                                               const Path& path, int before, int valid, int old) {
#pragma unroll 1
  for (int index = threadIdx.x & 31; index < kKeys * kRowChunks; index += 32) {
    const int row = index / kRowChunks, chunk = index % kRowChunks, step = before + row - path.base;
    const scalar_t* source = rows + index * 8;
    if (step >= 0 && row < valid) source = head + path.offsets[step] + chunk * 8;
    if (row < old || row >= valid) cp_async16(dst + swizzled(row, chunk), source, row < valid ? 16 : 0);
  }
}
#endif

// The pages of a block's runs, one run after another, through a warp's ring, and after each run room for its result: so
// pages of the next run are on their way while a result is merged. K and V of a place of the ring are cp.async groups of
// their own: at every wait exactly the 2 * STAGES - 1 youngest groups may still be in flight.
struct Stream {
  const scalar_t *k_rows, *v_rows;  // of this warp in page 0
  int64_t page_stride;
  Path path;
  const int* block_table;  // of the slot
  const int* chosen;       // the row's blocks, if it chose some
  uint32_t ring;
  int first_page, run_pages;
  int first_run, run_stride;  // of the block's runs
  int count;                  // pages of all of them
  int step = 0, page_of_run = 0, stage = 0;  // what is loaded next
  int numbers, ids;  // of 32 consecutive pages of the block, one a lane: the page of the row, its place in memory

  // A place of the ring, and the page that it is filled with next, if any. It is the one that is read next, too.
  struct Place {
    uint32_t k_tile;
    int64_t offset;
    int before;  // the first key
    bool is_page;
  };

  __device__ __forceinline__ Place advance() {
    Place place = {ring + stage * kStageBytes, 0, 0, step < count && page_of_run < run_pages};
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if (!place.is_page) {
      page_of_run = 0;
      return place;
    }
    if (step > 0 && step % 32 == 0) locate();
    place.offset = __shfl_sync(0xFFFFFFFFu, ids, step % 32) * page_stride;
    place.before = first_key(__shfl_sync(0xFFFFFFFFu, numbers, step % 32));
    ++step, ++page_of_run;
    return place;
  }
  // The first key of the warp in a page of the row.
  __device__ __forceinline__ int first_key(int page) const { return page * kPageTokens + (threadIdx.x >> 5) * kKeys; }
  // The next 32 pages: at the beginning by the caller.
  __device__ __forceinline__ void locate() {
    const int own = step + (threadIdx.x & 31), turn = divided(own, run_pages);
    numbers = first_page + (first_run + turn * run_stride) * run_pages + own - turn * run_pages;
    ids = 0;
    if (own < count) ids = __ldcg(block_table + (chosen ? __ldcg(chosen + numbers) : numbers));
  }

  // `rows`: all keys or all values. Rows from `old` on are left out.
  __device__ __forceinline__ void load(uint32_t tile, const scalar_t* rows, const Place& from, int length,
                                       int old = kAllKeys) const {
    const int valid = length - from.before;
    if (from.is_page) {
#if TREE
      if (min(from.before + kKeys, old) > path.base) {
        const scalar_t* head = rows - (threadIdx.x >> 5) * (kKeys * HEAD_DIM);
        load_path_tile(tile, rows + from.offset, head, path, from.before, valid, old - from.before);
      } else
#endif
        load_tile(tile, rows + from.offset, valid, old - from.before);
    }
    cp_async_commit();
  }

  // The ring's first pages but for keys from keys.old on: all that is older than the kernel before this one, which lets
  // this one start only after its own pdl_wait. The loops stay loops: short code starts soon.
  __device__ __forceinline__ void fill(const Keys& keys) {
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
      const Place place = advance();
      load(place.k_tile, k_rows, place, keys.length, keys.old);
      load(place.k_tile + kTileBytes, v_rows, place, keys.length, keys.old);
    }
  }

  // After pdl_wait: the rest of those pages, not committed. True if there is any: then cp_async_wait_all must follow.
  __device__ __forceinline__ bool fill_new(const Keys& keys) const {
    bool has_new = false;
    int page = 0, room = run_pages;
#pragma unroll 1
    for (int place = 0; place < STAGES && page < count; ++place) {
      if (place == room) {
        room += run_pages + 1;
        continue;
      }
      const int before = first_key(__shfl_sync(0xFFFFFFFFu, numbers, page));
      const int64_t offset = __shfl_sync(0xFFFFFFFFu, ids, page) * page_stride;
      const int first = max(keys.old - before, 0), end = min(keys.length - before, kKeys);
      ++page;
      if (first >= end) continue;
      has_new = true;
      load_new_rows(ring + place * kStageBytes, offset, before, first, end);
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

// The next `num_pages` of the stream, a run that begins with page `page` of the row.
__device__ __forceinline__ void attend(WarpState& state, Stream& stream, const Keys& keys, int page, int num_pages,
                                       float factor) {
  const int lane = threadIdx.x & 31;
  for (const int end = page + num_pages; page < end; ++page) {
    const int first_key = stream.first_key(page);
    const Stream::Place next = stream.advance();
    const uint32_t k_tile = next.k_tile, v_tile = k_tile + kTileBytes;
    float scores[2][4];
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
    score_tile(scores, state, TileRow(k_tile, lane_row_b(lane)));
    __syncwarp();
    stream.load(k_tile, stream.k_rows, next, keys.length);
    if (!keys.all_visible(first_key)) mask_tile(scores, first_key, {keys, keys});
    softmax_tile(scores, state, factor);
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
    accumulate_tile(state, scores, TileRow(v_tile, lane_row_a(lane)));
    __syncwarp();
    stream.load(v_tile, stream.v_rows, next, keys.length);
  }
}
