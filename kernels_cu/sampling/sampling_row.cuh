// A row of logits as the blocks of a cluster share it: logits asked for at once, values of tokens, sums and maxima over the row.
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

// The first digit: steps of 1/32 below the maximum; what is further down shares the last.
constexpr int kTail = kBins - 1;
constexpr int kNear = 256;  // steps: what is further below is less than e^-8 times as probable as the maximum
constexpr float kStepsPerUnit = 32.0f;
constexpr float kStep = 1.0f / kStepsPerUnit;

constexpr int kGroups = (VOCAB + 3) / 4;  // of 4 tokens, which share one Philox counter
constexpr int kBlockGroups = (kGroups + kBlocks - 1) / kBlocks;

struct Shared {
  uint32_t counts[kBins], mass_low[kBins], mass_high[kBins];  // of this block's tokens
  uint32_t row_counts[kBins];                                 // of the row
  uint64_t row_masses[kBins];
  uint64_t exchange[2][kBlocks];
  uint64_t received[2];  // count the bytes that peers send to exchange
  uint64_t warps[2][kWarps];
  uint64_t found_before;
  uint32_t found_count;
  int found_digit;
};

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

// What a filter keeps: tokens of a lower first digit, and of the same one those with at least this key.
struct Cut {
  int step;
  uint32_t key;
};

// Logits of a thread's first groups, all asked for before one is looked at, and before the request is known.
struct HeldLogits {
  static constexpr int kThreadGroups = (kBlockGroups + kThreads - 1) / kThreads, kHeld = kThreadGroups < 8 ? kThreadGroups : 8;
  float values[kHeld][4];

  // From group `first` of the row on, before group `end`. What lies behind that counts as a token that nobody takes.
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

// One row as one block of it sees it. `Counts` gives the word of token_counts that holds for a token in this row, and, if
// the row is masked, whether a token is allowed.
template <typename Counts>
struct Row {
  const float* logits;
  Counts token_counts;
  const SlotState* state;
  Shared* shared;
  uint64_t seed;
  float temperature, repetition_penalty, presence_penalty, frequency_penalty;
  float inverse;  // of the temperature, for estimates of z, which are wrong by 2^-22 of it at most
  float maximum;  // of z
  int position, block, turn;  // turn: values combined so far
  bool is_adjusted;  // by penalties or biases

  DEVICE int first_group() const { return block * kBlockGroups + threadIdx.x; }
  DEVICE int end_group() const { return min((block + 1) * kBlockGroups, kGroups); }

  // z of a token: the oracle's operations one by one.
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

  // visit(logit, token) for the block's tokens. The first pass found them in L2 and had several loads in flight; these find
  // them in L1, and short code serves them better.
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

  // How wrong an estimate of about `z` may be, together with the rounding of a bound of that size.
  DEVICE float doubt(float z) const {
    return z == __uint_as_float(0xFF800000u) ? 0.0f : 1e-4f + 1e-6f * (fabsf(maximum) + fabsf(z));
  }
  // Logits of a group, penalised, and estimates of their z; what lies past the row is -infinity.
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
  // visit(z) for the block's tokens that may have a z of `least` or more.
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

  // The values of all threads of the row in one; everyone gets it. Integers, so no order matters.
  template <typename Operation>
  DEVICE uint64_t combine(uint64_t value) {
    value = Operation::of_warp(value);
    const int set = turn & 1;  // two in turns: a warp, or a block, may be here again while another still reads
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

  DEVICE int step_of(float z) const {
    return static_cast<int>(fminf(__fsub_rn(maximum, z) * kStepsPerUnit, static_cast<float>(kTail)));
  }

  DEVICE bool kept(float z, Cut cut) const {
    const int step = step_of(z);
    return step < cut.step || (step == cut.step && ordered(z) >= cut.key);
  }
  // No less z is kept, but for the rounding that `doubt` covers.
  DEVICE float least_kept(Cut cut) const {
    const float minus_infinity = __uint_as_float(0xFF800000u);
    const float next_step = cut.step == kTail ? minus_infinity : maximum - (cut.step + 1) * kStep;
    const float of_key = cut.key == 0 ? minus_infinity : unordered(cut.key);
    return fminf(fmaxf(of_key, next_step), maximum - cut.step * kStep);
  }
};
