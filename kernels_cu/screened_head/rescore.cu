// Computes the exact logits of the tokens that a step may choose; all others, which the screen proves cannot be chosen, get -infinity.
//
//   formula   The exact logit of token v in row t lies in the interval screened -+ (bounds[v] norms[t] / divisor + |screened| 2^-21).
//             A row's threshold is, for a greedy request, the largest lower end of an interval; with top-k the k-th largest;
//             with min-p and without top-p the largest plus log(min_p) temperature (with top-k too the higher of the two); else
//             -infinity, as for every request with penalties, biases or log-probabilities. A token whose upper end reaches the
//             threshold of a row is a candidate. If a block has a candidate for one of eight neighbouring rows, all its candidates
//             get logits[t][v] = n[t] W[v]^T / divisor in these rows, with the bits of linear_head. All other logits become
//             -infinity: sample() gives the same token as with all logits. If an interval is not finite, all tokens are rescored,
//             so that an error in the logits is found as without a screen
//   operands  results (16) ResultRecord in mapped host memory, whose last word of the step becomes the number of tokens rescored;
//             logits (T, V) float32; best (T, BLOCKS * 8) uint32: the largest lower end of each warp's tokens, as an ordered
//             float; counters (2) uint64: the blocks that have arrived, a multiple of BLOCKS between launches, and a count that
//             is 0 between launches; context StepContext; screened (T, V) float32: from linear_packed_head with the copy of
//             screen_head.cu; bounds (V) float32; n (T, K) scalar_t and norms (T) float32 from head_rows.cu; weight (V, K)
//             scalar_t; states (B) SlotState; slots (T) int32, -1: nobody reads the row; is_counted: 0 if the step's command is
//             counted only when the step ends, as in a speculative step
//   constants IN_FEATURES: K, a multiple of 64. VOCAB: V. CLUSTER: cluster size of the linear_head whose bits are wanted, 1 or 2.
//             BLOCKS: no more than multiprocessors. ROWS: 1, 8, 16 or 32, at least T
//   launch    grid BLOCKS, block 256, no dynamic shared memory
//   numerics  float32; the products in tensor cores over 8 * CLUSTER runs of K, which are added in order, as in linear.cu. Sampling
//             divides by the temperature, and quotients may become equal by rounding: thresholds are lower by 2^-20 of themselves,
//             so that such tokens are kept together
//   oracle    reference/sampling.py sample over NumpyOps.lm_head; tests/reference/test_head_screen.py for the bound
//   source    original; the barrier as in cooperative groups
//   layout    groups of 32 tokens are dealt out to the warps of all blocks, so that candidates spread. A block rescores its own
//             candidates: blocks wait for each other only once, for the thresholds. Each warp stores the largest lower end of its
//             tokens. These are of different tokens, so the k-th largest of them is a threshold for top-k, hardly below the best one
#if !defined(IN_FEATURES) || !defined(VOCAB) || !defined(CLUSTER) || !defined(BLOCKS) || !defined(ROWS)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "mma.cuh"
#include "ordered_float.cuh"
#include "slot_state.cuh"

constexpr int K = IN_FEATURES, kWarps = 8, kThreads = kWarps * 32;
constexpr int kUnits = K / 64, kOwners = kWarps * CLUSTER, kOwnUnits = (kUnits + kOwners - 1) / kOwners;
constexpr int kGroups = (VOCAB + 31) / 32, kTeams = BLOCKS * kWarps;   // groups of tokens; warps of the grid, which share them
constexpr int kRounds = (kGroups + kTeams - 1) / kTeams, kLaneTeams = (kTeams + 31) / 32;
constexpr int kTogether = 8;                                          // units whose loads are under way together
constexpr bool kKeeps = kRounds * ROWS <= 32;                         // upper ends stay in registers from the first pass to the second
constexpr int kUnrolledRounds = kKeeps ? kRounds : ROWS > 8 ? 1 : 4;
constexpr uint32_t kNotFinite = 0xFFFFFFFFu;                          // above every lower end

