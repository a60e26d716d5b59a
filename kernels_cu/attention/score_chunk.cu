// score_chunk: computes what coarse_log_sums and score_blocks of select_blocks.cu do, in one launch for the many rows of a prefill chunk
// (sm_90a).
//
//   formula   that of select_blocks.cu: pooled[b] = (p[4b], max of p[4b .. 4b + 3]) of every row that chooses
//   operands  pooled float32 workspace (T, K, pages_per_sequence, 2); q (T, H*D) scalar_t; k1_pages (P, K, 4, D), k2_pages
//             (P, K, D) scalar_t; positions, slots (T) int32: rows of one slot, padding (-1) behind them; block_tables (B,
//             pages_per_sequence) int32
//   constants HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head: 16
//   launch    grid (any, T / 16 rounded up, K), block kThreads, kStages * kTileBytes of dynamic shared memory
//   numerics  products, sums and scores in float32, each in an order of its own row and entry alone, which is not that of select_blocks.cu;
//             scores are 2^24 times those of the formula, so that small ones have an order too
//   oracle    reference/sparse_attention.py block_scores
//   source    InfLLM-v2 (arXiv 2509.24663); FlashAttention-3 (arXiv 2407.08608) for products beside exponentials
//   layout    a warp has a row: its 16 query heads are 16 of the 64 rows of a warpgroup's products, and stay in registers. All 16 warps
//             take the same compressed keys, 64 at a time, out of a ring that one more warpgroup fills. Warpgroups take turns to multiply:
//             the exponentials of three, summed over the heads, run beside the products of the fourth. Blocks that share rows (grid x) each
//             compute all log sums, and divide the scores among them
#if !defined(HEAD_DIM) || !defined(GROUP)
#error "a constant is not defined"
#endif
#include "attention.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

static_assert(GROUP == 16, "a warp has the query heads of a row");

constexpr int kRows = 16;  // rows of a block, a warp each
constexpr int kWarpgroups = kRows / 4;
constexpr int kCopiers = 128;  // threads that fill the ring
constexpr int kThreads = kRows * 32 + kCopiers;
constexpr int kKeys = 64;  // compressed keys of a tile
constexpr int kStages = 8;
constexpr int kInFlight = 3;  // tiles that are being copied
constexpr int kFine = 4;  // entries of k1 in a block of tokens
constexpr float kScoreBits = 24.0f;  // scores are 2^this times as large

// A tile is stored as panels, each with kSwizzle bytes of every row.
constexpr int kSwizzle = HEAD_DIM == 96 ? 64 : 128;
constexpr int kPanelChunks = kSwizzle / 16;
constexpr int kPanelBytes = kKeys * kSwizzle;
constexpr int kTileBytes = kKeys * kRowBytes;
constexpr int kTileChunks = kKeys * kRowChunks;

// The queries of a row's 16 heads; a lane has heads lane / 4 and lane / 4 + 8.
struct Queries {
  uint32_t a[kDimSteps][4];

  DEVICE void load(const scalar_t* q) {
    const uint32_t* low = reinterpret_cast<const uint32_t*>(q + (threadIdx.x & 31) / 4 * HEAD_DIM) + threadIdx.x % 4;
    const uint32_t* high = low + 8 * HEAD_DIM / 2;
#pragma unroll
    for (int step = 0; step < kDimSteps; step++) {
      a[step][0] = low[step * 8], a[step][1] = high[step * 8];
      a[step][2] = low[step * 8 + 4], a[step][3] = high[step * 8 + 4];
    }
  }
};

using Scores = float[kKeys / 2];  // [4 j + 2 i + c]: head lane / 4 + 8 i, key 8 j + lane % 4 * 2 + c

// The compressed keys of a slot, ENTRIES of them in a page.
template <int ENTRIES>
struct Keys {
  const scalar_t* rows;  // rows of the KV head in page 0
  const int* block_table;
  int page_stride, last;  // elements from page to page; the last entry that exists

  // Starts the copies of a tile, in which existing entries take the place of missing ones. All copiers call it. Chunks are permuted within
  // a panel as tensor cores read them.
  DEVICE void copy(uint32_t target, int tile) const {
#pragma unroll 4
    for (int index = threadIdx.x % kCopiers; index < kTileChunks; index += kCopiers) {
      const int key = index / kRowChunks, chunk = index % kRowChunks;
      const int entry = min(max(tile * kKeys + key, 1), last);
      const int64_t page = static_cast<int64_t>(block_table[entry / ENTRIES]) * page_stride;
      const int permuted = chunk % kPanelChunks ^ (kSwizzle == 128 ? key & 7 : (key >> 1) & 3);
      cp_async16(target + chunk / kPanelChunks * kPanelBytes + key * kSwizzle + permuted * 16,
                 rows + page + entry % ENTRIES * HEAD_DIM + chunk * 8);
    }
  }
};

