// prefill_attention_wgmma: prefill_attention with Hopper's own instructions (sm_90a).
//
// out[i, h, :] = sum_j softmax_j(scale * q[i, h, :] . k[j, h / GROUP, :]) v[j, h / GROUP, :],  j = 0 .. start + i,
// or with WINDOW the last WINDOW of these
//
// out            [rows, H*D] scalar_t row-major; only rows below count are stored
// q              [rows, H*D] scalar_t row-major
// k_map          tensor map of k_pages [P, K heads, 64, D] scalar_t as a matrix of P * K heads * 64 rows, in boxes of
//                64 rows x kPanel columns, swizzled; the chunk's own keys already appended. v_map likewise
// block_tables   [B, pages_per_sequence] int32
// chunk          [3] int32: slot, start, count, in device memory, so that one launch serves every chunk of a bucket;
//                slot -1 or count 0: nothing is stored. start may be -1: then out of row 0, which sees nothing, is undefined
// constants      HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head. WINDOW: how many of a
//                row's last keys it sees, 0 for all
// grid           (H / kHeads, bucket rows / kRows rounded up); block kThreads; shared memory kSharedBytes
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are
//                rounded to scalar_t for the product with v, the result is rounded once when stored. A row's bits do
//                not depend on the chunk: tiles of keys lie at fixed positions, and a hidden tile changes nothing
// oracle         NumpyOps.prefill_attention
// source         FlashAttention-3 (arXiv 2407.08608)
// layout         A warpgroup has 64 query rows; those of a block are the same positions of several heads of one KV head
//                where GROUP allows, so that a tile of keys serves all and only one in a run is cut by the diagonal.
//                One more warp copies tiles of keys and values through a ring. The products of a tile's scores are
//                started before those of the last tile's values, and warpgroups take turns to start products: one's
//                softmax runs beside another's products. Tiles come from the diagonal down, long blocks first.
#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(WINDOW)
#error "a constant is not defined"
#endif
#include "wgmma_attention.cuh"

constexpr int kTilePages = 2;
constexpr int kKeys = kTilePages * kPageTokens;  // keys of a tile
constexpr int kTileBytes = kKeys * kRowBytes;
constexpr int kTilePanelBytes = kKeys * kSwizzle;
using Scores = float[kKeys / 2];
using Weights = uint32_t[kKeys / 16][4];

constexpr int kWarpgroups = HEAD_DIM == 64 ? 3 : 2;  // warpgroups that multiply: as many as the registers allow
constexpr int kThreads = (kWarpgroups + 1) * kWarpgroupThreads;
constexpr int kHeads = GROUP % kWarpgroups == 0 ? kWarpgroups : 1;
constexpr int kRows = kWarpgroupRows * kWarpgroups / kHeads;  // consecutive positions of a block
constexpr int kStages = 3;  // tiles of keys, and of values, in shared memory

// A copying warpgroup needs few registers, the others all that it leaves (of 65,536, in eights).
constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;

// Offsets in shared memory, which must begin at a multiple of 1024.
constexpr int kKeyTiles = kWarpgroups * kQueryBytes;
constexpr int kValueTiles = kKeyTiles + kStages * kTileBytes;
constexpr int kBarriers = kValueTiles + kStages * kTileBytes;
constexpr int kSharedBytes = kBarriers + (4 * kStages + 1) * 8;
// Barriers of a place of the ring: its keys, or values, are ready, or have been read. kLanded: the values of the
// chunk's last tile are there, but rows that were never written have yet to be cleared.
enum Barrier { kKeysReady, kValuesReady, kKeysRead, kValuesRead, kLanded };
static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");

DEVICE uint32_t barrier_of(uint32_t shared, Barrier kind, int stage) {
  return shared + kBarriers + (kind * kStages + stage) * 8;
}

