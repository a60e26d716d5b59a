// The product of a step's rows with the last matrices of their experts, added to the residual stream.
//
//   formula   x[t, c] = round(x[t, c] + scale * sum_i shares[t, i] * (inner[p] . W[e, c])), p = t * top + i, e = chosen[p], in
//             ascending i; rows of padding stay
//   operands  x (T, C) scalar_t; inner (T * top, K) scalar_t, row-major; weight of (E C, K): scalar_t row-major, or packed as in
//             packed_layout.cuh; chosen (T, top) int32, -1: of no expert; shares (T, top) float
//   constants IN_FEATURES: K, a multiple of 64, in 4 bits of 128. WEIGHT_BITS: 16 or 4.
//             In 4 bits RUNS: of the packed layout. SCALE_GROUP: columns that share a scale. ZEROS: 1 has zero points.
//             TOKEN_TILES: eights of pairs that a warp takes together, 1 or 2. ROWS: 1 for steps of one row, else 64.
//             EARLY: 1 if the kernel before tells that the routing is there before it lets this one start
//   launch    grid C / 16, block 256, dynamic shared memory: 8 rings of x, then 64 bytes for each pair
//   numerics  float32 sums over a slice or scale group in tensor cores, added in order within a quarter of K, then the
//             quarters, then the experts; rounded once. A row's bits depend on its own operands only
//   oracle    NumpyOps.experts_down
//   source    original
//   layout    sixteen columns are few, so K is split over four warps, which add their sums in order, and two groups of warps
//             take every other expert. The first weights are on their way before the wait for inner
#if !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || (WEIGHT_BITS == 4 && !defined(RUNS)) || \
    (WEIGHT_BITS == 4 && !defined(SCALE_GROUP)) || (WEIGHT_BITS == 4 && !defined(ZEROS)) || !defined(TOKEN_TILES) || \
    !defined(ROWS) || !defined(EARLY)
#error "a constant is not defined"
#endif
#include "expert_product.cuh"
#include "expert_rows.cuh"
#include "mbarrier.cuh"

constexpr int kParts = 4, kGroups = 2, kWarps = kParts * kGroups, kThreads = kWarps * 32;   // parts of K
constexpr int kPartSlices = (kSlices + kParts - 1) / kParts;
constexpr int kTokens = ROWS == 1 ? 1 : TOKEN_TILES * 8;
// Slices whose products are under way together, those of weights in registers, turns of x in shared memory.
constexpr int kTogether = TOKEN_TILES > 1 ? 1 : 2, kHeld = kSliceWords <= 10 ? 6 : WEIGHT_BITS == 4 && TOKEN_TILES > 1 ? 2 : 4;
constexpr int kTurnColumns = kTogether * kSliceColumns, kPitch = kTurnColumns * 2 + 64;
constexpr int kTurns = (kPartSlices + kTogether - 1) / kTogether, kRing = ROWS == 1 ? 6 : 2;
constexpr int kTurnBytes = kTokens * kPitch, kRingBytes = kRing * kTurnBytes;
static_assert(kHeld % kTogether == 0 && (ROWS == 1 || ROWS == 64), "constants");

// The warp's columns of x of a tile of pairs, through a ring of its own.
struct PartRows {
  const scalar_t* inner;
  const int* pairs;   // shared: of the warp's tile
  int count, begin, end;
  uint32_t ring;

  // Starts the copy of the columns of turn `turn` of the warp's part.
  DEVICE void start(int turn) const {
    constexpr int kPieces = kTurnColumns / 8;
    const int lane = threadIdx.x % 32, first = (begin + turn * kTogether) * kSliceColumns;
    if (turn < kTurns) {
      for (int i = lane; i < count * kPieces; i += 32) {
        const int token = i / kPieces, column = i % kPieces * 8;
        if (first + column < end * kSliceColumns)
          cp_async16(ring + turn % kRing * kTurnBytes + token * kPitch + column * 2,
                     inner + static_cast<int64_t>(pairs[token]) * K + first + column);
      }
    }
    cp_async_commit();
  }
};

struct RingRows {
  uint32_t place;
  DEVICE RingRows(const PartRows& from, int turn, int s) {
    const int lane = threadIdx.x % 32;
    place = from.ring + turn % kRing * kTurnBytes + (ROWS == 1 ? 0 : lane / 4 * kPitch) + s * (kSliceColumns * 2) + lane % 4 * 16;
  }
  DEVICE uint4 operator()(int s, int j, int i) const {
    return load_shared(place + i * 8 * kPitch + s * (kSliceColumns * 2) + j * 64);
  }
};

// The first weights of the warp's part of a tile.
DEVICE void load_first(Slice (&held)[kHeld], const WeightTile& weight, int begin, int end) {
#pragma unroll
  for (int i = 0; i < kHeld; i++)
    if (begin + i < end) weight.load(held[i], begin + i);
}

