// Cuts a row's pages into runs for latent attention, by the row's length and the number of splits alone, and says where the results of a
// run lie.
#pragma once
#include "warp_tile.cuh"

#if !defined(HEADS) || !defined(KV_RANK)
#error "a constant is not defined"
#endif

// Returns the number of keys that a row sees: its position + 1, or 0 for a row without a slot.
DEVICE int length_of(int row, const int* positions, const int* slots) {
  const int slot = load_now(slots + row), position = load_now(positions + row);
  return slot < 0 ? 0 : position + 1;
}

// The runs of a row: num_runs runs, at most `num_splits`, of run_pages consecutive pages each. The last one may have fewer.
struct LatentCut {
  int num_pages, run_pages, num_runs;

  DEVICE LatentCut(int length, int num_splits) {
    num_pages = (length + kPageTokens - 1) / kPageTokens;
    run_pages = (num_pages + num_splits - 1) / num_splits;
    num_runs = run_pages > 0 ? (num_pages + run_pages - 1) / run_pages : 0;
  }
};

// Offsets, in floats, of a row's results. Means of latents are [num_splits, HEADS, KV_RANK] for each row; of every 16 columns they are
// stored in the order 0, 1, 8, 9, 2, 3, 10 and so on, as the lanes hold an accumulator of tensor core products. Log sums, log2 of a run's
// sum of weights, are [num_splits] for each head of a row.
DEVICE int64_t means_of(int row, int num_splits) { return static_cast<int64_t>(row) * num_splits * (HEADS * KV_RANK); }
DEVICE int64_t log_sums_of(int row, int head, int num_splits) {
  return (static_cast<int64_t>(row) * HEADS + head) * num_splits;
}
