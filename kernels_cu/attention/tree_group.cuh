// Rows of a step whose pages a block reads for all of them: which ones, and where each one's path goes.
//
// The including file defines kRows, the most rows of a group.
#pragma once
#include "decode_cut.cuh"

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
  // The rows with that value.
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

  // By one warp: into `members`, for all.
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
