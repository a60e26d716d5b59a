// layer_products: all that a step of one row does between two attentions, in one launch: four products with weights of 4 bits.
//
// x += scale * attention Wo^T; inner = silu(n Wg^T) * (n Wu^T), n the normalised x; x += scale * inner Wd^T; and with NEXT q, k and v
// of the layer after it, from x normalised again: each as linear_packed.cu computes it, bit for bit.
// Operands: x (1, H) scalar_t; attention (1, A), inner (1, F) scalar_t; weights o, gate_up, down and qkv packed as in packed_layout.cuh;
//   mlp_norm, norm (H) scalar_t; counter uint64, of which only this kernel writes; the others as in linear_packed_qkv.
// Constants:
//   IN_FEATURES: H, the elements of a row. ATTENTION: A. INNER: F. QKV_ROWS: rows of the qkv weight. HEAD_DIM: elements of a head
//   NEXT: 1 if there is a layer after this one; 0: there is no qkv product
//   WEIGHT_BITS: 4. RUNS: 8, the parts of K. SCALE_GROUP: columns that share a scale: 32, 64 or 128. ZEROS: as in linear_packed.cu.
//     All four weights have these
//   SMEM_BYTES: dynamic shared memory of the launch. GRID: blocks, at most as many as multiprocessors, and as tiles of gate_up
//   LATE: 1: down and qkv take the place of o and gate_up in shared memory, once these have been used; 0: each has its own
//   PORTABLE: 1 leaves the copy engine out on sm_90 and later too
//   FATRELU: the activation is that of fatrelu.cuh; without it SiLU
// Grid: GRID blocks, all of which must run at once; block 512; SMEM_BYTES of dynamic shared memory.
// Numerics: those of linear_packed.cu; a row's bits are the same, whichever kernel has computed it.
// Oracle: NumpyOps.project_residual, gate_up, qkv.
// Source: original; the barrier as in cooperative groups (one counter, release and acquire).
// Why so: a small layer's weights fit into the shared memory of all multiprocessors together, so a block asks for all of its weights
//   at once, before it waits for attention; with LATE for those of two products, and for the others as soon as there is room. What is left are dependencies: between two products a counter in memory that all blocks
//   add to and wait for, which takes about half as long as from one kernel to the next. The tiles of the four weights are dealt out
//   to the blocks in turn; in a block, as in linear_packed.cu, eight warps share a tile, each has a run.
#if !defined(IN_FEATURES) || !defined(ATTENTION) || !defined(INNER) || !defined(QKV_ROWS) || !defined(HEAD_DIM) || !defined(NEXT) || \
    !defined(WEIGHT_BITS) || !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(GRID) || !defined(SMEM_BYTES) || \
    !defined(PORTABLE) || !defined(LATE)
#error "a constant is not defined"
#endif
// What the headers are told: one row, in blocks of two teams of eight warps.
#define LINEAR 0
#define ROWS 1
#define WARPS 16
#define WARPGROUPS 0
#define SHARED_RUN 0
#define NORM 1
#define PREPARED 0
#define STAGE_SLICES 0
#define STAGES 1
#define EARLY_SLOTS 1
#define CLUSTERS 0
#define RECEIVED_APART 0
#define FEEDS 0
#define KEPT_ROUNDS 1
#define ROW_SUM_BYTES (SCALE_GROUP == 16 ? 32 : 16)   // no more than the sums: so a larger layer fits
#include "linear_epilogue.cuh"
#include "packed_activations.cuh"
#include "packed_multiply.cuh"

constexpr int kTeams = kWarps / RUNS;
constexpr int kHidden = IN_FEATURES;
static_assert(WEIGHT_BITS == 4 && RUNS == 8, "weights of 4 bits in 8 runs");
#ifdef FATRELU
static_assert((FATRELU & 0x7F800000) != 0x7F800000, "FATRELU must be the bits of a finite threshold");
#endif

