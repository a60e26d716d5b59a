// Parts of the dense products of many rows: the tile that a block takes, copies of its rows to shared memory, the store of its sums.
#pragma once
#include "copy.cuh"
#include "types.cuh"

constexpr int kTileM = 128, kBand = 16;   // rows of a tile of y; row tiles in a band

// Returns the place of chunk `chunk` (16 bytes) in its tile row of CHUNKS chunks. The same chunk of 8 rows then covers all 32 banks.
template <int CHUNKS>
DEVICE int swizzle(int row, int chunk) {
  static_assert(CHUNKS == 4 || CHUNKS == 8, "CHUNKS");
  return chunk ^ (CHUNKS == 8 ? row & 7 : (row >> 1) & 3);
}

// Returns the column tile (x) and the row tile (y) of a block. Blocks go down a band of kBand row tiles, then on to the next column of
// tiles.
DEVICE int2 tile_of(int block, int tiles_m, int tiles_n) {
  const int band = block / (kBand * tiles_n), first = band * kBand;
  const int height = min(kBand, tiles_m - first), index = block - first * tiles_n;
  return make_int2(index / height, first + index % height);
}

// One thread's share of copying a tile of ROWS x 8 CHUNKS elements of a matrix to shared memory: the same chunk of every kStride-th row.
template <int ROWS, int CHUNKS, int THREADS, int STAGE_BYTES>
struct TileCopy {
  static constexpr int kStride = THREADS / CHUNKS, kCopies = ROWS / kStride, kRowBytes = CHUNKS * 16;
  const scalar_t* source;
  int rows_left, k_left, step;
  uint32_t target;

  DEVICE TileCopy(const scalar_t* matrix, int first, int num_rows, int k, uint32_t shared) {
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    source = matrix + (int64_t)(first + row) * k + chunk * 8;
    rows_left = num_rows - first - row;
    k_left = k - chunk * 8;
    step = kStride * k;
    target = shared + row * kRowBytes + swizzle<CHUNKS>(row, chunk) * 16;
  }

  // Starts the copy of the tile at column k0; what lies outside the matrix becomes zero and is not read.
  DEVICE void start(int k0, int stage) const {
#pragma unroll
    for (int i = 0; i < kCopies; i++) start_one(i, k0, stage);
  }
  // Starts only the i-th of the thread's kCopies copies.
  DEVICE void start_one(int i, int k0, int stage) const {
    const bool inside = i * kStride < rows_left && k0 < k_left;
    cp_async16(target + stage * STAGE_BYTES + i * kStride * kRowBytes, source + (i * step + k0), inside ? 16 : 0);
  }
};

// Transposes over the four lanes of a quad: values[j] of lane t becomes values[t] of lane j.
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

// Scales, adds and stores one warp's sums, rows from `row` on. A quad transposes four fragments, so that a lane owns 16 bytes of a
// row. `column_of(fragment)` returns the first of a fragment's eight columns; those are stored if it lies below n.
template <int FRAGMENTS_M, int FRAGMENTS_N, class ColumnOf>
DEVICE void store_sums(scalar_t* y, float (&sums)[FRAGMENTS_M][FRAGMENTS_N][4], int row, int m, int n, int stride, float alpha,
                       float beta, ColumnOf column_of) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < FRAGMENTS_M * 2; i++) {
    const int y_row = row + i * 8 + lane / 4;
#pragma unroll
    for (int j = 0; j < FRAGMENTS_N; j += 4) {
      const int y_column = column_of(j + lane % 4);
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
