// Dense product of a prefill chunk with a packed weight, unpacked in registers, in blocks of 64 rows: where larger ones would leave
// multiprocessors without work.
//
//   formula   y[m, n] = round(round(alpha * sum_k x[m, k] w[n, k]) + beta * y[m, n]); y is not read if beta is 0;
//             w[n, k] = round(scale[n, k / G] * (u[n, k] - zero[n, k / G])), with minimums round(scale * u - minimum)
//   operands  y (M, N) scalar_t, its rows `stride` elements apart; x (M, K) scalar_t row-major, 16-byte aligned; packed as
//             packed_layout.cuh describes; chunk as in chunk_rows.cuh
//   constants LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head. HEAD_DIM: of qkv only, elements of a head.
//             IN_FEATURES: K, a multiple of 128. WEIGHT_BITS: 2, 4 or 8. RUNS: of the layout, 8 or 1. SCALE_GROUP: columns that
//             share a scale. ZEROS: what is beside the scales, as in packed_layout.cuh. TILES: packed tiles of a block.
//             TILE_WARPS: warps that share a tile and divide its rows of x: 1 or 2. STAGES: slices of x and w in shared memory,
//             at least 3
//   launch    grid (ceil(N / 16 / TILES), ceil(M / 64)), block 32 * TILES * TILE_WARPS, shared
//             STAGES * (16384 + TILES * bytes of a unit)
//   numerics  as linear/gemm.cu after `dequantize` of repack.cu, bit for bit: a weight is rounded once, sums are fp32 in
//             ascending k, 16 at a time; the product is rounded to scalar_t before y is added
//   oracle    reference/ops.py project_residual without bias (alpha = the residual scale, beta = 1)
//   source    original; layout of the mma fragments as in the PTX manual, section 9.7.14
//   layout    a chunk of few rows costs what its weights cost: unpacked in memory, codes of 4 bits are eight times as many bytes,
//             written and read. A warp has one tile (operand A) and all of the block's rows of x (operand B), so that a weight is
//             unpacked once; lanes of a quad exchange codes, which are stored for another order of k (natural_order).
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || \
    !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(TILES) || !defined(TILE_WARPS) || !defined(STAGES)
#error "a constant is not defined"
#endif
#include "chunk_rows.cuh"
#include "packed_unpack.cuh"

constexpr int kWarps = TILES * TILE_WARPS, kThreads = kWarps * 32;
constexpr int kTokens = 64;                                     // rows of x of a block
constexpr int kTokenTiles = kTokens / 8 / TILE_WARPS;           // token tiles of a warp, 8 tokens each
constexpr int kRowBytes = 128, kPanelBytes = kTokens * kRowBytes;   // a panel has 64 columns of x
constexpr int kXBytes = 2 * kPanelBytes, kStageBytes = kXBytes + TILES * kUnitBytes;
constexpr int kAhead = STAGES - 1;                                 // stages on their way while one is read
constexpr int kHalfSteps = 4;                                      // steps of 16 k in half a slice
static_assert(TILE_WARPS == 1 || TILE_WARPS == 2, "TILE_WARPS");
static_assert(STAGES >= 3, "STAGES");

// Returns where chunk `chunk` (16 bytes) of a row of x lies in a stage, in panels of 64 columns: the same chunk of eight rows covers all banks.
DEVICE int token_offset(int row, int chunk) {
  return chunk / 8 * kPanelBytes + row * kRowBytes + (chunk % 8 ^ row & 7) * 16;
}

// A warp's share of copying its tile: neighbouring chunks of 16 bytes in each round.
struct WeightCopy {
  static constexpr int kChunks = kUnitBytes / 16, kStride = 32 * TILE_WARPS;
  static constexpr int kPadding = kRunBytes - kRunSlices * kUnitBytes;
  const unsigned char* source;
  int first;
  uint32_t target;

  DEVICE WeightCopy(const unsigned char* packed, int tile, uint32_t shared) {
    const int warp = threadIdx.x / 32;
    first = warp % TILE_WARPS * 32 + threadIdx.x % 32;
    source = packed + tile * kTileBytes + first * 16;
    target = shared + kXBytes + warp / TILE_WARPS * kUnitBytes + first * 16;
  }
  DEVICE void start(int slice, int stage) const {
    const unsigned char* const from = source + (slice * kUnitBytes + slice / kRunSlices * kPadding);
    const uint32_t to = target + stage * kStageBytes;
#pragma unroll
    for (int i = 0; i < kChunks; i += kStride)
      if (first + i < kChunks) cp_async16_lines(to + i * 16, from + i * 16);
  }
};

// A thread's share of copying rows of x: the same chunk of every kStride-th row. In place of rows that do not exist it copies the last one.
struct TokenCopy {
  static constexpr int kStride = kThreads / 16, kCopies = kTokens / kStride;
  const scalar_t* source[kCopies];
  uint32_t target;

