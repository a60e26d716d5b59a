// latent_attention_wgmma: latent_attention with Hopper's own instructions (sm_90a).
//
// means[t, run, h, :] = sum_j softmax_j(scale * queries[t, h, :] . page[j, :]) page[j, :C] over the positions j of the run,
// and log_sums[t, h, run], as in latent_attention
//
// means          float32 workspace [T, num_splits, HEADS, C]: runs that a row does not have are left as they are
// log_sums       float32 workspace [T, HEADS, num_splits], likewise
// queries        [T, HEADS, C + R] scalar_t row-major, C = KV_RANK, R = ROPE_DIM: those that absorb_queries makes
// pages          [P, 1, 64, C + R] scalar_t; latents and tails: tensor maps of it as [64 P, C + R] in boxes of 64 rows by 64 and by R
//                columns
// positions      [T] int32; slots [T] int32, slot -1: nothing is stored; block_tables [B, pages_per_sequence] int32
// tree_masks     [T] uint64, tree_base [T] int32, read with TREE only, as in latent_attention
// upcoming       weights that later kernels read, of which the first upcoming_bytes, a multiple of 16, are brought to the L2
// num_fresh      how many of a row's last keys absorb_queries may write
// num_splits     into how many runs a long row's pages are cut
// constants      HEADS: query heads. KV_RANK: elements of a latent: 256. ROPE_DIM: elements of a key behind it: 32 or 64. STAGES:
//                pages in shared memory, 3 or 4. TREE: 1 reads tree_masks
// grid           (a, T, ceil(HEADS / 64)): a row's runs x, x + a and so on, of 64 heads; block 128; shared memory
//                kBarrierOffset + 8 * STAGES bytes
// launched after absorb_queries, which releases this kernel before its own wait. absorb_queries itself starts once all kernels before the
//                two products in front of it have finished: so keys that are not fresh are read before pdl_wait
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are rounded
//                to scalar_t for the product with the latents
// oracle         NumpyOps.decode_latent_attention
// source         arXiv 2405.04434; Flash-Decoding (Dao et al. 2023), FlashAttention-3 (arXiv 2407.08608)
// layout         A warpgroup has 64 heads as the rows of its products, so that a page passes through shared memory once for all of them.
//                With 16 heads a block the reads of shared memory take longer than the products. Rows of queries that do not exist are
//                whatever lies behind those that do: nothing of them is stored. In shared memory a page lies in panels of 64 columns, which
//                are read as keys and, transposed, as values. The products of a page's scores start before those of the last page's sums, beside
//                which the softmax runs. A block copies the pages of all its runs as one sequence: whole pages of old keys with the copy
//                engine, so that no fence waits for later pages; others row by row
#if !defined(HEADS) || !defined(KV_RANK) || !defined(ROPE_DIM) || !defined(STAGES) || !defined(TREE)
#error "a constant is not defined"
#endif
#include "latent_pages.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kHeads = HEADS < 64 ? HEADS : 64;                // query heads of a block
constexpr int kQueryRows = (kHeads + 7) / 8 * 8;               // rows of queries that are kept in shared memory
constexpr int kPanelColumns = 64, kPanels = KV_RANK / kPanelColumns;
constexpr int kPanelBytes = kPageTokens * 128;                 // bytes of a panel of a page
constexpr int kTailSwizzle = ROPE_DIM * 2;                     // bytes of a row of the tail, the last panel, which has the rotated part of the key
constexpr int kQueryBytes = (kQueryRows * kRowBytes + 1023) / 1024 * 1024;
constexpr int kPathOffset = kQueryBytes + STAGES * kPageBytes; // offset of the rows of a path's nodes
constexpr int kBarrierOffset = kPathOffset + kMaxNodes * 4;    // offset of the barriers, one for each page in shared memory
constexpr int kWeightSteps = kPageTokens / 16;
static_assert(KV_RANK == 256 && (ROPE_DIM == 32 || ROPE_DIM == 64) && STAGES >= 3 && STAGES <= kThreads / 32, "sizes that the kernel does not take");