// The tiles that the block takes: all coarse ones (of k2), and then `num_fine` fine ones (of k1), every stride-th from first_fine on.
struct Tiles {
  Keys<1> coarse;
  Keys<kFine> fine;
  int num_coarse, num_fine, first_fine, stride;

  DEVICE int count() const { return num_coarse + num_fine; }
};

// The ring of tiles. For each place one barrier says that its tile is there, and one that all 16 warps have read it.
struct Ring {
  uint32_t tiles, barriers;

  DEVICE uint32_t tile(int i) const { return tiles + i % kStages * kTileBytes; }
  DEVICE uint32_t ready(int i) const { return barriers + i % kStages * 8; }
  DEVICE uint32_t read(int i) const { return barriers + (kStages + i % kStages) * 8; }

  DEVICE void create() const {
    for (int i = 0; i < kStages; i++) mbarrier_init(ready(i), kCopiers), mbarrier_init(read(i), kRows);
    mbarrier_init_fence();
  }
  // Fills the ring, tile by tile. All copiers call it.
  DEVICE void fill(const Tiles& all) const {
#pragma unroll 1
    for (int i = 0; i < all.count() + kInFlight; i++) {
      if (i < all.count()) {
        mbarrier_wait(read(i), i / kStages % 2 ^ 1);
        if (i < all.num_coarse) {
          all.coarse.copy(tile(i), i);
        } else {
          all.fine.copy(tile(i), all.first_fine + (i - all.num_coarse) * all.stride);
        }
      }
      cp_async_commit();
      if (i < kInFlight) continue;
      cp_async_wait<kInFlight>();
      async_proxy_fence();
      mbarrier_arrive(ready(i - kInFlight));
    }
  }
};

// Starts scores = q k of a tile.
DEVICE void start_scores(Scores& scores, const Queries& queries, uint64_t keys) {
#pragma unroll
  for (int step = 0; step < kDimSteps; step++) {
    const int panel = step * 32 / kSwizzle, within = step * 32 % kSwizzle;
    multiply_tile(scores, queries.a[step], keys + descriptor_step(panel * kPanelBytes + within), step > 0);
  }
  wgmma_commit();
}

// Warpgroups take turns to start their products: warpgroup w waits at numbered barrier 1 + w. Warpgroup 0 begins, without waiting; after
// the last tile the turn is not passed on to it.
DEVICE void take_turn(int warpgroup, int i) {
  if (warpgroup > 0 || i > 0) barrier_wait(1 + warpgroup, 256);
}
DEVICE void pass_turn(int warpgroup, int i, int count) {
  const int next = (warpgroup + 1) % kWarpgroups;
  if (next > 0 || i + 1 < count) barrier_arrive(1 + next, 256);
}

// Hands the scores of the ring's tiles begin .. end - 1 (of `all` tiles) to consume(scores, number), number = first, first + stride, ...
template <typename Consume>
DEVICE void each_tile(const Queries& queries, const Ring& ring, int begin, int end, int all, int first, int stride,
                      Consume& consume) {
  const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // the same in all lanes
  const uint64_t keys = wgmma_descriptor<kSwizzle>(ring.tiles, 0);
  Scores scores;
#pragma unroll 1
  for (int i = begin; i < end; i++, first += stride) {
    mbarrier_wait(ring.ready(i), i / kStages % 2);
    take_turn(warpgroup, i);
    settle(scores);
    wgmma_fence();
    start_scores(scores, queries, keys + descriptor_step(kTileBytes) * (i % kStages));
    pass_turn(warpgroup, i, all);
    wgmma_wait<0>();
    settle(scores);
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(ring.read(i));
    consume(scores, first);
  }
}

// The running maximum and sum of 2^(factor * score) of a lane's two heads; entries 1 .. last count.
struct LogSums {
  float max[2], sum[2], factor;
  int last;

  DEVICE void operator()(Scores& scores, int tile) {
    const int first = tile * kKeys + threadIdx.x % 4 * 2;
    if (tile == 0 || tile * kKeys + kKeys - 1 > last) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; i++) {
        const int entry = first + i / 4 * 8 + i % 2;
        if (entry < 1 || entry > last) scores[i] = kHiddenScore;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = scores[2 * half], added = 0.0f;
#pragma unroll
      for (int i = 2 * half; i < kKeys / 2; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
      top = fmaxf(max[half], quad_max(top) * factor);
#pragma unroll
      for (int i = 2 * half; i < kKeys / 2; i += 4) {
        added += exp2_fast(fmaf(scores[i], factor, -top)) + exp2_fast(fmaf(scores[i + 1], factor, -top));
      }
      sum[half] = fmaf(sum[half], exp2_fast(max[half] - top), added);
      max[half] = top;
    }
  }