// The part of the chunk that a block takes.
struct Work {
  int slot, start, count;
  int first_row;  // the block's first row of the chunk; blocks take rows from the end: it is negative past the beginning
  int tiles;      // tiles of keys up to the last one that its last row sees

  DEVICE explicit Work(const int* chunk) {
    slot = chunk[0], start = chunk[1], count = chunk[2];
    first_row = ((count + kRows - 1) / kRows - 1 - static_cast<int>(blockIdx.y)) * kRows;
    tiles = (start + min(count, first_row + kRows) + kKeys - 1) / kKeys;
  }
  // Returns how many tiles are read: with WINDOW those from the first row's window on, else all.
  DEVICE int rounds() const { return WINDOW > 0 ? tiles - max(start + first_row + 1 - WINDOW, 0) / kKeys : tiles; }
};

// The row of the chunk, and the head of the block, with which a warpgroup's rows begin.
DEVICE int warpgroup_row(int first_row, int warpgroup) {
  return first_row + (kHeads == 1 ? warpgroup * kWarpgroupRows : 0);
}
DEVICE int warpgroup_head(int warpgroup) { return kHeads == 1 ? 0 : warpgroup; }

// ---- the copying warp

// The keys, or the values, of one KV head.
struct Source {
  const TensorMap& map;
  int num_kv_heads, kv_head;

  // Starts the copies of `count` pages of a tile.
  DEVICE void copy(uint32_t tile, const int (&pages)[kTilePages], int count, uint32_t barrier) const {
#pragma unroll
    for (int i = 0; i < kTilePages; ++i) {
      if (i < count) copy_page<kKeys>(tile, i, map, num_kv_heads, kv_head, pages[i], barrier);
    }
  }
};

// Copies the block's tiles of keys and values through the ring, the last tile first. One warp calls it.
DEVICE void copy_tiles(const Work& work, const Source& keys, const Source& values, const int* block_table,
                       unsigned char* shared) {
  const uint32_t base = shared_address(shared);
  const bool leads = (threadIdx.x & 31) == 0;
  const int rounds = work.rounds();
  for (int i = 0; i < rounds; ++i) {
    const int tile = work.tiles - 1 - i, stage = i % kStages, parity = i / kStages % 2 ^ 1;
    const int valid = work.start + work.count - tile * kKeys;  // rows that were written
    const int num_pages = min(kTilePages, (valid + kPageTokens - 1) / kPageTokens);
    const int num_bytes = num_pages * kPageTokens * kRowBytes;
    const bool is_cut = valid < kKeys;  // the chunk's last tile, which comes first
    const uint32_t keys_ready = barrier_of(base, kKeysReady, stage);
    const uint32_t values_ready = is_cut ? barrier_of(base, kLanded, 0) : barrier_of(base, kValuesReady, stage);
    if (leads) {
      int pages[kTilePages];
#pragma unroll
      for (int page = 0; page < kTilePages; ++page) {
        pages[page] = page < num_pages ? __ldg(block_table + tile * kTilePages + page) : 0;
      }
      mbarrier_wait(barrier_of(base, kKeysRead, stage), parity);
      mbarrier_arrive_expect(keys_ready, num_bytes);
      keys.copy(base + kKeyTiles + stage * kTileBytes, pages, num_pages, keys_ready);
      mbarrier_wait(barrier_of(base, kValuesRead, stage), parity);
      mbarrier_arrive_expect(values_ready, num_bytes);
      values.copy(base + kValueTiles + stage * kTileBytes, pages, num_pages, values_ready);
    }
    if (is_cut) {
      mbarrier_wait(values_ready, 0);
      clear_rows<kKeys>(shared + kValueTiles + stage * kTileBytes, valid);
      if (leads) mbarrier_arrive(barrier_of(base, kValuesReady, stage));
    }
  }
}

// ---- the warpgroups that multiply

