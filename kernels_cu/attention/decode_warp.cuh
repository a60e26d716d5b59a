// One warp of decode_attention: finds the keys of a row, and takes its 16 keys of each page through a ring of its own.
#pragma once
#include "page_tiles.cuh"

constexpr int kHalfPlace = kAtOnce * kTileBytes;  // keys, then values, of the pages that are taken at once
constexpr int kStageBytes = 2 * kHalfPlace;
constexpr int kAllKeys = 0x7FFFFFFF;

// A node of a tree: its number on the row's path, and where it lies.
struct PathNode {
  int step, page, token;  // step -1: it is not on the path
};

// The keys of a row from number `base` on, which are nodes of a draft tree: node i is at location first + i, and the
// path goes through the set bits of `mask`. `offsets`, in shared memory, has for each of them the elements from the KV
// head's first token in page 0 to it; in fp8, where nodes lie in arrays of their own in their own order, from node 0.
struct Path {
  int64_t* offsets;
  int first, base;
  uint64_t mask;
  const page_t *k_nodes, *v_nodes;  // node 0 of the KV head, with FP8 only

  // Finds where a node lies. All threads of the block call it, each for a node.
  DEVICE PathNode look_up(const int* block_table) const {
    const int node = threadIdx.x, location = first + node;
    if (node >= kMaxNodes || !(mask >> node & 1)) return {-1, 0, 0};
    const int step = __popcll(mask & ((1ull << node) - 1));
    if (FP8) return {step, 0, node};
    return {step, __ldcg(block_table + location / kPageTokens), location % kPageTokens};
  }
  // Stores what look_up found in `offsets`, for all threads of the block, which call it. Ends with a barrier.
  DEVICE void keep(const PathNode& node, int64_t page_stride) const {
    const int64_t token_stride = FP8 ? page_stride / kPageTokens : HEAD_DIM;  // a node has all KV heads
    if (node.step >= 0) offsets[node.step] = node.page * page_stride + node.token * token_stride;
    __syncthreads();
  }
};

// Starts the copies of 16 rows. Those from `valid` on become zeros: they were never written, and 0 * NaN would stay
// NaN. Valid rows from `old` on are left out. Most tiles are whole; what the others need is a loop, since short code
// starts soon.
DEVICE void load_tile(uint32_t dst, const page_t* rows, int valid, int old) {
  const int lane = threadIdx.x & 31;
  if (min(valid, old) >= kKeys) {
#pragma unroll
    for (int i = 0; i < kKeys * kCopiedChunks / 32; ++i) {
      const int index = lane + i * 32;
      cp_async16(dst + copied_place(index / kCopiedChunks, index % kCopiedChunks), rows + index * kChunkElements);
    }
    return;
  }
#pragma unroll 1
  for (int index = lane; index < kKeys * kCopiedChunks; index += 32) {
    const int row = index / kCopiedChunks, chunk = index % kCopiedChunks;
    if (row < old || row >= valid) {
      cp_async16(dst + copied_place(row, chunk), rows + index * kChunkElements, row < valid ? 16 : 0);
    }
  }
}

// Does what load_tile does, for a tile that begins with key `before` and has keys from the path's base on. Offsets of
// nodes count from `head`.
DEVICE void load_path_tile(uint32_t dst, const page_t* rows, const page_t* head, const Path& path, int before,
                           int valid, int old) {
#pragma unroll 1
  for (int index = threadIdx.x & 31; index < kKeys * kCopiedChunks; index += 32) {
    const int row = index / kCopiedChunks, chunk = index % kCopiedChunks, step = before + row - path.base;
    const page_t* source = rows + index * kChunkElements;
    if (step >= 0 && row < valid) source = head + path.offsets[step] + chunk * kChunkElements;
    if (row < old || row >= valid) cp_async16(dst + copied_place(row, chunk), source, row < valid ? 16 : 0);
  }
}

// The pages of a block's runs, one run after another, through a warp's ring, and after each run a place for its result:
// so pages of the next run are on their way while a result is merged. Keys and values of a place of the ring are
// cp.async groups of their own: at every wait exactly the 2 * STAGES - 1 youngest groups may still be in flight.
struct Stream {
  const page_t *k_rows, *v_rows;  // the warp's rows in page 0
  int64_t page_stride;
  Path path;
  const int* block_table;  // the slot's
  const int* chosen;       // the row's blocks, if it chose some
  uint32_t ring;
  int first_page, run_pages;
  int first_run, run_stride;  // the block's first run, and the distance between its runs
  int count;                  // steps of all its runs: kAtOnce pages, or what is left of a run
  int num_pages;              // pages of the row
  PageScales scales = {};
  int step = 0, step_of_run = 0, stage = 0;  // the step that is loaded next, its number in its run, its place in the ring
  // For 32 consecutive steps, one a lane: the number of the step's first page in the row or in the list of its blocks,
  // and where its pages lie in memory (-1: the run has no such page).
  int numbers, ids[kAtOnce];
#if RECEIVED_ROW
  uint32_t received = 0;  // shared address of the newest key, then its value, once they are there
#endif
#if LISTED_LATE
  int known_from = 0, skipped_pages = 0;  // from place known_from on the list is known without it: place p has block p + skipped_pages
  int missing = 0;                        // pages that the first run lacks
  int known_steps = 0;  // steps, the first ones, whose pages are known without the list
  bool is_listed = false;  // whether the list has been waited for

