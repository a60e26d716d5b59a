// decode_attention: attention of up to 64 rows, each over the pages of its own slot (flash-decoding).
//
// out[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . k[j, h / GROUP, :]) v[j, h / GROUP, :],  j = 0 .. positions[t],
// or with WINDOW the last WINDOW of these. k[j], v[j] lie at location j of the pages of the row's slot, with TREE only for
// j < tree_base[t]: k[tree_base[t] + n] lies at location tree_base[t] + i, i being the n-th set bit of tree_masks[t], with
// FP8 at node i of k_nodes. With SELECTED a row with positions[t] >= dense_context sees, per KV head, only j in its blocks of 64.
//
// out            [T, H*D] scalar_t row-major; a row of slot -1 becomes zeros
// partials       float32 workspace, T * units * (num_splits / kCluster) * kHeads * D * 5 / 4 elements, where units is
//                K heads * kTiles
// arrivals       int32 workspace, T * units * kCluster, zero before the first launch and after every launch
// q              [T, H*D] scalar_t row-major
// k_pages        [P, K heads, 64, D] scalar_t, or e4m3 codes with FP8; v_pages likewise
// k_scales       [P, K heads] float32, powers of two that codes are multiplied by, with FP8 only; v_scales likewise
// k_nodes        [N, K heads, D] e4m3 codes of the step's rows, with FP8 and TREE only: node 0 of a tree is its slot's first
//                row; v_nodes likewise
// k_node_scales  [N, K heads] float32: the scale of the page that the node's path gives it; v_node_scales likewise
// positions      [T] int32; slots [T] int32; block_tables [B, pages_per_sequence] int32
// tree_masks     [T] uint64, tree_base [T] int32, read with TREE only: positions[t] + 1 is tree_base[t] plus the set bits;
//                many rows that see all their keys are left to tree_attention where it is compiled
// blocks         [T, K heads, num_selected] int32, ascending, the row's own block the last, read with SELECTED only; with
//                SELECTED 2 the rows that see everything are left to prefill_attention: nothing is stored
// num_splits     into how many runs a long row's pages are cut, a multiple of kCluster
// constants      HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head. STAGES: depth of a
//                warp's ring in pages, at least 2. PORTABLE: 1 leaves clusters out on sm_90 and later too. TREE: 1
//                reads tree_masks and tree_base. WINDOW: how many of a row's last keys it sees, 0 for all. SELECTED: 1
//                and 2 read blocks. FP8: 1 reads codes and scales
// grid           (kCluster * a, units * T, b) for a * b clusters of a row; block 128 in clusters of kCluster along x;
//                shared memory 16 * D * 2 + STAGES * 64 * D * 4 bytes, and in clusters 5 * kHeads * D more
// launched after linear_qkv or rope_append, which let this kernel start once all before them have finished: where keys
//                lie is looked up before pdl_wait, and one row's are read but for those that this step writes
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are
//                rounded to scalar_t for the product with v, the result is rounded once when stored
// oracle         NumpyOps.decode_attention
// source         Flash-Decoding (Dao et al. 2023), FlashAttention-2 (arXiv 2307.08691)
// layout         The query heads of a KV head are the rows of m16n8k16 tiles, so that a page is read once for all of
//                them (more than 16 heads: several blocks, the later ones out of the L2). A row's pages are cut into
//                runs by that row's length and the number of splits alone: a row's bits do not depend on its
//                neighbours. The keys of a tree's path, or of chosen blocks, take the places that they would have
//                alone: only where they are copied from differs. Of each page a warp takes 16 keys through a ring of
//                its own, filled by the lanes that read it: no barrier in the stream. A partial is (normalised output,
//                log2 of the sum of weights). The four warps are merged through shared memory, the blocks of a cluster
//                by sending each other slices of the output, clusters through the workspace, where the last one to
//                arrive merges; a short row stays in one cluster. The grid need not cover num_splits: clusters take
//                several turns, and those that have nothing to do come last. Why not otherwise: tools/log/attention.md
#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(STAGES) || !defined(PORTABLE) || !defined(TREE) || \
    !defined(WINDOW) || !defined(SELECTED) || !defined(FP8)
#error "a constant is not defined"
#endif
#define ROW_HALVES (GROUP <= 8 && !FP8 ? 1 : 2)
#include "attention.cuh"

