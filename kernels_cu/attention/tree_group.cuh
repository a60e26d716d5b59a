// Groups of rows of a step: a block of tree_attention reads their pages for all rows of a group. Finds the rows of a
// group, the path of each one, and their pages, which pass through a ring one after another. The nodes of the tree are
// loaded in the order of their numbers.
#pragma once
#include "page_tiles.cuh"

// The block's shape.
constexpr int kTiles = (GROUP + 15) / 16;  // blocks that share a KV head
constexpr int kHeads = (GROUP + kTiles - 1) / kTiles;
constexpr int kPacked = kHeads <= 8 ? 2 : 1;  // rows of the step that share a tile
constexpr int kRows = ROW_TILES * kPacked;    // most rows of a group
constexpr int kThreads = 128 * ROW_TILES;
constexpr int kPageBytes = kPageTokens * HEAD_DIM * static_cast<int>(sizeof(page_t));  // bytes of a page's keys, or of its values
constexpr int kStageBytes = 2 * kAtOnce * kPageBytes;  // keys, then values, of the pages of a step

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Returns a bit for each row of the step: `low` is that of row lane, `high` that of row lane + 32.
DEVICE uint64_t ballot(bool low, bool high) {
  return __ballot_sync(kAllLanes, low) | (uint64_t)__ballot_sync(kAllLanes, high) << 32;
}

// The rows of a step in the registers of a warp, in each lane rows lane and lane + 32.
struct StepRows {
  // `cut` holds both numbers of a row's cut: run_pages * kMaxNodes + clusters.
  int slot[2], base[2], length[2], first_page[2], cut[2];
  uint64_t path[2];
  uint64_t seeing;  // rows that see a key, one bit each

  DEVICE StepRows(const int* slots, const int* positions, const int* tree_base, const uint64_t* tree_masks,
                  int num_rows, int num_splits) {
    bool sees[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = (threadIdx.x & 31) + 32 * i;
      const bool exists = row < num_rows;
      slot[i] = exists ? __ldcg(slots + row) : -1;
      length[i] = exists ? __ldcg(positions + row) + 1 : 0;
      base[i] = exists ? __ldcg(tree_base + row) : 0;
      path[i] = exists ? __ldcg(tree_masks + row) : 0;
      sees[i] = slot[i] >= 0 && length[i] > 0;
    }
    seeing = ballot(sees[0], sees[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Cut own({sees[i] ? length[i] : 1, 0}, num_splits);
      first_page[i] = own.first_page;
      cut[i] = own.run_pages * kMaxNodes + own.clusters();
    }
  }

  // Returns a row's value to all lanes.
  DEVICE int of_row(const int (&values)[2], int row) const {
    return __shfl_sync(kAllLanes, row < 32 ? values[0] : values[1], row % 32);
  }
  // Returns the rows that have this value, one bit each.
  DEVICE uint64_t with(const int (&values)[2], int value) const {
    return ballot(values[0] == value, values[1] == value);
  }
};

// The rows of a group, in shared memory. A place without a row has row -1, which sees no key.
struct Members {
  int row[kRows], length[kRows];
  uint8_t path[kRows][kMaxNodes];  // the numbers of the row's nodes from the root on
  float k_scale[kRows], v_scale[kRows];  // with FP8: scales of the page that begins on the path, if one does
};

// The nodes of a tree in fp8, which have codes and scales in arrays of their own: those of a KV head, from node 0 on.
struct Nodes {
  const page_t *k, *v;
  const float *k_scales, *v_scales;
  int num_kv_heads;
};

// Rows of one slot and base whose pages are cut into the same runs, and one cluster of these runs.
struct Group {
  uint64_t rows;  // the rows of the step, one bit each
  int slot, base, cluster;
  int first_row;  // the slot's first row in the step, which is node 0; with FP8 only
  int length;     // keys of the longest row
  int num_nodes;  // nodes up to the last one that is on a path
  bool is_old;    // the keys before the base were in the cache before this step

