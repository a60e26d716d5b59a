// Multiplies rows by the matrices of their experts: gate_up of steps and chunks, and the down product of chunks (project).
//
//   formula   with e an expert of row t and p = t * top + its place among the row's: experts_gate_up
//             out[p, f] = round(silu(n[t] . Wg[e, f]) * (n[t] . Wu[e, f])); experts_project out[p, c] = round(inner[p] . W[e, c])
//   operands  out (T * top, N) scalar_t, N columns; x: n (T, K) or inner (T * top, K) scalar_t, row-major; weight of (2 E N, K),
//             the gates of all E experts and then their ups, or of (E N, K): scalar_t row-major, or packed as in packed_layout.cuh;
//             chosen (T * top) int32, -1: no expert; starts (E + 1) and order int32 from group_pairs with CHUNK, else null
//   constants PRODUCT: 0 gate_up, 1 project. IN_FEATURES: K, a multiple of 64, in 4 bits of 128. WEIGHT_BITS: 16 or 4.
//             In 4 bits RUNS: runs of the packed layout. SCALE_GROUP: columns that share a scale. ZEROS: 1 has zero points.
//             TOKEN_TILES: a block takes 8 * TOKEN_TILES pairs together.
//             WARP_TILES: weight tiles of a warp, 1 for a step. WARPS: warps of a block.
//             AHEAD: turns of weights that a warp has on their way in a step.
//             STAGE_SLICES: slices of x in a stage; 0: all of x in one stage. CHUNK: 1 takes pairs in the order of group_pairs
//   launch    grid (most tiles of pairs, ceil(weight tiles / (WARPS * WARP_TILES))), block 32 * WARPS, dynamic shared memory: one
//             stage (STAGE_SLICES 0) or three of the block's rows of x, each row 64 bytes longer than its columns; in a step then
//             a ring of weights for each warp; then 8 bytes for each of the block's 8 * TOKEN_TILES pairs
//   numerics  float32 sums over a slice or scale group in tensor cores, added in order; codes less zero points are exact;
//             rounded once. A pair's bits do not depend on the other pairs, nor on any constant but the weight's
//   oracle    NumpyOps.experts_gate_up, experts_down
//   source    original; grouped products as in MegaBlocks (arXiv 2211.15841)
//   layout    a block finds its expert from the routing alone, so the grid is the same whatever was chosen; surplus blocks end at
//             once. A warp's weights are read by no other warp: in a step they come through a ring of the warp's own in shared
//             memory, several slices ahead; in a chunk, where they serve many rows, they go to registers. All warps read the same
//             x, from shared memory
#if !defined(PRODUCT) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || (WEIGHT_BITS == 4 && !defined(RUNS)) || \
    (WEIGHT_BITS == 4 && !defined(SCALE_GROUP)) || (WEIGHT_BITS == 4 && !defined(ZEROS)) || !defined(TOKEN_TILES) || \
    !defined(AHEAD) || !defined(WARP_TILES) || !defined(WARPS) || !defined(STAGE_SLICES) || !defined(CHUNK)
#error "a constant is not defined"
#endif
#include "expert_product.cuh"
#include "expert_rows.cuh"
#include "gated.cuh"

constexpr int kThreads = WARPS * 32, kTokens = TOKEN_TILES * 8;
constexpr int kMinBlocks = CHUNK ? 1 : 512 / kThreads;
// kTogether: slices that a warp multiplies together, a turn. A step has kAhead turns of weights on their way to shared memory, a
// chunk kHeld slices on their way to registers.
constexpr int kTogether = TOKEN_TILES > 1 || kManyGroups ? 1 : WEIGHT_BITS == 4 ? 3 : 2, kAhead = AHEAD;
constexpr int kRingBytes = CHUNK ? 0 : kAhead * kTogether * kSlotBytes;   // a warp's ring
constexpr bool kResident = STAGE_SLICES == 0;
constexpr int kStageSlices = kResident ? kSlices : STAGE_SLICES, kStages = kResident ? 1 : 3;
constexpr int kNumStages = (kSlices + kStageSlices - 1) / kStageSlices;
constexpr int kStageColumns = kStageSlices * kSliceColumns;
constexpr int kPitch = kStageColumns * 2 + 64;   // bytes from row to row: two neighbouring rows cover all banks
static_assert(kResident || kStageSlices % kTogether == 0, "STAGE_SLICES must hold whole turns");
// Copies are waited for in the order in which they start. Those of a stage of x start two stages early, which must be at least kAhead
// turns, so that the wait for a turn's weights covers its x.
static_assert(CHUNK || kResident || kAhead <= 2 * kStageSlices / kTogether, "STAGE_SLICES is too small");

// The rows of x of the block's pairs, copied to shared memory one stage of columns after another.
struct Activations {
  const scalar_t* x;
  const int* rows;   // in shared memory: the row of x of each of the block's pairs
  int count;
  uint32_t shared;

  // Starts the copies of a stage.
  DEVICE void start(int stage) const {
    constexpr int kPieces = kStageColumns / 8;
    if (stage < kNumStages) {
      for (int i = threadIdx.x; i < count * kPieces; i += kThreads) {
        const int token = i / kPieces, column = i % kPieces * 8, from = stage * kStageColumns + column;
        if (from < K)
          cp_async16(shared + (stage % kStages * kTokens + token) * kPitch + column * 2, x + static_cast<int64_t>(rows[token]) * K + from);
      }
    }
  }
  DEVICE void begin() const {
    for (int stage = 0; stage < (kResident ? 1 : kStages - 1); stage++) {
      start(stage);
      cp_async_commit();
    }
  }
};

// Reads the lane's columns of x from shared memory, from slice `slice` on.
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

