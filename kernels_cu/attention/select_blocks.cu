// coarse_log_sums and score_blocks: score the blocks of 64 tokens for the rows that choose some of them, by compressed keys. pick_blocks.cu
// chooses by these scores.
//
//   formula   a row at position i chooses if i + 1 > dense_context; local = i / 64 - local_blocks. With c = scale log2(e),
//             for a KV head and its query heads h:
//             coarse_log_sums  lse[h] = log2 sum over e of 2^(c q[h] K2[e]), e = 1 .. (i + 1) / 64 - 1
//             score_blocks     p[e] = sum over h of 2^(c q[h] K1[e] - lse[h]), e = 1 .. 4 local, and p[0] = 0;
//                              pooled[b] = (p[4b], max of p[4b .. 4b + 3]), b = init_blocks .. local
//   operands  log_sums float32 workspace (T, K, num_tiles, kPadded): a partial sum for each 32 entries of K2; pooled
//             float32 workspace (T, K, pages_per_sequence, 2); q (T, H*D) scalar_t; k1_pages (P, K, 4, D), k2_pages
//             (P, K, D) scalar_t: entry e of K1 is row e % 4 of page e / 4 of the slot, of K2 page e; positions, slots
//             (T) int32; block_tables (B, pages_per_sequence) int32; with TREE k_pages (P, K, 64, D) scalar_t, tree_masks
//             (T) uint64, tree_base (T) int32: entry tree_base[t] / 64 of K2 is the mean of keys of the row's path; with
//             FP8 k_pages and k_nodes (N, K, D) are e4m3 codes, k_scales (P, K) and k_node_scales (N, K) float32
//   constants HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head. TREE: 1 reads tree_masks
//             and tree_base. FP8: if it is defined, with TREE, keys are codes, and those of nodes lie in k_nodes
//   launch    grid (any, T / rows_per_block rounded up, K); block rows_per_block * 32 or more, at most 128; no dynamic shared memory.
//             is_chunk: the rows are some or all rows of a prefill chunk
//   numerics  products, sums and scores in float32, each in an order of its own entry alone; scores are 2^24 times as large,
//             so that those far below the highest have an order without subnormal numbers; a score may be infinite
//   oracle    reference/sparse_attention.py block_scores
//   source    InfLLM-v2 (arXiv 2509.24663)
//   layout    the query heads of a KV head are the rows of m16n8k16 tiles. A warp takes 32 compressed keys at a time, straight into
//             registers. 32 dims of a key lie in the four lanes that hold its column, 16 bytes each, in an order of dims that the queries
//             have too, and that makes no difference to a sum of products. Warps do not depend on each other: those of a block take the
//             same keys for neighbouring rows, which then find them in L1, or other keys for one row. Both kernels let the next one start
//             at once, and read their first keys before pdl_wait unless this step writes them. Keys of earlier steps, and positions, slots
//             and tables, are older than the product that made q
#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(TREE)
#error "a constant is not defined"
#endif
#include "attention.cuh"
#include "e4m3.cuh"
#include "tree_rows.cuh"
#include "window_mean.cuh"

#ifdef FP8
typedef uint8_t page_t;
#else
typedef scalar_t page_t;
#endif

constexpr int kMostWarps = 4;
constexpr int kThreads = kMostWarps * 32;
constexpr int kHeadTiles = (GROUP + 15) / 16;
constexpr int kPadded = kHeadTiles * 16;  // query heads, filled up to whole tiles
constexpr int kBlocks = kHeadTiles == 1 ? 3 : 2;  // blocks on a multiprocessor, so that nothing is spilled
constexpr int kParts = HEAD_DIM / 32;  // parts of 32 dims of a key: two k-steps
constexpr int kKeyTiles = 4;  // n-tiles
constexpr int kKeys = kKeyTiles * 8;  // compressed keys that a warp takes at a time
constexpr int kEntries = 4;           // entries of K1 in a block
constexpr float kNoHead = 1e30f;      // the log sum of a head that does not exist: it weighs nothing
constexpr float kScoreBits = 24.0f;   // scores are 2^this times as large

