// prefill_selected_wgmma: attention of a prefill chunk's rows, each over the blocks that it chose (sm_90a).
//
// out[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . k[j, h / GROUP, :]) v[j, h / GROUP, :],  j = 0 .. start + t in the
// blocks of 64 that row t chose for this KV head
//
// out            [rows, H*D] scalar_t row-major; stored for rows t < count with start + t >= dense_context: the others
//                look at everything
// q              [rows, H*D] scalar_t row-major
// k_map          tensor map of k_pages [P, K heads, 64, D] scalar_t as a matrix of P * K heads * 64 rows, in boxes of
//                64 rows x kPanel columns, swizzled; the chunk's own keys already appended. v_map likewise
// block_tables   [B, pages_per_sequence] int32
// chunk          [3] int32: slot, start, count, in device memory; slot -1 or count 0: nothing is stored
// blocks         [rows, K heads, num_selected] int32: blocks of 64 tokens, ascending, a row's own block the last
// grid           (H / kHeads, bucket rows / kRows rounded up); block kThreads; shared memory kListOffset bytes and 8
//                for each of kRows * num_selected entries
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are
//                rounded to scalar_t for the product with v, the result is rounded once when stored. A row's bits do
//                not depend on the others: a block that it did not choose adds zeros to it (values are finite)
// oracle         NumpyOps.prefill_attention
// source         FlashAttention-3 (arXiv 2407.08608), InfLLM-v2 (arXiv 2509.24663)
// layout         Neighbours choose alike, so kRows of them share what is read: the block lists all that they chose with
//                a bit for each row, and one warp copies these through a ring, which every warpgroup goes along. 64 rows
//                of a product are kHeads heads of kTileRows neighbours: it is left out where none of these chose the
//                block, and a warp, which has the heads of one of them, leaves out the softmax where it did not. While one warpgroup is at the softmax the others' products run.
constexpr int kTilePages = 1;
#include "wgmma_attention.cuh"

constexpr int kWarpgroups = 3;  // that multiply: two leave the tensor cores waiting for the softmax more often
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
constexpr int kWarps = kThreads / 32;
constexpr int kHeads = 16;
static_assert(GROUP % kHeads == 0, "GROUP must be a multiple of 16");
static_assert(HEAD_DIM == 128, "64 in fp16 did not come back from its first launch on an H200: find out why before");
constexpr int kTileRows = kWarpgroupRows / kHeads;  // neighbours in a warpgroup's product
constexpr int kRows = kWarpgroups * kTileRows;      // of the block
static_assert(kRows <= 32, "a bit each");
constexpr int kStages = 5;  // blocks of keys and values in shared memory

// A copying warpgroup needs few registers, the others all that it leaves (of 65,536, in eights).
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 160;

// Offsets in shared memory, which must begin at a multiple of 1024.
constexpr int kKeyTiles = kWarpgroups * kQueryBytes;
constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
constexpr int kBarriers = kValueTiles + kStages * kTileBytes;
constexpr int kCounts = kBarriers + (2 * kStages + 2) * 8;  // of a warp's part of the list
constexpr int kListOffset = kCounts + kWarps * 4;
static_assert(kListOffset % 8 == 0, "an entry is read at once");
enum Barrier { kReady, kRead, kLanded };

__device__ __forceinline__ uint32_t barrier_of(uint32_t shared, Barrier kind, int stage) {
  return shared + kBarriers + (kind * kStages + stage) * 8;
}

// A block that rows chose: where it lies, and a bit for each row of the thread block that chose it.
struct Entry {
  int page;
  uint32_t rows;
};

// What a thread block works on.
struct Work {
  int slot, start, count;
  int first_row, num_rows;  // of the chunk; none past its end
  int last_block;           // that any of them sees

  __device__ __forceinline__ Work(const int* chunk, int dense_context) {
    slot = chunk[0], start = chunk[1], count = chunk[2];
    first_row = max(dense_context - start, 0) + static_cast<int>(blockIdx.y) * kRows;
    num_rows = min(count - first_row, kRows);
    last_block = (start + first_row + num_rows - 1) / kPageTokens;
  }
};

// ---- the list

