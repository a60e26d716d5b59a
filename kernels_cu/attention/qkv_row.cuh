// Makes q, k and v of one row and attends with them, by a cluster of eight blocks for each KV head. With OUTPUT_ROUNDS all blocks are one
// cluster, and multiply the result with the output's weight too. The template parameter `Product` is the product qkv, of which it makes the
// rows that a KV head needs:
//   Place                  the calling lane's place; Weights: its constructor asks for the weights of the block's tiles
//   prefetch(norm)         loads what it needs of the norm's weights
//   prepare()              before pdl_wait, waits for what surely comes before x
//   wait()                 waits until the weights are there
//   multiply(load, norm, eps) after pdl_wait, with load(i) for the i-th 16 bytes of x: stores the sums of a tile's rows for each round and
//                          run of K; returns the factor that they need
//   partial(run, round)    where these lie, 8 bytes for a row and its partner, once all warps have stored theirs
//   kRuns                  number of runs of K
//   kStartsNextEarly       whether the kernel has started the next one before it calls attend(), which else does so behind pdl_wait
//   kRowOffset             where kRoomBytes of shared memory are left for the row; all else of the first SMEM_BYTES is the product's own
//   Projection             with OUTPUT_ROUNDS, the product behind the attention, see qkv_attention.cu
#pragma once
#include "cluster.cuh"
#include "copy.cuh"
#include "fast_math.cuh"
#include "linear_epilogue.cuh"
#include "mma.cuh"
#define ROW_HALVES 1
#define RECEIVED_ROW 1
// The headers of products and those of attention define some of the same names.
namespace attention {
#include "decode_block.cuh"
}  // namespace attention

constexpr int kCluster = attention::kCluster, kThreads = 256;
constexpr int kReceivedBytes = 2 * HEAD_DIM * 2;         // bytes of the row's key, then of its value
constexpr int kRowBytes = (GROUP + 2) * HEAD_DIM * 2;    // bytes of q, k and v that a block receives
constexpr int kRoomBytes = kReceivedBytes + HEAD_ROUNDS * 32;  // and 32 bytes for each warp that finishes a tile, which it sends from there

#if OUTPUT_ROUNDS
constexpr int kClusterBlocks = KV_HEADS * kCluster;              // all blocks of the grid
constexpr int kAttendedBytes = KV_HEADS * GROUP * HEAD_DIM * 2;  // bytes of the row that attention makes
constexpr int kColumns = OUTPUT_ROUNDS * 16;                     // columns of x that a block finishes
static_assert(OUTPUT_ROUNDS <= 4, "a lane has two columns of x");
static_assert(kColumns * 2 <= HEAD_ROUNDS * 32, "the columns of x have no room");
static_assert(attention::kSlice <= 32, "a warp merges all vectors of a block");
#else
constexpr int kClusterBlocks = kCluster, kAttendedBytes = 0;
#endif

static_assert(GROUP <= 8 && CLUSTER == kCluster, "eight blocks take a KV head");
static_assert(HEAD_ROUNDS * 32 <= kThreads, "a warp finishes a tile");
static_assert(SMEM_BYTES % 128 == 0, "attention begins with a tile");

// A lane's two outputs in the warp that finishes a tile: a dimension of a head and the partner that it is rotated with.
struct Output {
  int own, dimension;         // number of the tile among those of the KV head
  bool exists, is_rotated;
  float cosine = 0.0f, sine = 0.0f;

  DEVICE Output() : own(blockIdx.x % kCluster * HEAD_ROUNDS + (threadIdx.x >> 5)) {
    dimension = own % kHeadTiles * 8 + threadIdx.x % 8;
    exists = threadIdx.x >> 5 < HEAD_ROUNDS && own < (GROUP + 2) * kHeadTiles;
    is_rotated = head() <= GROUP;
  }
  DEVICE int head() const { return own / kHeadTiles; }   // GROUP: the key, GROUP + 1: the value
  // Loads cosine and sine of the row's position.
  DEVICE void look_up(const float* rope, int max_context, int position) {
    if (!exists || !is_rotated) return;
    const float* angle = rope + static_cast<int64_t>(position) * kHalf + dimension;
    cosine = load_now(angle), sine = load_now(angle + static_cast<int64_t>(max_context) * kHalf);
  }
};

