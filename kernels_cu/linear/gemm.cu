// Dense product of many rows with tensor cores: it defines the bits of a chunk's products, and computes those for which cuBLASLt has no
// algorithm with these bits, or all of them where that library is absent.
//
//   formula   y[m, n] = round(round(alpha * sum_k x[m, k] w[n, k]) + beta * y[m, n]);  y is not read if beta is 0
//   operands  y (M, N) scalar_t, its rows `stride` elements apart; x (M, K) scalar_t row-major; w (N, K) scalar_t row-major;
//             chunk as in chunk_rows.cuh; 16-byte aligned. M any, N a multiple of 16, K a multiple of 32, stride a multiple of 8
//   constants TILE_N: columns of y a block: 64, 128 or 256. TILE_K: elements of k a stage: 32 or 64. STAGES: tiles of x
//             and w in flight, at least 3
//   launch    grid ceil(M / 128) * ceil(N / TILE_N), block TILE_N, shared (128 + TILE_N) * TILE_K * 2 * STAGES bytes
//   numerics  fp32 accumulation in ascending k; the product is rounded to scalar_t before y is added, as in cuBLASLt,
//             whose algorithms of sm_90 that do not split the sum give the same bits. A row's bits depend on its x, w,
//             alpha, beta only: not on M, not on TILE_N, TILE_K or STAGES
//   oracle    reference/ops.py project_residual without bias (alpha = the residual scale, beta = 1)
//   source    original; the shape is that of CUTLASS's sm_80 kernels (https://github.com/NVIDIA/cutlass)
//   layout    a warp has 64 x 64 of the tile: an operand fragment serves 4 or 8 mma, and the fragments of the next k-step
//             fit beside 128 sums. The 16-byte chunks of a tile row are permuted by its row number, so that neither
//             cp.async nor ldmatrix meets a bank conflict. Tiles are walked in bands of kBand rows of tiles: the blocks
//             that run together share x and w in L2.
#if !defined(TILE_N) || !defined(TILE_K) || !defined(STAGES)
#error "a constant is not defined"
#endif
#include "chunk_rows.cuh"
#include "gemm_tile.cuh"
#include "mma.cuh"

constexpr int kWarpTile = 64, kWarpsN = TILE_N / kWarpTile, kThreads = kTileM / kWarpTile * kWarpsN * 32;
constexpr int kFragmentsM = kWarpTile / 16, kFragmentsN = kWarpTile / 8;
constexpr int kChunks = TILE_K / 8;  // chunks of 16 bytes in a tile row
constexpr int kRowBytes = TILE_K * 2, kStageBytes = (kTileM + TILE_N) * kRowBytes;
constexpr int kSteps = TILE_K / 16;
static_assert(TILE_N == 64 || TILE_N == 128 || TILE_N == 256, "TILE_N");
static_assert(TILE_K == 32 || TILE_K == 64, "TILE_K");
static_assert(STAGES >= 3, "STAGES");

// A warp's operands of one k-step of 16.
struct Fragments {
  uint32_t x[kFragmentsM][4], w[kFragmentsN / 2][4];  // w: two 8-column fragments a load

  // Loads a k-step. `x_row` and `w_row`: addresses of the lane's first row of either tile in shared memory; `x_chunk` and `w_chunk`: the
  // place of the k-step's chunk in those rows.
  DEVICE void load(uint32_t x_row, uint32_t w_row, int x_chunk, int w_chunk) {
#pragma unroll
    for (int i = 0; i < kFragmentsM; i++) ldmatrix_x4(x[i], x_row + i * 16 * kRowBytes + x_chunk * 16);
#pragma unroll
    for (int j = 0; j < kFragmentsN / 2; j++) ldmatrix_x4(w[j], w_row + j * 16 * kRowBytes + w_chunk * 16);
  }

  DEVICE void multiply(float (&sums)[kFragmentsM][kFragmentsN][4]) const {
#pragma unroll
    for (int i = 0; i < kFragmentsM; i++)
#pragma unroll
      for (int j = 0; j < kFragmentsN; j++) {
        // The columns go back and forth: the fragment used last is used first again, which saves register reads.
        const int n = i & 1 ? kFragmentsN - 1 - j : j;
        const uint32_t b[2] = {w[n / 2][n % 2 * 2], w[n / 2][n % 2 * 2 + 1]};
        mma(sums[i][n], x[i], b);
      }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 256 / kThreads)
    KERNEL(gemm)(scalar_t* y, const scalar_t* x, const scalar_t* __restrict__ w, const int* chunk,
                 int m, int n, int k, int stride, float alpha, float beta) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_launch_dependents();
  const uint32_t x_shared = shared_address(shared), w_shared = x_shared + kTileM * kRowBytes;
  const int2 tile = tile_of(blockIdx.x, (m + kTileM - 1) / kTileM, (n + TILE_N - 1) / TILE_N);
  const int first_n = tile.x * TILE_N, first_m = tile.y * kTileM;
  const TileCopy<kTileM, kChunks, kThreads, kStageBytes> copy_x(x, first_m, m, k, x_shared);
  const TileCopy<TILE_N, kChunks, kThreads, kStageBytes> copy_w(w, first_n, n, k, w_shared);
  const int num_tiles = (k + TILE_K - 1) / TILE_K;
  pdl_wait();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; stage++) {
    if (stage < num_tiles) {
      copy_x.start(stage * TILE_K, stage);
      copy_w.start(stage * TILE_K, stage);
    }
    cp_async_commit();
  }
  if (is_behind_chunk(chunk, first_m)) {
    cp_async_wait_all();
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / kWarpsN * kWarpTile, warp_n = warp % kWarpsN * kWarpTile;
  // ldmatrix takes its row addresses from the lanes: for x rows 0-15 at one chunk, then at the next;
  // for w rows 0-7 at both chunks, then rows 8-15.
  const int x_lane = lane % 16, x_half = lane / 16;
  const int w_lane = lane % 8 + lane / 16 * 8, w_half = lane / 8 % 2;
  const uint32_t x_row = x_shared + (warp_m + x_lane) * kRowBytes, w_row = w_shared + (warp_n + w_lane) * kRowBytes;

  float sums[kFragmentsM][kFragmentsN][4] = {};
  Fragments fragments[2];
  cp_async_wait<STAGES - 2>();
  __syncthreads();
  fragments[0].load(x_row, w_row, swizzle<kChunks>(x_lane, x_half), swizzle<kChunks>(w_lane, w_half));
  int stage = 0, free_stage = STAGES - 1;
  for (int t = 0; t < num_tiles; t++) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const int next = (step + 1) % kSteps;
      if (next == 0) {
        // Behind this barrier every warp has read all of this stage: the next round may overwrite it.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
      // After the last tile this reads a stage that nobody fills; its fragments are not used.
      fragments[(step + 1) % 2].load(x_row + stage * kStageBytes, w_row + stage * kStageBytes,
                                     swizzle<kChunks>(x_lane, next * 2 + x_half), swizzle<kChunks>(w_lane, next * 2 + w_half));
      if (step == 0) {
        const int ahead = t + STAGES - 1;
        if (ahead < num_tiles) {
          copy_x.start(ahead * TILE_K, free_stage);
          copy_w.start(ahead * TILE_K, free_stage);
        }
        cp_async_commit();
        free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
      }
      fragments[step % 2].multiply(sums);
    }
  }
  const int column = first_n + warp_n;
  store_sums(y, sums, first_m + warp_m, m, n, stride, alpha, beta, [&](int fragment) { return column + fragment * 8; });
}
