// Which keys a row of decode_attention sees, and how their pages are cut into runs: by that row's length and the number
// of splits alone, so that every kernel that attends to them in this order gives the same bits.
#pragma once
#include "attention.cuh"

// A kernel without one of these options attends as with 0.
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef TREE
#define TREE 0
#endif
#ifndef FP8
#define FP8 0
#endif
#ifndef ROW_HALVES
#define ROW_HALVES 2  // 1: rows 8 to 15 of a tile of queries are empty, and nothing but products is done for them
#endif
#ifndef TEAMS
#define TEAMS 1  // four warps each, threadIdx.y of a block, with runs of their own
#endif
#ifndef LISTED_LATE
#define LISTED_LATE 0  // 1: the list of blocks comes after pdl_wait, pages that are known without it are read before
#endif
#ifndef RECEIVED_ROW
#define RECEIVED_ROW 0  // 1: the newest key and value come through shared memory, those in the pages are not there yet
#endif
#if __CUDA_ARCH__ >= 900 && !PORTABLE
#define IN_CLUSTERS 1  // blocks merge their results in clusters
#ifndef CLUSTER
#define CLUSTER 8  // blocks that share eight runs
#endif
#else
#define IN_CLUSTERS 0
#undef CLUSTER
#define CLUSTER 1
#endif

// How many runs are merged without going through memory, and up to how many pages a row is cut into that many alone:
// cheaper than merging through the workspace.
constexpr int kCluster = IN_CLUSTERS ? 8 : 1;
constexpr int kClusterPages = IN_CLUSTERS ? 32 : 4;
constexpr int kLeastPages = IN_CLUSTERS ? 1 : 2;  // of a run, where a page more takes less time than a result more to merge
constexpr int kMergeBatch = 8;                // clusters read at a time

constexpr int kSlices = 4;                    // of a page, each a warp's
constexpr int kKeys = kPageTokens / kSlices;  // of a slice

// The keys of a row, by position, or by their place among those of the blocks that it chose: none from `length` on, none
// before the window. Those below `old` were in the cache before this step.
struct Keys {
  int length, old;

  DEVICE int first() const { return WINDOW > 0 ? max(length - WINDOW, 0) : 0; }
  DEVICE bool all_visible(int from) const { return from + kKeys <= length && (WINDOW == 0 || from >= first()); }
  DEVICE bool visible(int key) const { return key < length && (WINDOW == 0 || key >= first()); }
};

// a / b, for counts below 2^20: a quotient is at least 0.5 / b away from the next integer, and the error less.
DEVICE int divided(int a, int b) { return __float2int_rz((a + 0.5f) * reciprocal_fast(static_cast<float>(b))); }

// How the pages that a row sees are cut: pages of a run, and how many runs there are.
struct Cut {
  int first_page, num_pages, run_pages, num_runs;

  DEVICE Cut(const Keys& keys, int num_splits) {
    first_page = keys.first() / kPageTokens;
    num_pages = (keys.length + kPageTokens - 1) / kPageTokens - first_page;
    const int wanted = num_pages <= kClusterPages ? kCluster : num_splits;
    run_pages = max(kLeastPages, divided(num_pages + wanted - 1, wanted));
    num_runs = divided(num_pages + run_pages - 1, run_pages);
  }
  // Steps of `at_once` pages in the runs `first`, first + stride and so on: only the last of all runs is shorter.
  DEVICE int steps_of(int first, int stride, int at_once) const {
    if (first >= num_runs) return 0;
    const int others = divided(num_runs - 1 - first, stride), last = first + others * stride;
    const int pages = min(run_pages, num_pages - last * run_pages);
    return others * ((run_pages + at_once - 1) / at_once) + (pages + at_once - 1) / at_once;
  }
  DEVICE int clusters() const { return (num_runs + kCluster - 1) / kCluster; }
};
