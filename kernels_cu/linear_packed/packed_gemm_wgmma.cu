// Dense product of a short prefill chunk with a weight of 4 bits on sm_90, unpacked in shared memory before the tensor cores.
//
//   formula   as packed_gemm.cu
//   operands  y (M, N) scalar_t, its rows `stride` elements apart; x (M, K) scalar_t row-major, as a tensor map in boxes of 64
//             rows and 64 columns; packed as packed_layout.cuh describes
//   constants LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head. HEAD_DIM: of qkv only, elements of a head.
//             IN_FEATURES: K, a multiple of 128. WEIGHT_BITS: 4. RUNS: of the layout, 8 or 1. SCALE_GROUP: columns that share
//             a scale: 32, 64 or 128. ZEROS: 1 has zero points beside the scales. TILES: packed tiles of a block: 4, 8 or 16.
//             STAGES: slices of x and of codes in shared memory, at least 2. UNPACKED: slices of the weight in 16 bits there,
//             at least 2
//   launch    grid (ceil(N / 16 / TILES), ceil(M / 64)), block 416, with 16 TILES 544, shared UNPACKED * TILES * 4096 + STAGES * (16384 + TILES *
//             bytes of a unit) + 512
//   numerics  those of packed_gemm.cu, bit for bit
//   oracle    reference/ops.py project_residual without bias (alpha = the residual scale, beta = 1)
//   source    original
//   layout    four warps, or eight, multiply (operand A: 64 rows of x, operand B: rows of w), eight unpack for them, one copies for
//             all. A lane has eight neighbouring k of a row, which are a chunk of 16 bytes as wgmma reads it.
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || \
    !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(TILES) || !defined(STAGES) || !defined(UNPACKED)
#error "a constant is not defined"
#endif
#include "mbarrier.cuh"
#include "packed_unpack.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kRowBytes = 128;                                 // 64 columns of a row: a panel's
constexpr int kTokens = 64, kXPanel = kTokens * kRowBytes, kXBytes = 2 * kXPanel;
constexpr int kRows = TILES * 16, kWPanel = kRows * kRowBytes, kWBytes = 2 * kWPanel;
constexpr int kCodes = TILES * kUnitBytes;
constexpr int kColumns = kRows < 128 ? kRows : 128;            // of y that four warps compute together
constexpr int kMultiplyWarps = kRows / kColumns * 4, kUnpackWarps = 8, kThreads = (kMultiplyWarps + kUnpackWarps + 1) * 32;
static_assert(TILES == 4 || TILES == 8 || TILES == 16, "TILES");
static_assert(STAGES >= 2 && UNPACKED >= 2 && (STAGES * 4 + UNPACKED * 2) * 8 <= 512, "STAGES or UNPACKED");

// Slices that one part of the block writes and another reads, in turn: a slice is full, or read, when its barrier says so.
template <int COUNT>
struct Ring {
  uint32_t barriers;
  int place = 0, parity = 0;

  DEVICE void prepare(int writers, int readers) const {
    for (int i = 0; i < COUNT; i++) mbarrier_init(full(i), writers), mbarrier_init(read(i), readers);
  }
  DEVICE uint32_t full(int i) const { return barriers + i * 16; }
  DEVICE uint32_t read(int i) const { return barriers + i * 16 + 8; }
  DEVICE uint32_t full() const { return full(place); }
  DEVICE uint32_t read() const { return read(place); }
  DEVICE void wait_full() const { mbarrier_wait(full(), parity); }
  DEVICE void wait_read() const { mbarrier_wait(read(), parity ^ 1); }   // passes at once the first time
  DEVICE void next() {
    if (++place == COUNT) place = 0, parity ^= 1;
  }
};

// Where a block's slices lie in shared memory, and its rings.
struct Block {
  uint32_t shared;
  Ring<UNPACKED> unpacked;
  Ring<STAGES> x, codes;

  DEVICE explicit Block(uint32_t memory) : shared(memory) {
    x.barriers = memory + UNPACKED * kWBytes + STAGES * (kXBytes + kCodes);
    codes.barriers = x.barriers + STAGES * 16, unpacked.barriers = codes.barriers + STAGES * 16;
  }
  DEVICE uint32_t w_place() const { return shared + unpacked.place * kWBytes; }
  DEVICE uint32_t x_place() const { return shared + UNPACKED * kWBytes + x.place * kXBytes; }
  DEVICE uint32_t code_place() const { return shared + UNPACKED * kWBytes + STAGES * kXBytes + codes.place * kCodes; }
};

