// qkv_attention: the product qkv and the attention of one row, a cluster for each KV head, in one launch.
//
// formula        those of linear_packed_qkv (without a bias) and of decode_attention (all keys, no tree, 16-bit pages), one after the other
// out            [H*D] scalar_t; slot -1: zeros
// partials, arrivals, k_pages, v_pages, positions, slots, block_tables, num_splits: as in decode_attention.cu; k and v of the row are stored
// x              [K] scalar_t; norm [K]; weight packed as in packed_layout.cuh; rope [2, max_context, D / 2] float32
// constants      GROUP: query heads of a KV head, at most 8. HEAD_ROUNDS: tiles of a block, an eighth of the KV head's, at most 8. STAGES:
//                places of the rings of pages, at least 2. SMEM_BYTES: shared memory of the product, a multiple of 128; attention's memory
//                follows it. The product's part leaves a ring of weights HEAD_ROUNDS chunks. EARLY_SLOTS: HEAD_ROUNDS or more.
//                KEPT_ROUNDS: 1, since partial sums lie in the rings
//                LINEAR: HEAD_DIM: IN_FEATURES: WEIGHT_BITS: RUNS: SCALE_GROUP: ZEROS: ROWS: WARPS: WARPGROUPS: SHARED_RUN: NORM: PREPARED:
//                STAGE_SLICES: CLUSTERS: RECEIVED_APART: FEEDS: TRIGGER: PORTABLE: as in linear_packed.cu for the normalised product qkv of
//                one row, whose eight warps have a run of at most 128 columns each
// grid           8 * KV heads in clusters of 8; block 256; dynamic shared memory SMEM_BYTES + 16 * D * 2 + STAGES * 64 * D * 4 + 5 * GROUP * D
// launched after kernels of which `embed`, or the qkv kernel of another layer, is the last to release its successor only after its own
//                wait: so position and slot of the row, and pages older than it, are read before pdl_wait
// numerics       the bits of linear_packed_qkv and decode_attention
// oracle         NumpyOps.qkv, then NumpyOps.decode_attention
// source         original; Flash-Decoding (Dao et al. 2023), RoPE arXiv 2104.09864
// layout         For one row and a short context both kernels take little more than the time of their starts and ends. Here the eight
//                blocks of a cluster make the rows of q, k and v that their KV head needs, a tile a round for eight warps with a run of K
//                each, and send them to each other. Weights, pages and block tables were asked for before x was there. A row of any length
//                comes out right, but of a long one each block takes many runs of pages, one after another: decode_attention shares them
//                out among many clusters
#if !defined(GROUP) || !defined(HEAD_ROUNDS) || !defined(STAGES) || !defined(LINEAR) || !defined(HEAD_DIM) || !defined(IN_FEATURES) || \
    !defined(WEIGHT_BITS) || !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(ROWS) || !defined(WARPS) || \
    !defined(WARPGROUPS) || !defined(SHARED_RUN) || !defined(NORM) || !defined(PREPARED) || !defined(STAGE_SLICES) || \
    !defined(EARLY_SLOTS) || !defined(CLUSTERS) || !defined(RECEIVED_APART) || !defined(FEEDS) || !defined(TRIGGER) || \
    !defined(KEPT_ROUNDS) || !defined(SMEM_BYTES) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "cluster.cuh"
#include "copy.cuh"
#include "linear_epilogue.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// The headers of packed products and those of attention define some of the same names.
namespace quantised {
#include "../linear_packed/packed_multiply.cuh"

static_assert(LINEAR == 0 && ROWS == 1 && !SHARED_RUN && NORM && !PREPARED && !CLUSTERS && KEPT_ROUNDS == 1, "the product of one row");
static_assert(kWarps == 8 && kSlots == HEAD_ROUNDS && kEarlySlots == kSlots && kAllAreEarly, "all weights are asked for at once, and no others");
static_assert(kChunkBytes >= 64, "sums of a tile lie where its weights did");

// The product with the interface that qkv_row.cuh describes.
struct Product {
  using Place = Lane;
  using Weights = WeightStream;
  static constexpr int kRuns = kFilledRuns, kRowOffset = kPartialOffset;
  const Lane& at;
  WeightStream& weights;

  DEVICE void prefetch(const scalar_t* norm) { RowPieces::prefetch_norm(norm); }
  DEVICE void prepare() const { wait(); }
  DEVICE void wait() const { weights.wait_for_rounds(HEAD_ROUNDS); }
  DEVICE float multiply(const scalar_t* x, const scalar_t* norm, float eps) {
    const RowScale scale{at, eps};
    const Activations activations{at, nullptr};
    activations.fill_normalised(x, norm, scale, weights, 1);
    __syncthreads();
    const float factor = scale.of(0);
    Sums sums[HEAD_ROUNDS] = {};
    accumulate_rounds(sums, weights, activations, at);
    __syncwarp();
    if (at.quarter == 0)
#pragma unroll
      for (int round = 0; round < HEAD_ROUNDS; round++)
        store_shared2(partial(at.warp, round) + at.token * 8, sums[round][0][0], sums[round][0][2]);
    return factor;
  }
  DEVICE uint32_t partial(int run, int round) const { return at.shared + kRingOffset + (run * kSlots + round) * kChunkBytes; }
};
}  // namespace quantised
#include "qkv_row.cuh"

static_assert(kRoomBytes <= quantised::kPartialBytes, "rows have no room");

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 2)
    KERNEL(qkv_attention)(scalar_t* __restrict__ out, float* partials, int* arrivals, scalar_t* k_pages, scalar_t* v_pages, const scalar_t* x,
                          const scalar_t* __restrict__ norm, const void* __restrict__ weight, const float* __restrict__ rope,
                          const int* positions, const int* slots, const int* block_tables, int num_splits, int pages_per_sequence,
                          int max_context, float eps, float scale) {
  extern __shared__ __align__(1024) unsigned char memory[];
  attend<quantised::Product>(memory, out, partials, arrivals, k_pages, v_pages, x, norm, weight, rope, positions, slots, block_tables,
                          num_splits, pages_per_sequence, max_context, eps, scale);
}
