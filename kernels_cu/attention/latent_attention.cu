// latent_attention: attention of up to 64 rows over latents, each over the pages of its own slot: the result of every run of pages
// (flash-decoding).
//
// means[t, run, h, :] = sum_j softmax_j(scale * queries[t, h, :] . page[j, :]) page[j, :C] over the positions j of the run,
// and log_sums[t, h, run], log2 of the sum of its weights. page[j] lies at location j of the pages of the row's slot, with TREE only for
// j < tree_base[t]: page[tree_base[t] + n] lies at location tree_base[t] + i, i being the n-th set bit of tree_masks[t]
//
// means          float32 workspace [T, num_splits, HEADS, C]: runs that a row does not have are left as they are
// log_sums       float32 workspace [T, HEADS, num_splits], likewise
// queries        [T, HEADS, C + R] scalar_t row-major, C = KV_RANK, R = ROPE_DIM: those that absorb_queries makes
// pages          [P, 1, 64, C + R] scalar_t
// positions      [T] int32; slots [T] int32, slot -1: nothing is stored; block_tables [B, pages_per_sequence] int32
// tree_masks     [T] uint64, tree_base [T] int32, read with TREE only: positions[t] + 1 is tree_base[t] plus the set bits
// upcoming       weights that later kernels read, of which the first upcoming_bytes, a multiple of 16, are brought to the L2
// num_fresh      how many of a row's last keys absorb_queries may write
// num_splits     into how many runs a long row's pages are cut
// constants      HEADS: query heads. KV_RANK: elements of a latent, a multiple of 128. ROPE_DIM: elements of a key behind it, a
//                multiple of 32. STAGES: pages in shared memory, at least 2. TREE: 1 reads tree_masks
// grid           (a, T, ceil(HEADS / 16)): a row's runs x, x + a and so on, of 16 heads; block 128; shared memory
//                STAGES * 128 * (C + R) + 2560 bytes
// launched after absorb_queries, which releases this kernel before its own wait. absorb_queries itself starts once all kernels before the
//                two products in front of it have finished: so keys that are not fresh are read before pdl_wait
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are rounded
//                to scalar_t for the product with the latents
// oracle         NumpyOps.decode_latent_attention
// source         arXiv 2405.04434; Flash-Decoding (Dao et al. 2023)
// layout         All heads see the same rows of 288 elements. A block takes 16 heads, the rows of m16n8k16 tiles. Of the scores its four
//                warps take 16 keys each, over all elements, with the queries in registers. Of the weighted sum they take a quarter of the
//                columns each, over all keys, so that sums stay in 32 registers a lane. Between the two the weights pass through shared memory. The
//                blocks of other heads read a page out of the L2, three of them on a multiprocessor of sm_90: one multiplies while another
//                waits. The keys of a tree's path take the places that they would have in a sequence of their own
#if !defined(HEADS) || !defined(KV_RANK) || !defined(ROPE_DIM) || !defined(STAGES) || !defined(TREE)
#error "a constant is not defined"
#endif
#include "latent_pages.cuh"

constexpr int kHeads = 16;                        // query heads of a block
constexpr int kCopiesAtOnce = TREE || __CUDA_ARCH__ >= 1000 ? 1 : 3;  // copies of a thread that are unrolled: more take registers from the queries
constexpr int kBlocksAtOnce = __CUDA_ARCH__ > 1030 ? 1 : TREE ? 2 : 3;  // blocks on a multiprocessor: sm_120 has 100 KB; sm_110 would spill
constexpr int kSteps = kCached / 16;              // k-steps of a score
constexpr int kColumnTiles = KV_RANK / 4 / 8;     // n-tiles of a warp's columns
constexpr int kWeightRow = kPageTokens * 2 + 16;  // bytes of a row of weights, so many that no ldmatrix meets a bank twice
constexpr int kWeightBytes = kHeads * kWeightRow;
static_assert(KV_RANK % 128 == 0 && ROPE_DIM % 32 == 0 && STAGES >= 2, "sizes that the kernel does not take");

// A row's chunks are permuted for the 8 x 8 ldmatrix. Rows are a multiple of 64 bytes apart, an odd multiple if they have 288 elements.
// Then neighbours alternate between two halves of the banks, and two more bits of the row choose among the four chunks of a half.
DEVICE int phase_of(int row) { return (row >> 1 & 3) << 4; }
// Byte offset of a row's chunk 4 i + 2 odd + `chunk` from byte 64 i of the row.
DEVICE int swizzled(int row, int chunk, int odd) { return (odd * 32 + chunk * 16) ^ phase_of(row); }

// The shared address of a row's chunk in the page at `place`.
struct PageAt {
  uint32_t place;
  DEVICE uint32_t operator()(int row, int chunk) const { return place + ((row * kChunks + chunk) * 16 ^ phase_of(row)); }
};
// Starts the copies of page `page` of the row, except for its keys from row `fresh` on.
DEVICE void load_page(const Source& source, uint32_t to, int page, int fresh) {
  source.load<kCopiesAtOnce>(page, source.block_table[page], fresh, PageAt{to});
}