static_assert(!SELECTED || WINDOW == 0, "a row chooses among all its blocks");
static_assert(STAGES >= 2, "a warp's ring also holds its float32 output");

#include "decode_block.cuh"
#include "tree_rows.cuh"

#if IN_CLUSTERS
#define CLUSTER_LAUNCH __cluster_dims__(kCluster, 1, 1)
#else
#define CLUSTER_LAUNCH
#endif

// The first pages and the query, by all warps. Of one row (`is_early`) what is older than the kernel before this one is
// read before the wait. The blocks of several rows find no room before the end of that kernel: theirs is the query that
// must not queue behind the pages.
DEVICE void begin(WarpState& state, unsigned char* shared, const scalar_t* q, const Heads& heads, Stream& stream,
                  const Keys& keys, bool is_early) {
  Query query;
  if (SELECTED) query.read(q, heads, load16_written);
  PathNode node;
  if (TREE) node = stream.path.look_up(stream.block_table);
  stream.locate();
  if (!is_early && !SELECTED) {
    pdl_wait();
    query.read(q, heads, load16_written);
  }
  const Stream::NewRow added = stream.fill(keys);
  pdl_launch_dependents();  // now: a row's few pages would wait 3 us and more behind the next kernel's weights
  if (TREE) stream.path.keep(node, stream.page_stride);
  if (is_early) {
    pdl_wait();
    query.read(q, heads, load16_written);
  }
  stream.load_scales();
  const bool has_new = TREE ? stream.fill_new(keys) : added.copy();
  query.store(shared);
  if (has_new) cp_async_wait_all();
  __syncthreads();
  load_query(state, shared_address(shared));
}

DEVICE void attend(WarpState& state, Stream& stream, const Keys& keys, int page, int num_pages, float factor) {
  attend(state, stream, keys, page, num_pages, factor, [] {});
}

extern "C" __global__ void CLUSTER_LAUNCH __launch_bounds__(kThreads, 2)
    KERNEL(decode_attention)(scalar_t* __restrict__ out, float* partials, int* arrivals, const scalar_t* q,
                             const page_t* k_pages, const page_t* v_pages, const int* positions, const int* slots,
                             const int* block_tables, const uint64_t* tree_masks, const int* tree_base, int num_splits,
                             int num_kv_heads, int pages_per_sequence, float scale
#if SELECTED
                         , const int* blocks, int num_selected, int dense_context
#endif
#if FP8
                         , const float* k_scales, const float* v_scales
#endif
#if FP8 && TREE
                         , const page_t* k_nodes, const page_t* v_nodes, const float* k_node_scales,
                         const float* v_node_scales
#endif
) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float log_sums[kWarps][16];
  const int rank = blockIdx.x % kCluster, warp = threadIdx.x >> 5;
  const int first_cluster = blockIdx.z * (gridDim.x / kCluster) + blockIdx.x / kCluster;
  const int num_clusters = gridDim.z * (gridDim.x / kCluster);
  const int units = num_kv_heads * kTiles, num_rows = gridDim.y / units;
  const int row = blockIdx.y / units, kv_head = blockIdx.y % units / kTiles, tile = blockIdx.y % kTiles;
  const Heads heads = {(((int64_t)row * num_kv_heads + kv_head) * GROUP + tile * kHeads) * HEAD_DIM,
                       min(kHeads, GROUP - tile * kHeads)};
  const bool is_early = !SELECTED && num_rows == 1;
  if (SELECTED) pdl_wait();  // the kernel before this one chose the pages
  const int slot = __ldcg(slots + row), position = __ldcg(positions + row);
  const uint64_t mask = TREE ? __ldcg(tree_masks + row) : 0;
  const int base = TREE ? __ldcg(tree_base + row) : position;
#if SELECTED
  const bool chooses = position >= dense_context;
  const int* chosen = chooses ? blocks + ((int64_t)row * num_kv_heads + kv_head) * num_selected : nullptr;
  // Positions minus places in the list of blocks, for its last blocks, in which a path lies.
  const int skipped = chooses ? (position / kPageTokens + 1 - num_selected) * kPageTokens : 0;
  if (SELECTED == 2 && slot >= 0 && !chooses) return;
#else
  const int* chosen = nullptr;
  constexpr int skipped = 0;
