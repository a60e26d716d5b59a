// Makes q, k and v of one row and attends with them, by a cluster of eight blocks for each KV head. The template parameter `Product` is the
// product qkv, of which it makes the rows that a KV head needs:
//   Place                  the calling lane's place; Weights: its constructor asks for the weights of the block's tiles
//   prefetch(norm)         loads what it needs of the norm's weights
//   prepare()              before pdl_wait, waits for what surely comes before x
//   wait()                 waits until the weights are there
//   multiply(x, norm, eps) after pdl_wait, stores the sums of a tile's rows for each round and run of K; returns the factor that they need
//   partial(run, round)    where these lie, 8 bytes for a row and its partner, once all warps have stored theirs
//   kRuns                  number of runs of K
//   kRowOffset             where kRoomBytes of shared memory are left for the row; all else of the first SMEM_BYTES is the product's own
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

static_assert(GROUP <= 8 && CLUSTER == kCluster, "a cluster takes a KV head");
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

// Adds up the sums of a tile over the runs of K, rotates and rounds them, and sends them to all blocks of the cluster. A head of queries
// goes to its row of the tile `queries`, the key and the value go to `row`, the value behind the key. The tile's warp does it; every block's
// barrier counts the bytes. The key or the value is also stored at `page_row`, if that is not null.
template <class Product>
DEVICE void finish_tile(const Product& product, const Output& output, float factor, uint32_t queries, uint32_t row, uint32_t barrier,
                        scalar_t* page_row) {
  if (!output.exists) return;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const uint32_t sent = row + kReceivedBytes + warp * 32;
  if (lane < 8) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int run = 0; run < Product::kRuns; run++) {
      const float2 part = load_shared2(product.partial(run, warp) + lane * 8);
      sum.x += part.x, sum.y += part.y;
    }
    float lo = sum.x * factor, hi = sum.y * factor;
    if (output.is_rotated) rotate(lo, hi, output.cosine, output.sine);
    const scalar_t values[2] = {from_float(lo), from_float(hi)};
#pragma unroll
    for (int half = 0; half < 2; half++)
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(sent + half * 16 + lane * 2), "h"(reinterpret_cast<const unsigned short&>(values[half])) : "memory");
  }
  __syncwarp();
  if (lane >= 2 * kCluster) return;
  const int half = lane / kCluster, peer = lane % kCluster, chunk = output.own % kHeadTiles + half * kHeadTiles, head = output.head();
  const uint4 v = load_shared(sent + half * 16);
  const uint32_t to = head < GROUP ? queries + attention::swizzled(head, chunk)
                                   : row + (head - GROUP) * (HEAD_DIM * 2) + chunk * 16;
  send_float4(peer_address(to, peer), peer_address(barrier, peer), __uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z),
              __uint_as_float(v.w));
  if (page_row != nullptr && peer == 0) store16(page_row + chunk * 8, v);
}

// Does all that the kernel does. `memory` is all of the block's dynamic shared memory; the other parameters are as in qkv_attention.cu.
template <class Product>
DEVICE void attend(unsigned char* memory, scalar_t* out, float* partials, int* arrivals, scalar_t* k_pages, scalar_t* v_pages,
                   const scalar_t* x, const scalar_t* norm, const void* weight, const float* rope, const int* positions, const int* slots,
                   const int* block_tables, int num_splits, int pages_per_sequence, int max_context, float eps, float scale) {
  __shared__ uint64_t barriers[2];
  __shared__ float log_sums[attention::kWarps][16];
  const int rank = blockIdx.x % kCluster, kv_head = blockIdx.x / kCluster, num_kv_heads = gridDim.x / kCluster;
  const int num_tiles = (GROUP + 2) * num_kv_heads * kHeadTiles;
  const attention::Heads heads = {static_cast<int64_t>(kv_head) * GROUP * HEAD_DIM, GROUP};
  const typename Product::Place at;
  typename Product::Weights weights(at, weight, num_tiles);
  Product product{at, weights};
  product.prefetch(norm);
  const int slot = load_now(slots), position = load_now(positions);
  const bool is_padding = slot < 0 || position < 0;
  const uint32_t row_barrier = shared_address(barriers), run_barrier = row_barrier + 8;
  if (threadIdx.x == 0) {
    mbarrier_init(row_barrier, 1), mbarrier_init(run_barrier, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(row_barrier, kRowBytes);
  }
  __syncwarp();
  cluster_announce();

  // Asks for the block's first pages, except for the row's own key and value.
  unsigned char* const own = memory + SMEM_BYTES;
  const uint32_t row = shared_address(memory) + Product::kRowOffset;  // where the row's key and value arrive
  const int warp = threadIdx.x >> 5;
  const bool attends = warp < attention::kWarps;
  const int64_t head_offset = static_cast<int64_t>(kv_head * kPageTokens + warp * attention::kKeys) * HEAD_DIM;
  const int64_t page_stride = static_cast<int64_t>(num_kv_heads) * kPageTokens * HEAD_DIM;
  const int* const block_table = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
  const attention::Keys keys = {position + 1, position};
  const attention::Cut cut(keys, num_splits);
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
  product.prepare();

  pdl_wait();
  pdl_launch_dependents();  // only now: so kernels after the next one may read early what was written before this kernel
  if (is_padding) {
    cluster_wait();
    product.wait();  // a block does not end while something is copied to it
    if (rank == 0 && attends) attention::store_zeros(out, heads);
    return;
  }
  const float factor = product.multiply(x, norm, eps);
  __syncthreads();
  cluster_wait();  // the peers' barriers exist
  finish_tile(product, output, factor, shared_address(own), row, row_barrier, page_row);
  if (!attends) return;

  mbarrier_wait(row_barrier, 0);
  attention::Target target = {out, partials + static_cast<int64_t>(kv_head) * (num_splits / kCluster) * attention::kVectors * 5, 0,
                              cut.clusters()};
  attention::WarpState state;
  attention::load_query(state, shared_address(own));
  added.take(row);
  stream.received = row;
  // A short row has one run a block, whose pages came with fill(). It is attended to outside of the loop, whose code is long.
  attention::begin_run(state);
  if (__builtin_expect(is_filled, true))
    attention::attend_filled(state, stream, keys, cut.first_page + rank * cut.run_pages, first_pages, scale * attention::kLog2e);
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
        attention::attend(state, stream, keys, page, pages, scale * attention::kLog2e, [] {});
        room = stream.advance();
      }
      attention::publish_warp(state, room.k_tile, log_sums[warp]);
      __syncthreads();
      if (turn > 0) cluster_wait();  // what peers received before has been used
      attention::send_slices(own, own + attention::kQueryBytes + (room.k_tile - stream.ring), log_sums, run_barrier, rank);
      if (run + kCluster < cut.num_runs) {
        __syncthreads();  // the results have been read
        stream.load(room.k_tile, false, room, keys.length);
        stream.load(room.k_tile + attention::kHalfPlace, true, room, keys.length);
      }
    }
    if (threadIdx.x == 0) mbarrier_arrive_expect(run_barrier, members * attention::kReceivedBytes);
    mbarrier_wait(run_barrier, turn & 1);
    attention::merge_slices(own, heads, target, rank, members);
    if (turn + 1 < target.used_clusters) cluster_announce();
  }
  if (target.used_clusters > 1 && attention::arrives_last(arrivals + kv_head * kCluster + rank, 1))
    target.merge_clusters(heads, rank);
}
