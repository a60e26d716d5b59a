// Dense product of many rows with a packed weight, unpacked in registers: for prefill chunks where no library is faster.
//
//   formula   y[m, n] = round(round(alpha * sum_k x[m, k] w[n, k]) + beta * y[m, n]); y is not read if beta is 0;
//             w[n, k] = round(scale[n, k / G] * (u[n, k] - zero[n, k / G])), with minimums round(scale * u - minimum). With GATED
//             y[m, f] = round(activation(round(alpha * sum_k x[m, k] w[f, k])) * round(alpha * sum_k x[m, k] w[N / 2 + f, k])),
//             f < N / 2, and beta is not read
//   operands  y (M, N) scalar_t, with GATED (M, N / 2), its rows `stride` elements apart, a multiple of 8; x (M, K) scalar_t row-major; packed as
//             packed_layout.cuh describes; 16-byte aligned; chunk as in chunk_rows.cuh. M any, N a multiple of 8
//   constants LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head. HEAD_DIM: of qkv only, elements of a head.
//             IN_FEATURES: K, a multiple of 128. WEIGHT_BITS: 2, 4 or 8. RUNS: of the layout, 8 or 1. SCALE_GROUP: columns that
//             share a scale. ZEROS: what is beside the scales, as in packed_layout.cuh. TILES: packed tiles of a block: 8
//             or 16. STAGES: halves of a slice of x and w in shared memory, at least 3. GATED: 1, of gate_up only: stores what
//             rows/activation.cu would make of both halves, bit for bit; without it stores both halves. FATRELU: with GATED, as there
//   launch    grid ceil(M / 128) * ceil(N / 16 / TILES), block 16 * TILES, shared
//             STAGES * (16384 + TILES * bytes of half a unit, whose scales are at least one group's)
//   numerics  as linear/gemm.cu after `dequantize` of repack.cu, bit for bit: a weight is rounded once, sums are fp32 in
//             ascending k, 16 at a time; the product is rounded to scalar_t before y is added
//   oracle    reference/ops.py project_residual without bias (alpha = the residual scale, beta = 1)
//   source    original; layout of the mma fragments as in the PTX manual, section 9.7.14
//   layout    a packed tile is two fragments of operand B, lo's rows and hi's. Weights are codes until they are in registers: in 4
//             bits half a slice of x and w takes 25 KB, and four of them fit where a block has 99 KB. Fragments of x are loaded
//             sixteen products ahead, across the border of two stages: the barrier between them hides behind those products.
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || \
    !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(TILES) || !defined(STAGES) || \
    (LINEAR != 2 && defined(GATED)) || (LINEAR != 2 && defined(FATRELU))
#error "a constant is not defined"
#endif
#include "chunk_rows.cuh"
#include "gated.cuh"
#include "gemm_tile.cuh"
#include "packed_unpack.cuh"

constexpr int kWarpTiles = 2, kWarps = TILES / kWarpTiles, kThreads = kWarps * 32;
constexpr int kFragmentsM = kTileM / 16, kFragmentsN = kWarpTiles * 2;
constexpr int kHalfColumns = kSliceColumns / 2, kHalves = K / kHalfColumns;
constexpr int kXChunks = kHalfColumns / 8, kXRowBytes = kHalfColumns * 2, kXStageBytes = kTileM * kXRowBytes;
constexpr int kHalfBytes = kHalfCodeBytes + HalfSlice::kGroups * kScaleBytes, kWStageBytes = TILES * kHalfBytes;
constexpr int kSteps = kHalfColumns / 16;
constexpr int kAhead = 4;                                        // fragments of x that are loaded before their turn
constexpr int kStageFragments = kSteps * kFragmentsM;
using RowCopy = TileCopy<kTileM, kXChunks, kThreads, kXStageBytes>;
static_assert(TILES == 8 || TILES == 16, "TILES");
static_assert(STAGES >= 3, "STAGES");

// Starts a copy of 8 bytes of weights.
DEVICE void cp_async8(uint32_t shared, const void* source) {
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 8;" ::"r"(shared), "l"(source) : "memory");
}

// A warp's share of copying half slices of its tiles: all lanes copy the codes of each tile, then the scales of both tiles. These have fewer
// pieces than there are lanes, so that several lanes copy the same piece.
struct WeightCopy {
  static constexpr int kCodeParts = WEIGHT_BITS == 8 ? 2 : 1, kParts = kWarpTiles * kCodeParts + 1;
  static constexpr int kScaleLanes = HalfSlice::kGroups * kScaleBytes / 16, kPadding = kRunBytes - kRunSlices * kUnitBytes;
  const unsigned char *codes[kWarpTiles], *scales;
  uint32_t target, scale_target;

