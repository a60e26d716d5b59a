// Routes the row of a one-row step and multiplies it by its experts' gate and up matrices, in one launch.
//
//   formula   chosen, shares and n as in route.cu; then with e = chosen[p], p = 0 .. TOP - 1:
//             out[p, f] = round(silu(n . Wg[e, f]) * (n . Wu[e, f]))
//   operands  out (TOP, columns) scalar_t; chosen (TOP) int32, ascending, all -1 for padding (slots has -1); shares (TOP) float; x (K),
//             norm (K), router (EXPERTS, K) scalar_t; weight (2 EXPERTS columns, K), the gates of all experts and then their ups:
//             scalar_t row-major, or packed as in packed_layout.cuh; slots (1) int32; next: the weight of the following product,
//             expert_bytes for each expert, or null
//   constants IN_FEATURES: K, a multiple of 64, in 4 bits of 128. EXPERTS: 1 to 32. TOP: experts of a row, 1 to EXPERTS.
//             ROUTE_WARPS: warps that score the row, as in route.cu. WEIGHT_BITS: 16 or 4.
//             In 4 bits RUNS: runs of the packed layout. SCALE_GROUP: columns that share a scale. ZEROS: 1 has zero points.
//             WARPS: warps of a block, at least ROUTE_WARPS. AHEAD: turns of weights that a warp has on their way
//   launch    grid ceil(TOP * columns / 8 / WARPS), block 32 * WARPS, dynamic shared memory: a ring for each warp, or norm and router
//             if they are larger; 2 K bytes; 4 ROUTE_WARPS (1 + EXPERTS) bytes
//   numerics  the routing's as in route.cu, the products' as in experts.cu, to the bit
//   oracle    NumpyOps.route, experts_gate_up
//   source    original
//   layout    every block computes the routing: that takes less time than another launch would, and a warp can start to load
//             weights as soon as their expert is known. Each warp has a tile, whose weights come through a ring of its own. A
//             block has so many warps that the tiles spread evenly over the multiprocessors, and their rings take all of its
//             shared memory. The next weight is prefetched into the L2, so that memory is not idle during the last products
//             and the start of the next kernel
#if !defined(IN_FEATURES) || !defined(EXPERTS) || !defined(TOP) || !defined(ROUTE_WARPS) || !defined(WEIGHT_BITS) || \
    (WEIGHT_BITS == 4 && !defined(RUNS)) || (WEIGHT_BITS == 4 && !defined(SCALE_GROUP)) || \
    (WEIGHT_BITS == 4 && !defined(ZEROS)) || !defined(WARPS) || !defined(AHEAD)
#error "a constant is not defined"
#endif
#define HIDDEN IN_FEATURES
#define TOKEN_TILES 1
#include "routed_row.cuh"

constexpr int kThreads = 32 * WARPS, kAhead = AHEAD;
constexpr int kRingBytes = kAhead * kTurnBytes;   // a warp's ring
// The turn at which a warp prefetches the next weight: all its own copies have been started, and its first weights have come.
constexpr int kPrefetchTurn = kTurns > kAhead ? kTurns - kAhead : 0;
constexpr int kRowOffset = WARPS * kRingBytes > kRouteBytes ? WARPS * kRingBytes : kRouteBytes;
constexpr int kSumsOffset = kRowOffset + K * 2;
static_assert(WARPS >= ROUTE_WARPS, "WARPS must be at least ROUTE_WARPS");

// The weight of the following product, of which the first ahead_bytes of each chosen expert are prefetched into the L2.
struct NextWeight {
  const void* weight;   // null: there is none
  int64_t expert_bytes;
  int ahead_bytes;               // a multiple of 16

  // Prefetches the share of the warp that has tile `tile` of the expert's `tiles`.
  DEVICE void prefetch(int expert, int tile, int tiles) const {
    const int own = (ahead_bytes + 16 * tiles - 1) / (16 * tiles) * 16, begin = tile * own;
    if (weight != nullptr && begin < ahead_bytes && threadIdx.x % 32 == 0)
      prefetch_to_l2(static_cast<const unsigned char*>(weight) + expert * expert_bytes + begin, min(own, ahead_bytes - begin));
  }
};

// The weight tile of a warp, which comes through a ring in shared memory that no other warp uses. A turn is a group of copies.
struct Ring {
  const TileSource& source;
  uint32_t shared;

  DEVICE uint32_t slot(int place, int s) const { return shared + place * kTurnBytes + s * kSlotBytes; }
  DEVICE void copy(int turn, int place) const {
#pragma unroll
    for (int s = 0; s < kTogether; s++)
      if (turn * kTogether + s < kSlices) source.copy(slot(place, s), turn * kTogether + s);
    cp_async_commit();
  }
  DEVICE void begin() const {
#pragma unroll
    for (int turn = 0; turn < kAhead; turn++) copy(turn, turn);
  }
  // Adds the products with the row at `row` in shared memory to `sums`. Calls next() once, when nothing is left to copy.
  template <class Next>
  DEVICE void accumulate(Sums (&sums)[1], uint32_t row, const Next& next) const {
    int place = 0;
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn++) {
      const int slice = turn * kTogether;
      cp_async_wait<kAhead - 1>();
      __syncwarp();
      Slice held[kTogether];
#pragma unroll
      for (int s = 0; s < kTogether; s++) TileSource::read(held[s], slot(place, s));
      __syncwarp();
      if (kAhead < kTurns) copy(turn + kAhead, place);
      else cp_async_commit();
      if (turn == kPrefetchTurn) next();
      place = place + 1 == kAhead ? 0 : place + 1;
      multiply_turn<kSlices % kTogether == 0>(sums, held, row, slice, 0, kSlices);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(experts_gate_up_row)(scalar_t* __restrict__ out, int* __restrict__ chosen, float* __restrict__ shares, const scalar_t* x,
                                const scalar_t* __restrict__ norm, const scalar_t* __restrict__ router,
                                const void* __restrict__ weight, const void* __restrict__ next, const int* slots, int columns,
                                int64_t expert_bytes, int ahead_bytes, float eps) {
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t shared = shared_address(memory), row = shared + kRowOffset;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int expert_tiles = columns / 8, index = blockIdx.x * WARPS + warp, place = index / expert_tiles, tile = index % expert_tiles;
  pdl_launch_dependents();
  const RouteWeights route_weights{norm, router, shared};
  route_weights.begin();
  pdl_wait();
  const bool is_padding = slots[0] < 0;
  const float score = score_row(*reinterpret_cast<RouteSums*>(memory + kSumsOffset), route_weights, x, eps,
                                [&](int column, uint4 piece) { store_shared(row + column * 2, piece); });
  const Choice choice(score);

  const bool has_tile = place < TOP && !is_padding;
  const int expert = expert_at(choice.taken, place);
  const TileSource source(weight, {static_cast<int64_t>(expert) * columns + tile * 8, static_cast<int64_t>(EXPERTS) * columns});
  const Ring ring{source, shared + warp * kRingBytes};
  if (has_tile) ring.begin();
  if (index == 0) choice.store(chosen, shares, score, is_padding);
  if (!has_tile) return;
  Sums sums[1] = {};
  const NextWeight next_weight{next, expert_bytes, ahead_bytes};
  ring.accumulate(sums, row, [&] { next_weight.prefetch(expert, tile, expert_tiles); });
  if (lane % 4 == 0) out[static_cast<int64_t>(place) * columns + tile * 8 + lane / 4] = activated(sums[0]);
}