static_assert(K % 64 == 0, "K must be a multiple of 64");
static_assert(CLUSTER == 1 || CLUSTER == 2, "CLUSTER must be 1 or 2");
static_assert(ROWS == 1 || ROWS == 8 || ROWS == 16 || ROWS == 32, "ROWS must be 1, 8, 16 or 32");
static_assert(kRounds * kThreads <= 1 << 16, "a block's tokens are counted in 16 bits");

// Returns the token at a place of the block, numbered [round][warp][lane].
DEVICE int token_at(int place) { return ((place >> 5) * BLOCKS + static_cast<int>(blockIdx.x)) * 32 + (place & 31); }

// Waits until all blocks have arrived; what they wrote before is visible then. All threads.
DEVICE void wait_for_all(uint64_t* arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    uint64_t before, now;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(arrivals) : "memory");
    const uint64_t target = (before / BLOCKS + 1) * BLOCKS;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(arrivals) : "memory");
    } while (now < target);
  }
  __syncthreads();
}

struct Shared {
  float partial[kOwners][16][8];        // sums of a run of K: [run][candidate of the tile][row of the eight]
  float threshold[ROWS], reach[ROWS];   // reach: norms / |divisor|, rounded up
  int slot[ROWS];
  uint32_t wanted;                      // bits of the rows that have a candidate in the block
  int count;                            // entries of `places`
  uint16_t places[kRounds * kThreads];  // places (token_at) of the tokens to rescore
};

// Returns half the width of the interval around a screened logit; not below 1e30 if anything is not finite.
DEVICE float width(float screened, float bound, float reach) { return fmaf(bound, reach, fabsf(screened) * 0x1p-21f); }

// A token's screened logits in all rows, and its bound, loaded together.
struct Looks {
  float z[ROWS], bound;

  Looks() = default;
  DEVICE Looks(const float* screened, const float* __restrict__ bounds, int token, int T) : bound(bounds[token]) {
#pragma unroll
    for (int t = 0; t < ROWS; t++) z[t] = t < T ? screened[static_cast<int64_t>(t) * VOCAB + token] : 0.0f;
  }
};

// Returns a value that is not above the k-th largest lower end, and hardly below it. `ends` are ordered floats, spread over the lanes of
// a warp, all of which call this.
DEVICE float kth_largest(const uint32_t (&ends)[kLaneTeams], int k) {
  uint32_t found = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 8; bit--) {
    const uint32_t trial = found | 1u << bit;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kLaneTeams; i++) count += ends[i] >= trial;
    if (static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, count)) >= k) found = trial;
  }
  return found == 0 ? __uint_as_float(0xFF800000u) : unordered(found);
}