  // Prepares a stream that goes back from the block's last run to its first; known_from and skipped_pages are given.
  DEVICE void know(int known, int skipped) {
    known_from = known, skipped_pages = skipped;
    if (count == 0) return;
    const int end = (first_run + 1) * run_pages;
    missing = step_of_run = max(end - num_pages, 0);
    const int unknown_run = divided(known_from + run_pages - 1, run_pages);  // runs from here on are known without the list
    const int runs = first_run < unknown_run ? 0 : divided(first_run - unknown_run, -run_stride) + 1;
    known_steps = min(runs * run_pages - (runs > 0 ? missing : 0), count);
    locate();
  }
  // Waits for the list, if the next step needs it.
  DEVICE void wait_for_list() {
    if (is_listed || step < known_steps) return;
    pdl_wait();
    is_listed = true;
    locate();
  }
#endif

  // A place of the ring, which is read next, and the pages that it is then filled with, if any.
  struct Place {
    uint32_t k_tile;
    int64_t offset[kAtOnce];
    int before;  // the warp's first key in them
    bool is_page;
  };
  // Steps of a whole run.
  DEVICE int run_steps() const { return (run_pages + kAtOnce - 1) / kAtOnce; }

  // Returns the next place of the ring and what it is filled with: the pages of the next step, or nothing after the end
  // of a run: then it is room for the result.
  DEVICE Place advance() {
    Place place = {ring + stage * kStageBytes, {}, 0, step < count && step_of_run < run_steps()};
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if (!place.is_page) {
      step_of_run = 0;
      return place;
    }
#if LISTED_LATE
    wait_for_list();
#endif
    if (step > 0 && step % 32 == 0) {
      locate();
      load_scales();
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) place.offset[i] = __shfl_sync(0xFFFFFFFFu, ids[i], step % 32) * page_stride;
    place.before = first_key(__shfl_sync(0xFFFFFFFFu, numbers, step % 32));
    ++step, ++step_of_run;
    return place;
  }
  // Returns the first key of the warp in a page of the row.
  DEVICE int first_key(int page) const { return page * kPageTokens + (threadIdx.x >> 5) * kKeys; }
  // Looks up the pages of 32 steps. The caller does it for the first ones, advance() for the others.
#if LISTED_LATE
  DEVICE void locate() {
    const int own = step / 32 * 32 + (threadIdx.x & 31), place = own + missing, turn = divided(place, run_pages);
    numbers = first_page + (first_run + turn * run_stride) * run_pages + place - turn * run_pages - (turn == 0 ? missing : 0);
    ids[0] = 0;
    if (own >= count || (numbers < known_from && !is_listed)) return;
    ids[0] = __ldcg(block_table + (numbers < known_from ? __ldcg(chosen + numbers) : numbers + skipped_pages));
  }
#else
  DEVICE void locate() {
    const int own = step + (threadIdx.x & 31), turn = divided(own, run_steps());
    const int run_begin = first_page + (first_run + turn * run_stride) * run_pages;
    numbers = run_begin + own * kAtOnce - turn * (run_steps() * kAtOnce);
    ids[0] = 0;
    if (own < count) ids[0] = __ldcg(block_table + (chosen ? __ldcg(chosen + numbers) : numbers));
#pragma unroll
    for (int i = 1; i < kAtOnce; ++i) {
      const int page = numbers + i;
      ids[i] = -1;
      if (own < count && page < min(run_begin + run_pages, first_page + num_pages)) {
        ids[i] = __ldcg(block_table + (chosen ? __ldcg(chosen + page) : page));
      }
    }
  }
#endif
  // Loads the scales of the 32 steps located last. It comes after pdl_wait: a page whose first token is new has a new
  // scale; on a path it is that of the node which is the first token.
  DEVICE void load_scales() {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int first_node = (numbers + i) * kPageTokens - path.base;
      if (FP8 && TREE && first_node >= 0 && first_node < __popcll(path.mask)) {
        scales.load_node(i, path.offsets[first_node] / HEAD_DIM);
      } else {
        scales.load(i, ids[i]);
      }
    }
  }

  // Starts to load all keys or, with `is_v`, all values of a place, as a cp.async group. Keys from `old` on are left
  // out.
  DEVICE void load(uint32_t tile, bool is_v, const Place& from, int length, int old = kAllKeys) const {
    const page_t* rows = is_v ? v_rows : k_rows;
    const int valid = length - from.before;
#if RECEIVED_ROW
    old = min(old, length - 1);
    const int newest = length - 1 - from.before, chunk = threadIdx.x & 31;
    if (received != 0 && from.is_page && newest >= 0 && newest < kKeys && chunk < kCopiedChunks) {
      store_shared(tile + copied_place(newest, chunk), load_shared(received + is_v * kRowBytes + chunk * 16));
    }
#endif
    if (from.is_page) {
      if constexpr (FP8) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const bool exists = from.offset[i] >= 0;  // a page that does not exist becomes zeros
          const page_t* source = rows + (exists ? from.offset[i] : 0);
          const int skipped = i * kPageTokens, before = from.before + skipped;
          if (TREE && exists && min(before + kKeys, old) > path.base) {
            const page_t* head = is_v ? path.v_nodes : path.k_nodes;
            load_path_tile(tile + i * kTileBytes, source, head, path, before, valid - skipped, old - before);
          } else {
            load_tile(tile + i * kTileBytes, source, exists ? valid - skipped : 0, old - from.before - skipped);
          }
        }
      } else if (TREE && min(from.before + kKeys, old) > path.base) {
        const page_t* head = rows - (threadIdx.x >> 5) * (kKeys * HEAD_DIM);
        load_path_tile(tile, rows + from.offset[0], head, path, from.before, valid, old - from.before);
      } else {
        load_tile(tile, rows + from.offset[0], valid, old - from.before);
      }
    }
    cp_async_commit();
  }

  // A lane's chunk of the newest key or value, at keys.old, if the warp has it (else null): where it will lie, and its
  // place in the ring.
  struct NewRow {
    const page_t* source;
    uint32_t target;

    // Starts the chunk's copy, after pdl_wait. Returns whether there is one: then cp_async_wait_all must follow.
    DEVICE bool copy() const {
      if (source != nullptr) cp_async16(target, source);
      return source != nullptr;
    }
#if RECEIVED_ROW
    // Takes the chunk from where the row was received.
    DEVICE void take(uint32_t received) const {
      if (source != nullptr) store_shared(target, load_shared(received + (threadIdx.x & 31) * 16));
      __syncwarp();
    }
#endif
  };

  // Starts to load the first pages of the ring, except for keys from keys.old on. Before pdl_wait only what is older
  // than the kernel before this one may be read, which lets this one start only after its own pdl_wait. Returns the
  // lane's chunk of the key or value at keys.old. The loops stay loops: short code starts soon.
  DEVICE NewRow fill(const Keys& keys) {
    NewRow added = {};
#pragma unroll 1
    for (int i = 0; i < STAGES; ++i) {
      const Place place = advance();
      load(place.k_tile, false, place, keys.length, keys.old);
      load(place.k_tile + kHalfPlace, true, place, keys.length, keys.old);
      if (!TREE && place.is_page && keys.old < keys.length) find_new(added, place, keys.old - place.before);
    }
    return added;
  }

  // Sets `added` if the place has the newest key; `row` is that key's row, counted from the warp's first one in the
  // first page of the place.
  DEVICE void find_new(NewRow& added, const Place& place, int row) const {
    const int lane = threadIdx.x & 31, chunk = lane % kCopiedChunks;
    const bool is_v = lane >= kCopiedChunks;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, row -= kPageTokens) {
      if (row < 0 || row >= kKeys || lane >= 2 * kCopiedChunks) continue;
      added.source = (is_v ? v_rows : k_rows) + place.offset[i] + row * HEAD_DIM + chunk * kChunkElements;
      added.target = place.k_tile + i * kTileBytes + (is_v ? kHalfPlace : 0) + copied_place(row, chunk);
    }
  }

  // Starts to load the keys that fill() left out, after pdl_wait. Returns whether there are any: then cp_async_wait_all
  // must follow.
  DEVICE bool fill_new(const Keys& keys) const {
    bool has_new = false;
    int from = 0, room = run_steps();
#pragma unroll 1
    for (int place = 0; place < STAGES && from < count; ++place) {
      if (place == room) {
        room += run_steps() + 1;
        continue;
      }
      const int first_before = first_key(__shfl_sync(0xFFFFFFFFu, numbers, from));
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int before = first_before + i * kPageTokens;
        const int64_t offset = __shfl_sync(0xFFFFFFFFu, ids[i], from) * page_stride;
        const int first = max(keys.old - before, 0), end = min(keys.length - before, kKeys);
        if (first >= end || (i > 0 && offset < 0)) continue;
        has_new = true;
        load_new_rows(ring + place * kStageBytes + i * kTileBytes, offset, before, first, end);
      }
      ++from;
    }
    return has_new;
  }

  // Starts the copies of rows of a page of the ring, keys and values together: each lane has a chunk of a key or of its
  // value.
  DEVICE void load_new_rows(uint32_t tile, int64_t offset, int before, int first, int end) const {
    const int lane = threadIdx.x & 31, chunk = lane % kCopiedChunks;
    const bool is_v = lane >= kCopiedChunks;
    const page_t* rows = (is_v ? v_rows : k_rows) + offset + chunk * kChunkElements;
    if (lane >= 2 * kCopiedChunks) return;
#pragma unroll 1
    for (int row = first; row < end; ++row) {
      const page_t* source = rows + row * HEAD_DIM;
      const int step = TREE ? before + row - path.base : -1;
      if (FP8 && step >= 0) {
        source = (is_v ? path.v_nodes : path.k_nodes) + chunk * kChunkElements + path.offsets[step];
      } else if (step >= 0) {
        source = rows - offset - (threadIdx.x >> 5) * (kKeys * HEAD_DIM) + path.offsets[step];
      }
      cp_async16(tile + (is_v ? kHalfPlace : 0) + copied_place(row, chunk), source);
    }
  }
};