// Lists in ascending order what the rows chose; returns how many. `blocks`: of the first row, the next one's `stride`
// further. All threads; `chosen` is room for a word for each block.
__device__ __forceinline__ int list_blocks(const Work& work, const int* blocks, int stride, int num_selected,
                                           const int* block_table, uint32_t* chosen, int* counts, Entry* list) {
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
  for (int i = begin + lane; i < end; i += 32) count += chosen[i] != 0;
  count = __reduce_add_sync(0xFFFFFFFFu, count);
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  int before = 0, total = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) before += counts[other];
    total += counts[other];
  }
  for (int first = begin; first < end; first += 32) {
    const uint32_t rows = first + lane < end ? chosen[first + lane] : 0;
    const uint32_t taken = __ballot_sync(0xFFFFFFFFu, rows != 0);
    if (rows) list[before + __popc(taken & ((1u << lane) - 1))] = {block_table[first + lane], rows};
    before += __popc(taken);
  }
  async_proxy_fence();  // copies will take the place of `chosen`
  __syncthreads();
  return total;
}

// ---- the copying warp

__device__ __forceinline__ void copy_blocks(const Work& work, const TensorMap& k_map, const TensorMap& v_map,
                                            int num_kv_heads, int kv_head, const Entry* list, int num_entries,
                                            unsigned char* shared) {
  const uint32_t base = shared_address(shared);
  const bool leads = (threadIdx.x & 31) == 0;
  const int valid = work.start + work.count - work.last_block * kPageTokens;  // rows of the last block that were written
  for (int i = 0; i < num_entries; ++i) {
    const int stage = i % kStages, parity = i / kStages % 2 ^ 1;
    const bool is_cut = i == num_entries - 1 && valid < kKeys;
    const uint32_t ready = barrier_of(base, kReady, stage), landed = is_cut ? barrier_of(base, kLanded, 0) : ready;
    if (leads) {
      const int page = list[i].page;
      mbarrier_wait(barrier_of(base, kRead, stage), parity);
      mbarrier_arrive_expect(landed, 2 * kTileBytes);
      copy_page(base + kKeyTiles + stage * kTileBytes, 0, k_map, num_kv_heads, kv_head, page, landed);
      copy_page(base + kValueTiles + stage * kTileBytes, 0, v_map, num_kv_heads, kv_head, page, landed);
    }
    if (is_cut) {
      mbarrier_wait(landed, 0);
      clear_rows(shared + kValueTiles + stage * kTileBytes, valid);
      if (leads) mbarrier_arrive(ready);
    }
  }
}

// ---- the warpgroups that multiply

// Of this lane's two rows of a tile (upper and lower half of the warp's 16).
struct Sight {
  int bit[2];        // which row of the thread block
  int own_entry[2];  // of the list: its own block, where it sees no later key
  int own_column[2];

  __device__ __forceinline__ Sight(const Work& work, int first, int num_entries) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bit[half] = first + (warp * 16 + half * 8 + lane / 4) / kHeads;
      const int position = work.start + work.first_row + bit[half];
      own_entry[half] = num_entries - 1 - (work.last_block - position / kPageTokens);
      own_column[half] = position % kPageTokens;
    }
  }
  // The last key that it sees of entry i, -1 if it chose another.
  __device__ __forceinline__ int last_seen(int half, uint32_t rows, int i) const {
    return !(rows >> bit[half] & 1) ? -1 : i == own_entry[half] ? own_column[half] : kKeys - 1;
  }
};

// Hides the keys after the last seen one.
__device__ __forceinline__ void mask(Scores& scores, int upper, int lower) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    if (i / 4 * 8 + i % 2 + column > (i / 2 % 2 ? lower : upper)) scores[i] = kHiddenScore;
  }
}

// The scores of entry i become weights; what the rows had before is brought to the new maximum.
__device__ __forceinline__ void weigh(Weights& weights, Scores& scores, Rows& rows, int upper, int lower, float factor) {
  if (max(upper, lower) < 0) {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = 0;
    return;
  }
  if (min(upper, lower) < kKeys - 1) mask(scores, upper, lower);
  float keep[2];
  softmax(scores, rows, keep, factor);
  // Most blocks leave every maximum where it was: then the factors are exactly 1.
  if (__any_sync(0xFFFFFFFFu, keep[0] != 1.0f || keep[1] != 1.0f)) rescale(rows, keep);
  pack(weights, scores);
}

