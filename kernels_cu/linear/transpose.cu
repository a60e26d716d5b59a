// The transpose of a matrix of 16-bit elements.
//
//   formula   out[c, r] = in[r, c]
//   operands  out (C, R) scalar_t; in (R, C) scalar_t; R and C even
//   launch    grid (ceil(C / 64), ceil(R / 64)), block 256, no shared memory of its own
//   numerics  none: elements are copied
//   oracle    numpy.transpose
//   source    original
//   layout    a block turns 64 by 64 elements in shared memory, so that a warp reads and writes runs of 128 bytes; an odd number of
//             words in a row of it keeps the lanes that read a column apart
#include "copy.cuh"

constexpr int kTile = 64, kStride = kTile + 2;

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(transpose)(uint16_t* __restrict__ out, const uint16_t* in, int R, int C) {
  pdl_begin();
  __shared__ __align__(4) uint16_t tile[kTile * kStride];
  const int warp = threadIdx.x / 32, pair = threadIdx.x % 32 * 2;
  const int row = blockIdx.y * kTile, column = blockIdx.x * kTile;
#pragma unroll
  for (int i = warp; i < kTile; i += 8)
    if (row + i < R && column + pair < C)
      *reinterpret_cast<uint32_t*>(tile + i * kStride + pair) =
          *reinterpret_cast<const uint32_t*>(in + static_cast<int64_t>(row + i) * C + column + pair);
  __syncthreads();
#pragma unroll
  for (int i = warp; i < kTile; i += 8)
    if (column + i < C && row + pair < R) {
      const uint32_t low = tile[pair * kStride + i], high = tile[(pair + 1) * kStride + i];
      *reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(column + i) * R + row + pair) = low | high << 16;
    }
}
