// Dense product of a prefill chunk with a packed weight on sm_90, unpacked in registers on its way to the tensor cores.
//
//   formula   as packed_gemm_wide.cu, with GATED and without
//   operands  y (M, N) scalar_t, with GATED (M, N / 2), its rows `stride` elements apart, an even number; x (M, K) scalar_t
//             row-major, as a tensor map in boxes of TOKENS rows and 64 columns; packed as packed_layout.cuh describes; chunk
//             as in chunk_rows.cuh
//   constants LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head. HEAD_DIM: of qkv only, elements of a head.
//             IN_FEATURES: K, a multiple of 128. WEIGHT_BITS: 2, 4 or 8. RUNS: of the layout, 8 or 1. SCALE_GROUP: columns that
//             share a scale. ZEROS: what is beside the scales, as in packed_layout.cuh. TOKENS: rows of x a block: 64 or
//             128. TILES: packed tiles of a block: 4, 8, 12 or 16. STAGES: slices of x and of codes in shared memory, at least 3.
//             GATED: as in packed_gemm_wide.cu. FATRELU: with GATED, as there
//   launch    grid (ceil(M / TOKENS), ceil(N / 16 / TILES)), block 32 * TILES + 32, or 512 with 16 tiles, shared
//             STAGES * (TOKENS * 256 + TILES * bytes of a unit + 16)
//   numerics  those of packed_gemm.cu, bit for bit
//   oracle    reference/ops.py project_residual without bias (alpha = the residual scale, beta = 1)
//   source    original
//   layout    four warps multiply together: each unpacks its tile to registers (operand A) while the tensor cores multiply the
//             half slice before it by the block's rows of x in shared memory (operand B). A warp copies its own codes and
//             waits for no other one; the last warp copies x, or with 16 tiles the first thread does beside its work. Blocks
//             with the same weights are neighbours in the grid, so that weights come from memory once.
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || \
    !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(TOKENS) || !defined(TILES) || !defined(STAGES) || \
    (LINEAR != 2 && defined(GATED)) || (LINEAR != 2 && defined(FATRELU))
#error "a constant is not defined"
#endif
#include "chunk_rows.cuh"
#include "gated.cuh"
#include "mbarrier.cuh"
#include "packed_unpack.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// With a warp more than 16 each thread would have 96 registers, too few for 128 rows of x.
constexpr bool kCopierWarp = TILES < 16;
constexpr int kThreads = TILES * 32 + (kCopierWarp ? 32 : 0);
constexpr int kRowBytes = 128, kPanelBytes = TOKENS * kRowBytes;   // a panel has 64 columns of x
constexpr int kXBytes = 2 * kPanelBytes;
constexpr int kHalfSteps = 4;                                      // steps of 16 k in half a slice
static_assert(TOKENS == 64 || TOKENS == 128, "TOKENS");
static_assert(TILES % 4 == 0 && TILES <= 16, "four warps multiply together");
static_assert(STAGES >= 3, "STAGES");

// The stage of a slice, which slices take in turn, and the parity of how often the stages have been gone through before.
struct Turn {
  int stage = 0, parity = 0;

  DEVICE void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  // Returns the turn of `slices` slices later, fewer than STAGES.
  DEVICE Turn after(int slices) const {
    const int later = stage + slices;
    return later < STAGES ? Turn{later, parity} : Turn{later - STAGES, parity ^ 1};
  }
};

// Addresses in shared memory: of slices of x, of each warp's units of codes, and of the two barriers of a stage of x. `full` completes when
// the stage has come, `read` when all warps that multiply have read it.
struct Stages {
  uint32_t shared;

  DEVICE uint32_t x(int stage) const { return shared + stage * kXBytes; }
  DEVICE uint32_t unit(int warp, int stage) const { return shared + STAGES * kXBytes + (warp * STAGES + stage) * kUnitBytes; }
  DEVICE uint32_t full(int stage) const { return unit(TILES, 0) + stage * 16; }
  DEVICE uint32_t read(int stage) const { return unit(TILES, 0) + stage * 16 + 8; }
  DEVICE void prepare() const {
    for (int i = 0; i < STAGES; i++) mbarrier_init(full(i), 1), mbarrier_init(read(i), TILES);
    mbarrier_init_fence();
  }
};

