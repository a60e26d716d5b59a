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
// constants      HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head. STAGES: depth of a warp's ring in pages, at
//                least 2. PORTABLE: 1 leaves clusters out on sm_90 and later too. CLUSTER: blocks that share eight runs: 1, 2, 4 or 8;
//                without clusters it does not count. TEAMS: teams of four warps in a block: 1 or 2, only 1 with TREE. TREE: 1 reads tree_masks
//                and tree_base. WINDOW: how many of a row's last keys it sees, 0 for all. SELECTED: 1 and 2 read blocks. FP8: 1 reads codes
//                and scales
// grid           (CLUSTER * a, units * T, b) for a * b clusters of a row;
//                block (128, TEAMS) in clusters of CLUSTER along x; shared memory
//                TEAMS * (16 * D * 2 + STAGES * 64 * D * 4) bytes, and in clusters 40 * kHeads * D / CLUSTER more
// launched after linear_qkv or rope_append, which release this kernel once all kernels before them have finished, or, of one short row,
//                linear_packed_qkv with TRIGGER 3: then `embed` is the last kernel before this one that releases its successor only after
//                its own wait. So block tables are read before pdl_wait. Keys that this step does not write are too, if the launch has only one row, or, in clusters with
//                CLUSTER * TEAMS < 8, if no other row of the launch has the row's slot. With SELECTED it is launched after pick_blocks,
//                and reads everything after pdl_wait
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are
//                rounded to scalar_t for the product with v, the result is rounded once when stored
// oracle         NumpyOps.decode_attention
// source         Flash-Decoding (Dao et al. 2023), FlashAttention-2 (arXiv 2307.08691)
// layout         The query heads of a KV head are the rows of m16n8k16 tiles, so that a page is read once for all of them (more than 16
//                heads: several blocks, the later ones out of the L2). A row's pages are cut into runs by that row's length and the number
//                of splits alone: a row's bits do not depend on its neighbours. The keys of a tree's path, or of chosen blocks, take the
//                places that they would have in a sequence of their own: only where they are copied from differs. Of each page a warp takes
//                16 keys through a ring of its own, filled by the lanes that read it: no barrier in the stream. A partial is (normalised
//                output, log2 of the sum of weights). The four warps are merged through shared memory, the blocks of a cluster by sending
//                each other slices of the output, clusters through the workspace, where the last one to arrive merges. A short row stays in
//                one cluster. The grid need not cover num_splits: clusters take several turns, and those that have nothing to do come last.
//                A block takes one of the eight runs of a cluster, or, with many rows, several of them one after another, so that all rows
//                are read at once instead of in waves. Then the turns of a cluster are neighbours, and the runs of a team are equally far
//                apart. What else was tried: tools/log/attention.md
#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(STAGES) || !defined(PORTABLE) || !defined(CLUSTER) || \
    !defined(TEAMS) || !defined(TREE) || !defined(WINDOW) || !defined(SELECTED) || !defined(FP8)
#error "a constant is not defined"
#endif
#define ROW_HALVES (GROUP <= 8 && !FP8 ? 1 : 2)
#include "attention.cuh"

static_assert(!SELECTED || WINDOW == 0, "a row chooses among all its blocks");
static_assert(STAGES >= 2, "a warp's ring also holds its float32 output");

#include "decode_block.cuh"
#include "tree_rows.cuh"

#if IN_CLUSTERS
#define CLUSTER_LAUNCH __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_LAUNCH
#endif

#if IN_CLUSTERS
constexpr bool kHasPeers = CLUSTER > 1;

// Passes a run's partial on to the blocks that merge its slices. In clusters of one block it stays there: nothing is sent.
DEVICE void hand_over(const unsigned char* shared, const unsigned char* results, const float (&log_sums)[kWarps][16],
                      uint32_t barrier, int member) {
  if (kHasPeers) return send_slices(shared, results, log_sums, barrier, member);
  const uint32_t received = shared_address(shared) + kReceivedOffset;
  merge_warps(results, log_sums, [&](int vector, const Partial& part) {
    const uint32_t place = member * kSlice + vector, out = received + place * 16;
    store_shared2(out, part.out.x, part.out.y);
    store_shared2(out + 8, part.out.z, part.out.w);
    store_shared_float(received + kReceivedSums + place * 4, part.log_sum);
  });
}

// Waits until the partials of `members` runs are there; the barrier's phase has this parity. All threads of the block call it.
DEVICE void await_partials(uint32_t barrier, int members, int parity) {
  if (!kHasPeers) return __syncthreads();
  if (is_first_thread()) mbarrier_arrive_expect(barrier, members * kReceivedBytes);
  mbarrier_wait(barrier, parity);
}