// Weight INDEX of the four, with ROWS_ rows of COLUMNS elements; its tiles are dealt out behind DEALT others.
template <int INDEX, int ROWS_, int COLUMNS, int DEALT>
struct Matrix {
  static constexpr int kIndex = INDEX, kLast = LATE && INDEX < 2 ? 1 : NEXT ? 3 : 2;   // of those asked for with it
  static constexpr int kTiles = ROWS_ / 16, kDealt = DEALT + kTiles, kColumns = COLUMNS, kNumSlices = COLUMNS / 128;
  static constexpr int kMostTiles = (kTiles + GRID - 1) / GRID, kTeamTiles = (kMostTiles + kTeams - 1) / kTeams;   // of a block, a team
  static constexpr int kBlocks = kTiles < GRID ? kTiles : GRID;   // that have any
  static constexpr int kSlicesOfRun = (kNumSlices + RUNS - 1) / RUNS, kFilled = (kNumSlices + kSlicesOfRun - 1) / kSlicesOfRun;
  static constexpr int kRunStride = packed_run_bytes(kSlicesOfRun);
  static constexpr int64_t kTileStride = (kFilled - 1) * kRunStride + packed_run_bytes(kNumSlices - (kFilled - 1) * kSlicesOfRun);
  static_assert(ROWS_ % 16 == 0 && COLUMNS % 128 == 0, "whole tiles and slices");

  // The block's tile at `place`; kTiles or more: there is none.
  DEVICE static int tile(int place) {
    const int behind = static_cast<int>(blockIdx.x) - DEALT % GRID;
    return (behind < 0 ? behind + GRID : behind) + place * GRID;
  }
  DEVICE static bool is_there(int place) { return tile(place) < kTiles; }
  // Bytes of the block's tiles in shared memory.
  DEVICE static int bytes() {
    return (is_there(kMostTiles - 1) ? kMostTiles : kMostTiles - 1) * RUNS * kRunStride;
  }
  DEVICE static int slices(int run) { return max(0, min(kSlicesOfRun, kNumSlices - run * kSlicesOfRun)); }
};
using Output = Matrix<0, kHidden, ATTENTION, 0>;
using GateUp = Matrix<1, 2 * INNER, kHidden, Output::kDealt>;
using Down = Matrix<2, kHidden, INNER, GateUp::kDealt>;
using Qkv = Matrix<3, QKV_ROWS, kHidden, Down::kDealt>;
static_assert(GateUp::kTiles >= GRID, "every block has a part of gate_up: a block that has not arrived knows how far the others can be");

// Shared memory.
constexpr int kMostColumns = INNER > ATTENTION ? (INNER > kHidden ? INNER : kHidden) : (ATTENTION > kHidden ? ATTENTION : kHidden);
constexpr int kSquares = kWarps * 4 * 8, kPlace = kSquares + kRowWarps * 4, kSums = kPlace + 32;
constexpr int kRow = kSums + GateUp::kMostTiles * RUNS * 64;
constexpr int kWeights = (kRow + kMostColumns / 128 * kXSliceBytes + 127) / 128 * 128;   // of the four products, one behind the other
static_assert(Qkv::kMostTiles <= GateUp::kMostTiles && Down::kMostTiles <= GateUp::kMostTiles, "sums of gate_up take the most room");
static_assert(Output::kMostTiles <= GateUp::kMostTiles, "sums of gate_up take the most room");

// A counter that blocks add to, and wait for: its value before this launch is a multiple of what a launch adds.
struct GridBarrier {
  static constexpr uint64_t kOfLaunch = Output::kBlocks + GateUp::kBlocks + Down::kBlocks;   // with and without NEXT
  uint64_t* counter;
  uint64_t target;   // of the first thread

