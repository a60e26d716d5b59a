// qkv_attention: the product qkv and the attention of one row in one launch, and the product with the output's weight, too.
//
// formula        those of linear_packed_qkv (without a bias) and of decode_attention (all keys, no tree, 16-bit pages), one after the other;
//                with OUTPUT_ROUNDS then that of linear_packed_residual (without a bias): x += output_scale * (attention output_weight^T),
//                and before all that x += sums_scale * (sums[0] + .. + sums[7]), unless sums is null
// out            [H*D] scalar_t; slot -1: zeros. With OUTPUT_ROUNDS nothing is stored there, and slot -1 leaves x as it is
// partials, k_pages, v_pages, positions, slots, block_tables, num_splits: as in decode_attention.cu; k and v of the row are stored
// x              [K] scalar_t; norm [K]; weight packed as in packed_layout.cuh; rope [2, max_context, D / 2] float32
// output_weight  (K, K), packed alike, for LINEAR = 1; read with OUTPUT_ROUNDS only, as is sums, [8][K] float32, which ffn_row left
// constants      GROUP: query heads of a KV head, at most 8. HEAD_ROUNDS: tiles of a block, an eighth of the KV head's, at most 8. STAGES:
//                places of the rings of pages, at least 2. SMEM_BYTES: shared memory of the product, a multiple of 128; attention's memory
//                follows it. The product's part leaves a ring of weights HEAD_ROUNDS chunks. EARLY_SLOTS: HEAD_ROUNDS or more.
//                KEPT_ROUNDS: 1, since partial sums lie in the rings.
//                OUTPUT_ROUNDS: tiles of a block of output_weight, at most HEAD_ROUNDS and 4; 0: without that product. KV_HEADS: with
//                OUTPUT_ROUNDS only, H / GROUP; K is then H*D
//                LINEAR: HEAD_DIM: IN_FEATURES: WEIGHT_BITS: RUNS: SCALE_GROUP: ZEROS: ROWS: WARPS: WARPGROUPS: SHARED_RUN: NORM: PREPARED:
//                STAGE_SLICES: CLUSTERS: RECEIVED_APART: FEEDS: TRIGGER: PORTABLE: as in linear_packed.cu for the normalised product qkv of
//                one row, whose eight warps have a run of at most 128 columns each
// grid           8 * KV heads in clusters of 8, with OUTPUT_ROUNDS in one cluster; block 256; dynamic shared memory SMEM_BYTES +
//                16 * D * 2 + STAGES * 64 * D * 4 + 5 * GROUP * D, and with OUTPUT_ROUNDS K * 4 more
// launched after kernels of which `embed`, or the qkv kernel of another layer, is the last to release its successor only after its own
//                wait: so position and slot of the row, and pages older than it, are read before pdl_wait
// numerics       the bits of linear_packed_qkv, decode_attention and linear_packed_residual. With OUTPUT_ROUNDS a row of more than 2,048 keys
//                is cut into eight runs all the same, so that its bits are others
// oracle         NumpyOps.qkv, then NumpyOps.decode_attention, and NumpyOps.project_residual
// source         original; Flash-Decoding (Dao et al. 2023), RoPE arXiv 2104.09864
// layout         For one row and a short context both kernels take little more than the time of their starts and ends. Here the eight
//                blocks of a cluster make the rows of q, k and v that their KV head needs, a tile a round for eight warps with a run of K
//                each, and send them to each other. Weights, pages and block tables were asked for before x was there. A row of any length
//                comes out right, but of a long one each block takes many runs of pages, one after another: decode_attention shares them
//                out among many clusters. With OUTPUT_ROUNDS each block reads the columns of x that it will finish, and sends them, with the
//                sums added, to all blocks. In the end the blocks of all KV heads send each other what they have merged, and the four warps of
//                a block that do not attend have meanwhile copied the weights of its tiles to where those of qkv were
#if !defined(GROUP) || !defined(HEAD_ROUNDS) || !defined(STAGES) || !defined(LINEAR) || !defined(HEAD_DIM) || !defined(IN_FEATURES) || \
    !defined(WEIGHT_BITS) || !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(ROWS) || !defined(WARPS) || \
    !defined(WARPGROUPS) || !defined(SHARED_RUN) || !defined(NORM) || !defined(PREPARED) || !defined(STAGE_SLICES) || \
    !defined(EARLY_SLOTS) || !defined(CLUSTERS) || !defined(RECEIVED_APART) || !defined(FEEDS) || !defined(TRIGGER) || \
    !defined(KEPT_ROUNDS) || !defined(SMEM_BYTES) || !defined(PORTABLE) || !defined(OUTPUT_ROUNDS) || \
    (OUTPUT_ROUNDS > 0 && !defined(KV_HEADS)) || (OUTPUT_ROUNDS == 0 && defined(KV_HEADS))
#error "a constant is not defined, or not for this launch"
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

// Returns where the sums of a run lie for a round, eight pairs of 8 bytes: in the place of the weights that made them.
DEVICE uint32_t partial_sums(const Lane& at, int run, int round) { return at.shared + kRingOffset + (run * kSlots + round) * kChunkBytes; }

// Multiplies ROUNDS tiles, whose weights lie in the rings, with x, and stores the sums of the warp's run.
template <int ROUNDS>
DEVICE void multiply_rounds(const WeightStream& weights, const Activations& x, const Lane& at) {
  Sums sums[ROUNDS] = {};
  accumulate_rounds(sums, weights, x, at);
  __syncwarp();
  if (at.quarter == 0)
#pragma unroll
    for (int round = 0; round < ROUNDS; round++)
      store_shared2(partial_sums(at, at.warp, round) + at.token * 8, sums[round][0][0], sums[round][0][2]);
}