// Returns the first location that the step writes in `slot`; called by whole warps, also before pdl_wait. `written` has the location of
// each row, or one before it. Positions, slots and trees are older than the product before attention.
DEVICE int first_written(const int* written, const int* slots, int slot, int num_rows) {
  int first = 0x7FFFFFFF;
#pragma unroll 1
  for (int row = threadIdx.x & 31; row < num_rows; row += 32) {
    const int other = __ldcg(slots + row), location = __ldcg(written + row);
    if (other == slot) first = min(first, location);
  }
  return __reduce_min_sync(0xFFFFFFFFu, first);
}

// The work of a warp: a row, and every stride-th tile of keys from `first` on. `row` is -1 where the row does not choose.
struct Work {
  int row, slot, position, first, stride;

  DEVICE Work(const int* positions, const int* slots, int num_rows, int rows_per_block, int dense_context) {
    const int warp = threadIdx.x / 32, lanes = blockDim.x / 32 / rows_per_block;
    row = blockIdx.y * rows_per_block + warp % rows_per_block;
    first = blockIdx.x + warp / rows_per_block * gridDim.x;  // the first warps of all blocks before their others
    stride = gridDim.x * lanes;
    slot = -1, position = 0;
    if (row < num_rows) slot = __ldcg(slots + row), position = __ldcg(positions + row);
    if (slot < 0 || position + 1 <= dense_context) row = -1;
  }
  // Returns the position from which on keys may not be read before pdl_wait. `written` is as in first_written.
  DEVICE int first_new(const int* written, const int* slots, int num_rows, int is_chunk) const {
    if (is_chunk) return 0;
    return num_rows == 1 ? __ldcg(written) : first_written(written, slots, slot, num_rows);
  }
  // Returns the number of the row and KV head among those of all rows.
  DEVICE int64_t unit() const { return static_cast<int64_t>(row) * gridDim.z + blockIdx.z; }
};

// 16 query heads as the A operands of all k-steps.
struct Queries {
  uint32_t a[2 * kParts][4];

  DEVICE void load(const scalar_t* q, int num_heads) {
    const int head = (threadIdx.x & 31) / 4, dim = threadIdx.x % 4 * 8;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      uint4 low = make_uint4(0, 0, 0, 0), high = make_uint4(0, 0, 0, 0);
      if (head < num_heads) low = load16(q + head * HEAD_DIM + part * 32 + dim);
      if (head + 8 < num_heads) high = load16(q + (head + 8) * HEAD_DIM + part * 32 + dim);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int i = 0; i < 4; i++) a[2 * part][i] = first[i], a[2 * part + 1][i] = second[i];
    }
  }
};

DEVICE void load_queries(Queries (&queries)[kHeadTiles], const scalar_t* q, int64_t unit) {
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; tile++) {
    queries[tile].load(q + (unit * GROUP + tile * 16) * HEAD_DIM, GROUP - tile * 16);
  }
}

// 32 compressed keys as the B operands of all k-steps.
struct KeyTile {
  uint4 words[kKeyTiles][kParts];

  // Loads entries first .. + 31; those before 1 or after `last` are replaced by existing ones. row_of(entry) is where an entry lies.
  template <typename RowOf>
  DEVICE void load(int first, int last, RowOf row_of) {
    const scalar_t* rows[kKeyTiles];
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++) {
      const int entry = min(max(first + n * 8 + static_cast<int>(threadIdx.x & 31) / 4, 1), last);
      rows[n] = row_of(entry) + threadIdx.x % 4 * 8;
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++)
#pragma unroll
      for (int part = 0; part < kParts; part++) words[n][part] = load16(rows[n] + part * 32);
  }

  // Scores of the keys for 16 query heads.
  DEVICE void score(float (&scores)[kKeyTiles][4], const Queries& queries) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[n][i] = 0.0f;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; n++) mma(scores[n], queries.a[2 * part], {words[n][part].x, words[n][part].y});