  // After pdl_wait.
  DEVICE explicit GridBarrier(uint64_t* shared_counter) : counter(shared_counter) {
    if (threadIdx.x == 0) target = read() / kOfLaunch * kOfLaunch;
  }
  DEVICE uint64_t read() const {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
  }
  // All that the block's threads have written is visible to whoever waits.
  DEVICE void arrive() const {
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
  }
  // Until `arrivals` more than before have come, counted from the wait before.
  DEVICE void wait(int arrivals) {
    if (threadIdx.x == 0) {
      target += arrivals;
      while (read() < target) {
      }
    }
    __syncthreads();
  }
};

// The warp's barrier of a weight: it completes when the warp's runs of its team's tiles are in shared memory.
template <class M>
DEVICE uint32_t barrier_of(const Lane& at) { return at.shared + at.warp * 32 + M::kIndex * 8; }

// Starts the copies of these runs to `to`.
template <class M>
DEVICE void copy_weights(const Lane& at, const void* weight, uint32_t to) {
  const int run = at.warp % RUNS, bytes = M::slices(run) * kUnitBytes;
  const unsigned char* const from = static_cast<const unsigned char*>(weight) + run * M::kRunStride;
  int count = 0;
#pragma unroll
  for (int i = 0; i < M::kTeamTiles; i++) count += M::is_there(i * kTeams + at.warp / RUNS);
  if (kCopyEngine && at.lane == 0) mbarrier_arrive_expect(barrier_of<M>(at), count * bytes);
#pragma unroll
  for (int i = 0; i < M::kTeamTiles; i++) {
    const int place = i * kTeams + at.warp / RUNS;
    if (!M::is_there(place) || bytes == 0) continue;
    const uint32_t target = to + (place * RUNS + run) * M::kRunStride;
    const unsigned char* const source = from + M::tile(place) * M::kTileStride;
    if (!kCopyEngine) {
      for (int b = at.lane * 16; b < bytes; b += 512) cp_async16_lines(target + b, source + b);
    } else if (at.lane == 0) {
      copy_bytes(target, source, bytes, barrier_of<M>(at));
    }
  }
  if (!kCopyEngine) cp_async_commit();
}

// Until they are there.
template <class M>
DEVICE void wait_for_weights(const Lane& at) {
  if (kCopyEngine) {
    mbarrier_wait(barrier_of<M>(at), 0);
  } else {
    cp_async_wait<M::kLast - M::kIndex>();
    __syncwarp();
  }
}

// x at `source` as it enters a product, in shared memory. A barrier must follow.
template <int COLUMNS>
DEVICE void fill(const Lane& at, const scalar_t* source) {
  constexpr int kAll = COLUMNS / 8, kEach = (kAll + kThreads - 1) / kThreads;
  uint4 v[kEach];
  float sums[kEach];
  const auto piece_of = [&](int i) { return i * kThreads + static_cast<int>(threadIdx.x); };
#pragma unroll
  for (int i = 0; i < kEach; i++)
    if (piece_of(i) < kAll) v[i] = load16_past_l1(source + piece_of(i) * 8);
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const uint4 entering = scaled(v[i]);
    if (piece_of(i) < kAll) store_shared(at.shared + kRow + x_offset(piece_of(i), 0), entering);
    sums[i] = piece_sum(entering);
  }
  sum_groups(sums, [&](int i, float sum) {
    if (piece_of(i) < kAll) store_shared_float(at.shared + kRow + sum_offset(piece_of(i), 0), sum);
  });
}