// Calls visit(row, chunk, place) for each chunk of ROWS rows that a thread copies; `place` is its shared address. Of the panels of latents
// a warp has every fourth row, and a lane the same chunk of each. Of the tail, whose rows are shorter, four or eight neighbouring lanes
// have a row, whose number may be ROWS or more.
template <int ROWS, int TURNS, class Visit>
DEVICE void visit_chunks(uint32_t to, Visit visit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t first = to + lane / 8 * (ROWS * 128) + warp * 128 + (lane % 8 ^ warp) * 16;
#pragma unroll TURNS
  for (int i = 0; i < ROWS / 4; i++) visit(i * 4 + warp, lane, (first ^ i % 2 * 64) + i * 512);
  constexpr int kTailChunks = ROPE_DIM / 8, kTogether = kThreads / kTailChunks;
  const int chunk = threadIdx.x % kTailChunks;
#pragma unroll
  for (int i = 0; i < (ROWS + kTogether - 1) / kTogether; i++) {
    const int row = i * kTogether + threadIdx.x / kTailChunks;
    const int permuted = chunk ^ (kTailSwizzle == 128 ? row & 7 : row >> 1 & 3);
    visit(row, KV_RANK / 8 + chunk, to + kPanels * (ROWS * 128) + row * kTailSwizzle + permuted * 16);
  }
}

// Starts the copies of page `page` of the row, page `number` of all pages, row by row, except for its keys from row `fresh` on. Rows that
// do not exist become zeros.
DEVICE void load_page(const Source& source, uint32_t to, int page, int number, int fresh) {
  const int visible = source.length - page * kPageTokens;
  visit_chunks<kPageTokens, TREE ? 2 : 16>(to, [&](int row, int chunk, uint32_t place) {
    if (row < fresh || row >= visible) source.copy(place, number * kPageTokens, row, chunk, visible);
  });
}

// Starts the copy of the whole page that has this number among all pages. One thread calls it.
DEVICE void copy_page(uint32_t to, const TensorMap& latents, const TensorMap& tails, int number, uint32_t barrier) {
  mbarrier_arrive_expect(barrier, kPageBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; panel++)
    copy_box(to + panel * kPanelBytes, latents, number * kPageTokens, panel * kPanelColumns, barrier);
  copy_box(to + kPanels * kPanelBytes, tails, number * kPageTokens, KV_RANK, barrier);
}

// The shared address of a row's chunk in the page at `place`, as visit_chunks finds it.
struct PageAt {
  uint32_t place;
  DEVICE uint32_t operator()(int row, int chunk) const {
    if (chunk < kPanels * 8) return place + chunk / 8 * kPanelBytes + row * 128 + (chunk % 8 ^ (row & 7)) * 16;
    const int permuted = (chunk - kPanels * 8) ^ (kTailSwizzle == 128 ? row & 7 : row >> 1 & 3);
    return place + kPanels * kPanelBytes + row * kTailSwizzle + permuted * 16;
  }
};

// Loads the queries of the block's heads into shared memory; zeros for heads that do not exist. A barrier must follow.
DEVICE void load_queries(uint32_t to, const scalar_t* queries, int num_heads) {
  constexpr int kTurns = kQueryRows / 4 + (kQueryRows * ROPE_DIM / 8 + kThreads - 1) / kThreads;
  uint4 v[kTurns];
  int turn = 0;
  visit_chunks<kQueryRows, kTurns>(to, [&](int row, int chunk, uint32_t) {
    v[turn] = make_uint4(0, 0, 0, 0);
    if (row < num_heads) v[turn] = load16_past_l1(queries + row * kCached + chunk * 8);
    turn++;
  });
  turn = 0;
  visit_chunks<kQueryRows, kTurns>(to, [&](int row, int, uint32_t place) {
    if (row < kQueryRows) store_shared(place, v[turn]);
    turn++;
  });
}

// Goes through the pages of the block's runs, one after the other.
struct Walk {
  const LatentCut& cut;
  int run, page, end;   // the run, the page of the row, the page behind the run's last one