// Adds up the sums of a tile over the runs of K, in order, for one of its eight rows and the row's partner.
template <class Product>
DEVICE float2 sum_of_runs(const Product& product, int round, int row) {
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int run = 0; run < Product::kRuns; run++) {
    const float2 part = load_shared2(product.partial(run, round) + row * 8);
    sum.x += part.x, sum.y += part.y;
  }
  return sum;
}

// What a block knows of its place in the cluster. Four barriers lie one behind the other: they count the bytes of q, k and v of the row,
// those of the results of runs, those of the attention of all KV heads, and those of x.
struct Block {
  unsigned char* own;   // the attention's part of shared memory
  uint32_t row;         // where the row's key and value arrive
  uint32_t barriers;
  int rank, kv_head;

  DEVICE uint32_t row_barrier() const { return barriers; }
  DEVICE uint32_t run_barrier() const { return barriers + 8; }
  DEVICE uint32_t attended_barrier() const { return barriers + 16; }
  DEVICE uint32_t stream_barrier() const { return barriers + 24; }
  DEVICE int first_peer() const { return OUTPUT_ROUNDS > 0 ? kv_head * kCluster : 0; }   // the KV head's first block in the cluster
  // Returns where the attention of all KV heads arrives: behind what peers send of runs.
  DEVICE uint32_t attended() const { return shared_address(own) + attention::kReceivedOffset + kCluster * attention::kReceivedBytes; }
  // Returns where x arrives.
  DEVICE uint32_t stream() const { return attended() + kAttendedBytes; }

  // Prepares the barriers. All threads call it.
  DEVICE void prepare() const {
    if (threadIdx.x == 0) {
      mbarrier_init(row_barrier(), 1), mbarrier_init(run_barrier(), 1);
      if (OUTPUT_ROUNDS > 0) mbarrier_init(attended_barrier(), 1), mbarrier_init(stream_barrier(), 1);
      mbarrier_init_fence();
      mbarrier_arrive_expect(row_barrier(), kRowBytes);
      if (OUTPUT_ROUNDS > 0) mbarrier_arrive_expect(attended_barrier(), kAttendedBytes), mbarrier_arrive_expect(stream_barrier(), kAttendedBytes);
    }
    __syncwarp();
    cluster_announce();
  }
};

// Adds up the sums of a tile over the runs of K, rotates and rounds them, and sends them to all blocks of the KV head. A head of queries
// goes to its row of the tile of queries, with which the attention's memory begins, the key and the value go to block.row, the value behind
// the key. The tile's warp does it. The key or the value is also stored at `page_row`, if that is not null.
template <class Product>
DEVICE void finish_tile(const Product& product, const Output& output, float factor, const Block& block, scalar_t* page_row) {
  if (!output.exists) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t sent = block.row + kReceivedBytes + warp * 32;
  if (lane < 8) {
    const float2 sum = sum_of_runs(product, warp, lane);
    float lo = sum.x * factor, hi = sum.y * factor;
    if (output.is_rotated) rotate(lo, hi, output.cosine, output.sine);
    const scalar_t values[2] = {from_float(lo), from_float(hi)};
#pragma unroll
    for (int half = 0; half < 2; half++) store_shared_element(sent + half * 16 + lane * 2, values[half]);
  }
  __syncwarp();
  if (lane >= 2 * kCluster) return;
  const int half = lane / kCluster, peer = block.first_peer() + lane % kCluster;
  const int chunk = output.own % kHeadTiles + half * kHeadTiles, head = output.head();
  const uint4 v = load_shared(sent + half * 16);
  const uint32_t to = head < GROUP ? shared_address(block.own) + attention::swizzled(head, chunk)
                                   : block.row + (head - GROUP) * (HEAD_DIM * 2) + chunk * 16;
  send_piece(v, to, block.row_barrier(), peer);
  if (page_row != nullptr && lane % kCluster == 0) store16(page_row + chunk * 8, v);
}