// Returns a row's threshold, found from the warps' largest lower ends at `best`: no token whose upper end is below it can be chosen. All
// lanes of a warp.
DEVICE float threshold_of(const uint32_t* best, const SlotState* state) {
  const float nothing = __uint_as_float(0xFF800000u), temperature = state->temperature;
  uint32_t ends[kLaneTeams], largest = 0;
#pragma unroll
  for (int i = 0; i < kLaneTeams; i++) {
    const int team = i * 32 + threadIdx.x % 32;
    ends[i] = team < kTeams ? static_cast<uint32_t>(load_now(reinterpret_cast<const int*>(best) + team)) : 0;
    largest = max(largest, ends[i]);
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  const bool is_adjusted = state->repetition_penalty != 1.0f || state->presence_penalty != 0.0f ||
                           state->frequency_penalty != 0.0f || state->num_logit_biases > 0;
  if (largest == kNotFinite || is_adjusted || state->num_logprobs > 0) return nothing;
  const float top = unordered(largest);
  if (temperature == 0.0f) return top;
  if (!(temperature >= 1e-6f && temperature <= 1e6f)) return nothing;
  const int top_k = state->top_k;
  const bool has_top_k = 0 < top_k && top_k < VOCAB;
  float threshold = nothing;
  if (has_top_k && top_k <= kTeams) {
    const float lower = kth_largest(ends, top_k);
    threshold = lower - fabsf(lower) * 0x1p-20f - 0x1p-100f;
  }
  if (state->top_p >= 1.0f && state->log_min_p > nothing) {
    const float below = state->log_min_p * temperature;
    threshold = fmaxf(threshold, top + below - (fabsf(top) + fabsf(below)) * 0x1p-20f - 0x1p-100f);
  }
  return threshold;
}

// Computes the exact logits of up to 16 of the block's candidates, from number `first` on, for at most eight rows. All threads.
DEVICE void rescore_tile(Shared& shared, float* logits, const scalar_t* n, const scalar_t* weight, int first, int T, float divisor) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const scalar_t* from[2];
  bool is_there[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int index = first + half * 8 + row;
    is_there[half] = index < shared.count;
    from[half] = weight + static_cast<int64_t>(is_there[half] ? token_at(shared.places[index]) : 0) * K + quarter * 8;
  }
  const bool has_token = row < T;
  const scalar_t* x = n + static_cast<int64_t>(has_token ? row : 0) * K + quarter * 8;
  const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int rank = 0; rank < CLUSTER; rank++) {
    const int owner = rank * kWarps + warp, begin = owner * kOwnUnits, end = min(begin + kOwnUnits, kUnits);
    float acc[4] = {};
#pragma unroll 1
    for (int unit = begin; unit < end; unit += kTogether) {
      uint4 a[kTogether][2][2], b[kTogether][2];
#pragma unroll
      for (int u = 0; u < kTogether; u++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int column = (unit + u) * 64 + j * 32;
          const bool inside = unit + u < end;
#pragma unroll
          for (int half = 0; half < 2; half++) a[u][half][j] = inside && is_there[half] ? load16_streamed(from[half] + column) : zero;
          b[u][j] = inside && has_token ? load16_past_l1(x + column) : zero;
        }
#pragma unroll
      for (int u = 0; u < kTogether; u++)
        if (unit + u < end) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const uint4 lo = a[u][0][j], hi = a[u][1][j];
            mma(acc, {lo.x, hi.x, lo.y, hi.y}, {b[u][j].x, b[u][j].y});
            mma(acc, {lo.z, hi.z, lo.w, hi.w}, {b[u][j].z, b[u][j].w});
          }
        }
    }