#if OUTPUT_ROUNDS
static_assert(OUTPUT_ROUNDS <= kSlots && kRunSlices == 1, "the rings have no room for the weights of the second product");
static_assert(IN_FEATURES == KV_HEADS * GROUP * HEAD_DIM, "both products have as many columns");
static_assert((GROUP + 2) * kHeadTiles == kHeadBlocks * HEAD_ROUNDS, "each barrier of a ring has counted a chunk of qkv before");

// The product behind the attention, of which a block makes OUTPUT_ROUNDS neighbouring tiles. Its weights take the places of those of qkv.
struct Projection {
  static constexpr int kRuns = kFilledRuns;
  const Lane& at;
  const WeightStream& weights;   // of qkv
  const void* weight;

  // Starts the copies of the weights of warp `other` as well as of the calling warp's own, once all warps have read the sums of qkv. The
  // first barrier of a warp's ring counts all of its bytes.
  DEVICE void start(int other) const {
    const int of = at.lane < 16 ? at.warp : other, round = at.lane % 16;
    if (of >= kSlices || round >= OUTPUT_ROUNDS) return;
    const uint32_t barrier = weights.barriers + (of - at.warp) * kMaxSlots * 8;
    const int64_t tile = static_cast<int64_t>(blockIdx.x) * OUTPUT_ROUNDS + round;
    async_proxy_fence();
    if (round == 0) mbarrier_arrive_expect(barrier, OUTPUT_ROUNDS * kUnitBytes);
    copy_bytes(weights.ring + ((of - at.warp) * kSlots + round) * kChunkBytes,
               static_cast<const unsigned char*>(weight) + tile * kTileBytes + of * kRunBytes, kUnitBytes, barrier);
  }
  // Multiplies with the row at `row` in shared memory and stores the sums of the warp's run for each round.
  DEVICE void multiply(uint32_t row) const {
    const Activations activations{at, nullptr};
    const int piece = at.run * kSlicePieces + at.lane % kSlicePieces;
    const bool exists = at.lane < kSlicePieces && at.slices > 0;
    uint4 v[1] = {};
    if (exists) v[0] = load_shared(row + piece * 16);
    enter_products<true>(activations.rows(), v, [&](int) { return Entry{piece, 0, exists}; });
    __syncwarp();
    if (at.slices > 0) mbarrier_wait(weights.barriers, 1);
    multiply_rounds<OUTPUT_ROUNDS>(weights, activations, at);
  }
  DEVICE uint32_t partial(int run, int round) const { return partial_sums(at, run, round); }
};
#endif

// The product with the interface that qkv_row.cuh describes.
struct Product {
  using Place = Lane;
  using Weights = WeightStream;
#if OUTPUT_ROUNDS
  using Projection = quantised::Projection;
#endif
  static constexpr int kRuns = kFilledRuns, kRowOffset = kPartialOffset;
  static constexpr bool kStartsNextEarly = false;
  const Lane& at;
  WeightStream& weights;
  RowPieces pieces;

  // With OUTPUT_ROUNDS x comes by way of the peers: what is not asked for before it comes is waited for behind it.
  DEVICE void prefetch(const scalar_t* norm) {
    if constexpr (OUTPUT_ROUNDS == 0) {
      RowPieces::prefetch_norm(norm);
    } else {
#pragma unroll
      for (int i = 0; i < kThreadPieces; i++)
        if (RowPieces::piece(i) < kPieces) pieces.norm[i] = load16_past_l1(norm + RowPieces::piece(i) * 8);
    }
  }
  DEVICE void prepare() const { wait(); }
  DEVICE void wait() const { weights.wait_for_rounds(HEAD_ROUNDS); }
  template <class Load>
  DEVICE float multiply(Load load, const scalar_t* norm, float eps) {
    const RowScale scale{at, eps};
    const Activations activations{at, nullptr};
    activations.fill_normalised(scale, weights, 1, [&](int, int piece) { return load(piece); }, [&](RowPieces& loaded) {
      if (OUTPUT_ROUNDS > 0) loaded = pieces;
      else loaded.load_norm(norm);
    });
    __syncthreads();
    const float factor = scale.of(0);
    multiply_rounds<HEAD_ROUNDS>(weights, activations, at);
    return factor;
  }
  DEVICE uint32_t partial(int run, int round) const { return partial_sums(at, run, round); }
};
}  // namespace quantised
#include "qkv_row.cuh"

static_assert(kRoomBytes <= quantised::kPartialBytes, "rows have no room");

extern "C" __global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kThreads, 2)
    KERNEL(qkv_attention)(scalar_t* __restrict__ out, float* partials, scalar_t* k_pages, scalar_t* v_pages, scalar_t* x,
                          const scalar_t* __restrict__ norm, const void* __restrict__ weight, const float* __restrict__ rope,
                          const int* positions, const int* slots, const int* block_tables, int num_splits, int pages_per_sequence,
                          int max_context, float eps, float scale, const void* __restrict__ output_weight, float output_scale,
                          const float* sums, float sums_scale) {
  extern __shared__ __align__(1024) unsigned char memory[];
  attend<quantised::Product>(memory, out, partials, k_pages, v_pages, x, norm, weight, rope, positions, slots, block_tables,
                             num_splits, pages_per_sequence, max_context, eps, scale, output_weight, output_scale, sums, sums_scale);
}