// Says that what was received has been used. All threads of the block call it, and later wait with await_peers.
DEVICE void announce_used() {
  if (!kHasPeers) return __syncthreads();
  cluster_announce();
}

// Waits until the peers' barriers exist, and until they have used what they received before.
DEVICE void await_peers() {
  if (kHasPeers) cluster_wait();
}
#endif

// Whether no other row of the launch adds keys to the slot of this one.
DEVICE bool is_alone(const int* slots, int row, int num_rows, int slot) {
  bool is_shared = false;
#pragma unroll
  for (int first = 0; first < kMaxRows; first += 32) {
    const int other = first + (threadIdx.x & 31);
    if (other < num_rows && other != row) is_shared |= __ldcg(slots + other) == slot;
  }
  return !__any_sync(0xFFFFFFFFu, is_shared);
}

// Loads the query and starts to load the first pages of the ring. All warps of a team call it. With `is_early` what is older than the
// kernel before this one is read before the wait. Else the query comes first: in clusters of eight, steps of 8 rows were not faster
// otherwise.
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
  pdl_launch_dependents();  // only now: a row's few pages would wait 3 us and more behind the next kernel's weights
  if (TREE) stream.path.keep(node, stream.page_stride);
  if (is_early) {
    pdl_wait();
    query.read(q, heads, load16_written);
  }
  stream.load_scales();
  const bool has_new = TREE ? stream.fill_new(keys) : added.copy();
  query.store(shared);
  if (has_new) cp_async_wait_all();
  team_barrier();
  load_query(state, shared_address(shared));
}

// The attend() of decode_warp.cuh, with nothing to do after the first step.
DEVICE void attend(WarpState& state, Stream& stream, const Keys& keys, int page, int num_pages, float factor) {
  attend(state, stream, keys, page, num_pages, factor, [] {});
}

extern "C" __global__ void CLUSTER_LAUNCH __launch_bounds__(TEAMS * kThreads, TEAMS == 1 ? 2 : 1)
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
  static_assert(!IN_CLUSTERS || CLUSTER * TEAMS <= kCluster, "a cluster takes eight runs");
  static_assert((kCluster == CLUSTER && TEAMS == 1) || !TREE, "one team looks up a path, with no other slots' rows");
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float team_log_sums[TEAMS][kWarps][16];
  const int team = TEAMS == 1 ? 0 : threadIdx.y;
  unsigned char* const own = shared + team * kTeamBytes;
  float (&log_sums)[kWarps][16] = team_log_sums[team];
  const int rank = blockIdx.x % CLUSTER, warp = threadIdx.x >> 5;
  const int number = blockIdx.z * (gridDim.x / CLUSTER) + blockIdx.x / CLUSTER;
  const int num_clusters = gridDim.z * (gridDim.x / CLUSTER);
  const int units = num_kv_heads * kTiles, num_rows = gridDim.y / units;
  const int row = blockIdx.y / units, kv_head = blockIdx.y % units / kTiles, tile = blockIdx.y % kTiles;
  const Heads heads = {(((int64_t)row * num_kv_heads + kv_head) * GROUP + tile * kHeads) * HEAD_DIM,
                       min(kHeads, GROUP - tile * kHeads)};
  if (SELECTED) pdl_wait();  // the kernel before this one chose the pages
  const int slot = __ldcg(slots + row), position = __ldcg(positions + row);
  constexpr int kRunsAtOnce = CLUSTER * TEAMS;  // runs of the cluster's eight that are attended to at a time
  const bool is_early =
    !SELECTED && (num_rows == 1 || (kRunsAtOnce < kCluster && is_alone(slots, row, num_rows, slot)));
  const uint64_t mask = TREE ? __ldcg(tree_masks + row) : 0;
  const int base = TREE ? __ldcg(tree_base + row) : position;
#if SELECTED
  const bool chooses = position >= dense_context;
  const int* chosen = chooses ? blocks + ((int64_t)row * num_kv_heads + kv_head) * num_selected : nullptr;
  // A position minus its place in the list of blocks. It holds for the list's last blocks, in which a path lies.
  const int skipped = chooses ? (position / kPageTokens + 1 - num_selected) * kPageTokens : 0;
  if (SELECTED == 2 && slot >= 0 && !chooses) return;
#else
  const int* chosen = nullptr;
  constexpr int skipped = 0;