// Starts the copy of a slice of x, nothing past the last one, once its stage has been read, which it has at first.
DEVICE void copy_rows(const Stages& stages, const TensorMap& x, int slice, Turn turn) {
  if (slice >= kSlices) return;
  const uint32_t full = stages.full(turn.stage);
  mbarrier_wait(stages.read(turn.stage), turn.parity ^ 1);
  mbarrier_arrive_expect(full, kXBytes);
#pragma unroll
  for (int panel = 0; panel < 2; panel++)
    copy_box(stages.x(turn.stage) + panel * kPanelBytes, x, blockIdx.x * TOKENS, slice * kSliceColumns + panel * 64, full);
}

// A warp's copies of its tile, slice by slice: the lanes take neighbouring chunks of 16 bytes of a unit.
struct CodeCopy {
  static constexpr int kChunks = kUnitBytes / 16, kPadding = kRunBytes - kRunSlices * kUnitBytes;
  const unsigned char* source;
  uint32_t target;

  DEVICE CodeCopy(const unsigned char* packed, int tile, uint32_t unit) {
    const int lane = threadIdx.x % 32;
    source = packed + tile * kTileBytes + lane * 16, target = unit + lane * 16;
  }
  // Starts the copy of a slice, nothing past the last one, and commits it. Slices come in order.
  DEVICE void start(int slice, int stage) {
#pragma unroll
    for (int i = 0; i < kChunks; i += 32)
      cp_async16_lines(target + stage * kUnitBytes + i * 16, source + i * 16,
                       slice < kSlices && (i + 32 <= kChunks || i + threadIdx.x % 32 < kChunks));
    cp_async_commit();
    source += kUnitBytes + ((slice + 1) % kRunSlices == 0 ? kPadding : 0);
  }
};

// Computes the sums of the warp's tile over all of K. Without a warp that copies, the first thread starts a copy of x in each slice,
// to the stage of two slices before.
DEVICE void multiply_all(float (&sums)[TOKENS / 2], const Stages& stages, CodeCopy& copy, const TensorMap& x,
                         uint32_t mask) {
  const int warp = threadIdx.x / 32;
  uint32_t a[2][kHalfSteps][4];
  HalfSlice codes, next;
  cp_async_wait<STAGES - 1>();
  __syncwarp();
  codes.load(stages.unit(warp, 0), 0), codes.order();
  Turn turn;
  uint32_t read_before = 0;
#pragma unroll 1
  for (int slice = 0; slice < kSlices; slice++) {
    const int stage = turn.stage;
    next.load(stages.unit(warp, stage), 1);
    mbarrier_wait(stages.full(stage), turn.parity);
    turn.next();
    const uint32_t rows = __shfl_sync(0xFFFFFFFFu, stages.x(stage), 0);   // so the compiler sees that all lanes have the same
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half == 1) {
        // Behind this all lanes have read the codes of this slice, whose place is free for others, and those of the next slice have come.
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        next.load(stages.unit(warp, turn.stage), 0);   // not used after the last slice
        copy.start(slice + STAGES, stage);
      }
#pragma unroll
      for (int step = 0; step < kHalfSteps; step++) codes.unpack(a[half][step], step, mask);
      settle(a[half]);
      wgmma_fence();
      const uint64_t b = wgmma_descriptor<kRowBytes>(rows + half * kPanelBytes, 0);
#pragma unroll
      for (int step = 0; step < kHalfSteps; step++) multiply_tile(sums, a[half][step], b + descriptor_step(step * 32), true);
      wgmma_commit();
      next.order();
      codes = next;
      wgmma_wait<1>();   // for the half slice before this one: its registers are free, after half 0 also its stage
      settle(a[1 - half]);
      if (half == 0 && slice > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(read_before);
      if (!kCopierWarp && half == 0 && slice > 1 && threadIdx.x == 0)
        copy_rows(stages, x, slice - 2 + STAGES, turn.after(STAGES - 3));
    }
    read_before = stages.read(stage);
  }
  wgmma_wait<0>();
  settle(sums);
}

