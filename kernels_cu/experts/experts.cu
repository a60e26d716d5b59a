// Products of rows with the matrices of their experts: gate_up of steps and chunks, and the product back of chunks.
//
//   formula   with e an expert of row t and p = t * top + its place among the row's: experts_gate_up
//             out[p, f] = round(silu(n[t] . Wg[e, f]) * (n[t] . Wu[e, f])); experts_project out[p, c] = round(inner[p] . W[e, c])
//   operands  out (T * top, N) scalar_t, N columns; x: n (T, K) or inner (T * top, K) scalar_t, row-major; weight of (2 E N, K),
//             the gates of all E experts and then their ups, or of (E N, K): scalar_t row-major, or packed as in packed_layout.cuh;
//             chosen (T * top) int32, -1: of no expert; with CHUNK starts (E + 1) and order int32 of group_pairs, else null
//   constants PRODUCT: 0 gate_up, 1 project. IN_FEATURES: K, a multiple of 64, in 4 bits of 128. WEIGHT_BITS: 16 or 4.
//             In 4 bits RUNS: of the packed layout. SCALE_GROUP: columns that share a scale. ZEROS: 1 has zero points.
//             TOKEN_TILES: eights of pairs that a block takes together. WARP_TILES: weight tiles of a warp. WARPS: of a block.
//             STAGE_SLICES: slices of x in a stage; 0: all of it at once. CHUNK: 1 takes pairs in the order of group_pairs
//   launch    grid (most tiles of pairs, ceil(weight tiles / (WARPS * WARP_TILES))), block 32 * WARPS, dynamic shared memory of
//             STAGES stages of 8 * TOKEN_TILES rows, each 64 bytes longer than its columns
//   numerics  float32 sums over a slice or scale group in tensor cores, added in order; codes less zero points are exact;
//             rounded once. A pair's bits do not depend on the other pairs, nor on any constant but the weight's
//   oracle    NumpyOps.experts_gate_up, experts_down
//   source    original; grouped products as in MegaBlocks (arXiv 2211.15841)
//   layout    a block finds its expert from the routing alone, so the grid is the same whatever was chosen; blocks too many
//             end at once. Weights go to registers, several slices ahead, since no other warp needs them; x, which all
//             warps read, to shared memory
#if !defined(PRODUCT) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || (WEIGHT_BITS == 4 && !defined(RUNS)) || \
    (WEIGHT_BITS == 4 && !defined(SCALE_GROUP)) || (WEIGHT_BITS == 4 && !defined(ZEROS)) || !defined(TOKEN_TILES) || \
    !defined(WARP_TILES) || !defined(WARPS) || !defined(STAGE_SLICES) || !defined(CHUNK)
#error "a constant is not defined"
#endif
#include "expert_product.cuh"
#include "expert_rows.cuh"

constexpr int kThreads = WARPS * 32, kTokens = TOKEN_TILES * 8;
constexpr int kMinBlocks = CHUNK || (TOKEN_TILES > 2 && kSliceWords > 10 && WEIGHT_BITS == 4) ? 1 : 512 / kThreads;
// Slices whose products are under way together, and those in registers.
constexpr int kTogether = TOKEN_TILES > 1 ? 1 : kSliceWords <= 10 ? 3 : 2;
constexpr int kHeld = WARP_TILES > 1 || TOKEN_TILES > 2 ? 2 : TOKEN_TILES > 1 ? 3 : 2 * kTogether;
constexpr bool kResident = STAGE_SLICES == 0;
constexpr int kStageSlices = kResident ? kSlices : STAGE_SLICES, kStages = kResident ? 1 : 3;
constexpr int kNumStages = (kSlices + kStageSlices - 1) / kStageSlices;
constexpr int kStageColumns = kStageSlices * kSliceColumns;
constexpr int kPitch = kStageColumns * 2 + 64;   // two rows side by side cover all banks
static_assert(kResident || kStageSlices % kTogether == 0, "STAGE_SLICES must hold whole turns");

// x of the block's pairs in shared memory, a stage of columns after the other.
struct Activations {
  const scalar_t* x;
  const int* rows;   // shared: of x, those of the block's pairs
  int count;
  uint32_t shared;

  DEVICE void start(int stage) const {
    constexpr int kPieces = kStageColumns / 8;
    if (stage < kNumStages) {
      for (int i = threadIdx.x; i < count * kPieces; i += kThreads) {
        const int token = i / kPieces, column = i % kPieces * 8, from = stage * kStageColumns + column;
        if (from < K)
          cp_async16(shared + (stage % kStages * kTokens + token) * kPitch + column * 2, x + static_cast<int64_t>(rows[token]) * K + from);
      }
    }
    cp_async_commit();
  }
  DEVICE void begin() const {
    for (int stage = 0; stage < (kResident ? 1 : kStages - 1); stage++) start(stage);
  }
  // Waits for a stage, and fills the place of the one before, which all warps have read.
  DEVICE void enter(int stage) const {
    cp_async_wait<kResident ? 0 : kStages - 2>();
    __syncthreads();
    if (!kResident) start(stage + kStages - 1);
  }
};

// The lane's columns of x from some slice on.
struct StagedRows {
  uint32_t place;
  DEVICE StagedRows(const Activations& from, int slice) {
    const int lane = threadIdx.x % 32, stage = slice / kStageSlices % kStages;
    place = from.shared + (stage * kTokens + lane / 4) * kPitch + slice % kStageSlices * (kSliceColumns * 2) + lane % 4 * 16;
  }
  DEVICE uint4 operator()(int s, int j, int i) const {
    return load_shared(place + i * 8 * kPitch + s * (kSliceColumns * 2) + j * 64);
  }
};

