// Multiplies a step's rows by the down matrices of their experts and adds the weighted sums to the residual stream.
//
//   formula   x[t, c] = round(x[t, c] + scale * sum_i shares[t, i] * (inner[p] . W[e, c])), p = t * top + i, e = chosen[p], in
//             ascending i; rows of padding stay as they are
//   operands  x (T, C) scalar_t; inner (T * top, K) scalar_t, row-major; weight of (E C, K): scalar_t row-major, or packed as in
//             packed_layout.cuh; chosen (T, top) int32, -1: no expert; shares (T, top) float
//   constants IN_FEATURES: K, a multiple of 64, in 4 bits of 128. WEIGHT_BITS: 16 or 4.
//             In 4 bits RUNS: runs of the packed layout. SCALE_GROUP: columns that share a scale. ZEROS: 1 has zero points.
//             ROWS: 1 for steps of one row, else 64. AHEAD: turns of weights and x that a warp has on their way
//   launch    grid C / 16, block 256, dynamic shared memory: 8 rings of weights and x, 4352 bytes, then 68 for each pair
//   numerics  float32 sums over a slice or scale group in tensor cores, added in order within a quarter of K, then the
//             quarters, then the experts; rounded once. A row's bits depend on its own operands only
//   oracle    NumpyOps.experts_down
//   source    original
//   layout    a block has only 16 columns, so four warps split K among them and add their sums in order, and two such groups of
//             warps take turns with the tiles of eight pairs. While a group adds its sums, the copies for its next tile that
//             can already start are under way: with many rows the weights; with one row, inner, since the expert still has to
//             be looked up
#if !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || (WEIGHT_BITS == 4 && !defined(RUNS)) || \
    (WEIGHT_BITS == 4 && !defined(SCALE_GROUP)) || (WEIGHT_BITS == 4 && !defined(ZEROS)) || !defined(ROWS) || !defined(AHEAD)
#error "a constant is not defined"
#endif
#define TOKEN_TILES 1
#include "expert_product.cuh"
#include "expert_rows.cuh"
#include "mbarrier.cuh"

constexpr int kParts = 4, kGroups = 2, kWarps = kParts * kGroups, kThreads = kWarps * 32;   // parts of K, groups of warps
constexpr int kPartSlices = (kSlices + kParts - 1) / kParts;
constexpr int kTokens = ROWS == 1 ? 1 : 8;
constexpr float kPadding = -1.0f;   // stands for the share of a pair without an expert
// kTogether: slices that a warp multiplies together, a turn. kAhead: turns of weights and x on their way to shared memory.
constexpr int kTogether = ROWS == 1 && !kManyGroups ? 2 : 1, kAhead = AHEAD;
constexpr int kTurns = (kPartSlices + kTogether - 1) / kTogether;
constexpr int kTurnColumns = kTogether * kSliceColumns, kPitch = kTurnColumns * 2 + 64;
constexpr int kWeightBytes = kTogether * kSlotBytes, kTurnBytes = kWeightBytes + kTokens * kPitch;
constexpr int kRingBytes = kAhead * kTurnBytes;   // a warp's ring
static_assert(ROWS == 1 || ROWS == 64, "ROWS must be 1 or 64");

// A warp's part of K, a quarter: the weights and x of its columns, which come through a ring of the warp's own in shared memory.
struct Part {
  uint32_t ring;
  int begin, end;   // slices [begin, end) of the part

