// Routing of one row by a block: the row is normalised and scored against a router, then every warp chooses among the scores by itself.
//
// The first ROUTE_WARPS warps share the row; a thread has pieces of eight columns, 32 * ROUTE_WARPS pieces apart. Sums go over a
// thread's pieces in order, then over lanes, then over warps in order. So of all constants the bits of the scores depend on HIDDEN,
// EXPERTS and ROUTE_WARPS alone, and the choice on these and TOP.
#pragma once
#include "copy.cuh"
#include "norm_values.cuh"
#include "ordered_float.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");
static_assert(EXPERTS >= 1 && EXPERTS <= 32 && TOP >= 1 && TOP <= EXPERTS, "EXPERTS must be 1 to 32, TOP at most as many");

constexpr int kRouteThreads = 32 * ROUTE_WARPS, kRouteTurns = (HIDDEN / 8 + kRouteThreads - 1) / kRouteThreads;
// Bytes of shared memory that hold the norm's weights and the router, if they are at most 46 KB; larger ones are read from global
// memory when they are needed.
constexpr int kAllRouteBytes = (1 + EXPERTS) * kRouteTurns * kRouteThreads * 16;
constexpr bool kHoldsRouter = kAllRouteBytes <= 46 << 10;
constexpr int kRouteBytes = kHoldsRouter ? kAllRouteBytes : 0;

// Returns the first column of the thread's piece in a turn. Past the row's end the thread has no piece.
DEVICE int route_column(int turn) { return (turn * kRouteThreads + static_cast<int>(threadIdx.x)) * 8; }
DEVICE bool has_piece(int turn) { return threadIdx.x < kRouteThreads && route_column(turn) < HIDDEN; }

// The thread's pieces of the norm's weights (line 0) and of the router's row of expert e (line 1 + e). These are weights: copies to
// shared memory may start while the kernel before still writes the row, where the compiler would move loads to registers behind the
// wait. A thread copies what it will read itself.
struct RouteWeights {
  const scalar_t *norm, *router;
  uint32_t shared;   // address of kRouteBytes of shared memory

  DEVICE void begin() const {
    if constexpr (kHoldsRouter) {
#pragma unroll
      for (int turn = 0; turn < kRouteTurns; turn++)
#pragma unroll
        for (int line = 0; line <= EXPERTS; line++)
          if (has_piece(turn)) cp_async16(place(line, turn), source(line, turn));
    }
  }
  DEVICE void wait() const { cp_async_wait_all(); }
  DEVICE uint4 piece(int line, int turn) const {
    return kHoldsRouter ? load_shared(place(line, turn)) : load16_streamed(source(line, turn));
  }
  DEVICE const scalar_t* source(int line, int turn) const {
    return (line == 0 ? norm : router + (line - 1) * HIDDEN) + route_column(turn);
  }
  DEVICE uint32_t place(int line, int turn) const {
    return shared + ((line * kRouteTurns + turn) * kRouteThreads + threadIdx.x) * 16;
  }
};

// Each warp's part of the row's square sum and of the experts' scores, in shared memory.
struct RouteSums {
  float squares[ROUTE_WARPS], scores[ROUTE_WARPS][EXPERTS];
};

// Returns `sum` plus the products of eight pairs of values, added in order.
DEVICE float dot(uint4 a, uint4 b, float sum) {
  const uint32_t *left = &a.x, *right = &b.x;
#pragma unroll
  for (int word = 0; word < 4; word++) {
    const float2 v = unpack2(left[word]), w = unpack2(right[word]);
    sum = fmaf(v.y, w.y, fmaf(v.x, w.x, sum));
  }
  return sum;
}

// Sums each of COUNT values, a power of two, over groups of 2 * DISTANCE lanes. The 2 * DISTANCE / COUNT lanes of the group from
// i * 2 * DISTANCE / COUNT on return the sum of value i. An exchange halves the values that a lane has left to add; one value after the
// other would take five exchanges each.
template <int COUNT, int DISTANCE = 16>
DEVICE float sum_of_each(const float (&values)[COUNT]) {
  constexpr int kLeft = COUNT > 1 ? COUNT / 2 : 1;
  float sums[kLeft];
  const bool is_upper = COUNT > 1 && threadIdx.x & DISTANCE;
#pragma unroll
  for (int i = 0; i < kLeft; i++) {
    const float other = values[COUNT > 1 ? i + kLeft : i];
    sums[i] = (is_upper ? other : values[i]) + __shfl_xor_sync(0xFFFFFFFFu, is_upper ? values[i] : other, DISTANCE);
  }
  if constexpr (DISTANCE > 1) return sum_of_each<kLeft, DISTANCE / 2>(sums);
  else return sums[0];
}