// Hides keys that a row does not see. first_key, first_query: positions of the tile and of the warpgroup's row 0.
DEVICE void mask(Scores& scores, int first_key, int first_query) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  const int last = first_query + warp * 16 + lane / 4 - first_key - lane % 4 * 2;  // column that the upper row sees
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    if (is_hidden<WINDOW>(i / 4 * 8 + i % 2, last + (i / 2) % 2 * 8)) scores[i] = kHiddenScore;
  }
}

// Turns scores into weights 2^(factor * score - max). `keep` is what brings earlier weights to the new maximum.
DEVICE void softmax(Scores& scores, Rows& rows, float (&keep)[2], float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = scores[2 * half];
#pragma unroll
    for (int i = 2 * half; i < kKeys / 2; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
    top = fmaxf(rows.max[half], quad_max(top) * factor);
    keep[half] = exp2_fast(rows.max[half] - top);
    rows.max[half] = top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < kKeys / 2; i += 4) {
      scores[i] = exp2_fast(fmaf(scores[i], factor, -top));
      scores[i + 1] = exp2_fast(fmaf(scores[i + 1], factor, -top));
      sum += scores[i] + scores[i + 1];
    }
    rows.sum[half] = rows.sum[half] * keep[half] + sum;
  }
}

// Packs the weights as A operands of the products with v: a pair of tiles of 8 columns is the operand of a product over
// 16 keys.
DEVICE void pack(Weights& weights, const Scores& scores) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = pack2(scores[2 * i], scores[2 * i + 1]);
}

// Warpgroups take turns to start their products: warpgroup w waits at numbered barrier 1 + w. There is a round for each
// tile that is read except the first, from 1 to `rounds`. Warpgroup 0 begins round 1 without waiting.
DEVICE void take_turn(int warpgroup, int round) {
  if (warpgroup > 0 || round > 1) barrier_wait(1 + warpgroup, 2 * kWarpgroupThreads);
}
DEVICE void pass_turn(int warpgroup, int round, int rounds) {
  const int next = (warpgroup + 1) % kWarpgroups;
  if (next > 0 || round < rounds) barrier_arrive(1 + next, 2 * kWarpgroupThreads);
}