#pragma unroll
    for (int c = 0; c < 4; c++) shared.partial[owner][row + c / 2 * 8][quarter * 2 + c % 2] = acc[c];
  }
  __syncthreads();
  const int of_tile = threadIdx.x / 8, token_row = threadIdx.x % 8, index = first + of_tile;
  if (of_tile < 16 && token_row < T && index < shared.count) {
    float sums[CLUSTER];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) {
      sums[rank] = 0.0f;
#pragma unroll
      for (int i = 0; i < kWarps; i++) sums[rank] += shared.partial[rank * kWarps + i][of_tile][token_row];
    }
    const float sum = CLUSTER == 1 ? sums[0] : sums[0] + sums[CLUSTER - 1];
    logits[static_cast<int64_t>(token_row) * VOCAB + token_at(shared.places[index])] = sum / divisor;
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(rescore)(ResultRecord* __restrict__ results, float* __restrict__ logits, uint32_t* best, uint64_t* counters,
                    const StepContext* context, const float* screened, const float* __restrict__ bounds, const scalar_t* n,
                    const float* norms, const scalar_t* __restrict__ weight, const SlotState* states, const int32_t* slots,
                    int T, float divisor, int is_counted) {
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  pdl_launch_dependents();
#pragma unroll 1
  for (int place = threadIdx.x; place < kRounds * kThreads; place += kThreads) {
    const int token = token_at(place);
    if (lane == 0 && token < VOCAB) asm volatile("prefetch.global.L2 [%0];" ::"l"(bounds + token));
  }
  pdl_wait();
  if (threadIdx.x < ROWS) {
    const int t = threadIdx.x;
    shared.slot[t] = t < T ? slots[t] : -1;
    shared.reach[t] = t < T ? norms[t] / fabsf(divisor) * (1.0f + 0x1p-20f) : 0.0f;
  }
  if (threadIdx.x == 0) shared.count = 0, shared.wanted = 0;
  __syncthreads();

  uint32_t largest[ROWS] = {};
  float upper[kKeeps ? kRounds : 1][ROWS];
#pragma unroll kUnrolledRounds
  for (int round = 0; round < kRounds; round++) {
    const int token = token_at(round * kThreads + threadIdx.x);
    if (token >= VOCAB) continue;
    const Looks looks(screened, bounds, token, T);
#pragma unroll
    for (int t = 0; t < ROWS; t++) {
      if (shared.slot[t] < 0) continue;
      const float z = looks.z[t], half = width(z, looks.bound, shared.reach[t]);
      largest[t] = max(largest[t], fabsf(z) < 1e30f && half < 1e30f ? ordered(z - half) : kNotFinite);
      if (kKeeps) upper[round][t] = z + half;
    }
  }
#pragma unroll
  for (int t = 0; t < ROWS; t++) {
    const uint32_t of_warp = __reduce_max_sync(0xFFFFFFFFu, largest[t]);
    if (lane == 0 && t < T) best[t * kTeams + blockIdx.x * kWarps + warp] = of_warp;
  }
  wait_for_all(counters);

#pragma unroll 1
  for (int t = warp; t < ROWS; t += kWarps) {
    if (shared.slot[t] < 0) continue;
    const float threshold = threshold_of(best + t * kTeams, states + shared.slot[t]);
    if (lane == 0) shared.threshold[t] = threshold;
  }
  __syncthreads();
#pragma unroll kUnrolledRounds
  for (int round = 0; round < kRounds; round++) {
    const int place = round * kThreads + threadIdx.x, token = token_at(place);
    uint32_t wanted = 0;   // rows that may choose the token
    if (token < VOCAB) {
      Looks looks;
      if (!kKeeps) looks = Looks(screened, bounds, token, T);
#pragma unroll
      for (int t = 0; t < ROWS; t++) {
        if (shared.slot[t] < 0) continue;
        const float end = kKeeps ? upper[round][t] : looks.z[t] + width(looks.z[t], looks.bound, shared.reach[t]);
        if (!(end < shared.threshold[t])) wanted |= 1u << t;
      }
      for (int t = 0; t < T; t++) logits[static_cast<int64_t>(t) * VOCAB + token] = __uint_as_float(0xFF800000u);
    }
    const bool is_candidate = wanted != 0;
    const uint32_t candidates = __ballot_sync(0xFFFFFFFFu, is_candidate);
    if (candidates != 0) {
      int to = 0;
      if (lane == 0) to = atomicAdd(&shared.count, __popc(candidates));
      to = __shfl_sync(0xFFFFFFFFu, to, 0) + __popc(candidates & (1u << lane) - 1);
      if (is_candidate) shared.places[to] = static_cast<uint16_t>(place), prefetch_to_l2(weight + static_cast<int64_t>(token) * K, K * 2);
      wanted = __reduce_or_sync(0xFFFFFFFFu, wanted);
      if (lane == 0) atomicOr(&shared.wanted, wanted);
    }
  }
  __syncthreads();
  uint64_t before = 0;   // high half: blocks that have counted; low half: their tokens. Requested now, looked at in the end
  if (threadIdx.x == 0) before = atomicAdd(counters + 1, 1ull << 32 | shared.count);
#pragma unroll 1
  for (int row = 0; row < ROWS; row += 8) {
    if (!(shared.wanted >> row & 255)) continue;
    const int64_t offset = row;
#pragma unroll 1
    for (int first = 0; first < shared.count; first += 16)
      rescore_tile(shared, logits + offset * VOCAB, n + offset * K, weight, first, T - row, divisor);
  }
  if (threadIdx.x != 0 || before >> 32 != BLOCKS - 1) return;
  counters[1] = 0;
  publish(results, context->next_entry + !is_counted, kMaxRows - 1, static_cast<uint32_t>(before) + shared.count, false);
}