// Returns, in lane e of every warp, the score of expert e. `store(column, piece)` gets the normalised row, which all threads see
// when this returns. All threads of the block call it, after `weights.begin()` and pdl_wait.
template <class Store>
DEVICE float score_row(RouteSums& sums, const RouteWeights& weights, const scalar_t* x, float eps, const Store& store) {
  constexpr int kTogether = EXPERTS > 4 ? 8 : EXPERTS > 2 ? 4 : EXPERTS;   // experts whose sums are exchanged together
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4 held[kRouteTurns];
  if (warp < ROUTE_WARPS) {
#pragma unroll
    for (int turn = 0; turn < kRouteTurns; turn++)
      held[turn] = has_piece(turn) ? load16_written(x + route_column(turn)) : make_uint4(0, 0, 0, 0);
    float own[1] = {};
#pragma unroll
    for (int turn = 0; turn < kRouteTurns; turn++) own[0] += squares(held[turn]);
    const float sum = sum_of_each(own);
    if (lane == 0) sums.squares[warp] = sum;
  }
  __syncthreads();
  if (warp < ROUTE_WARPS) {
    float total = 0.0f;
#pragma unroll
    for (int other = 0; other < ROUTE_WARPS; other++) total += sums.squares[other];
    const float scale = 1.0f / sqrtf(total / HIDDEN + eps);
    weights.wait();
#pragma unroll
    for (int turn = 0; turn < kRouteTurns; turn++) {
      if (!has_piece(turn)) continue;
      held[turn] = normalised(held[turn], weights.piece(0, turn), scale);
      store(route_column(turn), held[turn]);
    }
#pragma unroll
    for (int first = 0; first < EXPERTS; first += kTogether) {
      float scores[kTogether] = {};
#pragma unroll
      for (int turn = 0; turn < kRouteTurns; turn++) {
        if (!has_piece(turn)) continue;
#pragma unroll
        for (int i = 0; i < kTogether; i++)
          if (first + i < EXPERTS) scores[i] = dot(held[turn], weights.piece(1 + first + i, turn), scores[i]);
      }
      const float sum = sum_of_each(scores);
      const int expert = first + lane / (32 / kTogether);
      if (lane % (32 / kTogether) == 0 && expert < EXPERTS) sums.scores[warp][expert] = sum;
    }
  }
  __syncthreads();
  float score = 0.0f;
  if (lane < EXPERTS) {
#pragma unroll
    for (int other = 0; other < ROUTE_WARPS; other++) score += sums.scores[other][lane];
  }
  return score;
}

// The experts that a row takes, a bit each, and the highest of their scores.
struct Choice {
  uint32_t taken;
  float highest;

  // Takes the TOP highest scores of the lanes below EXPERTS, of equal ones that of the lower lane. All lanes of a warp call it.
  DEVICE explicit Choice(float score) : taken(0) {
    const int lane = threadIdx.x % 32;
    // Scores are compared as integers of the same order. NaN counts as minus infinity, whose key is still above 0, the key of a lane that
    // takes no part.
    uint32_t key = lane < EXPERTS ? ordered(score == score ? score : __int_as_float(0xFF800000)) : 0;
#pragma unroll
    for (int turn = 0; turn < TOP; turn++) {
      const uint32_t best = __reduce_max_sync(0xFFFFFFFFu, key);
      const int winner = __ffs(__ballot_sync(0xFFFFFFFFu, key == best)) - 1;
      if (turn == 0) highest = unordered(best);
      if (lane == winner) key = 0;
      taken |= 1u << winner;
    }
  }

  // Returns the share of the lane's expert: the softmax over the experts that are taken, 0 for others. All lanes call it.
  DEVICE float share(float score) const {
    const float weight = taken >> threadIdx.x % 32 & 1 ? expf(score - highest) : 0.0f;
    float total = weight;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, distance);
    return weight / total;
  }

  // Writes the experts that are taken, in ascending order (-1 for a padding row), and their shares. All lanes of one warp call it.
  DEVICE void store(int* chosen, float* shares, float score, bool is_padding) const {
    const int lane = threadIdx.x % 32, place = __popc(taken & ((1u << lane) - 1));
    const float own = share(score);
    if (taken >> lane & 1) {
      chosen[place] = is_padding ? -1 : lane;
      shares[place] = own;
    }
  }
};
