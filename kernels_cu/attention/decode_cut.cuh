// The keys that a row of decode attention sees, and the cut of their pages into runs. The cut depends on that row's
// length and the number of splits alone, so that every kernel that attends in this order gives the same bits.
#pragma once
#include "attention.cuh"

// The values of these options in a kernel that does not define them.
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

// kCluster runs are merged without going through memory. A row of at most kClusterPages pages is cut into no more than
// these: that is cheaper than merging through the workspace.
constexpr int kCluster = IN_CLUSTERS ? 8 : 1;
constexpr int kClusterPages = IN_CLUSTERS ? 32 : 4;
constexpr int kLeastPages = IN_CLUSTERS ? 1 : 2;  // least pages of a run: a page more takes less time than a result more to merge
constexpr int kMergeBatch = 8;                // clusters whose partials are read at a time

constexpr int kSlices = 4;                    // slices of a page, one for each warp
constexpr int kKeys = kPageTokens / kSlices;  // keys of a slice

// The keys that a row sees, numbered by position, or by their place in the blocks that it chose: those below `length`,
// but not those before its window. Loading may begin with those below `old`: either they were in the cache before this
// step, or pdl_wait comes first.
struct Keys {
  int length, old;

  DEVICE int first() const { return WINDOW > 0 ? max(length - WINDOW, 0) : 0; }
  // Whether the row sees all kKeys keys from `from` on.
  DEVICE bool all_visible(int from) const { return from + kKeys <= length && (WINDOW == 0 || from >= first()); }
  DEVICE bool visible(int key) const { return key < length && (WINDOW == 0 || key >= first()); }
};

// Returns a / b, rounded down, for counts below 2^20: a quotient is at least 0.5 / b away from the next integer, and
// the error less.
DEVICE int divided(int a, int b) { return __float2int_rz((a + 0.5f) * reciprocal_fast(static_cast<float>(b))); }

// The cut of the pages that a row sees: num_pages pages from first_page on make num_runs runs of run_pages pages each;
// only the last run may have fewer.
struct Cut {
  int first_page, num_pages, run_pages, num_runs;

  DEVICE Cut(const Keys& keys, int num_splits) {
    first_page = keys.first() / kPageTokens;
    num_pages = (keys.length + kPageTokens - 1) / kPageTokens - first_page;
    const int wanted = num_pages <= kClusterPages ? kCluster : num_splits;
    run_pages = max(kLeastPages, divided(num_pages + wanted - 1, wanted));
    num_runs = divided(num_pages + run_pages - 1, run_pages);
  }
  // Returns how many steps, each of at most `at_once` pages of one run, the runs `first`, first + stride and so on
  // take.
  DEVICE int steps_of(int first, int stride, int at_once) const {
    if (first >= num_runs) return 0;
    const int others = divided(num_runs - 1 - first, stride), last = first + others * stride;
    const int pages = min(run_pages, num_pages - last * run_pages);
    return others * ((run_pages + at_once - 1) / at_once) + (pages + at_once - 1) / at_once;
  }
  // Returns the number of clusters of runs: kCluster runs, or what is left, which are merged together.
  DEVICE int clusters() const { return (num_runs + kCluster - 1) / kCluster; }
};
