// Rows of a step whose pages a block of tree_attention reads for all of them: which ones, where each one's path goes, and
// their pages, which come one after another through a ring. The nodes of the tree lie in the order of the nodes.
#pragma once
#include "decode_tile.cuh"

// The block's shape.
constexpr int kTiles = (GROUP + 15) / 16;  // blocks that share a KV head
constexpr int kHeads = (GROUP + kTiles - 1) / kTiles;
constexpr int kPacked = kHeads <= 8 ? 2 : 1;  // rows of a tile
constexpr int kRows = ROW_TILES * kPacked;    // of a group, at most
constexpr int kThreads = 128 * ROW_TILES;
constexpr int kTileBytes = kPageTokens * kRowBytes;  // of a page
constexpr int kStageBytes = 2 * kTileBytes;

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

DEVICE uint64_t ballot(bool low, bool high) {
  return __ballot_sync(kAllLanes, low) | (uint64_t)__ballot_sync(kAllLanes, high) << 32;
}

// What the lanes of a warp hold of the rows of a step, each of its rows lane and lane + 32.
struct StepRows {
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

  DEVICE int of_row(const int (&values)[2], int row) const {
    return __shfl_sync(kAllLanes, row < 32 ? values[0] : values[1], row % 32);
  }
  // The rows that have this value, one bit each.
  DEVICE uint64_t with(const int (&values)[2], int value) const {
    return ballot(values[0] == value, values[1] == value);
  }
};

// A group in shared memory. A row that is missing is -1 and sees no key.
struct Members {
  int row[kRows], length[kRows];
  uint8_t path[kRows][kMaxNodes];  // the nodes from the root on
};

// Rows of one slot and base whose pages are cut into the same runs, and one cluster of these runs.
struct Group {
  uint64_t rows;  // one bit each
  int slot, base, cluster;
  int length;     // of the longest row
  int num_nodes;  // up to the last one that is on a path
  bool is_old;    // the keys before the base were in the cache before this step

  // The `item`-th of all groups and their clusters, the first clusters of like groups first; false if there are fewer.
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

  // One warp writes the group to `members`, where the whole block reads it.
  DEVICE void describe(const StepRows& all, Members& members) const {
    const int lane = threadIdx.x & 31;
    if (lane < kRows) members.row[lane] = -1, members.length[lane] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i, place = __popcll(rows & ((1ull << row) - 1));
      if (!(rows >> row & 1)) continue;
      members.row[place] = row, members.length[place] = all.length[i];
      int step = 0;
      for (uint64_t left = all.path[i]; left; left &= left - 1) members.path[place][step++] = __ffsll(left) - 1;
    }
  }

 private:
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
    length = __reduce_max_sync(kAllLanes, longest);
    const uint32_t low = __reduce_or_sync(kAllLanes, (uint32_t)nodes);
    const uint32_t high = __reduce_or_sync(kAllLanes, (uint32_t)(nodes >> 32));
    num_nodes = 64 - __clzll((uint64_t)high << 32 | low);
    is_old = __reduce_min_sync(kAllLanes, oldest) >= base;
  }
};

// The pages of a block's runs of one cluster of runs: every CLUSTER-th of these runs.
struct Pages {
  const scalar_t *k_pages, *v_pages;  // of this KV head in page 0
  int page_stride;
  const int* block_table;  // of the slot
  uint32_t ring;
  int base;  // keys from here on are nodes
  int first_page, first_run, run_pages;
  int count;
  int numbers, ids;  // of 32 consecutive steps, one a lane: the page of the row, its place in memory

  DEVICE Pages(const Cut& cut, int cluster, int rank) {
    run_pages = cut.run_pages;
    first_page = cut.first_page;
    first_run = cluster * kCluster + rank;
    const int end = min(cut.num_runs, (cluster + 1) * kCluster), runs = (end - first_run + CLUSTER - 1) / CLUSTER;
    const int last_run = first_run + (runs - 1) * CLUSTER;
    count = runs > 0 ? (runs - 1) * run_pages + min(run_pages, cut.num_pages - last_run * run_pages) : 0;
  }
  DEVICE int page_of(int step) const {
    return first_page + (first_run + step / run_pages * CLUSTER) * run_pages + step % run_pages;
  }
  DEVICE uint32_t stage(int step) const { return ring + step % STAGES * kStageBytes; }

  // The first step of the run in which the base lies or which begins behind it.
  DEVICE int first_tail() const {
    const int run = max(base / kPageTokens - first_page, 0) / run_pages;
    return max(run - first_run + CLUSTER - 1, 0) / CLUSTER * run_pages;
  }

  // The ring's first pages, a group each.
  DEVICE void fill() {
#pragma unroll 1
    for (int step = 0; step < STAGES; ++step) {
      load(step);
      cp_async_commit();
    }
  }
  // Loads the page of a step, its keys before the base. All threads call it, for steps in ascending order.
  DEVICE void load(int step) {
    if (step % 32 == 0) {
      const int own = step + (threadIdx.x & 31);
      numbers = page_of(own);
      ids = own < count ? __ldcg(block_table + numbers) : 0;
    }
    const int valid = base - __shfl_sync(0xFFFFFFFFu, numbers, step % 32) * kPageTokens;
    const int64_t offset = (int64_t)__shfl_sync(0xFFFFFFFFu, ids, step % 32) * page_stride;
    if (step < count && valid > 0) copy(stage(step), k_pages + offset, v_pages + offset, valid);
  }

  // Loads the nodes, which may go on in the page after that of the base. All threads call it.
  DEVICE void load_nodes(uint32_t nodes, int num_nodes) const {
    for (int index = threadIdx.x; index < num_nodes * kRowChunks; index += kThreads) {
      const int node = index / kRowChunks, chunk = index % kRowChunks, location = base + node;
      const int64_t page = __ldcg(block_table + location / kPageTokens);
      const int64_t source = page * page_stride + location % kPageTokens * HEAD_DIM + chunk * 8;
      cp_async16(nodes + swizzled(node, chunk), k_pages + source);
      cp_async16(nodes + kTileBytes + swizzled(node, chunk), v_pages + source);
    }
  }

 private:
  DEVICE void copy(uint32_t tile, const scalar_t* keys, const scalar_t* values, int valid) const {
#pragma unroll
    for (int i = 0; i < (kPageTokens * kRowChunks + kThreads - 1) / kThreads; ++i) {
      const int index = threadIdx.x + i * kThreads, row = index / kRowChunks, chunk = index % kRowChunks;
      if (kPageTokens * kRowChunks % kThreads != 0 && row >= kPageTokens) continue;
      const int source_bytes = row < valid ? 16 : 0;
      cp_async16(tile + swizzled(row, chunk), keys + index * 8, source_bytes);
      cp_async16(tile + kTileBytes + swizzled(row, chunk), values + index * 8, source_bytes);
    }
  }
};
