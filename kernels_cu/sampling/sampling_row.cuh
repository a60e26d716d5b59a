// A row of logits that the blocks of a cluster share: loading logits, the values z of tokens, sums and maxima over the row.
#pragma once
#include "copy.cuh"
#include "mbarrier.cuh"
#include "ordered_float.cuh"
#include "row_blocks.cuh"
#include "slot_state.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;
constexpr int kDigitBits = 10;
static_assert(kBins == 1 << kDigitBits, "a histogram has a bin for each value of a digit");

// The first digit of a z is the number of steps of 1/32 from the maximum down to it, at most kTail: all that
// are further down share this value.
constexpr int kTail = kBins - 1;
constexpr int kNear = 256;  // steps: tokens further below are less than e^-8 times as probable as the best
constexpr float kStepsPerUnit = 32.0f;
constexpr float kStep = 1.0f / kStepsPerUnit;

constexpr int kGroups = (VOCAB + 3) / 4;  // groups of 4 tokens, which share one Philox counter
constexpr int kBlockGroups = (kGroups + kBlocks - 1) / kBlocks;

struct Shared {
  uint32_t counts[kBins], mass_low[kBins], mass_high[kBins];  // histogram of this block's tokens
  uint32_t row_counts[kBins];                                 // histogram of the row
  uint64_t row_masses[kBins];
  uint64_t exchange[2][kBlocks];
  uint64_t received[2];  // mbarriers that count the bytes which peers send to exchange
  uint64_t warps[2][kWarps];
  uint64_t found_before;
  uint32_t found_count;
  int found_digit;
};

// The operations that Row::combine takes: the maximum and the sum, of two values and of a warp's.
struct Larger {
  DEVICE static uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
  DEVICE static uint64_t of_warp(uint64_t value) {
    const uint32_t high = value >> 32, top = __reduce_max_sync(0xFFFFFFFFu, high);
    return static_cast<uint64_t>(top) << 32 | __reduce_max_sync(0xFFFFFFFFu, high == top ? static_cast<uint32_t>(value) : 0u);
  }
};
struct Sum {
  DEVICE static uint64_t of(uint64_t a, uint64_t b) { return a + b; }
  DEVICE static uint64_t of_warp(uint64_t value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    return value;
  }
};

// The threshold of a filter, which keeps the tokens with a first digit below `step`, and of those with the digit `step` the ones whose
// key, ordered(z), is at least `key`.
struct Cut {
  int step;
  uint32_t key;
};

// The logits of up to kHeld of a thread's groups, loaded together; those of its first groups before the request is known.
struct HeldLogits {
  static constexpr int kThreadGroups = (kBlockGroups + kThreads - 1) / kThreads, kHeld = kThreadGroups < 8 ? kThreadGroups : 8;
  float values[kHeld][4];

  // Loads the groups first, first + kThreads, ... of the row that are below `end`. Places past the end get -infinity.
  DEVICE void read(const float* logits, int first, int end) {
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int group = first + i * kThreads;
#pragma unroll
      for (int j = 0; j < 4; j++) values[i][j] = __uint_as_float(0xFF800000u);
      if (group >= end) continue;
      if (VOCAB % 4 == 0) {
        const uint4 v = load16_written(logits + group * 4);
        values[i][0] = __uint_as_float(v.x), values[i][1] = __uint_as_float(v.y);
        values[i][2] = __uint_as_float(v.z), values[i][3] = __uint_as_float(v.w);
      } else {
#pragma unroll
        for (int j = 0; j < 4; j++) if (group * 4 + j < VOCAB) values[i][j] = logits[group * 4 + j];
      }
    }
  }
};

// One row as one of its blocks sees it. `Counts` returns a token's word of token_counts as it holds for this row and, if the row is
// masked, whether the token is allowed.
template <typename Counts>
struct Row {
  const float* logits;
  Counts token_counts;
  const SlotState* state;
  Shared* shared;
  uint64_t seed;
  float temperature, repetition_penalty, presence_penalty, frequency_penalty;
  float inverse;  // 1 / temperature, for estimates of z, whose relative error is 2^-22 at most
  float maximum;  // the largest z of the row
  int position, block, turn;  // turn: number of values combined so far
  bool is_adjusted;  // penalties or biases change the logits

  DEVICE int first_group() const { return block * kBlockGroups + threadIdx.x; }
  DEVICE int end_group() const { return min((block + 1) * kBlockGroups, kGroups); }