  DEVICE WeightCopy(const unsigned char* packed, int first_tile, int num_tiles, uint32_t shared) {
    const int lane = threadIdx.x % 32;
    const auto tile_of_warp = [&](int t) { return packed + min(first_tile + t, num_tiles - 1) * kTileBytes; };
#pragma unroll
    for (int t = 0; t < kWarpTiles; t++) codes[t] = tile_of_warp(t) + lane * 16;
    const int scale_tile = lane / kScaleLanes % kWarpTiles, place = lane % kScaleLanes * 16;
    scales = tile_of_warp(scale_tile) + kCodeBytes + place;
    target = shared + lane * kLaneBytes;
    scale_target = shared + scale_tile * kHalfBytes + kHalfCodeBytes + place;
  }
  // Starts a part of the copy of half slice `index` of K: the codes of a tile, or (the last part) the scales of both tiles.
  DEVICE void start_one(int part, int index, int stage) const {
    const int slice = index / 2, half = index % 2, unit = slice * kUnitBytes + slice / kRunSlices * kPadding;
    const uint32_t place = stage * kWStageBytes;
    if (part < kParts - 1) {
      const int tile = part / kCodeParts, piece = part % kCodeParts * 512;
      const unsigned char* const from = codes[tile] + (unit + half * kHalfStep + piece);
      const uint32_t to = target + place + tile * kHalfBytes + piece;
      if constexpr (kLaneBytes == 16) cp_async16_lines(to, from);
      else cp_async8(to, from);
    } else cp_async16_lines(scale_target + place, scales + (unit + half * kHalfColumns / SCALE_GROUP * kScaleBytes));
  }
};

// A thread's copies for a stage, and the number of fragments of x over whose products their starts are spread: all come before the barrier.
constexpr int kCopies = RowCopy::kCopies + WeightCopy::kParts, kCopyTurns = kStageFragments - kAhead - 1;

// The weights of a warp's tiles in registers: a half slice in codes, and two steps of 16 k unpacked to operand B.
struct Weights {
  HalfSlice codes[kWarpTiles];
  uint32_t w[2][kWarpTiles][4];   // pairs of k of each tile: lo, hi, then lo and hi eight k further
  uint32_t mask;

  DEVICE void load(uint32_t shared) {
#pragma unroll
    for (int t = 0; t < kWarpTiles; t++)
      codes[t].load_parts(shared + t * kHalfBytes, shared + t * kHalfBytes + kHalfCodeBytes, kLaneBytes), codes[t].order();
  }
  DEVICE void unpack(int step) {
#pragma unroll
    for (int t = 0; t < kWarpTiles; t++) codes[t].unpack(w[step % 2][t], step, mask);
  }
  // Adds one fragment of x times all columns of the warp. Columns go back and forth: the fragment used last is used first again.
  DEVICE void multiply(float (&sums)[kFragmentsN][4], const uint32_t (&x)[4], int step, bool is_back) const {
#pragma unroll
    for (int j = 0; j < kFragmentsN; j++) {
      const int n = is_back ? kFragmentsN - 1 - j : j;
      const uint32_t(&tile)[4] = w[step % 2][n / 2];
      mma(sums[n], x, {tile[n % 2], tile[n % 2 + 2]});
    }
  }
};

#ifdef GATED
// Stores activation(gate) * up of a warp's sums. The warp's two tiles are 16 neighbouring columns of y, of which each lane of a quad takes four.
DEVICE void store_gated(scalar_t* y, const float (&sums)[kFragmentsM][kFragmentsN][4], int first_row, int first_tile, int num_tiles,
                        int m, int stride, float alpha) {
  const int lane = threadIdx.x % 32, quarter = lane % 4, source = (lane & 28) + quarter % 2 * 2, tile = first_tile + quarter / 2;
#pragma unroll
  for (int i = 0; i < kFragmentsM * 2; i++) {
    uint32_t taken[2] = {};
#pragma unroll
    for (int t = 0; t < kWarpTiles; t++) {
      const float *gate = sums[i / 2][t * 2] + i % 2 * 2, *up = sums[i / 2][t * 2 + 1] + i % 2 * 2;
      const uint32_t pair = gated_pair(pack2(alpha * gate[0], alpha * gate[1]), pack2(alpha * up[0], alpha * up[1]));
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint32_t received = __shfl_sync(0xFFFFFFFFu, pair, source + j);
        if (quarter / 2 == t) taken[j] = received;
      }
    }
    const int row = first_row + i * 8 + lane / 4;
    if (row < m && tile < num_tiles)
      *reinterpret_cast<uint2*>(y + static_cast<int64_t>(row) * stride + tile * 8 + quarter % 2 * 4) = make_uint2(taken[0], taken[1]);
  }
}
#endif

