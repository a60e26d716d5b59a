// selected_attention: decode_attention of rows that each chose its blocks, on sm_90.
//
// out[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . k[j, h / GROUP, :]) v[j, h / GROUP, :],  j <= positions[t] in the
// blocks of 64 that the row chose for the KV head, or all of these j while positions[t] < dense_context. k[j], v[j] lie at
// location j of the pages of the row's slot, with TREE only for j < tree_base[t]: k[tree_base[t] + n] lies at location
// tree_base[t] + i, i being the n-th set bit of tree_masks[t].
//
// out            [T, H*D] scalar_t row-major; a row of slot -1 becomes zeros
// partials       float32 workspace, T * units * (num_splits / 8) * kHeads * D * 5 / 4 elements, where units is K heads *
//                kTiles
// arrivals       int32 workspace, T * units * 8, zero before the first launch and after every launch
// q              [T, H*D] scalar_t row-major
// k_pages        [P, K heads, 64, D] scalar_t; v_pages likewise
// positions      [T] int32; slots [T] int32; block_tables [B, pages_per_sequence] int32
// tree_masks     [T] uint64, tree_base [T] int32, read with TREE only: positions[t] + 1 is tree_base[t] plus the set bits
// num_splits     into how many runs the pages of a long row that does not choose are cut, a multiple of 8
// blocks         [T, K heads, num_selected] int32, ascending: at the end the row's own block and local_blocks before it
// constants      HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head. STAGES: depth of a
//                warp's ring in pages, at least 2. TREE: 1 reads tree_masks and tree_base. PAIRED: 1 has clusters of 16
// grid           (8 * a, units * T, b) for a * b clusters of a row, which with PAIRED are halves of clusters of 16, a
//                even; block 128 in clusters of 8 or 16 along x; shared memory 16 * D * 2 + STAGES * 64 * D * 4 + 5 *
//                kHeads * D bytes
// launched after pick_blocks, which releases this kernel once all kernels before it have finished: everything except
//                `blocks`, and the pages that it alone names, is read before pdl_wait
// numerics       those of decode_attention; a row's bits depend on nothing but the row and num_splits
// oracle         NumpyOps.decode_attention
// source         InfLLM-v2 (arXiv 2509.24663); Flash-Decoding (Dao et al. 2023), FlashAttention-2 (arXiv 2307.08691)
// layout         That of decode_attention with three differences. A cluster begins with the last of its runs. Their
//                pages are those of the blocks next to the row, known before the lists are, so that up to a third of
//                the reading is done while blocks are still being chosen. What the blocks of a cluster send each other
//                is merged after the first page of the next run, when it has long arrived. And runs are longer, since a
//                turn of a cluster costs time beside what it reads. With PAIRED the two halves of a cluster of 16 do
//                what two clusters do otherwise. Where the row has no more runs than theirs, the second half sends its
//                results to the first instead of through memory, with the same bits
#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(STAGES) || !defined(TREE) || !defined(PAIRED)
#error "a constant is not defined"
#endif
static_assert(STAGES >= 2, "a warp's ring also holds its float32 output");

#define LISTED_LATE 1
#include "decode_block.cuh"

// Loads the query and starts to load the first pages of the ring. All warps call it. The query comes first, since most
// blocks have to wait for the list before they load pages. The next kernel starts behind these: its weights would keep
// them waiting.
DEVICE void begin(WarpState& state, unsigned char* shared, const scalar_t* q, const Heads& heads, Stream& stream,
                  const Keys& keys) {
  Query query;
  query.read(q, heads, load16_past_l1);
  if (TREE) stream.path.keep(stream.path.look_up(stream.block_table), stream.page_stride);
  query.store(shared);
  __syncthreads();
  load_query(state, shared_address(shared));
  stream.fill(keys);
  pdl_launch_dependents();
}

static_assert(kSlice <= kThreads, "a thread has one vector of a slice at most");

// Merges the results of both halves of a cluster for the slice of block `rank`, as merge_clusters does; the first half
// stores them. In each half the slices of `members` runs have been received. `barrier` counts what the second half
// sends.
DEVICE void merge_pair(const unsigned char* shared, const Heads& heads, const Target& target, uint32_t barrier, int rank,
                       int members) {
  __shared__ __align__(16) float4 outputs[kSlice];
  __shared__ float log_sums[kSlice];
  const uint32_t out = shared_address(outputs + threadIdx.x), log_sum = shared_address(log_sums + threadIdx.x);
  if (target.cluster == 1) {
    return merge_received(shared, members, [&](int, const Partial& merged) { send_partial(out, log_sum, barrier, rank, merged); });
  }
  if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, kReceivedBytes);
  merge_received(shared, members, [&](int i, const Partial& merged) {
    mbarrier_wait(barrier, 0);
    const Partial other = received_partial(out, log_sum);
    const Partial both = merge<kMergeBatch>(2, [&](int index) { return index == 0 ? merged : other; });
    store_vector(target.out, heads, rank * kSlice + i, both.out);
  });
}

constexpr int kChosenRuns = 16;  // runs that the pages of a row that chose are cut into, if num_splits allows so many