// Attends from a warpgroup's 64 query rows to all tiles of the block.
DEVICE void multiply(const Work& work, scalar_t* out, const scalar_t* q, int row_stride, float factor,
                     unsigned char* shared) {
  // The number is the same in all lanes: products in a branch that looks divergent would be serialised.
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / kWarpgroupThreads - 1, 0);
  const int own_barrier = 1 + kWarpgroups + warpgroup;
  const int first_row = warpgroup_row(work.first_row, warpgroup), first_query = work.start + first_row;
  const int column = warpgroup_head(warpgroup) * HEAD_DIM;
  const bool leads = (threadIdx.x & 31) == 0;
  const uint32_t base = shared_address(shared), query_tile = base + warpgroup * kQueryBytes;
  const auto place_of = [=](int row) {
    const bool exists = first_row + row < work.count;
    return RowPlace{(int64_t)(exists ? first_row + row : 0) * row_stride + column, exists};
  };
  load_queries(query_tile, q, place_of);
  wait_for_queries(own_barrier);

  const uint64_t queries = wgmma_descriptor<kSwizzle>(query_tile, 0);
  const uint64_t keys = wgmma_descriptor<kSwizzle>(base + kKeyTiles, 0);
  const uint64_t values = wgmma_descriptor<kSwizzle>(base + kValueTiles, kTilePanelBytes);
  Rows rows = {};
  rows.max[0] = rows.max[1] = kNoMaximum;
  Scores scores;
  Weights weights;
  float keep[2];

  mbarrier_wait(barrier_of(base, kKeysReady, 0), 0);
  wgmma_fence();
  start_scores(scores, queries, keys);
  wgmma_wait<0>();
  settle(scores);
  if (leads) mbarrier_arrive(barrier_of(base, kKeysRead, 0));
  mask(scores, (work.tiles - 1) * kKeys, first_query);
  softmax(scores, rows, keep, factor);
  pack(weights, scores);

  const int rounds = work.rounds();
  for (int i = 1; i < rounds; ++i) {
    const int stage = i % kStages, last_stage = (i - 1) % kStages, first_key = (work.tiles - 1 - i) * kKeys;
    mbarrier_wait(barrier_of(base, kKeysReady, stage), i / kStages % 2);
    take_turn(warpgroup, i);
    settle(rows.out);
    wgmma_fence();
    start_scores(scores, queries, keys + descriptor_step(kTileBytes) * stage);
    mbarrier_wait(barrier_of(base, kValuesReady, last_stage), (i - 1) / kStages % 2);
    wgmma_fence();
    start_sums(rows, weights, values + descriptor_step(kTileBytes) * last_stage);
    pass_turn(warpgroup, i, rounds - 1);
    wgmma_wait<1>();
    settle(scores);
    if (leads) mbarrier_arrive(barrier_of(base, kKeysRead, stage));
    const bool begins_early = WINDOW > 0 && first_key < first_query + kWarpgroupRows - WINDOW;  // begins before a row's window
    if (begins_early || first_key + kKeys - 1 > first_query) mask(scores, first_key, first_query);
    softmax(scores, rows, keep, factor);
    finish_before_wait(rows.sum[0] + rows.sum[1], base);
    wgmma_wait<0>();
    settle(rows.out);
    settle(weights);
    if (leads) mbarrier_arrive(barrier_of(base, kValuesRead, last_stage));
    // Most tiles leave every maximum where it was: then the factors are exactly 1.
    if (__any_sync(0xFFFFFFFFu, keep[0] != 1.0f || keep[1] != 1.0f)) rescale(rows, keep);
    pack(weights, scores);
  }

  const int last = rounds - 1;
  mbarrier_wait(barrier_of(base, kValuesReady, last % kStages), last / kStages % 2);
  settle(rows.out);
  wgmma_fence();
  start_sums(rows, weights, values + descriptor_step(kTileBytes) * (last % kStages));
  wgmma_wait<0>();
  settle(rows.out);
  store_rows(out, rows, shared + warpgroup * kQueryBytes, own_barrier, place_of);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
KERNEL(prefill_attention_wgmma)(scalar_t* __restrict__ out, const scalar_t* __restrict__ q,
                                const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                                const int* __restrict__ block_tables, const int* chunk, int num_kv_heads,
                                int pages_per_sequence, float scale) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) unsigned char shared[];
  if (threadIdx.x == 0) {
    prefetch_tensor_map(k_map);
    prefetch_tensor_map(v_map);
    const uint32_t base = shared_address(shared);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barrier_of(base, kKeysReady, stage), 1);
      mbarrier_init(barrier_of(base, kValuesReady, stage), 1);
      mbarrier_init(barrier_of(base, kKeysRead, stage), kWarpgroups * 4);
      mbarrier_init(barrier_of(base, kValuesRead, stage), kWarpgroups * 4);
    }
    mbarrier_init(barrier_of(base, kLanded, 0), 1);
    mbarrier_init_fence();
  }
  pdl_wait();
  const Work work(chunk);
  if (work.slot < 0 || work.first_row < 0 || work.tiles == 0) return;
  __syncthreads();
  const int head = blockIdx.x * kHeads, kv_head = head / GROUP;
  const int row_stride = num_kv_heads * GROUP * HEAD_DIM;
  if (threadIdx.x < kWarpgroupThreads) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x < 32) {
      const Source keys = {k_map, num_kv_heads, kv_head}, values = {v_map, num_kv_heads, kv_head};
      copy_tiles(work, keys, values, block_tables + (int64_t)work.slot * pages_per_sequence, shared);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    multiply(work, out + head * HEAD_DIM, q + head * HEAD_DIM, row_stride, scale * kLog2e, shared);
  }
}
