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
// constants      HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head, a multiple of 16
// grid           (H / kHeads, at least bucket rows / kRows rounded up), which share the rows evenly; block kThreads;
//                shared memory kListOffset bytes and 8 for each of kRows * num_selected entries
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights, at most
//                2^kSlack, are rounded to scalar_t for the product with v, the result is rounded once when stored. A
//                row's bits do not depend on the others: a block that it did not choose adds zeros to it (values are
//                finite), whether its maxima are raised is a matter of its heads alone, and products of a warp and of a
//                warpgroup give the same bits
// oracle         NumpyOps.prefill_attention
// source         FlashAttention-3 (arXiv 2407.08608), InfLLM-v2 (arXiv 2509.24663)
// layout         Neighbours choose alike, so up to kRows of them share what is read: the block lists all that they
//                chose with a bit for each row, and one warp copies these through a ring. 64 rows of a product are
//                kHeads heads of up to kTileRows neighbours, of which a warp has one, and makes the softmax only if
//                this one chose the block. Blocks that at most two rows of a warpgroup chose are multiplied by each
//                row's warp alone, with the same order of sums; where rows share much, all is multiplied together. The
//                list says who reads an entry. A warp waits only for the entries that it reads itself, and the copying
//                warp arrives at an entry's barrier in the place of the warps that do not read it. An entry goes to any place that
//                is free: in order, entries behind one whose warp is busy would wait too. A maximum is raised only
//                where it is far surpassed, and the first half of the keys is multiplied with v beside the exponentials
//                of the second. A warp gives each block back before it waits for the next one, which may lie a whole
//                ring further on: else this would deadlock. Measured: tools/log/sparse.md
#if !defined(HEAD_DIM) || !defined(GROUP)
#error "a constant is not defined"
#endif
#include "chosen_blocks.cuh"
#include "warp_products.cuh"

constexpr int kKeys = kPageTokens;  // keys of a tile
constexpr int kTileBytes = kKeys * kRowBytes;
constexpr int kTilePanelBytes = kKeys * kSwizzle;
using Scores = float[kKeys / 2];
using Weights = uint32_t[kKeys / 16][4];

constexpr int kStages = 5;  // places of the ring: blocks of keys and values
constexpr int kParts = 2;   // parts of a block's keys, multiplied with v one after the other
constexpr float kSlack = 8.0f;  // by how much, in powers of two, scores may surpass a row's maximum before it is raised

// A copying warpgroup needs few registers, the others all that it leaves (of 65,536, in eights).
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters = 160;

// Offsets in shared memory, which must begin at a multiple of 1024.
constexpr int kKeyTiles = kWarpgroups * kQueryBytes;
constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
constexpr int kBarriers = kValueTiles + kStages * kTileBytes;
constexpr int kCounts = kBarriers + (2 * kStages + 2) * 8;  // offset of the number of entries in each warp's part of the list
constexpr int kListOffset = kCounts + kWarps * 4;
static_assert(kListOffset % 8 == 0, "an entry is read at once");
// Barriers of a place of the ring: it is ready, it has been read. kLanded: the chunk's last block is there, but rows of
// values that were never written have yet to be cleared.
enum Barrier { kReady, kRead, kLanded };

DEVICE uint32_t barrier_of(uint32_t shared, Barrier kind, int stage) {
  return shared + kBarriers + (kind * kStages + stage) * 8;
}

// The place of an entry in the ring, and the parity of this turn of the place. The copying warp writes it to the
// entry's `page`, as a negative number, once the copies have been asked for: before, the barrier of the place may be
// turns behind. Other warps poll it; both sides use atomics.
struct Place {
  int stage, parity;

