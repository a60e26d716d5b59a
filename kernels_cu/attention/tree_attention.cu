// tree_attention: decode_attention of rows of draft trees, which share the pages that they read.
//
// out[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . k[j, h / GROUP, :]) v[j, h / GROUP, :],  j = 0 .. positions[t],
// or with WINDOW the last WINDOW of these. For j < tree_base[t] k[j], v[j] lie at location j of the pages of the row's
// slot; k[tree_base[t] + n] lies at location tree_base[t] + i, i being the n-th set bit of tree_masks[t], with FP8 at node i
// of k_nodes.
//
// out            [T, H*D] scalar_t row-major; a row of slot -1 becomes zeros
// partials       float32 workspace, T * units * (num_splits / 8) * (8 or 16) * D * 5 / 4 elements: 8 where units have at
//                most 8 heads, units being K heads * kTiles
// arrivals       int32 workspace, T * units * 8, zero before the first launch and after every launch
// q              [T, H*D] scalar_t row-major
// k_pages        [P, K heads, 64, D] scalar_t, or e4m3 codes with FP8; v_pages likewise
// k_scales       [P, K heads] float32, k_nodes [N, K heads, D] codes, k_node_scales [N, K heads] float32 with FP8 only, as
//                decode_attention takes them; v_scales, v_nodes, v_node_scales likewise
// positions      [T] int32; slots [T] int32; block_tables [B, pages_per_sequence] int32
// tree_masks     [T] uint64, tree_base [T] int32: positions[t] + 1 is tree_base[t] plus the set bits
// num_rows       T, at most 64; num_splits: into how many runs a long row's pages are cut, a multiple of 8
// constants      HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head. STAGES: depth of the
//                ring in pages, at least 2. ROW_TILES: tiles of 16 query rows of a block. CLUSTER: blocks that share
//                eight runs: 2, 4 or 8. WINDOW: how many of a row's last keys it sees, 0 for all. FP8: if it is
//                defined, 1: reads codes
// grid           (CLUSTER, units, n): n clusters of each unit take turns with groups of rows and their clusters of runs;
//                block 128 * ROW_TILES in clusters of CLUSTER along x; shared memory (STAGES * 128 + max(128 + 16 *
//                ROW_TILES, 96 * ROW_TILES)) * D * 2 + ROW_TILES * (16 * D * 32 / CLUSTER + 512) bytes
// launched after linear_qkv or rope_append, which release this kernel once all kernels before them have finished: so
//                everything except q and the keys that this step writes is read before pdl_wait; but pages of a group are not
//                if another row of the slot has an earlier base
// numerics       those of decode_attention, to the bit
// oracle         NumpyOps.decode_attention
// source         original; Flash-Decoding (Dao et al. 2023), FlashAttention-2 (arXiv 2307.08691)
// layout         A row's bits must be those of plain decoding, which fix its runs of pages, the four slices of 16 keys
//                of a page with a softmax of their own, and the order in which these are merged. Nothing fixes which
//                warp does what. Rows of a tree see the same pages, cut alike unless a page begins between them
//                (Group). A block takes the heads of up to ROW_TILES * kPacked of them, a warp one slice for a tile of
//                16 query rows, and every page is read once for all. The nodes are loaded in their own order beside the
//                ring, and ldmatrix finds the keys of each row's path by address: a tile that two rows share multiplies
//                such a slice twice. A block takes 8 / CLUSTER runs: small clusters where many groups would otherwise
//                wait for a turn. In an accumulator a lane holds the same elements in all four slices, which are
//                therefore exchanged in this layout
#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(STAGES) || !defined(ROW_TILES) || !defined(CLUSTER) || \
    !defined(WINDOW)
#error "a constant is not defined"
#endif
static_assert(STAGES >= 2, "the page before may still be read when one is loaded");
#ifdef FP8
static_assert(ROW_TILES == 2, "three tiles of rows over codes spill registers");
#endif

#include "tree_merge.cuh"

// The memory behind the ring holds nodes and queries while keys are read, then what the slices exchange.
constexpr int kScratchOffset = STAGES * kStageBytes;
constexpr int kQueryOffset = kScratchOffset + kStageBytes;
constexpr int kQueryBytes = 16 * kRowBytes;
constexpr int kReadBytes = kStageBytes + ROW_TILES * kQueryBytes, kSentBytes = ROW_TILES * kExchangeBytes;
constexpr int kScratchBytes = kReadBytes > kSentBytes ? kReadBytes : kSentBytes;
constexpr int kReceivedOffset = kScratchOffset + kScratchBytes;

// The rows of the step that share a warp's tile, by half: query rows 0 to 7, and 8 to 15. A row that has a tile of its
// own is in both halves.
struct TileRows {
  Keys keys[2];
  const uint8_t* path[2];
  int row[2];
  float k_scale[2], v_scale[2];  // scales of the page that begins on the path

