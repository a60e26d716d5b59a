// Pages of latents on their way to shared memory, for a block of 128 threads: those of a slot, or of a path of a draft tree behind it.
#pragma once
#include "latent_cut.cuh"

#if !defined(ROPE_DIM) || !defined(TREE)
#error "a constant is not defined"
#endif

constexpr int kThreads = 128;                     // of a block
constexpr int kCached = KV_RANK + ROPE_DIM;
constexpr int kChunks = kCached / 8;              // 16-byte chunks of a row
constexpr int kRowBytes = kCached * 2;
constexpr int kPageBytes = kPageTokens * kRowBytes;

// Brings the block's part of the first `bytes` (a multiple of 16) of weights that are read soon to the L2: once the pages are asked for,
// memory has little to do until the next kernels have run.
DEVICE void bring_upcoming(const unsigned char* weights, int bytes) {
  constexpr int kPieceBytes = 2048;
  if (blockIdx.y + blockIdx.z > 0) return;
  const int step = gridDim.x * kThreads * kPieceBytes;
  for (int first = (threadIdx.x * gridDim.x + blockIdx.x) * kPieceBytes; first < bytes; first += step)
    prefetch_to_l2(weights + first, min(kPieceBytes, bytes - first));
}

// Where the keys of a row lie.
struct Source {
  const scalar_t* pages;
  const int* block_table;
  uint32_t path;  // shared int each: the row, among those of all pages, of every node of the path
  int length, num_nodes;  // keys of the row; those of its path, the last ones
  int settled;            // keys of the row that are older than the step; those behind them come by the kernel before this one

  // The first row of a page that is not settled, 0 to 64.
  DEVICE int first_fresh(int page) const { return min(max(settled - page * kPageTokens, 0), kPageTokens); }

  // Whether the page has 64 keys that are settled, and none of the path.
  DEVICE bool is_old(int page) const { return first_fresh(page) == kPageTokens && (page + 1) * kPageTokens <= length - num_nodes; }

  // Starts the copy of a chunk of a page that begins with row `first_row` of all pages, with zeros for rows from `visible` on.
  DEVICE void copy(uint32_t place, int first_row, int row, int chunk, int visible) const {
    const int node = row - visible + num_nodes;
    const int from = TREE && node >= 0 && row < visible ? load_shared_word(path + node * 4) : first_row + row;
    cp_async16(place, pages + static_cast<int64_t>(from) * kCached + chunk * 8, row < visible ? 16 : 0);
  }

  // Starts the copy of a page of the row, which has this number among all pages, but of its rows from `fresh` on; rows that do not
  // exist become zeros. COPIES: of a thread at once. place_of(row, chunk): the shared address of a chunk.
  template <int COPIES, class Place>
  DEVICE void load(int page, int number, int fresh, Place place_of) const {
    const int visible = length - page * kPageTokens;
#pragma unroll COPIES
    for (int index = threadIdx.x; index < kPageTokens * kChunks; index += kThreads) {
      const int row = index / kChunks, chunk = index - row * kChunks;
      if (row < fresh || row >= visible) copy(place_of(row, chunk), number * kPageTokens, row, chunk, visible);
    }
  }
  // And of the rows that are not settled alone.
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

// The rows of the nodes of a path, by the first warps. A barrier must follow.
DEVICE void look_up_path(uint32_t path, const int* block_table, uint64_t mask, int base) {
  const int bit = threadIdx.x;
  if (bit >= kMaxNodes || !(mask >> bit & 1)) return;
  const int location = base + bit, row = block_table[location / kPageTokens] * kPageTokens + location % kPageTokens;
  store_shared_word(path + __popcll(mask & ((1ull << bit) - 1)) * 4, row);
}