#if OUTPUT_ROUNDS
// What the mlp before adds to x: the sums of its product down over the runs of K [kRuns][H*D], times `scale`; null: x has it already.
struct Addend {
  static constexpr int kRuns = 8;
  const float* sums;
  float scale;

  // Returns the columns `column` and the next one of x, with what is added to them, as a residual product rounds them.
  DEVICE uint32_t added_to(const scalar_t* x, int column) const {
    constexpr int kWidth = KV_HEADS * GROUP * HEAD_DIM;
    const uint32_t before = static_cast<uint32_t>(load_now(reinterpret_cast<const int*>(x + column)));
    if (sums == nullptr) return before;
    float2 parts[kRuns], sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int run = 0; run < kRuns; run++) parts[run] = load_now(reinterpret_cast<const float2*>(sums + run * kWidth + column));
#pragma unroll
    for (int run = 0; run < kRuns; run++) sum.x += parts[run].x, sum.y += parts[run].y;
    const float2 values = unpack2(before);
    return pack2(fmaf(scale, sum.x, values.x), fmaf(scale, sum.y, values.y));
  }
};

// Sends the block's columns of x, with what is added to them, to all blocks of the cluster. One warp calls it.
DEVICE void send_columns(const Block& block, const scalar_t* x, const Addend& addend) {
  const int lane = threadIdx.x & 31, first = blockIdx.x * kColumns;
  const uint32_t sent = block.row + kReceivedBytes;   // where tiles of q, k and v lie later
  if (lane < kColumns / 2) store_shared_word(sent + lane * 4, addend.added_to(x, first + lane * 2));
  __syncwarp();
#pragma unroll
  for (int i = lane; i < kColumns / 8 * kClusterBlocks; i += 32) {
    const int offset = i % (kColumns / 8) * 16, peer = i / (kColumns / 8);
    send_piece(load_shared(sent + offset), block.stream() + first * 2 + offset, block.stream_barrier(), peer);
  }
}
#endif

// Waits for the warps that attend.
DEVICE void attending_barrier() { barrier_wait(1, attention::kThreads); }

// Attends with the row once it has come, and stores the block's part of the result where `target` says. The warps that attend call it.
// is_filled: the block has one run, of `first_pages` pages, which came with fill().
DEVICE void attend_row(const Block& block, attention::Stream& stream, const attention::Stream::NewRow& added, const attention::Keys& keys,
                       const attention::Cut& cut, attention::Target target, const attention::Heads& heads, bool is_filled, int first_pages,
                       float factor, float (&log_sums)[attention::kWarps][16]) {
  const int rank = block.rank, warp = threadIdx.x >> 5;
  unsigned char* const own = block.own;
  mbarrier_wait(block.row_barrier(), 0);
  attention::WarpState state;
  attention::load_query(state, shared_address(own));
  added.take(block.row);
  stream.received = block.row;
  // A run whose pages are there is attended to outside of the loop, whose code is long.
  attention::begin_run(state);
  if (is_filled) attention::attend_filled(state, stream, keys, cut.first_page + rank * cut.run_pages, first_pages, factor);
  for (; target.cluster < target.used_clusters; ++target.cluster) {
    const int turn = target.cluster, members = min(kCluster, cut.num_runs - turn * kCluster), run = turn * kCluster + rank;
    if (turn > 0 && rank >= members) cluster_wait();  // a block without a run takes part in the barrier below too
    if (rank < members) {
      const int page = cut.first_page + run * cut.run_pages, pages = min(cut.run_pages, cut.first_page + cut.num_pages - page);
      attention::Stream::Place room;
      if (turn == 0 && is_filled) {
        room.k_tile = stream.ring;
      } else {
        attention::begin_run(state);
        attention::attend(state, stream, keys, page, pages, factor, [] {});
        room = stream.advance();
      }
      attention::publish_warp(state, room.k_tile, log_sums[warp]);
      attending_barrier();
      if (turn > 0) cluster_wait();  // what peers received before has been used
      attention::send_slices(own, own + attention::kQueryBytes + (room.k_tile - stream.ring), log_sums, block.run_barrier(), rank, block.first_peer());
      if (run + kCluster < cut.num_runs) {
        attending_barrier();  // the results have been read
        stream.load(room.k_tile, false, room, keys.length);
        stream.load(room.k_tile + attention::kHalfPlace, true, room, keys.length);
      }
    }
    if (threadIdx.x == 0) mbarrier_arrive_expect(block.run_barrier(), members * attention::kReceivedBytes);
    mbarrier_wait(block.run_barrier(), turn & 1);
    attention::merge_slices(own, heads, target, rank, members);
    if (turn + 1 < target.used_clusters) cluster_announce();
  }
  // A thread merges the vectors that it has stored itself.
  if (target.used_clusters > 1) target.merge_clusters(heads, rank);
}