  DEVICE TileRows(const Members& members, int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = tile * kPacked + half % kPacked;
      row[half] = members.row[place];
      keys[half] = {members.length[place], 0};
      path[half] = members.path[place];
      k_scale[half] = members.k_scale[place], v_scale[half] = members.v_scale[place];
    }
  }
  DEVICE int length() const { return max(keys[0].length, keys[1].length); }
  DEVICE bool all_visible(int first_key) const {
    return keys[0].all_visible(first_key) && keys[1].all_visible(first_key);
  }
};

// The shared memory in which keys and values of a step are found: its pages, the nodes, and a row of zeros. The step's
// run ends before page `run_end`.
struct Sources {
  uint32_t stage, nodes, zeros;
  int base, run_end;

  // Finds key `key` of the row of a half, in page i of the step. Zeros stand for keys behind the row's last one, and for a
  // page that does not exist: memory that was never written may hold NaN.
  DEVICE PageRow find(const TileRows& rows, int half, int key, int i, bool is_v) const {
    if (kAtOnce > 1 && key / kPageTokens >= run_end) return PageRow(zeros, 0);
    if (key < base) return PageRow(stage + (is_v * kAtOnce + i) * kPageBytes, key % kPageTokens);
    if (key < rows.keys[half].length) return PageRow(nodes + is_v * kPageBytes, rows.path[half][key - base]);
    return PageRow(zeros, 0);
  }
  DEVICE KeyRows find_keys(const TileRows& rows, int half, int first_key, int i) const {
    return KeyRows([&](int key) { return find(rows, half, first_key + key, i, false); });
  }
};

// Attends to a slice of each page of a step, for all rows of the tile.
DEVICE void attend_slice(WarpState& state, const Sources& sources, const TileRows& rows, const PageScales& scales,
                         int first_key, float factor) {
  const int v_key = first_key + lane_row_a(threadIdx.x & 31);
  float scores[kAtOnce][2][4];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int first = first_key + i * kPageTokens, page = first / kPageTokens;
    const bool begins_on_path = page * kPageTokens >= sources.base, exists = kAtOnce == 1 || page < sources.run_end;
    const bool is_apart = kPacked == 2 && first + kKeys > sources.base;  // the two rows have different keys here
    const float scale = scales.of_keys(i);
    score_rows(scores[i], state, sources.find_keys(rows, 0, first, i), begins_on_path ? key_factor(rows.k_scale[0]) : scale);
    if (is_apart) {
      float other[2][4];
      score_rows(other, state, sources.find_keys(rows, 1, first, i), begins_on_path ? key_factor(rows.k_scale[1]) : scale);
#pragma unroll
      for (int n = 0; n < 2; ++n) scores[i][n][2] = other[n][2], scores[i][n][3] = other[n][3];
    }
    if (!exists) {
      mask_tile(scores[i], first, {Keys{0, 0}, Keys{0, 0}});
    } else if (!rows.all_visible(first)) {
      mask_tile(scores[i], first, rows.keys);
    }
  }
  softmax_at_once(scores, state, factor);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int first = first_key + i * kPageTokens;
    const bool begins_on_path = first / kPageTokens * kPageTokens >= sources.base;
    const bool is_apart = kPacked == 2 && first + kKeys > sources.base;
    const float scale = scales.of_values(i), first_scale = begins_on_path ? value_factor(rows.v_scale[0]) : scale;
    const float (&weights)[2][4] = scores[i];
    const PageRow v_row = sources.find(rows, 0, v_key + i * kPageTokens, i, true);
    if (is_apart) {
      accumulate_row(state, {{weights[0][0], weights[0][1], 0, 0}, {weights[1][0], weights[1][1], 0, 0}}, v_row,
                     first_scale);
      accumulate_row(state, {{0, 0, weights[0][2], weights[0][3]}, {0, 0, weights[1][2], weights[1][3]}},
                     sources.find(rows, 1, v_key + i * kPageTokens, i, true),
                     begins_on_path ? value_factor(rows.v_scale[1]) : scale);
    } else {
      accumulate_row(state, weights, v_row, first_scale);
    }
  }
}

// The heads of a block in one row of q or out.
struct Heads {
  int kv_head, num_kv_heads, tile;

  DEVICE int count() const { return min(kHeads, GROUP - tile * kHeads); }
  DEVICE int64_t offset(int row, int head) const {
    return (((int64_t)row * num_kv_heads + kv_head) * GROUP + tile * kHeads + head) * HEAD_DIM;
  }
};