  DEVICE explicit Walk(const LatentCut& whole) : cut(whole), run(blockIdx.x) { enter(); }
  DEVICE void enter() { page = run * cut.run_pages, end = min(page + cut.run_pages, cut.num_pages); }
  DEVICE bool is_over() const { return run >= cut.num_runs; }
  DEVICE bool begins_run() const { return page == run * cut.run_pages; }
  DEVICE bool ends_run() const { return page + 1 == end; }
  DEVICE void next() {
    if (++page < end) return;
    run += gridDim.x;
    enter();
  }
};

// The numbers, among all pages, of the pages that the block copies, in their order: 32 at a time, in the lanes of every warp.
struct PageNumbers {
  const LatentCut& cut;
  const int* block_table;
  int held;

  DEVICE PageNumbers(const LatentCut& whole, const int* table) : cut(whole), block_table(table) { look_up(0); }
  // Looks up the numbers of the block's pages `first` .. first + 31, one a lane.
  DEVICE void look_up(int first) {
    const int place = first + threadIdx.x % 32, run = blockIdx.x + place / cut.run_pages * gridDim.x;
    const int page = run * cut.run_pages + place % cut.run_pages;
    held = page < cut.num_pages ? load_now(block_table + page) : 0;
  }
  // Returns the number of a page by its place in this order. All lanes call it, for one place after the other.
  DEVICE int at(int place) {
    if (place > 0 && place % 32 == 0) look_up(place);
    return __shfl_sync(0xFFFFFFFFu, held, place % 32);
  }
};

// A lane's state of two of the block's heads: of 64 rows of products, rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Heads {
  float out[2][KV_RANK / 4];  // sums, for each half of the columns
  float max[2];               // maxima of scale * log2(e) * score
  float sum[2];               // this lane's part of the sums of weights
};
using Scores = float[kPageTokens / 2];
using Weights = uint32_t[kWeightSteps][4];

// Starts scores = queries page.
DEVICE void start_scores(Scores& scores, uint32_t queries, uint32_t page) {
  const uint64_t a = wgmma_descriptor<128>(queries, 0), b = wgmma_descriptor<128>(page, 0);
#pragma unroll
  for (int step = 0; step < KV_RANK / 16; step++) {
    const int panel = step / 4, within = step % 4 * 32;
    wgmma_shared(scores, a + descriptor_step(panel * (kQueryRows * 128) + within), b + descriptor_step(panel * kPanelBytes + within),
                 step > 0);
  }
  const uint64_t a_tail = wgmma_descriptor<kTailSwizzle>(queries + kPanels * (kQueryRows * 128), 0);
  const uint64_t b_tail = wgmma_descriptor<kTailSwizzle>(page + kPanels * kPanelBytes, 0);
#pragma unroll
  for (int step = 0; step < ROPE_DIM / 16; step++)
    wgmma_shared(scores, a_tail + descriptor_step(step * 32), b_tail + descriptor_step(step * 32), true);
  wgmma_commit();
}

// Starts out += weights latents.
DEVICE void start_sums(Heads& heads, const Weights& weights, uint32_t page) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint64_t latents = wgmma_descriptor<128>(page + half * (kPanels / 2) * kPanelBytes, kPanelBytes);
#pragma unroll
    for (int step = 0; step < kWeightSteps; step++)
      wgmma_registers(heads.out[half], weights[step], latents + descriptor_step(step * 16 * 128));
  }
  wgmma_commit();
}

DEVICE void settle(Heads& heads) { settle(heads.out[0]), settle(heads.out[1]); }

// Turns scores into weights 2^(factor * score - max). `keep` is what brings earlier weights to the new maximum.
DEVICE void softmax(Scores& scores, Heads& heads, float (&keep)[2], int visible, float factor) {
  if (visible < kPageTokens) {
#pragma unroll
    for (int i = 0; i < kPageTokens / 2; i++)
      if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= visible) scores[i] = kHiddenScore;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float top = scores[2 * half];
#pragma unroll
    for (int i = 2 * half; i < kPageTokens / 2; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
    top = fmaxf(heads.max[half], quad_max(top) * factor);
    keep[half] = exp2_fast(heads.max[half] - top);
    heads.max[half] = top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < kPageTokens / 2; i += 4) {
      scores[i] = exp2_fast(fmaf(scores[i], factor, -top));
      scores[i + 1] = exp2_fast(fmaf(scores[i + 1], factor, -top));
      sum += scores[i] + scores[i + 1];
    }
    heads.sum[half] = heads.sum[half] * keep[half] + sum;
  }
}