// Attends to the next `num_pages` of the stream, a run that begins with page `page` of the row. after_first() is called
// after its first step.
template <typename AfterFirst>
DEVICE void attend(WarpState& state, Stream& stream, const Keys& keys, int page, int num_pages, float factor,
                   AfterFirst after_first) {
  const int first_page = page;
  for (const int end = page + num_pages; page < end; page += kAtOnce) {
    const int first_key = stream.first_key(page);
    const Stream::Place next = stream.advance();
    const uint32_t k_tile = next.k_tile, v_tile = k_tile + kHalfPlace;
    float scores[kAtOnce][2][4];
    stream.scales.attend();
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) score_keys(scores[i], state, k_tile + i * kTileBytes, stream.scales.of_keys(i));
    __syncwarp();
    stream.load(k_tile, false, next, keys.length);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int first = first_key + i * kPageTokens;
      const Keys seen = i == 0 || page + i < end ? keys : Keys{0, 0};
      if (!seen.all_visible(first)) mask_tile(scores[i], first, {seen, seen});
    }
    softmax_at_once(scores, state, factor);
    cp_async_wait<2 * STAGES - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) accumulate_values(state, scores[i], v_tile + i * kTileBytes, stream.scales.of_values(i));
    __syncwarp();
    stream.load(v_tile, true, next, keys.length);
    stream.scales.next();
    if (page == first_page) after_first();
  }
}