// Returns the rows of an expert's weight tile: 8 gates and their ups (PRODUCT 0), or 16 rows.
DEVICE TileRows rows_of(int expert, int tile, int num_experts, int columns) {
  if (PRODUCT == 0) return {static_cast<int64_t>(expert) * columns + tile * 8, static_cast<int64_t>(num_experts) * columns};
  return {static_cast<int64_t>(expert) * columns + tile * 16, 8};
}

#if CHUNK
using Weights = WeightTile;
constexpr int kHeld = WARP_TILES > 1 ? 2 : 3;

DEVICE void load(Slice* slices, const Weights (&weights)[WARP_TILES], int slice) {
#pragma unroll
  for (int w = 0; w < WARP_TILES; w++)
    if (slice < kSlices) weights[w].load(slices[w], slice);
}

// The weight tiles of a warp of a chunk, which come to registers kHeld slices ahead.
struct Stream {
  const Weights (&weights)[WARP_TILES];
  Slice held[kHeld * WARP_TILES];

  DEVICE void begin() {
#pragma unroll
    for (int slice = 0; slice < kHeld; slice++) load(held + slice * WARP_TILES, weights, slice);
  }
  // Adds the weights times x of the block's pairs to `sums`. The copies of a stage of x are a group.
  DEVICE void accumulate(Sums (&sums)[WARP_TILES], const Activations& x) {
    const int used = (x.count + 7) / 8;
#pragma unroll 1
    for (int base = 0; base < kSlices; base += kHeld) {
#pragma unroll
      for (int turn = 0; turn < kHeld; turn++) {
        const int slice = base + turn;
        if (slice >= kSlices) break;
        if (slice % kStageSlices == 0) {
          cp_async_wait<kStages - 2>();
          __syncthreads();
          x.start(slice / kStageSlices + kStages - 1);
          cp_async_commit();
        }
        multiply<1>(sums, held + turn * WARP_TILES, StagedRows(x, slice), used);
        load(held + turn * WARP_TILES, weights, slice + kHeld);
      }
    }
  }
};
#else
using Weights = TileSource;

// The weight tile of a warp of a step, which comes through a ring in shared memory that no other warp uses.
struct Stream {
  const Weights (&weights)[1];
  uint32_t ring;

  // Starts the copies of the slices of a turn.
  DEVICE void copy(int turn) const {
#pragma unroll
    for (int s = 0; s < kTogether; s++)
      if (turn * kTogether + s < kSlices)
        weights[0].copy(ring + (turn % kAhead * kTogether + s) * kSlotBytes, turn * kTogether + s);
  }
  DEVICE void begin() const {
    for (int turn = 0; turn < kAhead; turn++) {
      copy(turn);
      cp_async_commit();
    }
  }
  // Adds the weights times x of the block's pairs to `sums`. The copies that a turn starts are a group, committed after the groups of
  // the first stages of x and of the first kAhead turns.
  DEVICE void accumulate(Sums (&sums)[1], const Activations& x) const {
    const int used = (x.count + 7) / 8;
    constexpr int kTurns = (kSlices + kTogether - 1) / kTogether;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn++) {
      const int slice = turn * kTogether;
      cp_async_wait<kAhead - 1>();
      if (slice % kStageSlices == 0) {
        __syncthreads();
        if (!kResident) x.start(slice / kStageSlices + kStages - 1);
      } else {
        __syncwarp();
      }
      Slice held[kTogether];
#pragma unroll
      for (int s = 0; s < kTogether; s++) Weights::read(held[s], ring + (turn % kAhead * kTogether + s) * kSlotBytes);
      __syncwarp();
      copy(turn + kAhead);
      cp_async_commit();
      if (slice + kTogether <= kSlices) {
        multiply<kTogether>(sums, held, StagedRows(x, slice), used);
      } else {
#pragma unroll
        for (int s = 0; s < kTogether; s++)
          if (slice + s < kSlices) multiply<1>(sums, held + s, StagedRows(x, slice + s), used);
      }
    }
  }
};
#endif

// Stores the warp's sums, with the activation if PRODUCT is 0, to the pairs' rows of `out`.
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
          row[(first_tile + w) * 8 + lane / 4] = from_float(gated(lo, hi));
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
  int* const pairs = reinterpret_cast<int*>(memory + kStages * kTokens * kPitch + WARPS * kRingBytes);
  int* const rows = pairs + kTokens;
  // The next kernel waits for this one to finish, so it need not start before this one's own wait.
  pdl_wait();
  pdl_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t shared = shared_address(memory);
  int own = 0;
  if (!CHUNK) own = count_pairs(chosen, num_pairs, num_experts);
  else if (lane < num_experts) own = starts[lane + 1] - starts[lane];
  const PairTile tile = tile_of<kTokens>(own, blockIdx.x);
  if (tile.expert < 0) return;

  const int num_tiles = columns / (PRODUCT == 0 ? 8 : 16), first_tile = (blockIdx.y * WARPS + warp) * WARP_TILES;
  // A warp without a tile takes the last one, and stores nothing.
  const Weights weights[WARP_TILES] = {
      Weights(weight, rows_of(tile.expert, min(first_tile, num_tiles - 1), num_experts, columns)),
#if WARP_TILES == 2
      Weights(weight, rows_of(tile.expert, min(first_tile + 1, num_tiles - 1), num_experts, columns)),
#endif
  };
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
  const Activations activations{x, rows, tile.count, shared};
  activations.begin();
#if CHUNK
  Stream stream{weights};
#else
  Stream stream{weights, shared + kStages * kTokens * kPitch + warp * kRingBytes};
#endif
  stream.begin();
  Sums sums[WARP_TILES] = {};
  stream.accumulate(sums, activations);
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