// Loads a tile of q into shared memory. The four warps of the tile call it.
DEVICE void load_queries(unsigned char* queries, const scalar_t* q, const TileRows& rows, const Heads& heads) {
  constexpr int kPieces = (16 * kRowChunks + 127) / 128;
  uint4 pieces[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int index = threadIdx.x % 128 + i * 128, query = index / kRowChunks, chunk = index % kRowChunks;
    const int row = query / 8 % 2 ? rows.row[1] : rows.row[0], head = kPacked == 2 ? query % 8 : query;
    pieces[i] = make_uint4(0, 0, 0, 0);
    if (row >= 0 && head < heads.count()) pieces[i] = load16_written(q + heads.offset(row, head) + chunk * 8);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int index = threadIdx.x % 128 + i * 128;
    if (index < 16 * kRowChunks) store16(queries + swizzled(index / kRowChunks, index % kRowChunks), pieces[i]);
  }
}

// Attends to all runs of the block in one cluster of runs. The copies that fill the ring have been started, and the
// queries have been stored without a barrier since.
DEVICE void attend_runs(unsigned char* shared, Pages& pages, Sources sources, const TileRows& rows,
                        const Exchange& exchange, int num_nodes, int first_tail, float scale) {
  const int slice = threadIdx.x / 32 % kSlices, tile = threadIdx.x / 128;
  WarpState state;
  begin_run(state);
  int page = pages.page_of(0), step_of_run = 0, member = pages.first_run % kCluster;
  for (int step = 0; step < pages.count; ++step) {
    // cp.async groups are those of the ring's fill, of the nodes, and one a step: so many of them are younger than the
    // group of this page.
    const bool is_tail = (page + kAtOnce) * kPageTokens > pages.base;
    pages.scales.attend();
    if (is_tail) {
      cp_async_wait_all();
    } else if (step < STAGES) {
      cp_async_wait<STAGES>();
    } else {
      cp_async_wait<STAGES - 2>();
    }
    __syncthreads();
    if (step == 0) {
      const uint32_t queries = shared_address(shared) + kQueryOffset + tile * kQueryBytes;
      load_query(state, queries);
    } else {
      pages.load(step - 1 + STAGES);
      if (step == first_tail) pages.load_nodes(sources.nodes, num_nodes);
    }
    cp_async_commit();
    if (is_tail && step > 0 && step == first_tail) {  // the nodes have only now been asked for
      cp_async_wait_all();
      __syncthreads();
    }
    sources.stage = pages.stage(step);
    if (kAtOnce > 1) sources.run_end = pages.run_end(step);
    const int first_key = page * kPageTokens + slice * kKeys;
    if (first_key < rows.length()) attend_slice(state, sources, rows, pages.scales, first_key, scale * kLog2e);
    pages.scales.next();
    page += kAtOnce;
    if (++step_of_run < pages.run_steps() && step + 1 < pages.count) continue;
    __syncthreads();  // nodes and queries have been read: the exchange takes their place
    exchange.finish_run(state, member);
    begin_run(state);
    page += CLUSTER * pages.run_pages - pages.run_steps() * kAtOnce;
    step_of_run = 0;
    member += CLUSTER;
  }
}

// The destination of the results of the block's heads: `out`, or the workspace for a row that several clusters share.
struct Output {
  scalar_t* out;
  float* partials;
  Heads heads;
  int unit, units, most_clusters;

