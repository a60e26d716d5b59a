// Copies pages of latents to shared memory, with a block of 128 threads: those of a slot, and with TREE behind them the nodes of a draft
// tree's path.
#pragma once
#include "latent_cut.cuh"

#if !defined(ROPE_DIM) || !defined(TREE)
#error "a constant is not defined"
#endif

constexpr int kThreads = 128;                     // threads of a block
constexpr int kCached = KV_RANK + ROPE_DIM;  // elements of a row: latent, rotated part of the key
constexpr int kChunks = kCached / 8;              // 16-byte chunks of a row
constexpr int kRowBytes = kCached * 2;
constexpr int kPageBytes = kPageTokens * kRowBytes;

// Prefetches to the L2 the block's part of the first `bytes` (a multiple of 16) of weights that later kernels read; only blocks of y = z = 0
// have a part. It is called once the pages have been asked for: from then on memory has little to do until the next kernels run.
DEVICE void bring_upcoming(const unsigned char* weights, int bytes) {
  constexpr int kPieceBytes = 2048;
  if (blockIdx.y + blockIdx.z > 0) return;
  const int step = gridDim.x * kThreads * kPieceBytes;
  for (int first = (threadIdx.x * gridDim.x + blockIdx.x) * kPieceBytes; first < bytes; first += step)
    prefetch_to_l2(weights + first, min(kPieceBytes, bytes - first));
}

// The keys of one row, and the copies of its pages to shared memory.
struct Source {
  const scalar_t* pages;
  const int* block_table;
  uint32_t path;  // shared address of an int for each node of the row's path: its row, among those of all pages
  int length, num_nodes;  // keys of the row; how many of them, the last ones, are those of its path
  int settled;            // keys of the row that are older than the step; the kernel before this one writes those behind them

  // Returns the first row of a page whose key is not settled, 0 to 64.
  DEVICE int first_fresh(int page) const { return min(max(settled - page * kPageTokens, 0), kPageTokens); }

  // Whether all 64 keys of the page are settled, and none is of the path.
  DEVICE bool is_old(int page) const { return first_fresh(page) == kPageTokens && (page + 1) * kPageTokens <= length - num_nodes; }

  // Starts the copy of a chunk of a row to shared address `place`. Its page begins with row `first_row` of all pages. From there on the
  // sequence has `visible` keys, the last num_nodes of which lie where the path says. Rows from `visible` on become zeros.
  DEVICE void copy(uint32_t place, int first_row, int row, int chunk, int visible) const {
    const int node = row - visible + num_nodes;
    const int from = TREE && node >= 0 && row < visible ? load_shared_word(path + node * 4) : first_row + row;
    cp_async16(place, pages + static_cast<int64_t>(from) * kCached + chunk * 8, row < visible ? 16 : 0);
  }

  // Starts the copies of page `page` of the row, page `number` of all pages, except for its keys from row `fresh` on; rows that do not
  // exist become zeros. COPIES: how many copies of a thread are unrolled. place_of(row, chunk) returns the shared address of a chunk.
  template <int COPIES, class Place>
  DEVICE void load(int page, int number, int fresh, Place place_of) const {
    const int visible = length - page * kPageTokens;
#pragma unroll COPIES
    for (int index = threadIdx.x; index < kPageTokens * kChunks; index += kThreads) {
      const int row = index / kChunks, chunk = index - row * kChunks;
      if (row < fresh || row >= visible) copy(place_of(row, chunk), number * kPageTokens, row, chunk, visible);
    }
  }
  // Starts the copies of those keys of the page alone that are not settled.
  template <class Place>
  DEVICE void load_fresh(int page, int number, Place place_of) const {
    const int visible = length - page * kPageTokens, end = min(visible, kPageTokens) * kChunks;
#pragma unroll 1
    for (int index = first_fresh(page) * kChunks + threadIdx.x; index < end; index += kThreads) {
      const int row = index / kChunks, chunk = index - row * kChunks;
      copy(place_of(row, chunk), number * kPageTokens, row, chunk, visible);
    }
  }
};

// Stores at `path` which row of all pages holds each node of a path: the set bits of `mask`, of which bit n is location base + n. Each of
// the first kMaxNodes threads takes a bit. A barrier must follow.
DEVICE void look_up_path(uint32_t path, const int* block_table, uint64_t mask, int base) {
  const int bit = threadIdx.x;
  if (bit >= kMaxNodes || !(mask >> bit & 1)) return;
  const int location = base + bit, row = block_table[location / kPageTokens] * kPageTokens + location % kPageTokens;
  store_shared_word(path + __popcll(mask & ((1ull << bit) - 1)) * 4, row);
}
