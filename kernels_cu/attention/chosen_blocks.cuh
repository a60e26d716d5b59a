// What neighbouring rows of a chunk chose, as one list of blocks for the thread block that takes them: who reads a block,
// and whether a warpgroup's warps take it together or each for its own row.
#pragma once
#include "wgmma_attention.cuh"

constexpr int kWarpgroups = 3;  // that multiply: two leave the tensor cores waiting for the softmax more often
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 16;
static_assert(GROUP % kHeads == 0, "GROUP must be a multiple of 16");
constexpr int kTileRows = kWarpgroupRows / kHeads;  // neighbours in a warpgroup's product, at most, one a warp
constexpr int kRows = kWarpgroups * kTileRows;  // of the block, at most
constexpr int kReaders = kWarpgroups * 4;       // warps
constexpr int kNoRow = 31;

// Where at least kShared / 8 rows of a warpgroup are at a block on average, all is taken together; else the blocks of
// kTogether rows and more.
constexpr int kShared = 18;
constexpr int kTogether = 3;

// A block that rows chose: where it lies, and a bit for each row of the thread block that chose it; above these bits how
// many warps are not at it.
constexpr int kAbsentShift = 16;
struct Entry {
  int page;
  uint32_t rows;
};
static_assert(kRows <= kAbsentShift && kReaders >> (kNoRow - kAbsentShift) == 0, "and the bit of no row is 0");

// What a thread block works on.
struct Work {
  int slot, start, count;
  int first_row, num_rows;  // of the chunk
  int last_block;           // that any of them sees

  DEVICE Work(const int* chunk, int dense_context) {
    slot = chunk[0], start = chunk[1], count = chunk[2];
    const int skipped = max(dense_context - start, 0), total = max(count - skipped, 0);
    const int tile = static_cast<int>(blockIdx.y), tiles = static_cast<int>(gridDim.y);
    first_row = skipped + tile * total / tiles;
    num_rows = skipped + (tile + 1) * total / tiles - first_row;
    last_block = (start + first_row + num_rows - 1) / kPageTokens;
  }
};

// A warpgroup's rows of the thread block's.
struct Share {
  int first, count;

  DEVICE Share(const Work& work, int warpgroup) {
    first = warpgroup * work.num_rows / kWarpgroups;
    count = (warpgroup + 1) * work.num_rows / kWarpgroups - first;
  }
  // The rows of the share that are among `rows`, a bit each.
  DEVICE uint32_t of(uint32_t rows) const { return rows >> first & ((1u << count) - 1); }
};

// How many warpgroups are at a block that rows chose.
DEVICE int num_warpgroups(const Work& work, uint32_t rows) {
  int found = 0;
#pragma unroll
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) found += Share(work, warpgroup).of(rows) != 0;
  return found;
}

// How many warps are at such a block, where at least `together` rows of a warpgroup take it together.
DEVICE int num_readers(const Work& work, uint32_t rows, int together) {
  int readers = 0;
#pragma unroll
  for (int warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
    const int chosen = __popc(Share(work, warpgroup).of(rows));
    readers += chosen >= together ? 4 : chosen;
  }
  return readers;
}

// How many entries there are, and how many rows of a warpgroup take one together.
struct Listed {
  int num_entries, together;
};

// Lists in ascending order what the rows chose. `blocks`: of the first row, the next one's `stride` further. All threads;
// `chosen` is room for a word for each block.
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