#pragma unroll
      for (int n = 0; n < kKeyTiles; n++) mma(scores[n], queries.a[2 * part + 1], {words[n][part].z, words[n][part].w});
    }
  }
};

// ---- the normaliser

#if TREE
// The keys of one KV head by their location in the pages of a slot: `pages` is this head's part of page 0, and a page of all heads takes
// `page_stride` elements. In fp8 the keys from location `base` on are nodes of a tree, in arrays of their own.
struct TreeKeys {
  const page_t* pages;
  const int* block_table;
  int64_t page_stride;
  int base;
#ifdef FP8
  const page_t* nodes;
  const float *scales, *node_scales;
  int num_kv_heads;
#endif

  // Returns two neighbouring elements of a key, its word `word`.
  DEVICE uint32_t at(int location, int word) const {
    const int page = block_table[location / kPageTokens];
    const page_t* key = pages + page * page_stride + location % kPageTokens * HEAD_DIM;
#ifdef FP8
    const int node = (location - base) * num_kv_heads;
    if (node >= 0) key = nodes + node * HEAD_DIM;
    const float* scale = node >= 0 ? node_scales + node : scales + static_cast<int64_t>(page) * num_kv_heads;
    return expand2(reinterpret_cast<const uint16_t*>(key)[word], *scale);
#else
    return reinterpret_cast<const uint32_t*>(key)[word];
#endif
  }
};

// Stores in shared memory the mean of positions first .. first + 127 of a row of a tree. Behind the base the path goes through the set bits
// of `mask`. One warp calls it.
DEVICE void mean_of_path(scalar_t* mean, const TreeKeys& keys, int first, uint64_t mask) {
#pragma unroll 1
  for (int word = threadIdx.x & 31; word < HEAD_DIM / 2; word += 32) {
    uint64_t left = mask;
    reinterpret_cast<uint32_t*>(mean)[word] = window_mean<2 * kPageTokens>([&](int i) {
      int location = first + i;
      if (location >= keys.base) {
        location = keys.base + __ffsll(static_cast<int64_t>(left)) - 1;
        left &= left - 1;
      }
      return keys.at(location, word);
    });
  }
}
#endif

// Returns log2 of the sum of 2^(factor * score) over keys first_key .. + 31, of which those from 1 to `last` count; there is at least one
// of them. It is that of row lane / 4 + 8 half of a tile of heads; all four lanes of a row get it.
DEVICE float log_sum(const float (&scores)[kKeyTiles][4], int half, float factor, int first_key, int last) {
  const int first = first_key + threadIdx.x % 4 * 2;
  float values[2 * kKeyTiles], top = kHiddenScore, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * kKeyTiles; i++) {
    const int key = first + i / 2 * 8 + i % 2;
    values[i] = 1 <= key && key <= last ? scores[i / 2][2 * half + i % 2] : kHiddenScore;
    top = fmaxf(top, values[i]);
  }
  top = quad_max(top) * factor;