  // Finds the `item`-th pair of a group and one of its clusters. Groups whose rows are cut alike come together: all of
  // them with their first cluster, then with their second and so on. Returns false if there are fewer.
  DEVICE bool find(const StepRows& all, int item) {
    uint64_t pending = all.seeing;
    while (pending) {
      const int leader = __ffsll(pending) - 1, cut = all.of_row(all.cut, leader);
      slot = all.of_row(all.slot, leader), base = all.of_row(all.base, leader);
      const uint64_t alike = pending & all.with(all.slot, slot) & all.with(all.base, base) & all.with(all.cut, cut) &
                             all.with(all.first_page, all.of_row(all.first_page, leader));
      const int num_groups = (__popcll(alike) + kRows - 1) / kRows, num_items = num_groups * (cut % kMaxNodes);
      if (item < num_items) {
        cluster = item / num_groups;
        choose(all, alike, item % num_groups);
        return true;
      }
      item -= num_items;
      pending &= ~alike;
    }
    return false;
  }

  // Writes the group to `members`, where the whole block reads it. One warp calls it.
  DEVICE void describe(const StepRows& all, Members& members) const {
    const int lane = threadIdx.x & 31;
    if (lane < kRows) members.row[lane] = -1, members.length[lane] = 0, members.k_scale[lane] = members.v_scale[lane] = 1.0f;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i, place = __popcll(rows & ((1ull << row) - 1));
      if (!(rows >> row & 1)) continue;
      members.row[place] = row, members.length[place] = all.length[i];
      int step = 0;
      for (uint64_t left = all.path[i]; left; left &= left - 1) members.path[place][step++] = __ffsll(left) - 1;
    }
    __syncwarp();
  }

  // Loads the scales of the page that begins on a row's path, for each row. The same warp calls it, after pdl_wait.
  DEVICE void load_scales(Members& members, const Nodes& nodes) const {
    const int place = threadIdx.x & 31, step = (base + kPageTokens - 1) / kPageTokens * kPageTokens - base;
    if (place >= kRows || base + step >= members.length[place]) return;
    const int node = members.path[place][step] * nodes.num_kv_heads;
    members.k_scale[place] = __ldcg(nodes.k_scales + node);
    members.v_scale[place] = __ldcg(nodes.v_scales + node);
  }

 private:
  // Makes this the `index`-th group of the rows that are alike.
  DEVICE void choose(const StepRows& all, uint64_t alike, int index) {
    const int lane = threadIdx.x & 31;
    bool chosen[2];
    int longest = 0, oldest = 0x7FFFFFFF;
    uint64_t nodes = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i;
      chosen[i] = (alike >> row & 1) && __popcll(alike & ((1ull << row) - 1)) / kRows == index;
      if (chosen[i]) longest = max(longest, all.length[i]), nodes |= all.path[i];
      if ((all.seeing >> row & 1) && all.slot[i] == slot) oldest = min(oldest, all.base[i]);
    }
    rows = ballot(chosen[0], chosen[1]);
#if FP8
    first_row = __ffsll(all.with(all.slot, slot)) - 1;
#endif
    length = __reduce_max_sync(kAllLanes, longest);
    const uint32_t low = __reduce_or_sync(kAllLanes, (uint32_t)nodes);
    const uint32_t high = __reduce_or_sync(kAllLanes, (uint32_t)(nodes >> 32));
    num_nodes = 64 - __clzll((uint64_t)high << 32 | low);
    is_old = __reduce_min_sync(kAllLanes, oldest) >= base;
  }
};

// The pages of a block's runs in one cluster of runs, and their ring. The block has every CLUSTER-th of these runs; a
// step takes kAtOnce pages of one.
struct Pages {
  const page_t *k_pages, *v_pages;  // rows of this KV head in page 0
  int page_stride;
  const int* block_table;  // the slot's
  uint32_t ring;
  int base;  // keys from here on are nodes
  int first_page, end_page, first_run, run_pages;
  int count;  // steps of all runs
  // For 32 consecutive steps, one a lane: the number in the row of the step's first page, and where its pages lie in
  // memory (-1: the run has no such page).
  int numbers, ids[kAtOnce];
  PageScales scales = {};
  Nodes nodes = {};