#endif
  // What lies from the base on is read last: early it is not there yet, and a path has to be looked up.
  Keys keys = {position + 1 - skipped, TREE || is_early ? base - skipped : position + 1 - skipped};
  if (slot < 0 || keys.length <= 0) {
    pdl_wait();
    if (rank == 0 && first_cluster == 0) store_zeros(out, heads);
    return;
  }
  const Cut cut(keys, num_splits);
  if (first_cluster >= cut.clusters()) return;
  __shared__ uint64_t received;
  const uint32_t barrier = shared_address(&received);
  if (IN_CLUSTERS) prepare_received(barrier);
  const int64_t head_offset = (int64_t)(kv_head * kPageTokens + warp * kKeys) * HEAD_DIM;
  const int64_t page_stride = (int64_t)num_kv_heads * kPageTokens * HEAD_DIM;
  const int* block_table = block_tables + (int64_t)slot * pages_per_sequence;
  __shared__ int64_t path_table[kMaxNodes];
  Path path = {path_table, base, base - skipped, mask};
#if FP8 && TREE
  const int64_t first_node = static_cast<int64_t>(first_row_of(slots, slot, num_rows)) * num_kv_heads + kv_head;
  path.k_nodes = k_nodes + first_node * HEAD_DIM, path.v_nodes = v_nodes + first_node * HEAD_DIM;
#endif
  const int64_t unit = blockIdx.y;
  Target target = {out, partials + unit * (num_splits / kCluster) * kVectors * 5, first_cluster, cut.clusters()};
  const int turns = divided(target.used_clusters - first_cluster + num_clusters - 1, num_clusters);
  const int run_stride = num_clusters * kCluster;
  int run = first_cluster * kCluster + rank;
  Stream stream = {k_pages + head_offset,
                   v_pages + head_offset,
                   page_stride,
                   path,
                   block_table,
                   chosen,
                   shared_address(shared) + kQueryBytes + warp * STAGES * kStageBytes,
                   cut.first_page,
                   cut.run_pages,
                   run,
                   run_stride,
                   cut.steps_of(run, run_stride, kAtOnce),
                   cut.num_pages};
#if FP8
  stream.scales = {k_scales + kv_head, v_scales + kv_head, num_kv_heads};
#if TREE
  stream.scales.k_node_scales = k_node_scales + first_node, stream.scales.v_node_scales = v_node_scales + first_node;
#endif
#endif
  WarpState state;
  if (stream.count > 0) {
    begin(state, shared, q, heads, stream, keys, is_early);
  } else {
    pdl_launch_dependents();
    pdl_wait();
  }
  for (int turn = 0; turn < turns; ++turn, run += run_stride, target.cluster += num_clusters) {
    const bool is_last = turn + 1 == turns;
    const unsigned char* results = shared + kQueryBytes;
    Stream::Place room;
    if (run < cut.num_runs) {
      begin_run(state);
      const int page = cut.first_page + run * cut.run_pages, pages = min(cut.run_pages, cut.first_page + cut.num_pages - page);
      if (!FP8 && turns == 1 && pages <= STAGES) {
        attend_filled(state, stream, keys, page, pages, scale * kLog2e);
        room.k_tile = stream.ring;
      } else {
        attend(state, stream, keys, page, pages, scale * kLog2e);
        room = stream.advance();
      }
      publish_warp(state, room.k_tile, log_sums[warp]);
      results += room.k_tile - stream.ring;
      __syncthreads();
    }
#if IN_CLUSTERS
    const int members = min(kCluster, cut.num_runs - target.cluster * kCluster);
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, members * kReceivedBytes);
    cluster_wait();  // the peers' barriers exist, and what they received before has been used
    if (run < cut.num_runs) send_slices(shared, results, log_sums, barrier, rank);
    mbarrier_wait(barrier, turn & 1);
    merge_slices(shared, heads, target, rank, members);
    if (!is_last) cluster_announce();  // what was received has been used
#else
    merge_warps(results, log_sums, [&](int vector, const Partial& merged) { target.keep(heads, vector, merged); });
#endif
    if (is_last) break;
    __syncthreads();  // the results have been read
    stream.load(room.k_tile, false, room, keys.length);
    stream.load(room.k_tile + kHalfPlace, true, room, keys.length);
  }
  if (target.used_clusters > 1 && arrives_last(arrivals + unit * kCluster + rank, target.used_clusters, turns)) {
    target.merge_clusters(heads, rank);
  }
}