// The warp's part of the sums of its tile of pairs.
DEVICE void accumulate(Sums (&sums)[1], Slice (&held)[kHeld], const WeightTile& weight, const PartRows& rows) {
  const int used = (rows.count + 7) / 8, begin = rows.begin, end = rows.end;
  for (int turn = 0; turn < kRing; turn++) rows.start(turn);
#pragma unroll 1
  for (int base = 0; begin + base < end; base += kHeld) {
#pragma unroll
    for (int of_held = 0; of_held < kHeld; of_held += kTogether) {
      const int slice = begin + base + of_held, turn = (base + of_held) / kTogether;
      if (slice >= end) break;
      cp_async_wait<kRing - 1>();
      __syncwarp();
      if (slice + kTogether <= end) {
        multiply<kTogether>(sums, held + of_held, RingRows(rows, turn, 0), used);
      } else {
#pragma unroll
        for (int s = 0; s < kTogether; s++)
          if (slice + s < end) multiply<1>(sums, held + of_held + s, RingRows(rows, turn, s), used);
      }
      __syncwarp();
      rows.start(turn + kRing);
#pragma unroll
      for (int s = 0; s < kTogether; s++)
        if (slice + s + kHeld < end) weight.load(held[of_held + s], slice + s + kHeld);
    }
  }
  cp_async_wait<0>();
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    KERNEL(experts_down)(scalar_t* x, const scalar_t* inner, const void* __restrict__ weight, const int* chosen,
                         const float* shares, int num_rows, int top, int num_experts, int columns, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ int listed[kWarps][kTokens];
  __shared__ float parts[kWarps][TOKEN_TILES * 128];
  float* const found = reinterpret_cast<float*>(memory + kWarps * kRingBytes);   // [pair][16]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % kParts, group = warp / kParts;
  const int begin = min(part * kPartSlices, kSlices), end = min(begin + kPartSlices, kSlices), num_pairs = num_rows * top;
  pdl_launch_dependents();
  if (!EARLY) pdl_wait();

  const int own = count_pairs(chosen, num_pairs, num_experts);
  PairTile tile = tile_of<kTokens>(own, group);
  const auto weights_of = [&](int expert) {
    return WeightTile(weight, {static_cast<int64_t>(max(expert, 0)) * columns + blockIdx.x * 16, 8});
  };
  Slice held[kHeld];
  if (tile.expert >= 0) load_first(held, weights_of(tile.expert), begin, end);
  if (EARLY) pdl_wait();
  // What the block's last work needs of x comes while it multiplies.
  const int row = threadIdx.x / 16, column = blockIdx.x * 16 + threadIdx.x % 16;
  scalar_t before = from_float(0.0f);
  if (row < num_rows) before = x[static_cast<int64_t>(row) * columns + column];

  for (int index = group; tile.expert >= 0; index += kGroups) {
    visit_pairs(chosen, num_pairs, tile, [&](int i, int pair) { listed[warp][i] = pair; });
    __syncwarp();
    Sums sums[1] = {};
    const PartRows rows{inner, listed[warp], tile.count, begin, end, shared_address(memory) + warp * kRingBytes};
    accumulate(sums, held, weights_of(tile.expert), rows);
    const PairTile next = tile_of<kTokens>(own, index + kGroups);
    if (next.expert >= 0) load_first(held, weights_of(next.expert), begin, end);
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; i++)
#pragma unroll
      for (int c = 0; c < 4; c++) parts[warp][(i * 4 + c) * 32 + lane] = sums[0][i][c];
    barrier_wait(1 + group, kParts * 32);
    for (int value = threadIdx.x % (kParts * 32); value < TOKEN_TILES * 128; value += kParts * 32) {
      const int place = value / 32, of_lane = value % 32;
      const int token = place / 4 * 8 + of_lane % 4 * 2 + place % 2, of_tile = of_lane / 4 + place % 4 / 2 * 8;
      float sum = 0.0f;
#pragma unroll
      for (int other = 0; other < kParts; other++) sum += parts[group * kParts + other][value];
      if (token < tile.count) found[listed[warp][token] * 16 + of_tile] = sum;
    }
    barrier_wait(1 + group, kParts * 32);
    tile = next;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_rows * 16; i += kThreads) {
    const int t = i / 16;
    if (chosen[t * top] < 0) continue;
    float sum = 0.0f;
    for (int place = 0; place < top; place++)
      sum = fmaf(shares[t * top + place], found[(t * top + place) * 16 + i % 16], sum);
    scalar_t* const out = x + static_cast<int64_t>(t) * columns + column;
    *out = from_float(fmaf(scale, sum, to_float(i < kThreads ? before : *out)));
  }
}