  // Returns the log sum of one of the lane's heads. All four lanes of the head call it.
  DEVICE float value(int half) const { return max[half] + log2_fast(quad_sum(sum[half])); }
};

// Sums the scores of a tile over a row's heads, pools them and stores them: blocks tile * 16 .. + 15, of which those up to `last` exist.
struct PooledScores {
  float2* pooled;
  float factor, offsets[2];
  int last;  // -1: nothing is stored

  DEVICE void operator()(Scores& scores, int tile) {
    const int lane = threadIdx.x & 31;
    float p[kKeys / 8][2];
#pragma unroll
    for (int n = 0; n < kKeys / 8; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        p[n][i] = exp2_fast(fmaf(scores[4 * n + i], factor, offsets[0])) +
                  exp2_fast(fmaf(scores[4 * n + 2 + i], factor, offsets[1]));
      }
    }
    // Eight lanes have a key's heads. Each lane ends with the sums of two keys, 8 n + lane % 4 * 2 + i for n = lane / 4.
#pragma unroll
    for (int half = kKeys / 16, distance = 16; half > 0; half /= 2, distance /= 2) {
      const bool upper = lane & distance;
#pragma unroll
      for (int n = 0; n < half; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float sent = upper ? p[n][i] : p[n + half][i], kept = upper ? p[n + half][i] : p[n][i];
          p[n][i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, distance);
        }
      }
    }
    if (tile == 0 && lane == 0) p[0][0] = 0.0f;  // entry 0 stands for a window that does not exist
    float highest = fmaxf(p[0][0], p[0][1]);
    highest = fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 1));
    const int block = tile * (kKeys / kFine) + lane / 2;
    if (lane % 2 == 0 && block <= last) pooled[block] = make_float2(p[0][0], highest);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(score_chunk)(float2* pooled, const scalar_t* q, const scalar_t* k1_pages, const scalar_t* k2_pages,
                        const int* positions, const int* slots, const int* block_tables, int num_rows,
                        int pages_per_sequence, int init_blocks, int local_blocks, int dense_context, float scale) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ uint64_t barriers[2 * kStages];
  const Ring ring = {shared_address(shared), shared_address(barriers)};
  if (threadIdx.x == 0) ring.create();
  __syncthreads();
  pdl_wait();
  pdl_launch_dependents();
  const int kv_head = blockIdx.z, num_kv_heads = gridDim.z, first_row = blockIdx.y * kRows;
  // Every warp looks at all rows of the block, so that it knows without a barrier what they do together.
  const int other = first_row + (threadIdx.x & 15), slot = slots[first_row];
  int position = -1;
  if (other < num_rows && slots[other] >= 0) position = positions[other];
  if (position + 1 <= dense_context) position = -1;
  const int highest = __reduce_max_sync(0xFFFFFFFFu, position);
  if (highest < 0) return;
  const int* block_table = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
  const int last_coarse = (highest + 1) / kPageTokens - 1, last_fine = (highest / kPageTokens - local_blocks) * kFine;
  const int first_fine = init_blocks * kFine / kKeys + blockIdx.x, stride = gridDim.x;
  const Tiles tiles = {
      {k2_pages + kv_head * HEAD_DIM, block_table, num_kv_heads * HEAD_DIM, last_coarse},
      {k1_pages + kv_head * (kFine * HEAD_DIM), block_table, num_kv_heads * (kFine * HEAD_DIM), last_fine},
      last_coarse / kKeys + 1, max(last_fine / kKeys - first_fine + stride, 0) / stride, first_fine, stride};
  if (threadIdx.x >= kRows * 32) return ring.fill(tiles);
  position = __shfl_sync(0xFFFFFFFFu, position, threadIdx.x / 32);
  const int row = position < 0 ? first_row : first_row + threadIdx.x / 32;
  const int64_t unit = static_cast<int64_t>(row) * num_kv_heads + kv_head;
  Queries queries;
  queries.load(q + unit * (GROUP * HEAD_DIM));
  LogSums log_sums = {{kNoMaximum, kNoMaximum}, {0.0f, 0.0f}, scale * kLog2e, (position + 1) / kPageTokens - 1};
  each_tile(queries, ring, 0, tiles.num_coarse, tiles.count(), 0, 1, log_sums);
  if (tiles.num_fine == 0) return;
  PooledScores scores = {pooled + unit * pages_per_sequence,
                         scale * kLog2e,
                         {kScoreBits - log_sums.value(0), kScoreBits - log_sums.value(1)},
                         position < 0 ? -1 : position / kPageTokens - local_blocks};
  each_tile(queries, ring, tiles.num_coarse, tiles.count(), tiles.count(), first_fine, stride, scores);
}