#ifdef GATED
// Stores activation(gate) * up of a warp's tile, whose lo has rows of gate and its hi those of up.
DEVICE void store(scalar_t* y, const float (&sums)[TOKENS / 2], int tile, int m, int stride, float alpha) {
  const int lane = threadIdx.x % 32, token = blockIdx.x * TOKENS + lane / 4;
#pragma unroll
  for (int i = 0; i < TOKENS / 8; i++) {
    const float *gate = sums + i * 4, *up = gate + 2;
    const uint32_t pair =
        transposed(gated_pair(pack2(alpha * gate[0], alpha * gate[1]), pack2(alpha * up[0], alpha * up[1])));
    if (token + i * 8 < m)
      *reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(token + i * 8) * stride + tile * 8 + lane % 4 * 2) = pair;
  }
}
#else
// Returns two 16-bit products as they are stored at `place`: with beta times the values there added, and rounded again.
DEVICE uint32_t added(uint32_t product, float beta, const uint32_t* place) {
  if (beta == 0.f) return product;
  const float2 value = unpack2(product), old = unpack2(*place);
  return pack2(fmaf(beta, old.x, value.x), fmaf(beta, old.y, value.y));
}

// Scales, adds and stores a warp's sums of one tile, transposed between the lanes of the warp, so that each has neighbours in a row of y.
DEVICE void store(scalar_t* y, const float (&sums)[TOKENS / 2], int tile, int m, int n, int stride, float alpha, float beta) {
  const int lane = threadIdx.x % 32, token = blockIdx.x * TOKENS + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = tile_row(tile, half * 8 + lane % 4 * 2, n);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
      const uint32_t product = transposed(pack2(alpha * sums[i * 4 + half * 2], alpha * sums[i * 4 + half * 2 + 1]));
      if (token + i * 8 >= m || row >= n) continue;
      uint32_t* const place = reinterpret_cast<uint32_t*>(y + static_cast<int64_t>(token + i * 8) * stride + row);
      *place = added(product, beta, place);
    }
  }
}

#endif

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(packed_gemm_wgmma)(scalar_t* y, const __grid_constant__ TensorMap x, const unsigned char* __restrict__ packed,
                              const int* chunk, int m, int n, int stride, float alpha, float beta) {
  extern __shared__ __align__(1024) unsigned char shared[];
  pdl_launch_dependents();
  const Stages stages{shared_address(shared)};
  const int warp = threadIdx.x / 32, num_tiles = (n + 15) / 16, tile = blockIdx.y * TILES + warp;
  CodeCopy copy(packed, min(tile, num_tiles - 1), stages.unit(warp, 0));
  const bool copies = threadIdx.x == (kCopierWarp ? TILES * 32 : 0);
  if (warp < TILES) {
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) copy.start(i, i);
  }
  if (copies) stages.prepare();
  pdl_wait();
  Turn turn;
  if (copies) {
#pragma unroll 1
    for (int slice = 0; slice < STAGES; slice++, turn.next()) copy_rows(stages, x, slice, turn);
  }
  if (is_behind_chunk(chunk, blockIdx.x * TOKENS)) {
    cp_async_wait_all();
#pragma unroll 1
    for (int slice = 0; copies && slice < min(STAGES, kSlices); slice++) mbarrier_wait(stages.full(slice), 0);
    return;
  }
  __syncthreads();
  if (warp == TILES) {
#pragma unroll 1
    for (int slice = STAGES; copies && slice < kSlices; slice++, turn.next()) copy_rows(stages, x, slice, turn);
    return;
  }
  float sums[TOKENS / 2] = {};
  multiply_all(sums, stages, copy, x, held_code_mask(m));
  if (tile >= num_tiles) return;
#ifdef GATED
  store(y, sums, tile, m, stride, alpha);
#else
  store(y, sums, tile, m, n, stride, alpha, beta);
#endif
}