// A warp's state of the block's heads: the queries of all of them, and of the output its quarter of the columns.
struct WarpState {
  uint32_t q[kSteps][4];
  float out[kColumnTiles][4];
  float max[2];  // maxima of scale * log2(e) * score
  float sum[2];  // this lane's part, of the warp's own keys
};

// Loads the queries of the block's heads by way of shared memory; zeros for heads that do not exist.
DEVICE void load_queries(WarpState& state, uint32_t place, const scalar_t* queries, int num_heads, int lane) {
  for (int index = threadIdx.x; index < kHeads * kChunks; index += kThreads) {
    const int head = index / kChunks;
    const bool exists = head < num_heads;
    cp_async16(place + (index * 16 ^ phase_of(head)), queries + (exists ? index * 8 : 0), exists ? 16 : 0);
  }
  cp_async_commit();
  cp_async_wait_all();
  __syncthreads();
  const int row = lane_row_a(lane);
#pragma unroll
  for (int step = 0; step < kSteps; step++)
    ldmatrix_x4(state.q[step], place + row * kRowBytes + step / 2 * 64 + swizzled(row, lane_chunk_a(lane), step % 2));
}

// Scores of the 16 heads for the warp's 16 keys.
DEVICE void score(float (&scores)[2][4], const WarpState& state, uint32_t page, int quarter, int lane) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
  const int key = lane_row_b(lane);
  const uint32_t row = page + (quarter * 16 + key) * kRowBytes;
  const uint32_t places[2] = {row + swizzled(key, lane_chunk_b(lane), 0), row + swizzled(key, lane_chunk_b(lane), 1)};
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    uint32_t b[4];
    ldmatrix_x4(b, places[step % 2] + step / 2 * 64);
    mma(scores[0], state.q[step], {b[0], b[1]});
    mma(scores[1], state.q[step], {b[2], b[3]});
  }
}

// Stores the weights 2^(factor * score - max) of a page in shared memory, and brings sums and output to the new maximum. At `tops` the
// warps exchange their maxima; `visible` keys of the page are seen.
DEVICE void weigh(float (&scores)[2][4], WarpState& state, uint32_t weights, uint32_t tops, int quarter, int lane, int visible,
                  float factor) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (quarter * 16 + n * 8 + (lane % 4) * 2 + i % 2 >= visible) scores[n][i] = kHiddenScore;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = 2 * half;
    const float top = quad_max(fmaxf(fmaxf(scores[0][i], scores[0][i + 1]), fmaxf(scores[1][i], scores[1][i + 1]))) * factor;
    if (lane % 4 == 0) store_shared_float(tops + ((half * 8 + lane / 4) * 4 + quarter) * 4, top);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = 2 * half, head = half * 8 + lane / 4;
    const uint4 all = load_shared(tops + head * 16);
    float max = fmaxf(fmaxf(__uint_as_float(all.x), __uint_as_float(all.y)),
                      fmaxf(__uint_as_float(all.z), __uint_as_float(all.w)));
    max = fmaxf(max, state.max[half]);
    const float keep = exp2_fast(state.max[half] - max);
    state.max[half] = max;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float low = exp2_fast(fmaf(scores[n][i], factor, -max)), high = exp2_fast(fmaf(scores[n][i + 1], factor, -max));
      sum += low + high;
      store_shared_word(weights + head * kWeightRow + (quarter * 16 + n * 8 + (lane % 4) * 2) * 2, pack2(low, high));
    }
    state.sum[half] = state.sum[half] * keep + sum;
    // Most pages leave every maximum where it was: then the factors are exactly 1.
    if (!__any_sync(0xFFFFFFFFu, keep != 1.0f)) continue;
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) state.out[n][i] *= keep, state.out[n][i + 1] *= keep;
  }
  __syncthreads();
}

// out += weights latents, of the warp's quarter of the columns.
DEVICE void accumulate(WarpState& state, uint32_t weights, uint32_t page, int quarter, int lane) {
  const int key = lane_row_a(lane), chunk = lane_chunk_a(lane);
  const uint32_t row = page + key * kRowBytes + quarter * (KV_RANK / 2);
  const uint32_t places[2] = {row + swizzled(key, chunk, 0), row + swizzled(key, chunk, 1)};
#pragma unroll
  for (int step = 0; step < kPageTokens / 16; step++) {
    uint32_t a[4];
    ldmatrix_x4(a, weights + key * kWeightRow + step * 32 + chunk * 16);
#pragma unroll
    for (int pair = 0; pair < kColumnTiles / 2; pair++) {
      uint32_t b[4];
      ldmatrix_x4_transposed(b, places[pair % 2] + step * 16 * kRowBytes + pair / 2 * 64);
      mma(state.out[2 * pair], a, {b[0], b[1]});
      mma(state.out[2 * pair + 1], a, {b[2], b[3]});
    }
  }
}

