// The sampling chain over one row of logits, for all sampling kernels; the header of sampling.cu explains it.
#pragma once
#include "draw.cuh"

DEVICE void clear_histogram(Shared* shared) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    shared->counts[bin] = 0, shared->mass_low[bin] = 0, shared->mass_high[bin] = 0;
  }
  __syncthreads();
}

// Adds a probability mass to a bin of the block's histogram, which keeps each 64-bit mass in two words.
DEVICE void add_mass(Shared* shared, int bin, uint64_t mass) {
  const uint32_t low = static_cast<uint32_t>(mass);
  const uint32_t carry = atomicAdd(&shared->mass_low[bin], low) + low < low;
  const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
  if (high) atomicAdd(&shared->mass_high[bin], high);
}
// Counts a token in its bin and, if MASS, adds its probability; `below_maximum` is z - maximum.
template <bool MASS>
DEVICE void add_token(Shared* shared, int bin, float below_maximum) {
  atomicAdd(&shared->counts[bin], 1u);
  if (MASS) add_mass(shared, bin, mass_of(below_maximum));
}

// Merges the blocks' histograms: each block sums a share of the bins over all blocks and stores the sums in every block. All threads.
DEVICE void merge_histograms(Shared* shared, int block) {
  row_barrier();
  if (threadIdx.x == 0) shared->found_digit = -1;  // all threads have read the one before
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

// A bin of the merged histogram, which is a value of the digit.
struct Digit {
  int index;        // -1: the sum of all bins is below the goal
  uint64_t before;  // sum of the bins before this one
  uint32_t count;   // tokens in this bin
};

// Returns the bin at which the running sum over the row's bins (probabilities if MASS, else counts) reaches `goal`. If `share` > 0 the
// goal is first set to that share of the whole sum. All threads of the block.
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
  uint64_t(&warps)[kWarps] = shared->warps[0];
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  uint64_t before = sum - a - b, total = 0;
  for (int other = 0; other < kWarps; other++) {
    if (other == warp) before += total;
    total += warps[other];
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

// Returns the cut at the goal-th largest z (MASS false), or at the z where the sum of probabilities, largest first and only of tokens
// that `outer` keeps, reaches `share` of its total (MASS true). Tokens with the same z stay or go together. The first pass tells only
// the kNear steps below the maximum apart, since the cut mostly lies there; all probabilities further below go into one bin.
template <bool MASS, typename Counts>
DEVICE Cut select(const Row<Counts>& row, uint64_t goal, float share, Cut outer) {
  int step = -1, shift = 0, end_step = kNear;
  uint32_t low = 0, high = 0;  // the range of keys, ordered(z), in which the cut lies, within the step
  while (true) {
    clear_histogram(row.shared);
    uint64_t far = 0;
    float least = row.least_kept(outer);
    if (!MASS && step < 0 && end_step < kTail) least = row.maximum - kNear * kStep;
    if (0 <= step && step < kTail) least = fmaxf(least, unordered(low));
    row.for_each_from(least, [&](float z) {
      const int own_step = row.step_of(z);
      const uint32_t key = ordered(z);
      const bool here = step < 0 ? own_step < kTail : own_step == step && low <= key && key <= high;
      if (!here || (MASS && !row.kept(z, outer))) return;
      if (step < 0 && own_step >= end_step) {
        if (MASS) far += mass_of(z - row.maximum);
      } else {
        add_token<MASS>(row.shared, step < 0 ? own_step : static_cast<int>((high - key) >> shift), z - row.maximum);
      }
    });
    if (MASS && step < 0) {
      far = Sum::of_warp(far);
      if (threadIdx.x % 32 == 0 && far > 0) add_mass(row.shared, kTail, far);
    }
    merge_histograms(row.shared, row.block);
    const Digit digit = find_digit<MASS>(row.shared, goal, step < 0 ? share : 0.0f);
    if (step < 0 && end_step < kTail && (digit.index < 0 || digit.index == kTail)) {
      end_step = kTail;
      continue;
    }
    goal -= digit.before < goal ? digit.before : 0;
    // If the cut falls on the digit's last token, all of the digit is kept and needs no further pass.
    const bool whole = digit.index >= 0 && (digit.count == 1 || (!MASS && digit.count == goal));
    if (step < 0) {
      step = digit.index < 0 ? kTail : digit.index;
      if (whole) return {step, 0};
      // The range is wider by a step on either side, which covers the rounding of step_of.
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

// Returns the cut that top-k, and then top-p among what top-k keeps, make together.
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

// Writes the log-probabilities of the chosen token and of the `count` best tokens, from the raw logits. Each of the best takes a pass
// over the row. All threads of the row.
template <typename Counts>
DEVICE void write_logprobs(TokenLogprobs* out, Row<Counts>& row, int chosen, int count) {
  uint64_t best = 0, sum = 0;
  row.for_each([&](float logit, int token) { best = Larger::of(best, candidate(logit, token)); });
  const float maximum = unordered(static_cast<uint32_t>(row.template combine<Larger>(best) >> 32));
  row.for_each([&](float logit, int) { sum += mass_of(logit - maximum); });
  const float log_sum = logf(static_cast<float>(row.template combine<Sum>(sum)) * 0x1p-40f);
  const bool writes = row.block == 0 && threadIdx.x == 0;
  count = min(count, VOCAB);
  uint64_t previous = ~0ull;
  for (int i = 0; i < count; i++) {
    best = 0;
    row.for_each([&](float logit, int token) {
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

// Initialises the block's mbarriers and tells the row's other blocks so. After row_wait, which must follow, all blocks run and have
// their barriers, so that a block may send to another.
DEVICE void announce_block(Shared& shared) {
  if constexpr (kBlocks > 1) {
    if (threadIdx.x == 0) {
      for (uint64_t& barrier : shared.received) mbarrier_init(shared_address(&barrier), 1);
      mbarrier_init_fence();
    }
    __syncwarp();
    row_announce();
  }
}

// Sets the fields of the row that do not depend on the request and starts to load its first logits, before the request is read.
template <typename Counts>
DEVICE HeldLogits begin_row(Row<Counts>& row, const float* logits) {
  row.logits = logits + static_cast<int64_t>(blockIdx.y) * VOCAB;
  row.block = blockIdx.x;
  HeldLogits held;
  held.read(row.logits, row.first_group(), row.end_group());
  return held;
}

// Sets the fields of the row that come from the slot's state: sampling parameters, seed and position.
template <typename Counts>
DEVICE void set_request(Row<Counts>& row, const SlotState* state, Shared* shared) {
  row.state = state;
  row.shared = shared;
  row.seed = state->seed;
  row.temperature = state->temperature;
  row.inverse = row.temperature == 1.0f || row.temperature == 0.0f ? 1.0f : __frcp_rn(row.temperature);
  row.repetition_penalty = state->repetition_penalty;
  row.presence_penalty = state->presence_penalty;
  row.frequency_penalty = state->frequency_penalty;
  row.position = state->position;
  row.turn = 0;
  row.is_adjusted = row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f ||
                    row.frequency_penalty != 0.0f || state->num_logit_biases > 0;
}

constexpr uint64_t kUnusable = ~0ull;  // larger than any candidate

// Returns the best candidate by raw logits among the thread's tokens, 0 if all are -infinity, or kUnusable if one is NaN or +infinity.
// It finds the best group of four first, then the token in it. `first` is the thread's first group, `end` the block's end.
DEVICE uint64_t best_raw(HeldLogits& held, const float* logits, int first, int end) {
  constexpr int kRounds = (HeldLogits::kThreadGroups + HeldLogits::kHeld - 1) / HeldLogits::kHeld;
  const float infinity = __uint_as_float(0x7F800000u);
  float best = -infinity;
  int best_group = first;
  bool is_usable = true;
#pragma unroll 1
  for (int round = 0; round < kRounds; round++, first += HeldLogits::kHeld * kThreads) {
    if (round > 0) held.read(logits, first, end);
#pragma unroll
    for (int i = 0; i < HeldLogits::kHeld; i++) {
      const float(&v)[4] = held.values[i];
#pragma unroll
      for (int j = 0; j < 4; j++) is_usable = is_usable && v[j] < infinity;  // false for NaN too
      const float top = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
      if (top > best) best = top, best_group = first + i * kThreads;
    }
  }
  if (!is_usable) return kUnusable;
  if (best == -infinity) return 0;
  float values[4];
  load_logits<VOCAB>(values, logits, best_group);
  int token = 3;
#pragma unroll
  for (int j = 2; j >= 0; j--) token = values[j] == best ? j : token;
  return candidate(best, best_group * 4 + token);
}

// Returns the row's token, kNonFinite or kNothingAllowed. Its last exchange is a barrier of the row's blocks: when it returns, all of
// them have read the state, and no block's shared memory is read by another any more.
template <typename Counts>
DEVICE int sample_row(Row<Counts>& row, HeldLogits& held, int top_k, float top_p, float log_min_p) {
  const float infinity = __uint_as_float(0x7F800000u);
  uint64_t best = 0;
  if (Counts::kIsMasked || row.is_adjusted) {
    row.for_each([&](float logit, int token) {
      best = Larger::of(best, logit < infinity ? candidate(row.penalise(logit, token), token) : kUnusable);
    });
  } else {
    best = best_raw(held, row.logits, row.first_group(), row.end_group());
  }
  best = row.template combine<Larger>(best);
  if (best == kUnusable) return static_cast<int>(kNonFinite);
  // Dividing by the temperature keeps the order, so the largest logit has the largest z.
  row.maximum = row.scale(unordered(static_cast<uint32_t>(best >> 32)));
  if (best == 0 || row.maximum == -infinity) {
    bool is_masked = false;
    if constexpr (Counts::kIsMasked) is_masked = row.token_counts.mask.is_masked;
    return static_cast<int>(is_masked ? kNothingAllowed : kNonFinite);
  }
  int token = token_of(best);
  if (row.temperature != 0.0f) {
    token = draw(row, filter(row, top_k, top_p), log_min_p);
  }
  return token;
}