// Sends the block's part of the attention, which lies in the place of the queries, to all blocks of the cluster. The warp that merged it calls
// it.
DEVICE void send_attended(const Block& block) {
  constexpr int kSliceChunks = attention::kSlice / 2;   // of 16 bytes
  const uint32_t from = shared_address(block.own), to = block.attended() + block.kv_head * GROUP * HEAD_DIM * 2;
  __syncwarp();
#pragma unroll
  for (int i = threadIdx.x & 31; i < kSliceChunks * kClusterBlocks; i += 32) {
    const int offset = (block.rank * kSliceChunks + i % kSliceChunks) * 16, peer = i / kSliceChunks;
    send_piece(load_shared(from + offset), to + offset, block.attended_barrier(), peer);
  }
}

// Multiplies the attention of all KV heads, once it has come, with the block's tiles of the output's weight, adds the sums, times `scale`, to
// what has come of x, and stores that. All warps call it.
template <class Projection>
DEVICE void project_row(const Block& block, const Projection& projection, scalar_t* x, float scale) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const bool finishes = warp < OUTPUT_ROUNDS && lane < 8;
  const int column = blockIdx.x * kColumns + warp * 16 + lane;
  const auto* const before = reinterpret_cast<const scalar_t*>(block.own + (block.stream() - shared_address(block.own))) + column;
  mbarrier_wait(block.attended_barrier(), 0);
  projection.multiply(block.attended());
  __syncthreads();
  if (!finishes) return;
  const float2 sum = sum_of_runs(projection, warp, lane);
  x[column] = from_float(fmaf(scale, sum.x, to_float(before[0])));
  x[column + 8] = from_float(fmaf(scale, sum.y, to_float(before[8])));
}