extern "C" __global__ void __cluster_dims__(PAIRED ? 16 : 8, 1, 1) __launch_bounds__(kThreads, 2)
KERNEL(selected_attention)(scalar_t* __restrict__ out, float* partials, int* arrivals,
                           const scalar_t* q, const scalar_t* k_pages, const scalar_t* v_pages, const int* positions,
                           const int* slots, const int* block_tables, const uint64_t* tree_masks, const int* tree_base,
                           int num_splits, int num_kv_heads, int pages_per_sequence, float scale,
                           const int* blocks, int num_selected, int dense_context, int local_blocks) {
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float log_sums[kWarps][16];
  const int rank = blockIdx.x % kCluster, warp = threadIdx.x >> 5;
  const int first_cluster = blockIdx.z * (gridDim.x / kCluster) + blockIdx.x / kCluster;
  const int num_clusters = gridDim.z * (gridDim.x / kCluster);
  const int units = num_kv_heads * kTiles;
  const int row = blockIdx.y / units, kv_head = blockIdx.y % units / kTiles, tile = blockIdx.y % kTiles;
  const Heads heads = {(((int64_t)row * num_kv_heads + kv_head) * GROUP + tile * kHeads) * HEAD_DIM,
                       min(kHeads, GROUP - tile * kHeads)};
  const int slot = __ldcg(slots + row), position = __ldcg(positions + row);
  const bool chooses = position >= dense_context;
  // A position minus its place in the list of blocks. It holds for the list's last blocks, in which a path lies.
  const int skipped = chooses ? (position / kPageTokens + 1 - num_selected) * kPageTokens : 0;
  const Keys keys = {position + 1 - skipped, kAllKeys};
  if (slot < 0 || keys.length <= 0) {
    pdl_wait();
    if (rank == 0 && first_cluster == 0) store_zeros(out, heads);
    return;
  }
  const Cut cut(keys, chooses ? min(num_splits, kChosenRuns) : num_splits);
  if (first_cluster >= cut.clusters()) return;
  __shared__ uint64_t received[2];  // barriers: for what peers send, and for what the cluster's second half sends
  const uint32_t barrier = shared_address(received), pair_barrier = barrier + 8;
  if (PAIRED && threadIdx.x == 0) mbarrier_init(pair_barrier, 1);
  prepare_received(barrier);
  const int first_peer = PAIRED ? blockIdx.x / kCluster % 2 * kCluster : 0;
  const int64_t head_offset = (int64_t)(kv_head * kPageTokens + warp * kKeys) * HEAD_DIM;
  __shared__ int64_t path_table[kMaxNodes];
  const int base = TREE ? __ldcg(tree_base + row) : 0;
  const Path path = {path_table, base, base - skipped, TREE ? __ldcg(tree_masks + row) : 0};
  const int64_t unit = blockIdx.y;
  Target target = {out, partials + unit * (num_splits / kCluster) * kVectors * 5, first_cluster, cut.clusters()};
  // The cluster takes the last of its clusters of runs first.
  const int turns = divided(target.used_clusters - first_cluster + num_clusters - 1, num_clusters);
  const int stride = num_clusters * kCluster, first_run = first_cluster * kCluster + rank;
  target.cluster += (turns - 1) * num_clusters;
  int run = first_run + (turns - 1) * stride;
  Stream stream = {k_pages + head_offset,
                   v_pages + head_offset,
                   (int64_t)num_kv_heads * kPageTokens * HEAD_DIM,
                   path,
                   block_tables + (int64_t)slot * pages_per_sequence,
                   blocks + ((int64_t)row * num_kv_heads + kv_head) * num_selected,
                   shared_address(shared) + kQueryBytes + warp * STAGES * kStageBytes,
                   cut.first_page,
                   cut.run_pages,
                   run < cut.num_runs ? run : run - stride,
                   -stride,
                   cut.steps_of(first_run, stride, kAtOnce),
                   cut.num_pages};
  stream.know(chooses ? num_selected - 1 - local_blocks : 0, skipped / kPageTokens);
  WarpState state;
  if (stream.count > 0) {
    begin(state, shared, q, heads, stream, keys);
  } else {
    pdl_launch_dependents();
  }
  const bool is_paired = PAIRED && target.used_clusters == 2;  // each half has one turn
  // Merges what was received in a turn, and keeps the result.
  const auto settle = [&](int turn) {
    mbarrier_wait(barrier, turn & 1);
    const int members = min(kCluster, cut.num_runs - target.cluster * kCluster);
    if (is_paired) {
      merge_pair(shared, heads, target, pair_barrier, rank, members);
    } else {
      merge_slices(shared, heads, target, rank, members);
    }
    target.cluster -= num_clusters;
  };
  for (int turn = 0; turn < turns; ++turn, run -= stride) {
    const unsigned char* results = shared + kQueryBytes;
    Stream::Place room;
    if (run < cut.num_runs) {  // in the first turn a block may have no run
      begin_run(state);
      const int page = run * cut.run_pages;
      attend(state, stream, keys, page, min(cut.run_pages, cut.num_pages - page), scale * kLog2e, [&] {
        if (turn == 0) return;
        settle(turn - 1);
        cluster_announce();  // what was received has been used
      });
      room = stream.advance();
      publish_warp(state, room.k_tile, log_sums[warp]);
      results += room.k_tile - stream.ring;
      __syncthreads();
    }
    const int members = min(kCluster, cut.num_runs - target.cluster * kCluster);
    if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, members * kReceivedBytes);
    cluster_wait();  // the peers' barriers exist, and what they received before has been used
    if (run < cut.num_runs) send_slices(shared, results, log_sums, barrier, rank, first_peer);
    if (turn + 1 == turns) break;
    __syncthreads();  // the results have been read
    if (run >= cut.num_runs) continue;
    stream.load(room.k_tile, false, room, keys.length);
    stream.load(room.k_tile + kHalfPlace, true, room, keys.length);
  }
  settle(turns - 1);
  if (!stream.is_listed) pdl_wait();  // kernels after this one wait for it alone, and so for all before it
  if (is_paired) return;
  if (target.used_clusters > 1 && arrives_last(arrivals + unit * kCluster + rank, target.used_clusters, turns)) {
    target.merge_clusters(heads, rank);
  }
}
