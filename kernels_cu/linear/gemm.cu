// Dense product of many rows with tensor cores: the stand-in for cuBLASLt where that library is absent.
//
//   formula   y[m, n] = round(round(alpha * sum_k x[m, k] w[n, k]) + beta * y[m, n]);  y is not read if beta is 0
//   operands  y (M, N) scalar_t, its rows `stride` elements apart; x (M, K) scalar_t row-major; w (N, K) scalar_t row-major;
//             16-byte aligned. M any, N a multiple of 16, K a multiple of 32, stride a multiple of 8
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
#include "copy.cuh"
#include "mma.cuh"
#include "types.cuh"

constexpr int kTileM = 128, kBand = 16;
constexpr int kWarpTile = 64, kWarpsN = TILE_N / kWarpTile, kThreads = kTileM / kWarpTile * kWarpsN * 32;
constexpr int kFragmentsM = kWarpTile / 16, kFragmentsN = kWarpTile / 8;
constexpr int kChunks = TILE_K / 8;  // of 16 bytes in a tile row
constexpr int kRowBytes = TILE_K * 2, kStageBytes = (kTileM + TILE_N) * kRowBytes;
constexpr int kSteps = TILE_K / 16;
static_assert(TILE_N == 64 || TILE_N == 128 || TILE_N == 256, "TILE_N");
static_assert(TILE_K == 32 || TILE_K == 64, "TILE_K");
static_assert(STAGES >= 3, "STAGES");

// Where chunk `chunk` of a tile row lies in that row. 8 rows at one chunk then cover all 32 banks.
DEVICE int swizzle(int row, int chunk) { return chunk ^ (kChunks == 8 ? row & 7 : (row >> 1) & 3); }

// Column tile and row tile of a block: down a band of kBand row tiles, then on to the next column of tiles.
DEVICE int2 tile_of(int block, int tiles_m, int tiles_n) {
  const int band = block / (kBand * tiles_n), first = band * kBand;
  const int height = min(kBand, tiles_m - first), index = block - first * tiles_n;
  return make_int2(index / height, first + index % height);
}

// One thread's share of copying ROWS x TILE_K of a matrix to shared memory: the same chunk of every kStride-th row.
template <int ROWS>
struct TileCopy {
  static constexpr int kStride = kThreads / kChunks, kCopies = ROWS / kStride;
  const scalar_t* source;
  int rows_left, k_left, step;
  uint32_t target;

  DEVICE TileCopy(const scalar_t* matrix, int first, int num_rows, int k, uint32_t shared) {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    source = matrix + (int64_t)(first + row) * k + chunk * 8;
    rows_left = num_rows - first - row;
    k_left = k - chunk * 8;
    step = kStride * k;
    target = shared + row * kRowBytes + swizzle(row, chunk) * 16;
  }

  // Starts the copy of the tile at column k0; what lies outside the matrix becomes zero and is not read.
  DEVICE void start(int k0, int stage) const {
#pragma unroll
    for (int i = 0; i < kCopies; i++) {
      const bool inside = i * kStride < rows_left && k0 < k_left;
      cp_async16(target + stage * kStageBytes + i * kStride * kRowBytes, source + (i * step + k0), inside ? 16 : 0);
    }
  }
};

// values[j] of lane t becomes values[t] of lane j, over the four lanes of a quad.
DEVICE void transpose_quad(uint32_t (&values)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, odd ? values[j] : values[j + 1], 1);
    (odd ? values[j] : values[j + 1]) = received;
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, upper ? values[j] : values[j + 2], 2);
    (upper ? values[j] : values[j + 2]) = received;
  }
}

struct Fragments {
  uint32_t x[kFragmentsM][4], w[kFragmentsN / 2][4];  // w: two 8-column fragments a load

  // `x_row` and `w_row`: this lane's first row of either tile in shared memory; `chunk` by mma k-step.
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
        // Back and forth: the fragment used last is used first again, which saves register reads.
        const int n = i & 1 ? kFragmentsN - 1 - j : j;
        const uint32_t b[2] = {w[n / 2][n % 2 * 2], w[n / 2][n % 2 * 2 + 1]};
        mma(sums[i][n], x[i], b);
      }
  }
};

// Scales, adds and stores one warp's sums. A quad transposes four fragments, so that a lane owns 16 bytes of a row.
DEVICE void store(scalar_t* y, float (&sums)[kFragmentsM][kFragmentsN][4], int row, int column, int m, int n,
                  int stride, float alpha, float beta) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kFragmentsM * 2; i++) {
    const int y_row = row + i * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < kFragmentsN; j += 4) {
      const int y_column = column + (j + lane % 4) * 8;
      const bool inside = y_row < m && y_column < n;
      scalar_t* place = y + (inside ? (int64_t)y_row * stride + y_column : 0);
      uint32_t words[4] = {0, 0, 0, 0};
      if (beta != 0.f) {
        if (inside) {
          const uint4 old = load16(place);
          words[0] = old.x, words[1] = old.y, words[2] = old.z, words[3] = old.w;
        }
        transpose_quad(words);
      }
#pragma unroll
      for (int f = 0; f < 4; f++) {
        const float* pair = sums[i / 2][j + f] + i % 2 * 2;
        uint32_t product = pack2(alpha * pair[0], alpha * pair[1]);
        if (beta != 0.f) {
          const float2 value = unpack2(product), old = unpack2(words[f]);
          product = pack2(fmaf(beta, old.x, value.x), fmaf(beta, old.y, value.y));
        }
        words[f] = product;
      }
      transpose_quad(words);
      if (inside) store16(place, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 256 / kThreads)
    KERNEL(gemm)(scalar_t* y, const scalar_t* x, const scalar_t* __restrict__ w, int m, int n,
                 int k, int stride, float alpha, float beta) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_launch_dependents();
  const uint32_t x_shared = shared_address(shared), w_shared = x_shared + kTileM * kRowBytes;
  const int2 tile = tile_of(blockIdx.x, (m + kTileM - 1) / kTileM, (n + TILE_N - 1) / TILE_N);
  const int first_n = tile.x * TILE_N, first_m = tile.y * kTileM;
  const TileCopy<kTileM> copy_x(x, first_m, m, k, x_shared);
  const TileCopy<TILE_N> copy_w(w, first_n, n, k, w_shared);
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
  fragments[0].load(x_row, w_row, swizzle(x_lane, x_half), swizzle(w_lane, w_half));
  int stage = 0, free_stage = STAGES - 1;
  for (int t = 0; t < num_tiles; t++) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const int next = (step + 1) % kSteps;
      if (next == 0) {
        // Every warp has read all of this stage when it passes: the next round may overwrite it.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
      }
      // After the last tile this reads a stage that nobody fills; its fragments are not used.
      fragments[(step + 1) % 2].load(x_row + stage * kStageBytes, w_row + stage * kStageBytes,
                                     swizzle(x_lane, next * 2 + x_half), swizzle(w_lane, next * 2 + w_half));
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
  store(y, sums, first_m + warp_m, first_n + warp_n, m, n, stride, alpha, beta);
}