// Packs the weights as A operands of the products with latents: a pair of tiles of 8 columns is the operand of a product over 16 keys.
DEVICE void pack(Weights& weights, const Scores& scores) {
#pragma unroll
  for (int i = 0; i < kPageTokens / 4; i++) weights[i / 4][i % 4] = pack2(scores[2 * i], scores[2 * i + 1]);
}

DEVICE void begin_run(Heads& heads) {
#pragma unroll
  for (int i = 0; i < KV_RANK / 4; i++) heads.out[0][i] = heads.out[1][i] = 0.0f;
  heads.max[0] = heads.max[1] = kNoMaximum;
  heads.sum[0] = heads.sum[1] = 0.0f;
}

// Stores the run's result; means and log_sums begin with the block's first head.
DEVICE void store_run(const Heads& heads, float* means, float* log_sums, int num_splits, int num_heads) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float sum = quad_sum(heads.sum[half]), inverse = 1.0f / sum;
    const int head = threadIdx.x / 32 * 16 + half * 8 + lane / 4;
    if (head >= num_heads) continue;
    float* out = means + head * KV_RANK + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < KV_RANK / 16; i++) {
      const float* two = &heads.out[i / (KV_RANK / 32)][i % (KV_RANK / 32) * 8 + 2 * half];
      *reinterpret_cast<float4*>(out + i * 16) = make_float4(two[0] * inverse, two[1] * inverse, two[4] * inverse, two[5] * inverse);
    }
    if (lane % 4 == 0) log_sums[static_cast<int64_t>(head) * num_splits] = heads.max[half] + log2_fast(sum);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(latent_attention_wgmma)(float* means, float* log_sums, const scalar_t* queries, const scalar_t* pages,
                                   const __grid_constant__ TensorMap latents, const __grid_constant__ TensorMap tails,
                                   const int* positions, const int* slots, const int* block_tables, const uint64_t* tree_masks,
                                   const int* tree_base, const unsigned char* __restrict__ upcoming, int num_fresh, int num_splits,
                                   int pages_per_sequence, int upcoming_bytes, float scale) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int row = blockIdx.y, first_head = blockIdx.z * kHeads, num_heads = min(HEADS - first_head, kHeads);
  const int own_slot = load_now(slots + row), position = load_now(positions + row);
  // The shuffle makes the length the same in all lanes for the compiler: products in a branch that looks divergent would be serialised.
  const int length = __shfl_sync(0xFFFFFFFFu, own_slot < 0 ? 0 : position + 1, 0);
  const LatentCut cut(length, num_splits);
  if (static_cast<int>(blockIdx.x) >= cut.num_runs) {
    pdl_launch_dependents();
    bring_upcoming(upcoming, upcoming_bytes);
    pdl_wait();
    return;
  }
  const int* block_table = block_tables + static_cast<int64_t>(own_slot) * pages_per_sequence;
  const uint32_t query_tile = shared_address(shared), ring = query_tile + kQueryBytes, path = query_tile + kPathOffset;
  const uint32_t barriers = query_tile + kBarrierOffset;
  const uint64_t mask = TREE ? __ldcg(tree_masks + row) : 0;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(latents), prefetch_tensor_map(tails);
    for (int i = 0; i < STAGES; i++) mbarrier_init(barriers + i * 8, 1);
    mbarrier_init_fence();
  }
  if (TREE) look_up_path(path, block_table, mask, __ldcg(tree_base + row));
  const Source source = {pages, block_table, path, length, __popcll(mask), length - num_fresh};
  const float factor = scale * kLog2e;
  Walk ahead(cut);   // the next page to copy, and its place among the block's
  int place = 0;
  PageNumbers numbers(cut, block_table);
  const auto copy_next = [&](int slot, bool is_early) {
    if (!ahead.is_over()) {
      const int number = numbers.at(place++);
      if (!source.is_old(ahead.page))
        load_page(source, ring + slot * kPageBytes, ahead.page, number, is_early ? source.first_fresh(ahead.page) : kPageTokens);
      else if (threadIdx.x == slot * 32)
        copy_page(ring + slot * kPageBytes, latents, tails, number, barriers + slot * 8);
      ahead.next();
    }
    cp_async_commit();
  };
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < STAGES; i++) copy_next(i, true);
  pdl_launch_dependents();
  bring_upcoming(upcoming, upcoming_bytes);
  pdl_wait();
  // Copy the fresh keys of the pages that are on their way. Unless runs are short, only the block that has the row's last run finds any.
  bool has_fresh = false;
  Walk early(cut);
