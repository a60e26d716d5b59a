// Reads memory as fast as the device can: the yardstick for kernels that stream weights.
//
//   formula   out[w] = XOR of the 32-bit words that warp w has read; XOR over out = XOR over data
//   operands  out (grid * 8) uint32; data (num_tiles, 2048, 4) uint32, 16-byte aligned
//   launch    any grid, block 256, no shared memory
//   numerics  integers, exact
//   oracle    numpy.bitwise_xor.reduce
//   source    original
//   layout    a tile is 32 KiB: 8 independent loads of 16 bytes for each thread; the 32 of a warp lie side by side
#include "copy.cuh"

constexpr int kThreads = 256;
constexpr int kLoads = 8;

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(read_bandwidth)(uint32_t* __restrict__ out, const uint4* __restrict__ data, int num_tiles) {
  pdl_begin();
  uint32_t found = 0;
  for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const uint4* source = data + static_cast<int64_t>(tile) * (kLoads * kThreads) + threadIdx.x;
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) v[i] = load16_streamed(source + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; i++) found ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) found ^= __shfl_xor_sync(0xffffffffu, found, distance);
  if (threadIdx.x % 32 == 0) out[(blockIdx.x * kThreads + threadIdx.x) / 32] = found;
}