__device__ __forceinline__ void multiply(const Work& work, scalar_t* out, const scalar_t* q, int row_stride,
                                         float factor, const Entry* list, int num_entries, unsigned char* shared) {
  // The same in all lanes: products in a branch that looks divergent would be serialised.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroupThreads - 1, 0);
  const int own_barrier = 1 + warpgroup, first = warpgroup * kTileRows;
  const bool leads = (threadIdx.x & 31) == 0;
  const uint32_t base = shared_address(shared), query_tile = base + warpgroup * kQueryBytes;
  const auto place_of = [=](int row) {
    const int position = first + row / kHeads;
    const bool exists = position < work.num_rows;
    return RowPlace{(int64_t)(work.first_row + (exists ? position : 0)) * row_stride + row % kHeads * HEAD_DIM, exists};
  };
  load_queries(query_tile, q, place_of);
  wait_for_queries(own_barrier);

  const uint64_t queries = wgmma_descriptor<kSwizzle>(query_tile, 0);
  const uint64_t keys = wgmma_descriptor<kSwizzle>(base + kKeyTiles, 0);
  const uint64_t values = wgmma_descriptor<kSwizzle>(base + kValueTiles, kTilePanelBytes);
  const Sight sight(work, first, num_entries);
  Rows rows = {};
  rows.max[0] = rows.max[1] = kNoMaximum;
  Scores scores;
  Weights weights;

  for (int i = 0; i < num_entries; ++i) {
    const int stage = i % kStages;
    const uint32_t bits = __shfl_sync(0xFFFFFFFFu, list[i].rows, 0);
    mbarrier_wait(barrier_of(base, kReady, stage), i / kStages % 2);
    if (bits >> first & ((1u << kTileRows) - 1)) {
      wgmma_fence();
      start_scores(scores, queries, keys + descriptor_step(kTileBytes) * stage);
      wgmma_wait<0>();
      settle(scores);
      weigh(weights, scores, rows, sight.last_seen(0, bits, i), sight.last_seen(1, bits, i), factor);
      settle(rows.out);
      wgmma_fence();
      start_sums(rows, weights, values + descriptor_step(kTileBytes) * stage);
      wgmma_wait<0>();
      settle(rows.out);
      settle(weights);
    }
    if (leads) mbarrier_arrive(barrier_of(base, kRead, stage));
  }
  store_rows(out, rows, shared + warpgroup * kQueryBytes, own_barrier, place_of);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
KERNEL(prefill_selected_wgmma)(scalar_t* __restrict__ out, const scalar_t* __restrict__ q,
                               const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                               const int* __restrict__ block_tables, const int* chunk, const int* blocks,
                               int num_kv_heads, int pages_per_sequence, float scale, int num_selected,
                               int dense_context) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) unsigned char shared[];
  if (threadIdx.x == 0) {
    prefetch_tensor_map(k_map);
    prefetch_tensor_map(v_map);
    const uint32_t base = shared_address(shared);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barrier_of(base, kReady, stage), 1);
      mbarrier_init(barrier_of(base, kRead, stage), kWarpgroups * 4);
    }
    mbarrier_init(barrier_of(base, kLanded, 0), 1);
    mbarrier_init_fence();
  }
  pdl_wait();
  const Work work(chunk, dense_context);
  if (work.slot < 0 || work.num_rows <= 0) return;
  const int head = blockIdx.x * kHeads, kv_head = head / GROUP;
  const int row_stride = num_kv_heads * GROUP * HEAD_DIM;
  Entry* list = reinterpret_cast<Entry*>(shared + kListOffset);
  const int num_entries = list_blocks(
      work, blocks + ((int64_t)work.first_row * num_kv_heads + kv_head) * num_selected, num_kv_heads * num_selected,
      num_selected, block_tables + (int64_t)work.slot * pages_per_sequence,
      reinterpret_cast<uint32_t*>(shared + kKeyTiles), reinterpret_cast<int*>(shared + kCounts), list);
  if (threadIdx.x < kWarpgroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x < 32) copy_blocks(work, k_map, v_map, num_kv_heads, kv_head, list, num_entries, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    multiply(work, out + head * HEAD_DIM, q + head * HEAD_DIM, row_stride, scale * kLog2e, list, num_entries, shared);
  }
}
