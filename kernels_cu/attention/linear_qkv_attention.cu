// linear_qkv_attention: the product qkv and the attention of one row in one launch, as in qkv_attention.cu, with weights in 16 bits.
//
// formula        those of linear_qkv (without a bias) and of decode_attention (all keys, no tree, 16-bit pages), one after the other
// out            and all others as in qkv_attention.cu, but weight [(H + 2 K heads) * D, K] scalar_t row-major
// constants      GROUP: query heads of a KV head, at most 8. HEAD_ROUNDS: tiles of a block, an eighth of the KV head's, at most 8. STAGES:
//                places of the rings of pages, at least 2. SMEM_BYTES: shared memory of the product, a multiple of 128; attention's memory
//                follows it. HEAD_DIM: elements of a head. IN_FEATURES: K, a multiple of 512. PORTABLE: 0
// grid           as in qkv_attention.cu
// launched after kernels of which `embed` is the last to release its successor only after its own wait: position and slot of the row, and
//                pages older than it, are read before pdl_wait. The next kernel starts at once, so it and those after it may read early
//                only what is older than `embed`, too
// numerics       the bits of linear_qkv and decode_attention
// oracle         NumpyOps.qkv, then NumpyOps.decode_attention
// source         original; Flash-Decoding (Dao et al. 2023), RoPE arXiv 2104.09864
// layout         As in qkv_attention.cu; a lane copies the weights that it reads itself, and holds its part of x in registers
#if !defined(GROUP) || !defined(HEAD_ROUNDS) || !defined(STAGES) || !defined(SMEM_BYTES) || !defined(HEAD_DIM) || !defined(IN_FEATURES) || \
    !defined(PORTABLE)
#error "a constant is not defined"
#endif
#define LINEAR 0
#include "norm_values.cuh"
#define OUTPUT_ROUNDS 0
#include "qkv_row.cuh"

namespace unquantised {
constexpr int K = IN_FEATURES, kWarps = kThreads / 32;
constexpr int kOwnUnits = K / 64 / kWarps;     // units of 64 k in a warp's run
constexpr int kSlots = HEAD_ROUNDS * kOwnUnits, kChunkBytes = 2048;   // bytes of a chunk: 16 rows x 64 k
constexpr int kSquareOffset = kWarps * kSlots * kChunkBytes;  // offset of the warps' sums of squares
static_assert(K % (64 * kWarps) == 0, "IN_FEATURES must be a multiple of 512");
static_assert(kSquareOffset + 128 + kRoomBytes <= SMEM_BYTES, "SMEM_BYTES is too small");

struct Place {
  uint32_t shared;
  int warp, lane, token, quarter;   // named as in weight_stream.cuh
  DEVICE Place() {
    extern __shared__ __align__(1024) unsigned char memory[];
    shared = shared_address(memory);
    warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = lane >> 2, quarter = lane & 3;
  }
  DEVICE uint32_t chunk(int run, int slot) const { return shared + (run * kSlots + slot) * kChunkBytes; }
  // Returns the first of the lane's columns in unit u of its run.
  DEVICE int column(int u) const { return (warp * kOwnUnits + u) * 64 + quarter * 8; }
};

// Starts the copies of the warp's run of every tile of the block. Each lane copies what it reads itself.
struct Weights {
  DEVICE Weights(const Place& at, const void* weight, int num_tiles) {
    for (int round = 0; round < HEAD_ROUNDS; round++) {
      const int tile = kv_head_tile(blockIdx.x % kHeadBlocks * HEAD_ROUNDS + round);
      if (tile >= num_tiles) continue;
      const QkvTiles tiles{num_tiles, 0};
      const scalar_t* const lo = static_cast<const scalar_t*>(weight) + static_cast<int64_t>(tiles.lo(tile, at.token)) * K;
#pragma unroll
      for (int u = 0; u < kOwnUnits; u++) {
        const uint32_t to = at.chunk(at.warp, round * kOwnUnits + u) + at.lane * 16;
        const scalar_t* const from = lo + at.column(u);
        cp_async16_lines(to, from);
        cp_async16_lines(to + 512, from + 32);
        cp_async16_lines(to + 1024, from + kHalf * K);
        cp_async16_lines(to + 1536, from + kHalf * K + 32);
      }
    }
    cp_async_commit();
  }
};

// The product with the interface that qkv_row.cuh describes. x is normalised as in linear/activations.cuh.
struct Product {
  using Place = unquantised::Place;
  using Weights = unquantised::Weights;
  static constexpr int kRuns = kWarps, kRowOffset = kSquareOffset + 128;
  static constexpr bool kStartsNextEarly = true;
  const Place& at;
  const Weights& weights;
  uint4 norms[kOwnUnits][2];