// Does all that the kernel does. `memory` is all of the block's dynamic shared memory; the other parameters are as in qkv_attention.cu.
template <class Product>
DEVICE void attend(unsigned char* memory, scalar_t* out, float* partials, scalar_t* k_pages, scalar_t* v_pages, scalar_t* x,
                   const scalar_t* norm, const void* weight, const float* rope, const int* positions, const int* slots,
                   const int* block_tables, int num_splits, int pages_per_sequence, int max_context, float eps, float scale,
                   const void* output_weight, float output_scale, const float* sums, float sums_scale) {
  __shared__ uint64_t barriers[4];
  __shared__ float log_sums[attention::kWarps][16];
  const Block block = {memory + SMEM_BYTES, shared_address(memory) + Product::kRowOffset, shared_address(barriers),
                       static_cast<int>(blockIdx.x % kCluster), static_cast<int>(blockIdx.x / kCluster)};
  const int rank = block.rank, kv_head = block.kv_head, num_kv_heads = gridDim.x / kCluster, warp = threadIdx.x >> 5;
  const typename Product::Place at;
  typename Product::Weights weights(at, weight, (GROUP + 2) * num_kv_heads * kHeadTiles);
  Product product{at, weights, {}};
  product.prefetch(norm);
  const int slot = load_now(slots), position = load_now(positions);
  const bool is_padding = slot < 0 || position < 0;
  block.prepare();

  // Asks for the block's first pages, except for the row's own key and value.
  unsigned char* const own = block.own;
  const bool attends = warp < attention::kWarps;
  const int64_t head_offset = static_cast<int64_t>(kv_head * kPageTokens + warp * attention::kKeys) * HEAD_DIM;
  const int64_t page_stride = static_cast<int64_t>(num_kv_heads) * kPageTokens * HEAD_DIM;
  const int* const block_table = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
  const attention::Keys keys = {position + 1, position};
  const attention::Cut cut(keys, OUTPUT_ROUNDS > 0 ? kCluster : num_splits);
  attention::Stream stream = {k_pages + head_offset,
                              v_pages + head_offset,
                              page_stride,
                              {nullptr, position, position, 0},
                              block_table,
                              nullptr,
                              shared_address(own) + attention::kQueryBytes + warp * STAGES * attention::kStageBytes,
                              cut.first_page,
                              cut.run_pages,
                              rank,
                              kCluster,
                              cut.steps_of(rank, kCluster, attention::kAtOnce),
                              cut.num_pages};
  attention::Stream::NewRow added = {};
  if (attends) {
    for (int i = GROUP * attention::kRowChunks + threadIdx.x; i < 16 * attention::kRowChunks; i += attention::kThreads)
      store16(own + attention::swizzled(i / attention::kRowChunks, i % attention::kRowChunks), make_uint4(0, 0, 0, 0));  // rows of no head
    if (!is_padding && stream.count > 0) {
      stream.locate();
      added = stream.fill(keys);
    }
  }
  Output output;
  output.exists &= !is_padding;
  output.look_up(rope, max_context, position);
  scalar_t* page_row = nullptr;
  if (output.exists && output.head() >= GROUP) {
    const int64_t page = load_now(block_table + position / kPageTokens);
    page_row = (output.head() == GROUP ? k_pages : v_pages) + page * page_stride +
               static_cast<int64_t>(kv_head * kPageTokens + position % kPageTokens) * HEAD_DIM;
  }

  const int first_pages = min(cut.run_pages, cut.num_pages - rank * cut.run_pages);  // pages of the block's first run
  const bool is_filled = rank < cut.num_runs && rank + kCluster >= cut.num_runs && first_pages <= STAGES;
  const attention::Heads heads = {OUTPUT_ROUNDS > 0 ? 0 : static_cast<int64_t>(kv_head) * GROUP * HEAD_DIM, GROUP};
  product.prepare();
  if (OUTPUT_ROUNDS > 0) cluster_wait();  // the peers' barriers exist

  pdl_wait();
  if constexpr (!Product::kStartsNextEarly) pdl_launch_dependents();  // only now: so later kernels may read early what is older than this one
  if (is_padding) {
    if (OUTPUT_ROUNDS == 0) cluster_wait();
    product.wait();  // a block does not end while something is copied to it
    if (OUTPUT_ROUNDS == 0 && rank == 0 && attends) attention::store_zeros(out, heads);
    return;
  }
#if OUTPUT_ROUNDS
  if (warp == 0) send_columns(block, x, {sums, sums_scale});
  mbarrier_wait(block.stream_barrier(), 0);
  const float row_factor = product.multiply([&](int piece) { return load_shared(block.stream() + piece * 16); }, norm, eps);
#else
  const float row_factor = product.multiply([&](int piece) { return load16_past_l1(x + piece * 8); }, norm, eps);
#endif
  __syncthreads();
  if (OUTPUT_ROUNDS == 0) cluster_wait();  // the peers' barriers exist
  finish_tile(product, output, row_factor, block, page_row);
  const float factor = scale * attention::kLog2e;
  if constexpr (OUTPUT_ROUNDS == 0) {
    float* const workspace = partials + static_cast<int64_t>(kv_head) * (num_splits / kCluster) * attention::kVectors * 5;
    if (attends) attend_row(block, stream, added, keys, cut, {out, workspace, 0, cut.clusters()}, heads, is_filled, first_pages, factor, log_sums);
  } else {
    const typename Product::Projection projection{at, weights, output_weight};
    __syncthreads();  // the sums of q, k and v have been read
    // What a block merges takes the place of its queries. In a block without a run a warp may still be reading them, but has no use for them.
    if (attends) {
      attend_row(block, stream, added, keys, cut, {reinterpret_cast<scalar_t*>(own), nullptr, 0, 1}, heads, is_filled, first_pages, factor, log_sums);
      if (warp == 0) send_attended(block);
    } else {
      projection.start(warp - attention::kWarps);
    }
    project_row(block, projection, x, output_scale);
  }
}