// x normalised, by the first eight warps, and its square sums.
DEVICE void fill_normalised(const Lane& at, const scalar_t* x, const RowPieces& weights) {
  if (at.warp >= kRowWarps) return;
  uint4 v[kThreadPieces];
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++)
    if (RowPieces::piece(i) < kPieces) v[i] = load16_past_l1(x + RowPieces::piece(i) * 8);
  float sums[kThreadPieces], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++) {
    const int piece = RowPieces::piece(i);
    const uint4 entering = weighted(v[i], weights.norm[i]);
    if (piece < kPieces) store_shared(at.shared + kRow + x_offset(piece, 0), entering);
    sums[i] = piece_sum(entering);
    if (piece < kPieces) square = square_sum(v[i], square);
  }
  sum_groups(sums, [&](int i, float sum) {
    if (RowPieces::piece(i) < kPieces) store_shared_float(at.shared + kRow + sum_offset(RowPieces::piece(i), 0), sum);
  });
  square = RowPieces::warp_square_sum(square);
  if (at.lane == 0) store_shared_float(at.shared + kSquares + at.warp * 4, square);
}

// out += S, then fewer slices of one tile: as many products under way at a time as in linear_packed.cu.
template <int SLICES>
DEVICE void multiply_run(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  constexpr int kTogether = kUnitScales > 1 ? 1 : SLICES >= 4 ? 4 : SLICES >= 2 ? 2 : 1;
  multiply_slices<kTogether>(out, unit, x, at);
  if constexpr (SLICES > kTogether) multiply_run<SLICES - kTogether>(out, unit + kTogether * kUnitBytes, x + kTogether * kXSliceBytes, at);
}

// The warp's run of its team's tiles; their sums to shared memory.
template <class M>
DEVICE void multiply_tiles_of(const Lane& at, uint32_t weights) {
  const int run = at.warp % RUNS, team = at.warp / RUNS, slices = M::slices(run);
  if (!M::is_there(team) || slices == 0) return;
  Sums out[M::kTeamTiles] = {};
  uint32_t units[M::kTeamTiles];
#pragma unroll
  for (int i = 0; i < M::kTeamTiles; i++) units[i] = weights + ((i * kTeams + team) * RUNS + run) * M::kRunStride;
  uint32_t x = at.shared + kRow + run * M::kSlicesOfRun * kXSliceBytes;
  wait_for_weights<M>(at);
  if (M::kTeamTiles == 1 && slices == M::kSlicesOfRun) {
    multiply_run<M::kSlicesOfRun>(out[0], units[0], x, at);
  } else {
    // Sums of a tile that does not exist mean nothing.
#pragma unroll 1
    for (int slice = 0; slice < slices; slice++) {
      multiply_tiles(out, units, x, at);
#pragma unroll
      for (int i = 0; i < M::kTeamTiles; i++) units[i] += kUnitBytes;
      x += kXSliceBytes;
    }
  }
#pragma unroll
  for (int i = 0; i < M::kTeamTiles; i++) {
    finish_sums(out[i]);
    const uint32_t to = at.shared + kSums + ((i * kTeams + team) * RUNS + run) * 64 + at.token * 8;
    if (at.quarter == 0 && M::is_there(i * kTeams + team)) store_shared2(to, out[i][0][0], out[i][0][2]);
  }
}

// One of the products in this block: `look` asks for what its outputs need besides, `multiply` comes once x is in shared memory. A thread
// finishes one pair of outputs.
template <class M, class Epilogue>
struct Product {
  Epilogue& epilogue;
  int place = threadIdx.x / 8, row = threadIdx.x % 8;