extern "C" __global__ void __launch_bounds__(kThreads, 256 / kThreads)
    KERNEL(packed_gemm_wide)(scalar_t* y, const scalar_t* x, const unsigned char* __restrict__ packed, const int* chunk, int m,
                             int n, int stride, float alpha, float beta) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_launch_dependents();
  const int num_tiles = (n + 15) / 16, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int2 place = tile_of(blockIdx.x, (m + kTileM - 1) / kTileM, (num_tiles + TILES - 1) / TILES);
  const int first_tile = place.x * TILES + warp * kWarpTiles, first_m = place.y * kTileM;
  const uint32_t x_shared = shared_address(shared), w_warp = x_shared + STAGES * kXStageBytes + warp * kWarpTiles * kHalfBytes;
  const WeightCopy copy_w(packed, first_tile, num_tiles, w_warp);
  const RowCopy copy_x(x, first_m, m, K, x_shared);
  const auto start_copy = [&](int part, int index, int to_stage) {
    if (part < RowCopy::kCopies) copy_x.start_one(part, index * kHalfColumns, to_stage);
    else copy_w.start_one(part - RowCopy::kCopies, index, to_stage);
  };
  pdl_wait();
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
#pragma unroll
    for (int part = 0; part < kCopies; part++) start_copy(part, min(i, kHalves - 1), i);
    cp_async_commit();
  }
  if (is_behind_chunk(chunk, first_m)) {
    cp_async_wait_all();
    return;
  }

  // ldmatrix takes its row addresses from the lanes: rows 0-15 at one chunk, then at the next.
  const uint32_t x_lane = x_shared + lane % 16 * kXRowBytes, first_chunk = swizzle<kXChunks>(lane % 16, lane / 16) * 16;
  const auto load_x = [&](uint32_t(&fragment)[4], int index, int stage) {
    const int step = index / kFragmentsM, i = index % kFragmentsM;
    ldmatrix_x4(fragment, x_lane + stage * kXStageBytes + (first_chunk ^ step * 32) + i * 16 * kXRowBytes);
  };
  float sums[kFragmentsM][kFragmentsN][4] = {};
  uint32_t fragments[kAhead][4];
  Weights weights;
  weights.mask = held_code_mask(m);
  cp_async_wait<STAGES - 2>();
  __syncthreads();
  weights.load(w_warp), weights.unpack(0);
#pragma unroll
  for (int i = 0; i < kAhead; i++) load_x(fragments[i], i, 0);
  int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
  for (int t = 0; t < kHalves; t++) {
#pragma unroll
    for (int index = 0; index < kStageFragments; index++) {
      const int step = index / kFragmentsM, i = index % kFragmentsM;
      if (index + kAhead == kStageFragments) {
        // Behind this barrier every warp has read all of this stage: the next round may overwrite it. Values that are read after the last
        // stage are not used.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        weights.load(w_warp + stage * kWStageBytes);
      }
      // Copies are spread over the stage, or the tensor cores would wait for them. Past the end the last half slice is copied, and not used.
#pragma unroll
      for (int part = index; part < kCopies; part += kCopyTurns)
        if (index < kCopyTurns) start_copy(part, min(t + STAGES - 1, kHalves - 1), free_stage);
      if (index == kCopyTurns) {
        cp_async_commit();
        free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
      }
      weights.multiply(sums[i], fragments[i % kAhead], step, i % 2 == 1);
      load_x(fragments[i % kAhead], (index + kAhead) % kStageFragments, stage);
      if (i == kFragmentsM - 2) weights.unpack((step + 1) % kSteps);
    }
  }
  cp_async_wait_all();
#ifdef GATED
  store_gated(y, sums, first_m, first_tile, num_tiles, m, stride, alpha);
#else
  store_sums(y, sums, first_m, m, n, stride, alpha, beta, [&](int fragment) {
    const int tile = first_tile + fragment / 2;
    return tile < num_tiles ? tile_row(tile, fragment % 2 * 8, n) : n;
  });
#endif
}