// Attends to a run whose pages all came with fill(), where no other run follows. The scores and weights of all pages
// come first, since those of one page do not wait for those of another; a place without a page has hidden keys, whose
// weights are 0 and change nothing. The values, sums and products are those of attend().
DEVICE void attend_filled(WarpState& state, const Stream& stream, const Keys& keys, int page, int num_pages,
                          float factor) {
  const int lane = threadIdx.x & 31;
  float scores[STAGES][2][4] = {}, tops[STAGES * ROW_HALVES], keep[STAGES][ROW_HALVES];
  Values values[2];
  cp_async_wait_all();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (i + 1 == STAGES && num_pages < STAGES) break;  // a test for every page would keep one from starting beside another
    score_tile(scores[i], state, TileRow(stream.ring + i * kStageBytes, lane_row_b(lane)));
  }
  values[0].load(TileRow(stream.ring + kHalfPlace, lane_row_a(lane)));
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    const int first_key = stream.first_key(page + i);
    const Keys seen = i < num_pages ? keys : Keys{0, 0};
    if (!seen.all_visible(first_key)) mask_tile(scores[i], first_key, {seen, seen});
    find_tops(tops + i * ROW_HALVES, scores[i]);
  }
  quad_maxima(tops);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) weigh_tile(scores[i], keep[i], state, tops + i * ROW_HALVES, factor);
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (i >= num_pages) break;
    if (i + 1 < STAGES) values[(i + 1) % 2].load(TileRow(stream.ring + (i + 1) * kStageBytes + kHalfPlace, lane_row_a(lane)));
    if (i > 0) scale_output(state, keep[i]);  // before the first page it is zero
    accumulate_values(state, scores[i], values[i % 2]);
  }
  __syncwarp();
}