  DEVICE void store(int row, const VectorPlace& place, float4 value) const {
    scalar_t* to = out + heads.offset(row, kPacked == 2 ? place.lane / 4 : place.query()) + place.element();
    *reinterpret_cast<uint32_t*>(to) = pack2(value.x, value.y);
    *reinterpret_cast<uint32_t*>(to + kSecondElements) = pack2(value.z, value.w);
  }
  DEVICE RowPartials of_row(int row, int num_clusters) const {
    return {partials + ((int64_t)row * units + unit) * most_clusters * kRowVectors * 5, num_clusters};
  }
  // Calls visit(tile, index, place, row) for each vector that the block merges, if its row and head exist: `index` is
  // its number in the block's slice of the tile, `place` its place in the tile.
  template <typename Visit>
  DEVICE void each_vector(const Members& members, int rank, Visit visit) const {
    for (int i = threadIdx.x; i < ROW_TILES * kSlice; i += kThreads) {
      const int tile = i / kSlice, index = i % kSlice;
      const VectorPlace place(rank * kSlice + index);
      const int row = members.row[tile * kPacked + place.half % kPacked];
      if (row >= 0 && (kPacked == 2 ? place.lane / 4 : place.query()) < heads.count()) visit(tile, index, place, row);
    }
  }
  DEVICE void store_zeros(uint64_t rows) const {
    for (; rows; rows &= rows - 1) {
      scalar_t* to = out + heads.offset(__ffsll(rows) - 1, 0);
      for (int i = threadIdx.x; i < heads.count() * kRowChunks; i += kThreads) {
        store16(to + i * 8, make_uint4(0, 0, 0, 0));
      }
    }
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
KERNEL(tree_attention)(scalar_t* __restrict__ out, float* partials, int* arrivals,
                       const scalar_t* q, const page_t* k_pages, const page_t* v_pages, const int* positions,
                       const int* slots, const int* block_tables, const uint64_t* tree_masks, const int* tree_base,
                       int num_rows, int num_splits, int num_kv_heads, int pages_per_sequence, float scale
#if FP8
                       , const float* k_scales, const float* v_scales, const page_t* k_nodes, const page_t* v_nodes,
                       const float* k_node_scales, const float* v_node_scales
#endif
) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Members members;
  __shared__ float log_sums[ROW_TILES][kSlices][16];
  __shared__ __align__(16) unsigned char zeros[kRowBytes];
  __shared__ uint64_t received;
  const int rank = blockIdx.x, unit = blockIdx.y, units = gridDim.y, tile = threadIdx.x / 128;
  const uint32_t barrier = shared_address(&received), memory = shared_address(shared);
  const Heads heads = {unit / kTiles, num_kv_heads, unit % kTiles};
  const Output output = {out, partials, heads, unit, units, num_splits / kCluster};
  const Exchange exchange = {shared + kScratchOffset, log_sums, memory + kReceivedOffset, barrier};
  if (threadIdx.x < kRowChunks) store16(zeros + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  uint64_t blind;  // rows that see no key
  for (int turn = 0;; ++turn) {
    const StepRows step_rows(slots, positions, tree_base, tree_masks, num_rows, num_splits);
    blind = ~step_rows.seeing & (num_rows < kMaxNodes ? (1ull << num_rows) - 1 : ~0ull);
    Group group;
    if (!group.find(step_rows, blockIdx.z + turn * gridDim.z)) break;
    if (turn == 0) {
      cluster_announce();
    } else {
      cluster_arrive();
      cluster_wait();  // all that the blocks share has been read
    }
    const Cut cut({group.length, 0}, num_splits);
    Pages pages(cut, group.cluster, rank);
    constexpr int kPageSize = kPageTokens * HEAD_DIM;
    pages.k_pages = k_pages + heads.kv_head * kPageSize;
    pages.v_pages = v_pages + heads.kv_head * kPageSize;
    pages.page_stride = num_kv_heads * kPageSize;
    pages.block_table = block_tables + (int64_t)group.slot * pages_per_sequence;
    pages.ring = memory;
    pages.base = group.base;
#if FP8
    pages.scales = {k_scales + heads.kv_head, v_scales + heads.kv_head, num_kv_heads};
    const int64_t first_node = static_cast<int64_t>(group.first_row) * num_kv_heads + heads.kv_head;
    pages.nodes = {k_nodes + first_node * HEAD_DIM, v_nodes + first_node * HEAD_DIM, k_node_scales + first_node,
                   v_node_scales + first_node, num_kv_heads};
#endif
    if (threadIdx.x < 32) group.describe(step_rows, members);
    if (group.is_old) pages.fill();
    pdl_launch_dependents();
    pdl_wait();
    if (FP8 && threadIdx.x < 32) group.load_scales(members, pages.nodes);
    if (!group.is_old) pages.fill();
    const int first_tail = pages.first_tail();
    if (first_tail == 0) pages.load_nodes(memory + kScratchOffset, group.num_nodes);
    cp_async_commit();
    __syncthreads();
    const int num_members = min(kCluster, cut.num_runs - group.cluster * kCluster);
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, num_members * kRunBytes);
    const TileRows rows(members, tile);
    load_queries(shared + kQueryOffset + tile * kQueryBytes, q, rows, heads);
    if (turn == 0) cluster_wait();  // the peers' barriers exist
    const Sources sources = {memory, memory + kScratchOffset, shared_address(zeros), group.base, 0};
    attend_runs(shared, pages, sources, rows, exchange, group.num_nodes, first_tail, scale);
    mbarrier_wait(barrier, turn & 1);
    const int num_clusters = cut.clusters();
    output.each_vector(members, rank, [&](int tile_of, int index, const VectorPlace& place, int row) {
      const Partial merged = exchange.merge_runs(tile_of, index, place, num_members);
      if (num_clusters == 1) {
        output.store(row, place, merged.out);
      } else {
        output.of_row(row, num_clusters).put(group.cluster, place.of_row(), merged);
      }
    });
    const int64_t counter = ((int64_t)members.row[0] * units + unit) * kCluster + rank;
    if (num_clusters > 1 && arrives_last(arrivals + counter, num_clusters)) {
      output.each_vector(members, rank, [&](int, int, const VectorPlace& place, int row) {
        output.store(row, place, output.of_row(row, num_clusters).merged(place.of_row()).out);
      });
    }
  }
  if (rank == 0 && blockIdx.z == 0 && blind) {
    pdl_wait();
    output.store_zeros(blind);
  }
}