#pragma unroll 1
  for (int i = 0; i < STAGES && !early.is_over(); i++, early.next()) {
    if (source.first_fresh(early.page) >= min(length - early.page * kPageTokens, kPageTokens)) continue;
    source.load_fresh(early.page, load_now(block_table + early.page), PageAt{ring + i * kPageBytes});
    has_fresh = true;
  }
  load_queries(query_tile, queries + (static_cast<int64_t>(row) * HEADS + first_head) * kCached, num_heads);
  if (has_fresh) cp_async_wait_all();
  async_proxy_fence();

  Heads heads;
  Scores scores;
  Weights weights;
  float keep[2];
  int slot = 0, before = 0, turn = 0;   // places in the ring of the page and of the one before it; turns of the loop, up to STAGES
  int parity = 0;                       // parity of the barrier's phase for that place
  for (Walk now(cut); !now.is_over(); now.next()) {
    if (source.is_old(now.page)) {
      mbarrier_wait(barriers + slot * 8, parity);
    } else {
      // Each turn commits a group, from turn 2 on that of the page STAGES - 2 further on. So STAGES - 1 groups are younger than that of one
      // of the first STAGES pages, and STAGES - 3 than that of a later page.
      if (turn < STAGES) cp_async_wait<STAGES - 1>(); else cp_async_wait<STAGES - 3>();
      async_proxy_fence();
    }
    __syncthreads();
    if (turn >= 2) copy_next(before == 0 ? STAGES - 1 : before - 1, false); else cp_async_commit();
    if (turn < STAGES) turn++;
    const uint32_t page = ring + slot * kPageBytes;
    const bool begins = now.begins_run();
    if (begins) begin_run(heads);
    settle(heads);
    wgmma_fence();
    start_scores(scores, query_tile, page);
    if (begins) {
      wgmma_wait<0>();
    } else {
      start_sums(heads, weights, ring + before * kPageBytes);
      wgmma_wait<1>();
    }
    settle(scores);
    softmax(scores, heads, keep, length - now.page * kPageTokens, factor);
    finish_before_wait(heads.sum[0] + heads.sum[1], query_tile);
    wgmma_wait<0>();
    settle(heads), settle(weights);
    // Most pages leave every maximum where it was: then the factors are exactly 1.
    if (__any_sync(0xFFFFFFFFu, keep[0] != 1.0f || keep[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < KV_RANK / 4; i++) heads.out[0][i] *= keep[i / 2 % 2], heads.out[1][i] *= keep[i / 2 % 2];
    }
    pack(weights, scores);
    before = slot, slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (slot == 0) parity ^= 1;
    if (now.ends_run()) {
      settle(heads);
      wgmma_fence();
      start_sums(heads, weights, page);
      wgmma_wait<0>();
      settle(heads);
      store_run(heads, means + means_of(row, num_splits) + static_cast<int64_t>(now.run * HEADS + first_head) * KV_RANK,
                log_sums + log_sums_of(row, first_head, num_splits) + now.run, num_splits, num_heads);
    }
  }
}