  DEVICE uint32_t slot(int turn) const { return ring + turn % kAhead * kTurnBytes; }
  // Starts the copies of the weights of a turn.
  DEVICE void copy_weights(const TileSource& weight, int turn) const {
#pragma unroll
    for (int s = 0; s < kTogether; s++) {
      const int slice = begin + turn * kTogether + s;
      if (turn < kTurns && slice < end) weight.copy(slot(turn) + s * kSlotBytes, slice);
    }
  }
  // Starts the copies of a turn's columns of x, of `count` pairs. If ROWS is 1, `inner` is the pair's own row and `pairs` is unused.
  DEVICE void copy_rows(const scalar_t* inner, const int* pairs, int count, int turn) const {
    constexpr int kPieces = kTurnColumns / 8;
    const int first = (begin + turn * kTogether) * kSliceColumns;
    if (turn >= kTurns) return;
    for (int i = threadIdx.x % 32; i < count * kPieces; i += 32) {
      const int token = i / kPieces, column = i % kPieces * 8;
      if (first + column < end * kSliceColumns)
        cp_async16(slot(turn) + kWeightBytes + token * kPitch + column * 2,
                   inner + (ROWS == 1 ? 0 : static_cast<int64_t>(pairs[token]) * K) + first + column);
    }
  }
  // Starts the copies of the first kAhead turns of weights, as one group.
  DEVICE void begin_weights(const TileSource& weight) const {
    for (int turn = 0; turn < kAhead; turn++) copy_weights(weight, turn);
    cp_async_commit();
  }
  // Starts the copies of the first kAhead turns of a row. They belong to the group of the first weights, which accumulate commits.
  DEVICE void begin_row(const scalar_t* row) const {
    for (int turn = 0; turn < kAhead; turn++) copy_rows(row, nullptr, 1, turn);
  }
};

// Reads the lane's columns of x of a turn, from the turn's slice s on.
struct TurnRows {
  uint32_t place;
  DEVICE TurnRows(uint32_t slot, int s) {
    const int lane = threadIdx.x % 32;
    place = slot + kWeightBytes + (ROWS == 1 ? 0 : lane / 4 * kPitch) + s * (kSliceColumns * 2) + lane % 4 * 16;
  }
  DEVICE uint4 operator()(int s, int j, int) const { return load_shared(place + s * (kSliceColumns * 2) + j * 64); }
};