  DEVICE bool finishes() const { return place < M::kMostTiles && M::is_there(place); }
  DEVICE void look() {
    if (finishes()) epilogue.prefetch(0, 0, M::tile(place), row, 0);
  }
  // The block's tiles lie at `weights`; `factor()` is what the sums are multiplied by.
  template <class Factor>
  DEVICE void multiply(const Lane& at, uint32_t weights, Factor factor) {
    __syncthreads();
    multiply_tiles_of<M>(at, weights);
    __syncthreads();
    if (!finishes()) return;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int run = 0; run < M::kFilled; run++) {
      const float2 part = load_shared2(at.shared + kSums + (place * RUNS + run) * 64 + row * 8);
      sum.x += part.x, sum.y += part.y;
    }
    const float by = factor();
    epilogue.store(0, 0, M::tile(place), row, 0, sum.x * by, sum.y * by);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) KERNEL(layer_products)(
    scalar_t* x, const scalar_t* attention, scalar_t* inner, const void* __restrict__ o, const scalar_t* __restrict__ mlp_norm,
    const void* __restrict__ gate_up, const void* __restrict__ down, uint64_t* counter, float scale, float eps,
    const scalar_t* __restrict__ norm, const void* __restrict__ qkv, scalar_t* q, scalar_t* k_pages, scalar_t* v_pages,
    const scalar_t* __restrict__ bias, const float* __restrict__ rope, const int* positions, const int* locations, const int* slots,
    const int* __restrict__ block_tables, int num_heads, int num_kv_heads, int pages_per_sequence, int max_context) {
  const Lane at;
  if (kCopyEngine) {
    if (at.lane == 0)
      for (int i = 0; i < 4; i++) mbarrier_init(at.shared + at.warp * 32 + i * 8, 1);
    mbarrier_init_fence();
    __syncwarp();
  }
  const uint32_t o_weights = at.shared + kWeights, gate_up_weights = o_weights + Output::bytes();
  const uint32_t down_weights = LATE ? o_weights : gate_up_weights + GateUp::bytes(), qkv_weights = down_weights + Down::bytes();
  const auto copy_others = [&] {
    copy_weights<Down>(at, down, down_weights);
    if (NEXT) copy_weights<Qkv>(at, qkv, qkv_weights);
  };
  copy_weights<Output>(at, o, o_weights);
  copy_weights<GateUp>(at, gate_up, gate_up_weights);
  if (!LATE) copy_others();
  __syncwarp();
  RowPieces mlp_weights, next_weights;
  mlp_weights.load_norm(mlp_norm);
  if (NEXT) next_weights.load_norm(norm);
  ResidualEpilogue<1, 1> add{x, nullptr, kHidden, scale};
  GateUpEpilogue activate{inner, INNER, nullptr};
  QkvEpilogue<1, 1> append{q, k_pages, v_pages, bias, rope, positions, locations, slots, block_tables, 1, num_heads, num_kv_heads,
                           pages_per_sequence, max_context};
  Product<Output, ResidualEpilogue<1, 1>> o_product{add};
  Product<GateUp, GateUpEpilogue> gate_up_product{activate};
  Product<Down, ResidualEpilogue<1, 1>> down_product{add};
  Product<Qkv, QkvEpilogue<1, 1>> qkv_product{append};
  const auto one = [] { return 1.0f; };
  const auto of_rms = [&] { return RowPieces::scale(at.shared + kSquares, eps); };
  pdl_wait();
  GridBarrier grid(counter);
  if (NEXT) append.prepare(at.shared + kPlace), append.publish(), append.look_up(), append.settle();
  else pdl_launch_dependents();

  if (Output::is_there(0)) {
    o_product.look();
    fill<ATTENTION>(at, attention);
    o_product.multiply(at, o_weights, one);
    grid.arrive();
  }
  grid.wait(Output::kBlocks);
  fill_normalised(at, x, mlp_weights);
  gate_up_product.multiply(at, gate_up_weights, of_rms);
  if (LATE) copy_others();   // all warps have multiplied
  grid.arrive();
  if (Down::is_there(0)) {
    down_product.look();
    grid.wait(GateUp::kBlocks);
    fill<INNER>(at, inner);
    down_product.multiply(at, down_weights, one);
    grid.arrive();
  } else if (NEXT && threadIdx.x == 0) {
    grid.target += GateUp::kBlocks;
  }
  if (!NEXT || !Qkv::is_there(0)) return;
  qkv_product.look();
  grid.wait(Down::kBlocks);
  fill_normalised(at, x, next_weights);
  qkv_product.multiply(at, qkv_weights, of_rms);
}