// All copies, by one warp: a lane copies the units of one tile, two lanes the panels of x.
DEVICE void copy_all(Block block, const TensorMap& x, const unsigned char* packed, int num_tiles) {
  constexpr int kPadding = kRunBytes - kRunSlices * kUnitBytes, kFirst = STAGES < kSlices ? STAGES : kSlices;
  const int lane = threadIdx.x % 32;
  const unsigned char* const tile = packed + min(static_cast<int>(blockIdx.x) * TILES + lane, num_tiles - 1) * kTileBytes;
  const auto copy_codes = [&](int slice) {
    block.codes.wait_read();
    if (lane == 0) mbarrier_arrive_expect(block.codes.full(), kCodes);
    __syncwarp();
    const unsigned char* const unit = tile + (slice * kUnitBytes + slice / kRunSlices * kPadding);
    if (lane < TILES) copy_bytes(block.code_place() + lane * kUnitBytes, unit, kUnitBytes, block.codes.full());
    block.codes.next();
  };
  for (int slice = 0; slice < kFirst; slice++) copy_codes(slice);
  pdl_wait();
  for (int slice = 0; slice < kSlices; slice++) {
    block.x.wait_read();
    if (lane == 0) mbarrier_arrive_expect(block.x.full(), kXBytes);
    __syncwarp();
    if (lane < 2)
      copy_box(block.x_place() + lane * kXPanel, x, blockIdx.y * kTokens, slice * kSliceColumns + lane * 64, block.x.full());
    block.x.next();
    if (slice + kFirst < kSlices) copy_codes(slice + kFirst);
  }
}

// Codes to weights, by eight warps: half a unit at a time.
DEVICE void unpack_all(Block block) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - kMultiplyWarps, row = lane / 4, quarter = lane % 4;
#pragma unroll 1
  for (int slice = 0; slice < kSlices; slice++) {
    block.codes.wait_full();
    block.unpacked.wait_read();
#pragma unroll
    for (int item = 0; item < TILES * 2 / kUnpackWarps; item++) {
      const int tile = (item * kUnpackWarps + warp) / 2, half = warp % 2;
      const uint32_t unit = block.code_place() + tile * kUnitBytes;
      const uint4 codes = load_shared(unit + half * 512 + lane * 16);
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      const uint32_t rows = block.w_place() + half * kWPanel + (tile * 16 + row) * kRowBytes;
      Group group;
#pragma unroll
      for (int b = 0; b < 2; b++) {   // of 32 columns
        if (b == 0 || SCALE_GROUP == 32) group.load(unit, (half * 64 + b * 32) / SCALE_GROUP);
        uint32_t first[4], second[4];
        group.unpack(first, words[b * 2]), group.unpack(second, words[b * 2 + 1]);
        const uint32_t place = rows + (b * 4 + quarter ^ row) * 16;
        store_shared(place, make_uint4(first[0], first[2], second[0], second[2]));
        store_shared(place + 8 * kRowBytes, make_uint4(first[1], first[3], second[1], second[3]));
      }
    }
    async_proxy_fence();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(block.codes.read()), mbarrier_arrive(block.unpacked.full());
    block.codes.next(), block.unpacked.next();
  }
}

// The sums of 64 rows of x and kColumns rows of the weight, by four warps.
DEVICE void multiply_all(float (&sums)[kColumns / 2], Block block) {
  const int first = threadIdx.x / 128 * kColumns;   // of the block's rows
#pragma unroll 1
  for (int slice = 0; slice < kSlices; slice++) {
    const uint32_t x_read = block.x.read(), w_read = block.unpacked.read();
    block.unpacked.wait_full();
    block.x.wait_full();
    const uint64_t x = wgmma_descriptor<kRowBytes>(block.x_place(), 0);
    const uint64_t w = wgmma_descriptor<kRowBytes>(block.w_place() + first * kRowBytes, 0);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; step++)
      wgmma_shared(sums, x + descriptor_step(step / 4 * kXPanel + step % 4 * 32),
                   w + descriptor_step(step / 4 * kWPanel + step % 4 * 32), true);
    wgmma_commit();
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(x_read), mbarrier_arrive(w_read);
    block.x.next(), block.unpacked.next();
  }
  settle(sums);
}

// Scales, adds and stores the sums: a lane has neighbouring columns of y in pairs.
DEVICE void store_all(scalar_t* y, const float (&sums)[kColumns / 2], int m, int n, int stride, float alpha, float beta) {
  const int lane = threadIdx.x % 32, token = blockIdx.y * kTokens + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int first_tile = blockIdx.x * TILES + threadIdx.x / 128 * (kColumns / 16), num_tiles = (n + 15) / 16;
#pragma unroll
  for (int i = 0; i < kColumns / 8; i++) {
    const int row = tile_row(first_tile + i / 2, i % 2 * 8 + lane % 4 * 2, n);
    if (first_tile + i / 2 >= num_tiles) break;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float* const pair = sums + i * 4 + half * 2;
      uint32_t* const place = reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(token + half * 8) * stride + row);
      if (token + half * 8 < m) *place = scaled_sum(pair[0], pair[1], alpha, beta, place);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(packed_gemm_wgmma)(scalar_t* y, const __grid_constant__ TensorMap x, const unsigned char* __restrict__ packed,
                              int m, int n, int stride, float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char shared[];
  pdl_launch_dependents();
  const Block block(shared_address(shared));
  if (threadIdx.x == 0) {
    block.x.prepare(1, kMultiplyWarps), block.codes.prepare(1, kUnpackWarps), block.unpacked.prepare(kUnpackWarps, kMultiplyWarps);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < kMultiplyWarps) {
    float sums[kColumns / 2] = {};
    multiply_all(sums, block);
    // The kernel before this one, which may have written y, has ended: x has come.
    store_all(y, sums, m, n, stride, alpha, beta);
  } else if (warp < kMultiplyWarps + kUnpackWarps) {
    unpack_all(block);
  } else {
    copy_all(block, x, packed, (n + 15) / 16);
  }
}