// Adds the products of a warp's part to `sums`. The copies of its first weights (ROWS 64) or of the row's first columns (ROWS 1) have
// been started; the copies that are started here are one group for each turn.
DEVICE void accumulate(Sums (&sums)[1], const Part& part, const TileSource& weight, const scalar_t* inner, const int* pairs,
                       int count) {
  for (int turn = 0; turn < kAhead; turn++) {
    if (ROWS == 1) part.copy_weights(weight, turn);
    else part.copy_rows(inner, pairs, count, turn);
    cp_async_commit();
  }
#pragma unroll 1
  for (int turn = 0; part.begin + turn * kTogether < part.end; turn++) {
    const int slice = part.begin + turn * kTogether;
    cp_async_wait<kAhead - 1>();
    __syncwarp();
    Slice held[kTogether];
#pragma unroll
    for (int s = 0; s < kTogether; s++) TileSource::read(held[s], part.slot(turn) + s * kSlotBytes);
    if (slice + kTogether <= part.end) {
      multiply<kTogether>(sums, held, TurnRows(part.slot(turn), 0), 1);
    } else {
#pragma unroll
      for (int s = 0; s < kTogether; s++)
        if (slice + s < part.end) multiply<1>(sums, held + s, TurnRows(part.slot(turn), s), 1);
    }
    __syncwarp();
    part.copy_weights(weight, turn + kAhead);
    part.copy_rows(inner, pairs, count, turn + kAhead);
    cp_async_commit();
  }
  cp_async_wait<0>();
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    KERNEL(experts_down)(scalar_t* x, const scalar_t* inner, const void* __restrict__ weight, const int* chosen,
                         const float* shares, int num_rows, int top, int num_experts, int columns, float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  const auto sums_of = reinterpret_cast<float(*)[128]>(memory + kWarps * kRingBytes);   // [warp][128]
  const auto listed = reinterpret_cast<int(*)[8]>(sums_of + kWarps);                      // [warp][8]: the pairs of its tile
  float* const found = reinterpret_cast<float*>(listed + kWarps);                         // [pair][16]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / kParts, num_pairs = num_rows * top;
  const int begin = min(warp % kParts * kPartSlices, kSlices);
  float* const held_shares = found + num_pairs * 16;                                      // [pair]
  const Part part{shared_address(memory) + warp * kRingBytes, begin, min(begin + kPartSlices, kSlices)};
  pdl_launch_dependents();
  pdl_wait();

  const int own = ROWS == 1 ? 0 : count_pairs(chosen, num_pairs, num_experts);
  const auto tile_at = [&](int index) -> PairTile {
    if (ROWS > 1) return tile_of<kTokens>(own, index);
    return {index < num_pairs ? chosen[index] : -1, 0, 1};   // each pair has an expert of its own
  };
  const auto weights_of = [&](int expert) {
    return TileSource(weight, {static_cast<int64_t>(expert) * columns + blockIdx.x * 16, 8});
  };
  const auto share_of = [&](int pair) { return chosen[pair] < 0 ? kPadding : shares[pair]; };
  const auto row_of = [&](int index) { return inner + static_cast<int64_t>(index) * K; };
  if (ROWS == 1 && group < num_pairs) part.begin_row(row_of(group));
  PairTile tile = tile_at(group);
  if (ROWS > 1 && tile.expert >= 0) part.begin_weights(weights_of(tile.expert));
  // The values of x and the shares that the block needs at its end are loaded while it multiplies.
  const int row = threadIdx.x / 16, column = blockIdx.x * 16 + threadIdx.x % 16;
  scalar_t before = from_float(0.0f);
  if (row < num_rows) before = x[static_cast<int64_t>(row) * columns + column];
  const float share = threadIdx.x < num_pairs ? share_of(threadIdx.x) : kPadding;

  for (int index = group; tile.expert >= 0; index += kGroups) {
    if (ROWS == 1) listed[warp][0] = index;
    else visit_pairs(chosen, num_pairs, tile, [&](int i, int pair) { listed[warp][i] = pair; });
    __syncwarp();
    Sums sums[1] = {};
    accumulate(sums, part, weights_of(tile.expert), ROWS == 1 ? row_of(index) : inner, listed[warp], tile.count);
    const PairTile next = tile_at(index + kGroups);
    if (next.expert >= 0) {
      if (ROWS == 1) part.begin_row(row_of(index + kGroups));
      else part.begin_weights(weights_of(next.expert));
    }
#pragma unroll
    for (int c = 0; c < 4; c++) sums_of[warp][c * 32 + lane] = sums[0][0][c];
    barrier_wait(1 + group, kParts * 32);
    const int value = threadIdx.x % (kParts * 32), c = value / 32, of_lane = value % 32;
    const int token = of_lane % 4 * 2 + c % 2, of_tile = of_lane / 4 + c / 2 * 8;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < kParts; other++) sum += sums_of[group * kParts + other][value];
    if (token < tile.count) found[listed[warp][token] * 16 + of_tile] = sum;
    barrier_wait(1 + group, kParts * 32);
    tile = next;
  }
  cp_async_wait_all();   // in a row of padding nothing has waited for the copies of inner
  if (threadIdx.x < num_pairs) held_shares[threadIdx.x] = share;
  for (int pair = threadIdx.x + kThreads; pair < num_pairs; pair += kThreads) held_shares[pair] = share_of(pair);
  __syncthreads();
  for (int i = threadIdx.x; i < num_rows * 16; i += kThreads) {
    const int t = i / 16;
    if (held_shares[t * top] == kPadding) continue;
    float sum = 0.0f;
    for (int place = 0; place < top; place++)
      sum = fmaf(held_shares[t * top + place], found[(t * top + place) * 16 + i % 16], sum);
    scalar_t* const out = x + static_cast<int64_t>(t) * columns + column;
    *out = from_float(fmaf(scale, sum, to_float(i < kThreads ? before : *out)));
  }
}