  DEVICE Place(int stage, int parity) : stage(stage), parity(parity) {}
  // Waits until the entry has a place. It is the same in all lanes, and the shuffle tells the compiler so.
  DEVICE explicit Place(Entry& entry) {
    int found = 0;
    do {
      if ((threadIdx.x & 31) == 0) found = atomicOr(&entry.page, 0);
      found = __shfl_sync(0xFFFFFFFFu, found, 0);
    } while (found >= 0);
    stage = ~found >> 1, parity = ~found & 1;
  }
  DEVICE void publish(Entry& entry) const { atomicExch(&entry.page, ~(stage << 1 | parity)); }
};

// ---- the copying warp

// Copies each entry of the list to any place of the ring that is free, and says in its `page` which: an entry whose
// rows are busy does not hold up those behind it. One warp calls it.
DEVICE void copy_blocks(const Work& work, const TensorMap& k_map, const TensorMap& v_map, int num_kv_heads, int kv_head,
                        Entry* list, int num_entries, unsigned char* shared) {
  const int lane = threadIdx.x & 31;
  const uint32_t base = shared_address(shared);
  const int valid = work.start + work.count - work.last_block * kPageTokens;  // rows of the last block that were written
  uint32_t turns = 0;  // how often place `lane` was taken
  for (int i = 0; i < num_entries; ++i) {
    Entry entry = {};
    if (lane == 0) entry = list[i];
    uint32_t free;
    do {
      free = __ballot_sync(0xFFFFFFFFu, lane < kStages && mbarrier_test(barrier_of(base, kRead, lane), turns % 2 ^ 1));
    } while (free == 0);
    const int stage = __shfl_sync(0xFFFFFFFFu, __ffs(free) - 1, 0);
    const Place place(stage, __shfl_sync(0xFFFFFFFFu, turns, stage) % 2);
    if (lane == stage) ++turns;
    const bool is_cut = i == num_entries - 1 && valid < kKeys;
    const uint32_t ready = barrier_of(base, kReady, stage), landed = is_cut ? barrier_of(base, kLanded, 0) : ready;
    if (lane == 0) {
      mbarrier_arrive_many(barrier_of(base, kRead, stage), entry.rows >> kAbsentShift);
      mbarrier_arrive_expect(landed, 2 * kTileBytes);
      copy_page<kKeys>(base + kKeyTiles + stage * kTileBytes, 0, k_map, num_kv_heads, kv_head, entry.page, landed);
      copy_page<kKeys>(base + kValueTiles + stage * kTileBytes, 0, v_map, num_kv_heads, kv_head, entry.page, landed);
      place.publish(list[i]);
    }
    if (is_cut) {
      mbarrier_wait(landed, 0);
      clear_rows<kKeys>(shared + kValueTiles + stage * kTileBytes, valid);
      if (lane == 0) mbarrier_arrive(ready);
    }
  }
}

// ---- the warpgroups that multiply

// The keys that this lane's two rows of a tile see: one row in the upper and one in the lower half of the warp's 16.
struct Sight {
  int bit[2];        // the row's bit in Entry::rows; kNoRow: there is no row
  int own_entry[2];  // the entry of its own block, in which it sees no later key
  int own_column[2];  // its own key in this block

  DEVICE Sight(const Work& work, const Share& share, int num_entries) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (warp * 16 + half * 8 + lane / 4) / kHeads;
      bit[half] = row < share.count ? share.first + row : kNoRow;
      const int position = work.start + work.first_row + share.first + row;
      own_entry[half] = num_entries - 1 - (work.last_block - position / kPageTokens);
      own_column[half] = position % kPageTokens;
    }
  }
  // Returns the last key of entry i that the row sees; -1 if it did not choose this block.
  DEVICE int last_seen(int half, uint32_t rows, int i) const {
    return !(rows >> bit[half] & 1) ? -1 : i == own_entry[half] ? own_column[half] : kKeys - 1;
  }
};

// Hides the keys after `upper` from the lane's upper row, and those after `lower` from its lower one.
DEVICE void mask(Scores& scores, int upper, int lower) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    if (i / 4 * 8 + i % 2 + column > (i / 2 % 2 ? lower : upper)) scores[i] = kHiddenScore;
  }
}

