// Merges what neighbouring rows of a chunk chose into one list of blocks for the thread block that takes these rows. The
// list says which rows chose a block, and so which warps read it, and whether a warpgroup's warps take it together or
// each for its own row.
#pragma once
#include "wgmma_attention.cuh"

constexpr int kWarpgroups = 3;  // warpgroups that multiply: two would leave the tensor cores waiting for the softmax more often
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 16;  // query heads of a row that are multiplied together
static_assert(GROUP % kHeads == 0, "GROUP must be a multiple of 16");
constexpr int kTileRows = kWarpgroupRows / kHeads;  // most rows in a warpgroup's product: neighbours, one for each warp
constexpr int kRows = kWarpgroups * kTileRows;  // most rows of the thread block
constexpr int kReaders = kWarpgroups * 4;       // warps that multiply
constexpr int kNoRow = 31;  // a bit of Entry::rows that is never set

// A warpgroup takes a block together that kTogether or more of its rows chose. It takes all its blocks together if rows
// share much: if a block that a warpgroup's rows chose was chosen by kShared / 8 or more of them, on average over the
// blocks of all warpgroups of the thread block.
constexpr int kShared = 18;
constexpr int kTogether = 3;

// A block that rows chose: the page where it lies, and a bit for each row of the thread block that chose it. The bits
// from kAbsentShift on count the warps that do not read it.
constexpr int kAbsentShift = 16;
struct Entry {
  int page;
  uint32_t rows;
};
static_assert(kRows <= kAbsentShift && kReaders >> (kNoRow - kAbsentShift) == 0, "and the bit of no row is 0");

// The rows of the chunk that a thread block takes. Rows that see everything are left out; the tiles of the grid share
// the others evenly.
struct Work {
  int slot, start, count;
  int first_row, num_rows;  // rows of the chunk
  int last_block;           // last block of 64 tokens that any of them sees

  DEVICE Work(const int* chunk, int dense_context) {
    slot = chunk[0], start = chunk[1], count = chunk[2];
    const int skipped = max(dense_context - start, 0), total = max(count - skipped, 0);
    const int tile = static_cast<int>(blockIdx.y), tiles = static_cast<int>(gridDim.y);
    first_row = skipped + tile * total / tiles;
    num_rows = skipped + (tile + 1) * total / tiles - first_row;
    last_block = (start + first_row + num_rows - 1) / kPageTokens;
  }
};

// The rows of the thread block that a warpgroup takes.
struct Share {
  int first, count;

  DEVICE Share(const Work& work, int warpgroup) {
    first = warpgroup * work.num_rows / kWarpgroups;
    count = (warpgroup + 1) * work.num_rows / kWarpgroups - first;
  }
  // Returns the bits of those of `rows` that are in the share, its first row in bit 0.
  DEVICE uint32_t of(uint32_t rows) const { return rows >> first & ((1u << count) - 1); }
};

// Returns how many warpgroups have a row among those that chose a block.
DEVICE int num_warpgroups(const Work& work, uint32_t rows) {
  int found = 0;
#pragma unroll
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) found += Share(work, warpgroup).of(rows) != 0;
  return found;
}

// Returns how many warps read such a block: all four of a warpgroup if at least `together` of its rows chose it, else
// one for each row that did.
DEVICE int num_readers(const Work& work, uint32_t rows, int together) {
  int readers = 0;
#pragma unroll
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
    const int chosen = __popc(Share(work, warpgroup).of(rows));
    readers += chosen >= together ? 4 : chosen;
  }
  return readers;
}

// The number of entries of the list, and how many rows of a warpgroup must have chosen an entry for the warpgroup to
// take it together.
struct Listed {
  int num_entries, together;
};

// Lists the blocks that the rows chose, in ascending order. `blocks` is the choice of the first row; that of the next
// one lies `stride` elements further. All threads call it. `chosen` is room for a word for each block, `counts` for one
// for each warp.
DEVICE Listed list_blocks(const Work& work, const int* blocks, int stride, int num_selected, const int* block_table,
                          uint32_t* chosen, int* counts, Entry* list) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32, num_blocks = work.last_block + 1;
  for (int i = threadIdx.x; i < num_blocks; i += kThreads) chosen[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < work.num_rows * num_selected; i += kThreads) {
    const int row = i / num_selected;
    atomicOr(&chosen[blocks[(int64_t)row * stride + i % num_selected]], 1u << row);
  }
  __syncthreads();
  const int run = (num_blocks + kThreads - 1) / kThreads * 32, begin = warp * run, end = min(begin + run, num_blocks);
  int count = 0;
  for (int i = begin + lane; i < end; i += 32) count += (chosen[i] != 0) + (num_warpgroups(work, chosen[i]) << 16);
  count = __reduce_add_sync(0xFFFFFFFFu, count);
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  int before = 0, total = 0, visits = 0;
  for (int other = 0; other < kWarps; ++other) {
    const int entries = counts[other] & 0xFFFF;
    if (other < warp) before += entries;
    total += entries, visits += counts[other] >> 16;
  }
  const int together = 8 * work.num_rows * num_selected >= kShared * visits ? 1 : kTogether;
  for (int first = begin; first < end; first += 32) {
    const uint32_t rows = first + lane < end ? chosen[first + lane] : 0;
    const uint32_t taken = __ballot_sync(0xFFFFFFFFu, rows != 0);
    const uint32_t absent = kReaders - num_readers(work, rows, together);
    if (rows) {
      list[before + __popc(taken & ((1u << lane) - 1))] = {block_table[first + lane], rows | absent << kAbsentShift};
    }
    before += __popc(taken);
  }
  async_proxy_fence();  // copies will take the place of `chosen`
  __syncthreads();
  return {total, together};
}