  DEVICE TokenCopy(const scalar_t* x, int first_token, int m, uint32_t shared) {
    const int row = threadIdx.x / 16, chunk = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < kCopies; i++)
      source[i] = x + static_cast<int64_t>(min(first_token + row + i * kStride, m - 1)) * K + chunk * 8;
    target = shared + token_offset(row, chunk);
  }
  DEVICE void start(int slice, int stage) const {
#pragma unroll
    for (int i = 0; i < kCopies; i++)
      cp_async16(target + stage * kStageBytes + i * kStride * kRowBytes, source[i] + slice * kSliceColumns);
  }
};

// Adds the products of one slice to a warp's sums: its tile's unit at `unit` times its rows of x, whose stage begins at `x`.
DEVICE void add_slice(float (&sums)[kTokenTiles * 4], uint32_t unit, uint32_t x, uint32_t mask) {
  const int warp_token = threadIdx.x / 32 % TILE_WARPS * kTokenTiles * 8, lane = threadIdx.x % 32;
  // ldmatrix takes its row addresses from the lanes: tokens 0-7 at both chunks of 16 k, then tokens 8-15.
  const uint32_t first = token_offset(warp_token + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const auto load_tokens = [&](uint32_t (&b)[kTokenTiles / 2][4], int step) {
    const uint32_t rows = x + (first ^ step % kHalfSteps * 32) + step / kHalfSteps * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kTokenTiles / 2; i++) ldmatrix_x4(b[i], rows + i * 16 * kRowBytes);
  };
  uint32_t b[2][kTokenTiles / 2][4];
  HalfSlice codes;
  load_tokens(b[0], 0);
#pragma unroll
  for (int step = 0; step < 2 * kHalfSteps; step++) {
    if (step % kHalfSteps == 0) codes.load(unit, step / kHalfSteps), codes.order();
    if (step + 1 < 2 * kHalfSteps) load_tokens(b[(step + 1) % 2], step + 1);
    uint32_t a[4];
    codes.unpack(a, step % kHalfSteps, mask);
#pragma unroll
    for (int t = 0; t < kTokenTiles; t++)
      mma(reinterpret_cast<float(&)[4]>(sums[t * 4]), a, {b[step % 2][t / 2][t % 2 * 2], b[step % 2][t / 2][t % 2 * 2 + 1]});
  }
}

// Scales, adds and stores a warp's sums of one tile, in fragments of 8 rows of y.
DEVICE void store(scalar_t* y, const float (&sums)[kTokenTiles * 4], int tile, int token, int m, int n, int stride, float alpha,
                  float beta) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTokenTiles; t++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int row = tile_row(tile, lane / 4 + c / 2 * 8, n), y_row = token + t * 8 + lane % 4 * 2 + c % 2;
      if (y_row >= m || row >= n) continue;
      scalar_t* const place = y + static_cast<int64_t>(y_row) * stride + row;
      const scalar_t product = from_float(alpha * sums[t * 4 + c]);
      *place = beta == 0.f ? product : from_float(fmaf(beta, to_float(*place), to_float(product)));
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(packed_gemm)(scalar_t* y, const scalar_t* x, const unsigned char* __restrict__ packed, const int* chunk, int m, int n,
                        int stride, float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char shared[];
  pdl_launch_dependents();
  const int num_tiles = (n + 15) / 16, first_token = blockIdx.y * kTokens;
  const int warp = threadIdx.x / 32, tile = blockIdx.x * TILES + warp / TILE_WARPS;
  const uint32_t stages = shared_address(shared);
  const WeightCopy weights(packed, min(tile, num_tiles - 1), stages);
  const TokenCopy tokens(x, first_token, m, stages);
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (i < kSlices) weights.start(i, i);
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kAhead; i++) {
    if (i < kSlices) tokens.start(i, i);
    cp_async_commit();
  }
  if (is_behind_chunk(chunk, first_token)) {
    cp_async_wait_all();
    return;
  }

  float sums[kTokenTiles * 4] = {};
  const uint32_t mask = held_code_mask(m);
  int stage = 0, free_stage = kAhead;
#pragma unroll 1
  for (int slice = 0; slice < kSlices; slice++) {
    // Behind this barrier every warp has read the free stage.
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    if (slice + kAhead < kSlices) weights.start(slice + kAhead, free_stage), tokens.start(slice + kAhead, free_stage);
    cp_async_commit();
    const uint32_t place = stages + stage * kStageBytes;
    add_slice(sums, place + kXBytes + warp / TILE_WARPS * kUnitBytes, place, mask);
    stage = stage + 1 == STAGES ? 0 : stage + 1, free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
  }
  if (tile < num_tiles)
    store(y, sums, tile, first_token + warp % TILE_WARPS * kTokenTiles * 8, m, n, stride, alpha, beta);
}
