// How latent attention cuts a row's pages into runs, by the row's length and the number of splits alone, and where the result
// of a run lies.
#pragma once
#include "warp_tile.cuh"

#if !defined(HEADS) || !defined(KV_RANK)
#error "a constant is not defined"
#endif

// Keys that a row sees; none without a slot.
DEVICE int length_of(int row, const int* positions, const int* slots) {
  const int slot = load_now(slots + row), position = load_now(positions + row);
  return slot < 0 ? 0 : position + 1;
}

struct LatentCut {
  int num_pages, run_pages, num_runs;

  DEVICE LatentCut(int length, int num_splits) {
    num_pages = (length + kPageTokens - 1) / kPageTokens;
    run_pages = (num_pages + num_splits - 1) / num_splits;
    num_runs = run_pages > 0 ? (num_pages + run_pages - 1) / run_pages : 0;
  }
};

// Where the results of a row begin: means of latents [num_splits, HEADS, KV_RANK], of every 16 columns 0, 1, 8, 9, 2, 3, 10 and so on,
// as the lanes of tensor core products have them; and log2 of the sums of weights of a head
// [num_splits].
DEVICE int64_t means_of(int row, int num_splits) { return static_cast<int64_t>(row) * num_splits * (HEADS * KV_RANK); }
DEVICE int64_t log_sums_of(int row, int head, int num_splits) {
  return (static_cast<int64_t>(row) * HEADS + head) * num_splits;
}