  // Returns the z of a token, the logit after bias, penalties and temperature, by the oracle's operations one by one.
  DEVICE float adjust(float logit, int token) const { return scale(penalise(logit, token)); }
  DEVICE float scale(float logit) const {
    return temperature == 1.0f || temperature == 0.0f ? logit : __fdiv_rn(logit, temperature);
  }
  DEVICE float penalise(float logit, int token) const {
    if constexpr (Counts::kIsMasked) {
      if (!token_counts.allows(token)) return __uint_as_float(0xFF800000u);
    }
    if (is_adjusted) {
      const uint32_t word = token_counts.of(token), count = word & ~(kSeen | kBiased);
      if (word & kBiased) logit = __fadd_rn(logit, logit_bias_of(state, token));
      if (word & kSeen && repetition_penalty != 1.0f) {
        logit = logit > 0.0f ? __fdiv_rn(logit, repetition_penalty) : __fmul_rn(logit, repetition_penalty);
      }
      logit = __fsub_rn(logit, count ? presence_penalty : 0.0f);
      logit = __fsub_rn(logit, __fmul_rn(frequency_penalty, static_cast<float>(count)));
    }
    return logit;
  }

  // Calls visit(logit, token) for the thread's tokens. The first pass over the row had several loads in flight, since logits then
  // come from L2; later passes find them in L1, where short code is faster.
  template <typename Visit>
  DEVICE void for_each(Visit visit) const {
#pragma unroll 1
    for (int group = first_group(); group < end_group(); group += kThreads) {
      float values[4];
      load_logits<VOCAB>(values, logits, group);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = group * 4 + i;
        if (VOCAB % 4 == 0 || token < VOCAB) visit(values[i], token);
      }
    }
  }

  // Returns a bound for the error of an estimate near `z` plus the rounding of a threshold of that size.
  DEVICE float doubt(float z) const {
    return z == __uint_as_float(0xFF800000u) ? 0.0f : 1e-4f + 1e-6f * (fabsf(maximum) + fabsf(z));
  }
  // Loads a group's logits, applies mask, biases and penalties, and returns them in `values`. `estimates` gets estimates of their z,
  // -infinity past the row's end.
  DEVICE void estimate(float (&values)[4], float (&estimates)[4], int group) const {
    load_logits<VOCAB>(values, logits, group);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = group * 4 + i;
      const bool exists = VOCAB % 4 == 0 || token < VOCAB;
      if ((Counts::kIsMasked || is_adjusted) && exists) values[i] = penalise(values[i], token);
      estimates[i] = exists ? values[i] * inverse : __uint_as_float(0xFF800000u);
    }
  }
  // Calls visit(z) for those of the thread's tokens whose z may be `least` or more.
  template <typename Visit>
  DEVICE void for_each_from(float least, Visit visit) const {
    const float bound = least - doubt(least);
#pragma unroll 1
    for (int group = first_group(); group < end_group(); group += kThreads) {
      float values[4], estimates[4];
      estimate(values, estimates, group);
      bool has_any = false;
#pragma unroll
      for (int i = 0; i < 4; i++) has_any = has_any || estimates[i] >= bound;
      if (!has_any) continue;
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (estimates[i] >= bound && (VOCAB % 4 == 0 || group * 4 + i < VOCAB)) visit(scale(values[i]));
    }
  }

  // Returns the sum or maximum of the values of all threads of the row, to each of them. Values are integers, so order does not matter.
  template <typename Operation>
  DEVICE uint64_t combine(uint64_t value) {
    value = Operation::of_warp(value);
    const int set = turn & 1;  // two sets take turns: a warp or block may write its next value while another still reads
    if (threadIdx.x % 32 == 0) shared->warps[set][threadIdx.x / 32] = value;
    __syncthreads();
    value = Operation::of_warp(threadIdx.x % 32 < kWarps ? shared->warps[set][threadIdx.x % 32] : 0);
    if constexpr (kBlocks > 1) {
      const uint32_t barrier = shared_address(&shared->received[set]);
      if (threadIdx.x == 0) mbarrier_arrive_expect(barrier, sizeof(shared->exchange[0]));
      if (threadIdx.x < kBlocks) send_peer(&shared->exchange[set][block], barrier, threadIdx.x, value);
      mbarrier_wait(barrier, turn >> 1 & 1);
      value = shared->exchange[set][0];
      for (int peer = 1; peer < kBlocks; peer++) value = Operation::of(value, shared->exchange[set][peer]);
    }
    turn++;
    return value;
  }

  // Returns the first digit of a z.
  DEVICE int step_of(float z) const {
    return static_cast<int>(fminf(__fsub_rn(maximum, z) * kStepsPerUnit, static_cast<float>(kTail)));
  }

  DEVICE bool kept(float z, Cut cut) const {
    const int step = step_of(z);
    return step < cut.step || (step == cut.step && ordered(z) >= cut.key);
  }
  // Returns a lower bound for the z that the cut keeps, up to the rounding that `doubt` covers.
  DEVICE float least_kept(Cut cut) const {
    const float minus_infinity = __uint_as_float(0xFF800000u);
    const float next_step = cut.step == kTail ? minus_infinity : maximum - (cut.step + 1) * kStep;
    const float of_key = cut.key == 0 ? minus_infinity : unordered(cut.key);
    return fminf(fmaxf(of_key, next_step), maximum - cut.step * kStep);
  }
};