DEVICE TileRows rows_of(int expert, int tile, int num_experts, int columns) {
  if (PRODUCT == 0) return {static_cast<int64_t>(expert) * columns + tile * 8, static_cast<int64_t>(num_experts) * columns};
  return {static_cast<int64_t>(expert) * columns + tile * 16, 8};
}

DEVICE void load(Slice* slices, const WeightTile (&weights)[WARP_TILES], int slice) {
#pragma unroll
  for (int w = 0; w < WARP_TILES; w++)
    if (slice < kSlices) weights[w].load(slices[w], slice);
}

// The warp's weight tiles times the block's pairs. `held` has the first slices.
DEVICE void accumulate(Sums (&sums)[WARP_TILES], Slice (&held)[kHeld * WARP_TILES], const WeightTile (&weights)[WARP_TILES],
                       const Activations& x) {
  const int used = (x.count + 7) / 8;
#pragma unroll 1
  for (int base = 0; base < kSlices; base += kHeld) {
#pragma unroll
    for (int turn = 0; turn < kHeld; turn += kTogether) {
      const int slice = base + turn;
      if (slice >= kSlices) break;
      if (slice % kStageSlices == 0) x.enter(slice / kStageSlices);
      const StagedRows rows(x, slice);
      if (slice + kTogether <= kSlices) {
        multiply<kTogether>(sums, held + turn * WARP_TILES, rows, used);
      } else {
#pragma unroll
        for (int s = 0; s < kTogether; s++)
          if (slice + s < kSlices) multiply<1>(sums, held + (turn + s) * WARP_TILES, StagedRows(x, slice + s), used);
      }
#pragma unroll
      for (int s = 0; s < kTogether; s++) load(held + (turn + s) * WARP_TILES, weights, slice + s + kHeld);
    }
  }
}

DEVICE void store(scalar_t* out, const Sums (&sums)[WARP_TILES], const int* pairs, int count, int first_tile, int num_tiles,
                  int columns) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int w = 0; w < WARP_TILES; w++) {
    if (first_tile + w >= num_tiles) continue;
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; i++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int token = i * 8 + lane % 4 * 2 + odd;
        if (token >= count) continue;
        const float lo = sums[w][i][odd], hi = sums[w][i][odd + 2];
        scalar_t* const row = out + static_cast<int64_t>(pairs[token]) * columns;
        if (PRODUCT == 0) {
          row[(first_tile + w) * 8 + lane / 4] = from_float(lo / (1.0f + __expf(-lo)) * hi);
        } else {
          row[(first_tile + w) * 16 + lane / 4] = from_float(lo);
          row[(first_tile + w) * 16 + 8 + lane / 4] = from_float(hi);
        }
      }
  }
}

DEVICE void expert_product(scalar_t* out, const scalar_t* x, const void* weight, const int* chosen, const int* starts,
                           const int* order, int num_pairs, int top, int num_experts, int columns) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ int pairs[kTokens], rows[kTokens];
  // After the wait: then the next kernel knows that the routing is there, and may look which weights it will need.
  pdl_wait();
  pdl_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int own = 0;
  if (!CHUNK) own = count_pairs(chosen, num_pairs, num_experts);
  else if (lane < num_experts) own = starts[lane + 1] - starts[lane];
  const PairTile tile = tile_of<kTokens>(own, blockIdx.x);
  if (tile.expert < 0) return;

  const int num_tiles = columns / (PRODUCT == 0 ? 8 : 16), first_tile = (blockIdx.y * WARPS + warp) * WARP_TILES;
  // A warp without a tile takes the last one, and stores nothing.
  const WeightTile weights[WARP_TILES] = {
      WeightTile(weight, rows_of(tile.expert, min(first_tile, num_tiles - 1), num_experts, columns)),
#if WARP_TILES == 2
      WeightTile(weight, rows_of(tile.expert, min(first_tile + 1, num_tiles - 1), num_experts, columns)),
#endif
  };
  Slice held[kHeld * WARP_TILES];
#pragma unroll
  for (int slice = 0; slice < kHeld; slice++) load(held + slice * WARP_TILES, weights, slice);

  const auto take = [&](int i, int pair) { pairs[i] = pair, rows[i] = PRODUCT == 0 ? pair / top : pair; };
  if (warp == 0) {
    if (CHUNK) {
      const int* const listed = order + starts[tile.expert] + tile.first;
      for (int i = lane; i < tile.count; i += 32) take(i, listed[i]);
    } else {
      visit_pairs(chosen, num_pairs, tile, take);
    }
  }
  __syncthreads();
  const Activations activations{x, rows, tile.count, shared_address(memory)};
  activations.begin();
  Sums sums[WARP_TILES] = {};
  accumulate(sums, held, weights, activations);
  store(out, sums, pairs, tile.count, first_tile, num_tiles, columns);
}

#if PRODUCT == 0
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    KERNEL(experts_gate_up)(scalar_t* __restrict__ out, const scalar_t* x, const void* __restrict__ weight, const int* chosen,
                            const int* starts, const int* order, int num_pairs, int top, int num_experts, int columns) {
  expert_product(out, x, weight, chosen, starts, order, num_pairs, top, num_experts, columns);
}
#endif

#if PRODUCT == 1
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    KERNEL(experts_project)(scalar_t* __restrict__ out, const scalar_t* x, const void* __restrict__ weight, const int* chosen,
                            const int* starts, const int* order, int num_pairs, int top, int num_experts, int columns) {
  expert_product(out, x, weight, chosen, starts, order, num_pairs, top, num_experts, columns);
}
#endif