#pragma unroll
  for (int i = 0; i < 2 * kKeyTiles; i++) sum += exp2_fast(fmaf(values[i], factor, -top));
  return top + log2_fast(quad_sum(sum));
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    KERNEL(coarse_log_sums)(float* log_sums, const scalar_t* q, const scalar_t* k2_pages, const page_t* k_pages,
                            const int* positions, const int* slots, const int* block_tables,
                            const uint64_t* tree_masks, const int* tree_base, int num_rows, int rows_per_block,
                            int is_chunk, int pages_per_sequence, int num_tiles, int dense_context, float scale
#ifdef FP8
                            , const float* k_scales, const page_t* k_nodes, const float* k_node_scales
#endif
) {
  pdl_launch_dependents();
  const Work work(positions, slots, num_rows, rows_per_block, dense_context);
  if (work.row < 0) return pdl_wait();
  const int last = (work.position + 1) / kPageTokens - 1, lane = threadIdx.x & 31;
  if (work.first > last / kKeys) return;
  const int num_kv_heads = gridDim.z, kv_head = blockIdx.z;
  const int* block_table = block_tables + static_cast<int64_t>(work.slot) * pages_per_sequence;
#if TREE
  __shared__ __align__(16) scalar_t path_means[kMostWarps][HEAD_DIM];
  scalar_t* path_mean = path_means[threadIdx.x / 32];
  const int base = __ldcg(tree_base + work.row), of_path = base / kPageTokens;
  const int* written = tree_base;
#else
  const int* written = positions;
#endif
  const auto row_in = [&](int page) { return k2_pages + (page * num_kv_heads + kv_head) * HEAD_DIM; };
  KeyTile keys;
  const int first_new = work.first_new(written, slots, num_rows, is_chunk) / kPageTokens;
  const int early = min(work.first * kKeys + kKeys - 1, last) < first_new ? work.first : -1;
  if (early >= 0) keys.load(early * kKeys, last, [&](int entry) { return row_in(__ldcg(block_table + entry)); });
  pdl_wait();
#if TREE
  const int ahead = of_path / kKeys - work.first;
  if (of_path <= last && ahead >= 0 && ahead % work.stride == 0) {  // the entry is in one of this warp's tiles
    const int64_t page_stride = static_cast<int64_t>(num_kv_heads) * (kPageTokens * HEAD_DIM);
    TreeKeys path_keys = {k_pages + kv_head * (kPageTokens * HEAD_DIM), block_table, page_stride, base};
#ifdef FP8
    const int64_t first_node = static_cast<int64_t>(first_row_of(slots, work.slot, num_rows)) * num_kv_heads + kv_head;
    path_keys.nodes = k_nodes + first_node * HEAD_DIM, path_keys.num_kv_heads = num_kv_heads;
    path_keys.scales = k_scales + kv_head, path_keys.node_scales = k_node_scales + first_node;
#endif
    mean_of_path(path_mean, path_keys, (of_path - 1) * kPageTokens, tree_masks[work.row]);
    __syncwarp();
  }
  const auto row_of = [&](int entry) { return entry == of_path ? path_mean : row_in(block_table[entry]); };
#else
  const auto row_of = [&](int entry) { return row_in(block_table[entry]); };
#endif
  Queries queries[kHeadTiles];
  load_queries(queries, q, work.unit());
#pragma unroll 1
  for (int tile = work.first; tile <= last / kKeys; tile += work.stride) {
    if (tile != early) keys.load(tile * kKeys, last, row_of);
    float* sums = log_sums + (work.unit() * num_tiles + tile) * kPadded;
#pragma unroll
    for (int heads = 0; heads < kHeadTiles; heads++) {
      float scores[kKeyTiles][4];
      keys.score(scores, queries[heads]);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float value = log_sum(scores, half, scale * kLog2e, tile * kKeys, last);
        if (lane % 4 == 0) sums[heads * 16 + half * 8 + lane / 4] = value;
      }
    }
  }
}

// ---- scores

// Returns the log sum of head lane % 16 of a tile, merged from its partial ones in their order: even ones, odd ones, then both.
DEVICE float merge_log_sums(const float* parts, int count) {
  constexpr int kMergeBatch = 32;  // partial sums that a lane waits for at once
  const int lane = threadIdx.x & 31;
  parts += lane % 16;
  float top = kNoMaximum, sum = 0.0f;
#pragma unroll 1
  for (int first = lane / 16; first < count; first += 2 * kMergeBatch) {
    float values[kMergeBatch], highest = top;
#pragma unroll
    for (int i = 0; i < kMergeBatch; i++) {
      values[i] = first + 2 * i < count ? parts[(first + 2 * i) * kPadded] : kHiddenScore;
    }
#pragma unroll
    for (int i = 0; i < kMergeBatch; i++) highest = fmaxf(highest, values[i]);
    sum *= exp2_fast(top - highest);
#pragma unroll
    for (int i = 0; i < kMergeBatch; i++) sum += exp2_fast(values[i] - highest);
    top = highest;
  }
  const float highest = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 16));
  sum *= exp2_fast(top - highest);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 16);
  return highest + log2_fast(sum);
}

