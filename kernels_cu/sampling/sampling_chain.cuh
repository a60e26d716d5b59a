// The sampling chain over one row of logits, for the kernels of sampling.cu and tree_sampling.cu; see the first of them.
#pragma once
#include "ordered_float.cuh"
#include "philox.cuh"
#include "row_blocks.cuh"
#include "slot_state.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2 * kThreads;
constexpr int kDigitBits = 10;
static_assert(kBins == 1 << kDigitBits, "a histogram has a bin for each value of a digit");

// The first digit: steps of 1/32 below the maximum; what is further down shares the last.
constexpr int kTail = kBins - 1;
constexpr float kStepsPerUnit = 32.0f;
constexpr float kStep = 1.0f / kStepsPerUnit;

constexpr int kGroups = (VOCAB + 3) / 4;  // of 4 tokens, which share one Philox counter
constexpr int kBlockGroups = (kGroups + kBlocks - 1) / kBlocks;

struct Shared {
  uint32_t counts[kBins], mass_low[kBins], mass_high[kBins];  // of this block's tokens
  uint32_t row_counts[kBins];                                 // of the row
  uint64_t row_masses[kBins];
  uint64_t exchange[2][kBlocks];
  uint64_t warps[kWarps];
  uint64_t found_before;
  uint32_t found_count;
  int found_digit;
};

struct Larger {
  DEVICE static uint64_t of(uint64_t a, uint64_t b) { return a > b ? a : b; }
};
struct Sum {
  DEVICE static uint64_t of(uint64_t a, uint64_t b) { return a + b; }
};

// What a filter keeps: tokens of a lower first digit, and of the same one those with at least this key.
struct Cut {
  int step;
  uint32_t key;
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
  float maximum;  // of z
  int position, block, parity;
  bool is_adjusted;  // by penalties or biases

  DEVICE int end_group() const { return min((block + 1) * kBlockGroups, kGroups); }

  // z of a token: the oracle's operations one by one.
  DEVICE float adjust(float logit, int token) const {
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
    return temperature == 1.0f || temperature == 0.0f ? logit : __fdiv_rn(logit, temperature);
  }

  // visit(value, token) for the block's tokens: raw logits, or z. The first pass finds them in L2 and needs several
  // loads in flight; later ones find them in L1, and short code serves them better.
  template <bool RAW, int UNROLL = 1, typename Visit>
  DEVICE void for_each(Visit visit) const {
#pragma unroll UNROLL
    for (int group = block * kBlockGroups + threadIdx.x; group < end_group(); group += kThreads) {
      float values[4];
      load_logits<VOCAB>(values, logits, group);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = group * 4 + i;
        if (VOCAB % 4 == 0 || token < VOCAB) visit(RAW ? values[i] : adjust(values[i], token), token);
      }
    }
  }

  // The values of all threads of the row in one; everyone gets it. Integers, so no order matters.
  template <typename Operation>
  DEVICE uint64_t combine(uint64_t value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      value = Operation::of(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    }
    if (threadIdx.x % 32 == 0) shared->warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared->warps[0];
    for (int warp = 1; warp < kWarps; warp++) value = Operation::of(value, shared->warps[warp]);
    // Two sets in turns: a block may be here again while another still reads.
    if (threadIdx.x < kBlocks) store_peer(&shared->exchange[parity][block], threadIdx.x, value);
    row_barrier();
    value = shared->exchange[parity][0];
    for (int peer = 1; peer < kBlocks; peer++) value = Operation::of(value, shared->exchange[parity][peer]);
    parity ^= 1;
    return value;
  }

  DEVICE int step_of(float z) const {
    return static_cast<int>(fminf(__fsub_rn(maximum, z) * kStepsPerUnit, static_cast<float>(kTail)));
  }

  DEVICE bool kept(float z, Cut cut) const {
    const int step = step_of(z);
    return step < cut.step || (step == cut.step && ordered(z) >= cut.key);
  }
};

DEVICE void clear_histogram(Shared* shared) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    shared->counts[bin] = 0, shared->mass_low[bin] = 0, shared->mass_high[bin] = 0;
  }
  __syncthreads();
}

template <bool MASS>
DEVICE void add_token(Shared* shared, int bin, float below_maximum) {
  atomicAdd(&shared->counts[bin], 1u);
  if (!MASS) return;
  const uint64_t mass = mass_of(below_maximum);
  const uint32_t low = static_cast<uint32_t>(mass);
  const uint32_t carry = atomicAdd(&shared->mass_low[bin], low) + low < low;
  const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
  if (high) atomicAdd(&shared->mass_high[bin], high);
}