// Raises the maxima of the rows where scores surpass them by more than kSlack powers of two; sums and output are
// brought to the new maxima. All lanes of a warp do so, or none does.
DEVICE void raise_maxima(const Scores& scores, Rows& rows, float factor) {
  float top[2], keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = scores[2 * half];
#pragma unroll
    for (int i = 2 * half; i < kKeys / 2; i += 4) top[half] = fmaxf(top[half], fmaxf(scores[i], scores[i + 1]));
    top[half] *= factor;
  }
  if (!__any_sync(0xFFFFFFFFu, top[0] > rows.max[0] + kSlack || top[1] > rows.max[1] + kSlack)) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = fmaxf(rows.max[half], quad_max(top[half]));
    keep[half] = exp2_fast(rows.max[half] - top[half]);
    rows.max[half] = top[half];
    rows.sum[half] *= keep[half];
  }
  rescale(rows, keep);
}

// Turns the scores of a part of the keys into weights; these are 0 where the rows did not choose the block.
DEVICE void weigh(Weights& weights, Scores& scores, Rows& rows, int part, bool chosen, float factor) {
  constexpr int kCount = kKeys / 2 / kParts;
  const int first = part * kCount;
  if (!chosen) {
#pragma unroll
    for (int i = first / 2; i < (first + kCount) / 2; ++i) weights[i / 4][i % 4] = 0;
    return;
  }
  float sums[4] = {};
#pragma unroll
  for (int i = first; i < first + kCount; ++i) {
    scores[i] = exp2_fast(fmaf(scores[i], factor, -rows.max[i / 2 % 2]));
    sums[i % 4] += scores[i];
  }
  rows.sum[0] += sums[0] + sums[1], rows.sum[1] += sums[2] + sums[3];
#pragma unroll
  for (int i = first / 2; i < (first + kCount) / 2; ++i) {
    weights[i / 4][i % 4] = pack2(scores[2 * i], scores[2 * i + 1]);
  }
}

// A lane's results over the blocks so far, and what it needs for the next one.
struct State {
  Rows rows;
  Scores scores;
  Weights weights;
  float factor;

  // Hides the keys that the rows do not see, after `upper` and `lower`, and raises the maxima.
  DEVICE void judge(int upper, int lower) {
    if (min(upper, lower) < kKeys - 1) mask(scores, upper, lower);
    raise_maxima(scores, rows, factor);
  }

  // Takes a block that rows of some of the warpgroup's warps chose. All its warps call it; `values` are those of part
  // 0.
  DEVICE void take_together(uint64_t queries, uint64_t keys, uint64_t values, int upper, int lower) {
    const bool chosen = max(upper, lower) >= 0;
    wgmma_fence();
    start_scores(scores, queries, keys);
    wgmma_wait<0>();
    settle(scores);
    if (chosen) judge(upper, lower);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      weigh(weights, scores, rows, part, chosen, factor);
      if (part == 0) settle(rows.out);
      wgmma_fence();
      start_sums<kParts>(rows, weights, values, part);
    }
    wgmma_wait<0>();
    settle(rows.out);
    settle(weights);
  }

  // Takes a block that the warp's row chose. One warp calls it; tiles are given by their addresses in shared memory.
  DEVICE void take_alone(uint32_t queries, uint32_t keys, uint32_t values, int upper, int lower) {
    score_alone(scores, queries, keys);
    judge(upper, lower);
#pragma unroll
    for (int part = 0; part < kParts; ++part) weigh(weights, scores, rows, part, true, factor);
    sum_alone(rows, weights, values);
    __syncwarp();
  }
};