// Sums entries first_entry .. + 31 of p over all heads, pools them and stores them: blocks first_entry / 4 .. + 7, of which those up to
// `last` exist.
DEVICE void store_pooled(float2* pooled, float (&p)[kKeyTiles][2], int first_entry, int last) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int n = 0; n < kKeyTiles; n++) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) p[n][i] += __shfl_xor_sync(0xFFFFFFFFu, p[n][i], distance);
    if (first_entry + n == 0 && lane % 4 == 0) p[n][0] = 0.0f;  // entry 0 stands for a window that does not exist
    const float highest = fmaxf(p[n][0], p[n][1]);
    const float2 block = make_float2(p[n][0], fmaxf(highest, __shfl_xor_sync(0xFFFFFFFFu, highest, 1)));
    const int number = first_entry / kEntries + n * 2 + lane % 4 / 2;
    if (lane / 4 == n && lane % 2 == 0 && number <= last) pooled[number] = block;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    KERNEL(score_blocks)(float2* pooled, const float* log_sums, const scalar_t* q, const scalar_t* k1_pages,
                         const int* positions, const int* slots, const int* block_tables, const int* tree_base,
                         int num_rows, int rows_per_block, int is_chunk, int pages_per_sequence, int num_tiles,
                         int init_blocks, int local_blocks, int dense_context, float scale) {
  pdl_launch_dependents();
  const Work work(positions, slots, num_rows, rows_per_block, dense_context);
  if (work.row < 0) return pdl_wait();
  const int local = work.position / kPageTokens - local_blocks, last = local * kEntries, lane = threadIdx.x & 31;
  const int first_tile = init_blocks * kEntries / kKeys + work.first;
  if (first_tile > last / kKeys) return;
  const int num_kv_heads = gridDim.z, kv_head = blockIdx.z;
  const int* block_table = block_tables + static_cast<int64_t>(work.slot) * pages_per_sequence;
  const auto row_in = [&](int page, int entry) {
    return k1_pages + ((page * num_kv_heads + kv_head) * kEntries + entry % kEntries) * HEAD_DIM;
  };
  KeyTile keys;
  const int first_new = work.first_new(TREE ? tree_base : positions, slots, num_rows, is_chunk) / (kPageTokens / kEntries);
  const int early = min(first_tile * kKeys + kKeys - 1, last) < first_new ? first_tile : -1;
  if (early >= 0) {
    keys.load(early * kKeys, last, [&](int entry) { return row_in(__ldcg(block_table + entry / kEntries), entry); });
  }
  pdl_wait();
  Queries queries[kHeadTiles];
  load_queries(queries, q, work.unit());
  float offsets[kHeadTiles][2];
  const int count = ((work.position + 1) / kPageTokens - 1) / kKeys + 1;
#pragma unroll
  for (int tile = 0; tile < kHeadTiles; tile++) {
    float value = kScoreBits - merge_log_sums(log_sums + work.unit() * num_tiles * kPadded + tile * 16, count);
    if (tile * 16 + lane % 16 >= GROUP) value = -kNoHead;
    offsets[tile][0] = __shfl_sync(0xFFFFFFFFu, value, lane / 4);
    offsets[tile][1] = __shfl_sync(0xFFFFFFFFu, value, lane / 4 + 8);
  }
#pragma unroll 1
  for (int tile = first_tile; tile <= last / kKeys; tile += work.stride) {
    if (tile != early) {
      keys.load(tile * kKeys, last, [&](int entry) { return row_in(block_table[entry / kEntries], entry); });
    }
    float p[kKeyTiles][2] = {};
#pragma unroll
    for (int heads = 0; heads < kHeadTiles; heads++) {
      float scores[kKeyTiles][4];
      keys.score(scores, queries[heads]);
#pragma unroll
      for (int n = 0; n < kKeyTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[n][i % 2] += exp2_fast(fmaf(scores[n][i], scale * kLog2e, offsets[heads][i / 2]));
    }
    store_pooled(pooled + work.unit() * pages_per_sequence, p, tile * kKeys, local);
  }
}