// Stores the run's result. `tops` is free by then, and takes the warps' sums.
DEVICE void store_run(const WarpState& state, float* means, float* log_sums, int num_splits, uint32_t tops, int num_heads,
                      int quarter, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float sum = quad_sum(state.sum[half]);
    if (lane % 4 == 0) store_shared_float(tops + ((half * 8 + lane / 4) * 4 + quarter) * 4, sum);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int head = half * 8 + lane / 4;
    const uint4 all = load_shared(tops + head * 16);
    const float sum = ((__uint_as_float(all.x) + __uint_as_float(all.y)) + __uint_as_float(all.z)) + __uint_as_float(all.w);
    if (head >= num_heads) continue;
    const float inverse = 1.0f / sum;
    float* out = means + head * KV_RANK + quarter * (KV_RANK / 4) + lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < kColumnTiles; n += 2) {
      const float *low = &state.out[n][2 * half], *high = &state.out[n + 1][2 * half];
      *reinterpret_cast<float4*>(out + n * 8) = make_float4(low[0] * inverse, low[1] * inverse, high[0] * inverse, high[1] * inverse);
    }
    if (quarter == 0 && lane % 4 == 0) log_sums[static_cast<int64_t>(head) * num_splits] = state.max[half] + log2_fast(sum);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    KERNEL(latent_attention)(float* means, float* log_sums, const scalar_t* queries, const scalar_t* pages, const int* positions,
                             const int* slots, const int* block_tables, const uint64_t* tree_masks, const int* tree_base,
                             const unsigned char* __restrict__ upcoming, int num_fresh, int num_splits, int pages_per_sequence,
                             int upcoming_bytes, float scale) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int path_rows[TREE ? kMaxNodes : 1];
  const int row = blockIdx.y, first_head = blockIdx.z * kHeads, num_heads = min(HEADS - first_head, kHeads);
  const int lane = threadIdx.x % 32, quarter = threadIdx.x / 32;
  const int length = length_of(row, positions, slots);
  const LatentCut cut(length, num_splits);
  if (static_cast<int>(blockIdx.x) >= cut.num_runs) {
    pdl_launch_dependents();
    bring_upcoming(upcoming, upcoming_bytes);
    pdl_wait();
    return;
  }
  const int* block_table = block_tables + static_cast<int64_t>(__ldcg(slots + row)) * pages_per_sequence;
  const uint64_t mask = TREE ? __ldcg(tree_masks + row) : 0;
  if (TREE) {
    look_up_path(shared_address(path_rows), block_table, mask, __ldcg(tree_base + row));
    __syncthreads();
  }
  const Source source = {pages, block_table, shared_address(path_rows), length, __popcll(mask), length - num_fresh};
  const uint32_t ring = shared_address(shared), weights = ring + STAGES * kPageBytes, tops = weights + kWeightBytes;
  WarpState state;
  bool has_queries = false;
  for (int run = blockIdx.x; run < cut.num_runs; run += gridDim.x) {
    const int first = run * cut.run_pages, count = min(cut.run_pages, cut.num_pages - first);
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      if (i < count) load_page(source, ring + i * kPageBytes, first + i, has_queries ? kPageTokens : source.first_fresh(first + i));
      cp_async_commit();
    }
    if (!has_queries) {
      pdl_launch_dependents();
      bring_upcoming(upcoming, upcoming_bytes);
      pdl_wait();
      for (int i = 0; i < min(STAGES - 1, count); i++)
        source.load_fresh(first + i, block_table[first + i], PageAt{ring + i * kPageBytes});
      const scalar_t* own = queries + (static_cast<int64_t>(row) * HEADS + first_head) * kCached;
      load_queries(state, ring + (STAGES - 1) * kPageBytes, own, num_heads, lane);
      has_queries = true;
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state.out[n][i] = 0.0f;
    state.max[0] = state.max[1] = kNoMaximum;
    state.sum[0] = state.sum[1] = 0.0f;
    for (int i = 0; i < count; i++) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();  // the page is there, and the place of the next one is free
      if (i + STAGES - 1 < count) load_page(source, ring + (i + STAGES - 1) % STAGES * kPageBytes, first + i + STAGES - 1, kPageTokens);
      cp_async_commit();
      const uint32_t page = ring + i % STAGES * kPageBytes;
      float scores[2][4];
      score(scores, state, page, quarter, lane);
      weigh(scores, state, weights, tops, quarter, lane, length - (first + i) * kPageTokens, scale * kLog2e);
      accumulate(state, weights, page, quarter, lane);
    }
    store_run(state, means + means_of(row, num_splits) + static_cast<int64_t>(run * HEADS + first_head) * KV_RANK,
              log_sums + log_sums_of(row, first_head, num_splits) + run, num_splits, tops, num_heads, quarter, lane);
    __syncthreads();  // the pages and the sums have been read
  }
}