#endif
  // Keys from the base on are read last: before the wait they are not there yet, and those of a path have to be looked up.
  Keys keys = {position + 1 - skipped, TREE || is_early ? base - skipped : position + 1 - skipped};
  if (slot < 0 || keys.length <= 0) {
    pdl_wait();
    if (rank == 0 && number == 0) store_zeros(out, heads);
    return;
  }
  Cut cut(keys, num_splits);
  const int used_clusters = cut.clusters();
  constexpr bool kNeighbours = kRunsAtOnce < kCluster;
  const int most_turns = divided(used_clusters + num_clusters - 1, num_clusters);
  const int first_cluster = kNeighbours ? number * most_turns : number, step = kNeighbours ? 1 : num_clusters;
  if (first_cluster >= used_clusters) return;
  const int turns = kNeighbours ? min(most_turns, used_clusters - first_cluster)
                                : divided(used_clusters - first_cluster + step - 1, step);
  if (kNeighbours) cut.num_runs = min(cut.num_runs, (first_cluster + turns) * kCluster);  // up to the last one of this cluster
  __shared__ uint64_t received;
  const uint32_t barrier = shared_address(&received);
#if IN_CLUSTERS
  if (kHasPeers) prepare_received(barrier);
#endif
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
  Target target = {out, partials + unit * (num_splits / kCluster) * kVectors * 5, first_cluster, used_clusters};
  const int first_member = rank + team * CLUSTER;
  const int run_stride = kNeighbours ? kRunsAtOnce : num_clusters * kCluster;
  const int first_run = first_cluster * kCluster + first_member;
  Stream stream = {k_pages + head_offset,
                   v_pages + head_offset,
                   page_stride,
                   path,
                   block_table,
                   chosen,
                   shared_address(own) + kQueryBytes + warp * STAGES * kStageBytes,
                   cut.first_page,
                   cut.run_pages,
                   first_run,
                   run_stride,
                   cut.steps_of(first_run, run_stride, kAtOnce),
                   cut.num_pages};
#if FP8
  stream.scales = {k_scales + kv_head, v_scales + kv_head, num_kv_heads};
#if TREE
  stream.scales.k_node_scales = k_node_scales + first_node, stream.scales.v_node_scales = v_node_scales + first_node;
#endif
#endif
  WarpState state;
  if (stream.count > 0) {
    begin(state, own, q, heads, stream, keys, is_early);
  } else {
    pdl_launch_dependents();
    pdl_wait();
  }
  const bool has_one_run = first_run + run_stride >= cut.num_runs;
  for (int turn = 0; turn < turns; ++turn, target.cluster += step) {
    const int members = min(kCluster, cut.num_runs - target.cluster * kCluster);
#if IN_CLUSTERS
    if (first_member >= members) await_peers();  // a block without a run takes part in the barrier below too
#endif
    for (int member = first_member; member < members; member += kRunsAtOnce) {
      const int run = target.cluster * kCluster + member, page = cut.first_page + run * cut.run_pages;
      const int pages = min(cut.run_pages, cut.first_page + cut.num_pages - page);
      Stream::Place room;
      begin_run(state);
      if (!FP8 && kRunsAtOnce == kCluster && has_one_run && pages <= STAGES) {
        attend_filled(state, stream, keys, page, pages, scale * kLog2e);
        room.k_tile = stream.ring;
      } else {
        attend(state, stream, keys, page, pages, scale * kLog2e);
        room = stream.advance();
      }
      publish_warp(state, room.k_tile, log_sums[warp]);
      const unsigned char* results = own + kQueryBytes + (room.k_tile - stream.ring);
      team_barrier();
#if IN_CLUSTERS
      if (member == first_member) await_peers();
      hand_over(shared, results, log_sums, barrier, member);
#else
      merge_warps(results, log_sums, [&](int vector, const Partial& merged) { target.keep(heads, vector, merged); });
#endif
      if (run + run_stride < cut.num_runs) {
        team_barrier();  // the results have been read
        stream.load(room.k_tile, false, room, keys.length);
        stream.load(room.k_tile + kHalfPlace, true, room, keys.length);
      }
      if (kRunsAtOnce == kCluster) break;
    }
#if IN_CLUSTERS
    await_partials(barrier, members, turn & 1);
    merge_slices(shared, heads, target, rank, members);
    if (turn + 1 < turns) announce_used();
#endif
  }
  if (target.used_clusters > 1 && arrives_last(arrivals + unit * kCluster + rank, target.used_clusters, turns)) {
    target.merge_clusters(heads, rank);
  }
}