// Every block sums a share of the bins over all blocks and hands the sums to all.
DEVICE void merge_histograms(Shared* shared, int block) {
  row_barrier();
  if (threadIdx.x == 0) shared->found_digit = -1;  // everyone has read the last one
  for (int i = threadIdx.x; i < kBins / kBlocks; i += kThreads) {
    const int bin = block * (kBins / kBlocks) + i;
    uint32_t count = 0;
    uint64_t mass = 0;
#pragma unroll
    for (int peer = 0; peer < kBlocks; peer++) {
      count += load_peer(&shared->counts[bin], peer);
      mass += load_peer(&shared->mass_low[bin], peer);
      mass += static_cast<uint64_t>(load_peer(&shared->mass_high[bin], peer)) << 32;
    }
#pragma unroll
    for (int peer = 0; peer < kBlocks; peer++) {
      store_peer(&shared->row_counts[bin], peer, count);
      store_peer(&shared->row_masses[bin], peer, mass);
    }
  }
  row_barrier();
}

struct Digit {
  int index;        // -1: the goal is beyond every bin
  uint64_t before;  // sum of the bins before it
  uint32_t count;   // tokens in it
};

// The bin in which the running sum over the row's bins reaches `goal`. `share` > 0: the goal is that share of the sum.
template <bool MASS>
DEVICE Digit find_digit(Shared* shared, uint64_t& goal, float share) {
  const int first = 2 * threadIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t a = MASS ? shared->row_masses[first] : shared->row_counts[first];
  const uint64_t b = MASS ? shared->row_masses[first + 1] : shared->row_counts[first + 1];
  uint64_t sum = a + b;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) shared->warps[warp] = sum;
  __syncthreads();
  uint64_t before = sum - a - b, total = 0;
  for (int other = 0; other < kWarps; other++) {
    if (other == warp) before += total;
    total += shared->warps[other];
  }
  if (share > 0.0f) {
    const uint64_t wanted = static_cast<uint64_t>(ceil(static_cast<double>(share) * static_cast<double>(total)));
    goal = wanted > 1 ? wanted : 1;
  }
  const bool in_a = before < goal && goal <= before + a;
  if (in_a || (before + a < goal && goal <= before + a + b)) {
    shared->found_digit = in_a ? first : first + 1;
    shared->found_before = in_a ? before : before + a;
    shared->found_count = shared->row_counts[in_a ? first : first + 1];
  }
  __syncthreads();
  if (shared->found_digit < 0) return {-1, total, 0};
  return {shared->found_digit, shared->found_before, shared->found_count};
}

// The cut at the goal-th largest z (MASS false), or where the sum of probabilities, largest first and only of what
// `outer` keeps, reaches `share` of its total. Tokens with the same z stay or go together.
template <bool MASS, typename Counts>
DEVICE Cut select(const Row<Counts>& row, uint64_t goal, float share, Cut outer) {
  int step = -1, shift = 0;
  uint32_t low = 0, high = 0;  // keys that the step's tokens may have
  while (true) {
    clear_histogram(row.shared);
    row.template for_each<false>([&](float z, int) {
      const int own_step = row.step_of(z);
      const uint32_t key = ordered(z);
      const bool here = step < 0 ? own_step < kTail : own_step == step && low <= key && key <= high;
      if (here && (!MASS || row.kept(z, outer))) {
        add_token<MASS>(row.shared, step < 0 ? own_step : static_cast<int>((high - key) >> shift), z - row.maximum);
      }
    });
    merge_histograms(row.shared, row.block);
    const Digit digit = find_digit<MASS>(row.shared, goal, step < 0 ? share : 0.0f);
    goal -= digit.before < goal ? digit.before : 0;
    // All of a digit stays if its last token is the one: no need to look inside.
    const bool whole = digit.index >= 0 && (digit.count == 1 || (!MASS && digit.count == goal));
    if (step < 0) {
      step = digit.index < 0 ? kTail : digit.index;
      if (whole) return {step, 0};
      // A step's width on either side covers the rounding of step_of.
      const float top = row.maximum - step * kStep;
      high = step == kTail ? 0xFFFFFFFFu : ordered(top + kStep);
      low = step == kTail ? 0u : ordered(top - 2.0f * kStep);
    } else {
      const uint32_t index = digit.index < 0 ? (high - low) >> shift : static_cast<uint32_t>(digit.index);
      const uint32_t span = (1u << shift) - 1;
      high -= index << shift;
      low = high - low > span ? high - span : low;
      if (whole || low == high) return {step, low};
    }
    shift = max(0, 32 - __clz(high - low) - kDigitBits);
  }
}