  DEVICE void prefetch(const scalar_t* norm) {
#pragma unroll
    for (int u = 0; u < kOwnUnits; u++) norms[u][0] = load16_past_l1(norm + at.column(u)), norms[u][1] = load16_past_l1(norm + at.column(u) + 32);
  }
  DEVICE void prepare() const {}
  DEVICE void wait() const { cp_async_wait_all(); }
  template <class Load>
  DEVICE float multiply(Load load, const scalar_t*, float eps) const {
    uint4 v[kOwnUnits][2];
#pragma unroll
    for (int u = 0; u < kOwnUnits; u++) v[u][0] = load(at.column(u) / 8), v[u][1] = load(at.column(u) / 8 + 4);
    const float scale = rms(v, eps);
#pragma unroll
    for (int u = 0; u < kOwnUnits; u++)
#pragma unroll
      for (int j = 0; j < 2; j++) v[u][j] = normalised(v[u][j], norms[u][j], scale);
    wait();
    float sums[HEAD_ROUNDS][4] = {};
#pragma unroll
    for (int u = 0; u < kOwnUnits; u++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int round = 0; round < HEAD_ROUNDS; round++) {
          const uint32_t from = at.chunk(at.warp, round * kOwnUnits + u) + j * 512 + at.lane * 16;
          const uint4 lo = load_shared(from), hi = load_shared(from + 1024);
          mma(sums[round], {lo.x, hi.x, lo.y, hi.y}, {v[u][j].x, v[u][j].y});
          mma(sums[round], {lo.z, hi.z, lo.w, hi.w}, {v[u][j].z, v[u][j].w});
        }
    __syncwarp();
    if (at.quarter == 0)
#pragma unroll
      for (int round = 0; round < HEAD_ROUNDS; round++)
        store_shared2(partial(at.warp, round) + at.token * 8, sums[round][0], sums[round][2]);
    return 1.0f;
  }
  DEVICE uint32_t partial(int run, int round) const { return at.chunk(run, round * kOwnUnits); }

  // Returns 1 / rms of x, of which `v` is the lane's part. All threads call it.
  DEVICE float rms(const uint4 (&v)[kOwnUnits][2], float eps) const {
    float sum = 0.0f;
#pragma unroll
    for (int u = 0; u < kOwnUnits; u++)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 a = unpack2((&v[u][j].x)[e]);
          sum = fmaf(a.y, a.y, fmaf(a.x, a.x, sum));
        }
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (at.lane == 0) store_shared_float(at.shared + kSquareOffset + at.warp * 4, sum);
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; warp++) total += load_shared_float(at.shared + kSquareOffset + warp * 4);
    return rsqrtf(fmaf(total, 1.0f / K, eps));
  }
};
}  // namespace unquantised

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, 1)
    KERNEL(linear_qkv_attention)(scalar_t* __restrict__ out, float* partials, scalar_t* k_pages, scalar_t* v_pages,
                                 scalar_t* x, const scalar_t* __restrict__ norm, const void* __restrict__ weight,
                                 const float* __restrict__ rope, const int* positions, const int* slots, const int* block_tables,
                                 int num_splits, int pages_per_sequence, int max_context, float eps, float scale) {
  pdl_launch_dependents();
  extern __shared__ __align__(1024) unsigned char memory[];
  attend<unquantised::Product>(memory, out, partials, k_pages, v_pages, x, norm, weight, rope, positions, slots, block_tables,
                               num_splits, pages_per_sequence, max_context, eps, scale, nullptr, 0.0f, nullptr, 0.0f);
}