// Goes through the list, 32 entries at a time: a warp takes those that its row chose and those that its warpgroup takes
// together. The next entry is found before this one is done: looking for it takes as long as a few products.
DEVICE void take_blocks(State& state, const Share& share, const Sight& sight, Entry* list, const Listed& listed,
                        uint32_t query_tile, unsigned char* shared) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  const uint32_t base = shared_address(shared), key_tiles = base + kKeyTiles, value_tiles = base + kValueTiles;
  const uint64_t queries = wgmma_descriptor<kSwizzle>(query_tile, 0);
  const uint64_t keys = wgmma_descriptor<kSwizzle>(key_tiles, 0);
  const uint64_t values = wgmma_descriptor<kSwizzle>(value_tiles, kTilePanelBytes);
  for (int first = 0; first < listed.num_entries; first += 32) {
    const uint32_t lane_rows = first + lane < listed.num_entries ? list[first + lane].rows : 0;
    const uint32_t chosen = share.of(lane_rows);
    const uint32_t all_together = __ballot_sync(0xFFFFFFFFu, __popc(chosen) >= listed.together);
    uint32_t left = all_together | __ballot_sync(0xFFFFFFFFu, chosen >> warp & 1);
    int next = __shfl_sync(0xFFFFFFFFu, __ffs(left) - 1, 0);  // the same in all lanes, for the compiler too
    while (left) {
      const int i = first + next;
      const uint32_t rows = __shfl_sync(0xFFFFFFFFu, lane_rows, next);
      const bool is_together = all_together >> next & 1;
      left &= left - 1;
      next = __shfl_sync(0xFFFFFFFFu, __ffs(left) - 1, 0);
      const Place place(list[i]);
      mbarrier_wait(barrier_of(base, kReady, place.stage), place.parity);
      const int upper = sight.last_seen(0, rows, i), lower = sight.last_seen(1, rows, i);
      if (is_together) {
        const uint64_t step = descriptor_step(kTileBytes) * place.stage;
        state.take_together(queries, keys + step, values + step, upper, lower);
      } else {
        const int step = kTileBytes * place.stage;
        state.take_alone(query_tile, key_tiles + step, value_tiles + step, upper, lower);
      }
      if (lane == 0) mbarrier_arrive(barrier_of(base, kRead, place.stage));
    }
  }
}

// Attends from a warpgroup's rows to all blocks of the list.
DEVICE void multiply(const Work& work, scalar_t* out, const scalar_t* q, int row_stride, float factor, Entry* list,
                     const Listed& listed, unsigned char* shared) {
  // The number is the same in all lanes: products in a branch that looks divergent would be serialised.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroupThreads - 1, 0);
  const int own_barrier = 1 + warpgroup;
  const Share share(work, warpgroup);
  const uint32_t query_tile = shared_address(shared) + warpgroup * kQueryBytes;
  const auto place_of = [=](int row) {
    const bool exists = row / kHeads < share.count;
    const int64_t position = work.first_row + (exists ? share.first + row / kHeads : 0);
    return RowPlace{position * row_stride + row % kHeads * HEAD_DIM, exists};
  };
  load_queries(query_tile, q, place_of);
  wait_for_queries(own_barrier);
  State state;
  state.rows = {};
  state.rows.max[0] = state.rows.max[1] = kNoMaximum;
  state.factor = factor;
  take_blocks(state, share, Sight(work, share, listed.num_entries), list, listed, query_tile, shared);
  store_rows(out, state.rows, shared + warpgroup * kQueryBytes, own_barrier, place_of);
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
      mbarrier_init(barrier_of(base, kRead, stage), kReaders);
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
  const Listed listed = list_blocks(
      work, blocks + ((int64_t)work.first_row * num_kv_heads + kv_head) * num_selected, num_kv_heads * num_selected,
      num_selected, block_tables + (int64_t)work.slot * pages_per_sequence,
      reinterpret_cast<uint32_t*>(shared + kKeyTiles), reinterpret_cast<int*>(shared + kCounts), list);
  if (threadIdx.x < kWarpgroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x < 32) copy_blocks(work, k_map, v_map, num_kv_heads, kv_head, list, listed.num_entries, shared);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    multiply(work, out + head * HEAD_DIM, q + head * HEAD_DIM, row_stride, scale * kLog2e, list, listed, shared);
  }
}