template <typename Counts>
DEVICE Cut filter(const Row<Counts>& row, int top_k, float top_p) {
  Cut cut = {kTail, 0};
  if (0 < top_k && top_k < VOCAB) cut = select<false>(row, top_k, 0.0f, cut);
  if (top_p < 1.0f) {
    const Cut inner = select<true>(row, 0, top_p, cut);
    const bool same = inner.step == cut.step;
    if (inner.step < cut.step || (same && inner.key > cut.key)) cut = inner;
  }
  return cut;
}

// The arg max of z + noise among what the filters keep.
template <typename Counts>
DEVICE int draw(Row<Counts>& row, Cut cut, float log_min_p) {
  const float minus_infinity = __uint_as_float(0xFF800000u), least = __fadd_rn(row.maximum, log_min_p);
  uint64_t best = 0;
#pragma unroll 1
  for (int group = row.block * kBlockGroups + threadIdx.x; group < row.end_group(); group += kThreads) {
    float values[4];
    load_logits<VOCAB>(values, row.logits, group);
    const uint4 random = philox(group, row.position, row.seed);
    const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = group * 4 + i;
      if (VOCAB % 4 != 0 && token >= VOCAB) continue;
      const float z = row.adjust(values[i], token);
      const bool stays = row.kept(z, cut) && z >= least;
      best = Larger::of(best, candidate(stays ? __fadd_rn(z, gumbel(words[i])) : minus_infinity, token));
    }
  }
  return token_of(row.template combine<Larger>(best));
}

// Log-probabilities of the chosen token and of the `count` best, from the raw logits, one pass over the row for each.
template <typename Counts>
DEVICE void write_logprobs(TokenLogprobs* out, Row<Counts>& row, int chosen, int count) {
  uint64_t best = 0, sum = 0;
  row.template for_each<true>([&](float logit, int token) { best = Larger::of(best, candidate(logit, token)); });
  const float maximum = unordered(static_cast<uint32_t>(row.template combine<Larger>(best) >> 32));
  row.template for_each<true>([&](float logit, int) { sum += mass_of(logit - maximum); });
  const float log_sum = logf(static_cast<float>(row.template combine<Sum>(sum)) * 0x1p-40f);
  const bool writes = row.block == 0 && threadIdx.x == 0;
  count = min(count, VOCAB);
  uint64_t previous = ~0ull;
  for (int i = 0; i < count; i++) {
    best = 0;
    row.template for_each<true>([&](float logit, int token) {
      const uint64_t other = candidate(__fsub_rn(__fsub_rn(logit, maximum), log_sum), token);
      if (other < previous) best = Larger::of(best, other);
    });
    previous = row.template combine<Larger>(best);
    if (writes) {
      out->top_logprobs[i] = unordered(static_cast<uint32_t>(previous >> 32));
      out->top_ids[i] = token_of(previous);
    }
  }
  if (writes) {
    out->logprob = __fsub_rn(__fsub_rn(row.logits[chosen], maximum), log_sum);
    out->num_top = count;
  }
}

template <typename Counts>
DEVICE void set_request(Row<Counts>& row, const SlotState* state, Shared* shared) {
  row.state = state;
  row.shared = shared;
  row.seed = state->seed;
  row.temperature = state->temperature;
  row.repetition_penalty = state->repetition_penalty;
  row.presence_penalty = state->presence_penalty;
  row.frequency_penalty = state->frequency_penalty;
  row.position = state->position;
  row.block = blockIdx.x;
  row.parity = 0;
  row.is_adjusted = row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f ||
                    row.frequency_penalty != 0.0f || state->num_logit_biases > 0;
}

// The row's token, or kNonFinite. It ends with a barrier of the row: every block has read the state, none is read from
// any more.
template <typename Counts>
DEVICE int sample_row(Row<Counts>& row, int top_k, float top_p, float log_min_p) {
  constexpr uint64_t kUnusable = ~0ull;  // larger than any candidate
  const float infinity = __uint_as_float(0x7F800000u);
  uint64_t best = 0;
  row.template for_each<true, 4>([&](float logit, int token) {
    // Not true of NaN either.
    best = Larger::of(best, logit < infinity ? candidate(row.adjust(logit, token), token) : kUnusable);
  });
  best = row.template combine<Larger>(best);
  if (best == kUnusable || best >> 32 == ordered(-infinity)) return static_cast<int>(kNonFinite);
  int token = token_of(best);
  if (row.temperature != 0.0f) {
    row.maximum = unordered(static_cast<uint32_t>(best >> 32));
    token = draw(row, filter(row, top_k, top_p), log_min_p);
  }
  return token;
}