  DEVICE Pages(const Cut& cut, int cluster, int rank) {
    run_pages = cut.run_pages;
    first_page = cut.first_page, end_page = cut.first_page + cut.num_pages;
    first_run = cluster * kCluster + rank;
    const int end = min(cut.num_runs, (cluster + 1) * kCluster), runs = (end - first_run + CLUSTER - 1) / CLUSTER;
    const int last_run = first_run + (runs - 1) * CLUSTER;
    const int last_pages = min(run_pages, cut.num_pages - last_run * run_pages);
    count = runs > 0 ? (runs - 1) * run_steps() + (last_pages + kAtOnce - 1) / kAtOnce : 0;
  }
  // Steps of a whole run.
  DEVICE int run_steps() const { return (run_pages + kAtOnce - 1) / kAtOnce; }
  // The first page of the run that a step belongs to, and the page behind its last one.
  DEVICE int run_begin(int step) const { return first_page + (first_run + step / run_steps() * CLUSTER) * run_pages; }
  DEVICE int run_end(int step) const { return min(run_begin(step) + run_pages, end_page); }
  // A step's first page, and its place in the ring.
  DEVICE int page_of(int step) const { return run_begin(step) + step % run_steps() * kAtOnce; }
  DEVICE uint32_t stage(int step) const { return ring + step % STAGES * kStageBytes; }

  // Returns the first step of the first of the block's runs in which the base lies or which begins behind it: the nodes
  // are needed from there on.
  DEVICE int first_tail() const {
    const int run = max(base / kPageTokens - first_page, 0) / run_pages;
    return max(run - first_run + CLUSTER - 1, 0) / CLUSTER * run_steps();
  }

  // Starts to load the first pages of the ring, each place as a cp.async group of its own.
  DEVICE void fill() {
#pragma unroll 1
    for (int step = 0; step < STAGES; ++step) {
      load(step);
      cp_async_commit();
    }
  }
  // Starts to load the pages of a step, only their keys before the base. All threads call it, for steps in ascending
  // order.
  DEVICE void load(int step) {
    if (step % 32 == 0) locate(step + (threadIdx.x & 31));
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int valid = base - (__shfl_sync(0xFFFFFFFFu, numbers, step % 32) + i) * kPageTokens;
      const int64_t id = __shfl_sync(0xFFFFFFFFu, ids[i], step % 32), offset = id * page_stride;
      const bool exists = step < count && valid > 0 && (i == 0 || id >= 0);
      if (exists) copy(stage(step) + i * kPageBytes, k_pages + offset, v_pages + offset, valid);
    }
  }

  // Starts to load keys and values of the nodes, which may go on in the page after that of the base. All threads call
  // it.
  DEVICE void load_nodes(uint32_t memory, int num_nodes) const {
    for (int index = threadIdx.x; index < num_nodes * kCopiedChunks; index += kThreads) {
      const int node = index / kCopiedChunks, chunk = index % kCopiedChunks;
#if FP8
      const int64_t source = static_cast<int64_t>(node) * nodes.num_kv_heads * HEAD_DIM + chunk * kChunkElements;
      const page_t *keys = nodes.k + source, *values = nodes.v + source;
#else
      const int location = base + node;
      const int64_t page = __ldcg(block_table + location / kPageTokens);
      const int64_t source = page * page_stride + location % kPageTokens * HEAD_DIM + chunk * kChunkElements;
      const page_t *keys = k_pages + source, *values = v_pages + source;
#endif
      cp_async16(memory + copied_place(node, chunk), keys);
      cp_async16(memory + kPageBytes + copied_place(node, chunk), values);
    }
  }

 private:
  // Looks up the pages of a step, and loads the scales of those that begin before the base. Each lane does it for a
  // step of its own.
  DEVICE void locate(int step) {
    numbers = page_of(step);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = step < count && (i == 0 || numbers + i < run_end(step));
      ids[i] = exists ? __ldcg(block_table + numbers + i) : -(i > 0);
      scales.load(i, exists && (numbers + i) * kPageTokens < base ? ids[i] : -1);
    }
  }

  // Starts the copies of a page's keys and values; rows from `valid` on become zeros.
  DEVICE void copy(uint32_t tile, const page_t* keys, const page_t* values, int valid) const {
#pragma unroll
    for (int i = 0; i < (kPageTokens * kCopiedChunks + kThreads - 1) / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads, row = index / kCopiedChunks, chunk = index % kCopiedChunks;
      if (kPageTokens * kCopiedChunks % kThreads != 0 && row >= kPageTokens) continue;
      const int source_bytes = row < valid ? 16 : 0, place = copied_place(row, chunk);
      cp_async16(tile + place, keys + index * kChunkElements, source_bytes);
      cp_async16(tile + kAtOnce * kPageBytes + place, values + index * kChunkElements, source_bytes);
    }
  }
};
