// The draw among the tokens that the filters keep: the arg max of z + noise, whose exact logarithms are computed for few tokens only.
//
// Cheap estimates of z + noise show which token of a warp can be its largest: all others are further below the largest estimate than
// the errors of two estimates. Only for such tokens are the values computed that the oracle defines, and these are compared. So the
// result is the token that computing all values would give.
#pragma once
#include "philox.cuh"
#include "sampling_row.cuh"

// The filters' threshold on the scale of estimates of z: a token is dropped if its estimate is below `least` and kept if it is `sure` or
// more; between the two, its exact z decides.
struct Estimates {
  float least, sure;
  float margin;  // a token whose estimate is further below a warp's largest estimate cannot have the largest z + noise

  template <typename Counts>
  DEVICE Estimates(const Row<Counts>& row, Cut cut, float least_z) {
    const float edge = fmaxf(row.least_kept(cut), least_z), room = row.doubt(edge);
    least = edge - room, sure = edge + room;
    margin = 1e-4f + 1e-6f * fabsf(row.maximum);   // only a z within 26 of the maximum can win
  }
};

// A thread's best token so far by its estimate of z + noise, with its random word, and the estimate of the second best token.
struct Seeming {
  float best, second;
  int token;
  uint32_t word;

  DEVICE void take(float estimate, int its_token, uint32_t its_word) {
    const bool is_better = estimate > best;
    second = fmaxf(second, fminf(best, estimate));
    best = fmaxf(best, estimate);
    token = is_better ? its_token : token, word = is_better ? its_word : word;
  }
};

// Returns which of a group's four tokens the filters drop, bit i for token i, by their exact z.
template <typename Counts>
DEVICE uint32_t dropped_of(const Row<Counts>& row, Cut cut, float least_z, int group) {
  uint32_t dropped = 0;
#pragma unroll 1
  for (int i = 0; i < 4 && group * 4 + i < VOCAB; i++) {
    const float z = row.adjust(row.logits[group * 4 + i], group * 4 + i);
    dropped |= (row.kept(z, cut) && z >= least_z ? 0u : 1u) << i;
  }
  return dropped;
}

// Returns the thread's best candidate by its exact z + noise, computed for all its tokens: for when two estimates are too close.
template <typename Counts>
DEVICE uint64_t best_of_all(const Row<Counts>& row, Cut cut, float least_z) {
  uint64_t best = 0;
#pragma unroll 1
  for (int group = row.first_group(); group < row.end_group(); group += kThreads) {
    const uint4 random = philox(group, row.position, row.seed);
    const uint32_t dropped = dropped_of(row, cut, least_z, group);
#pragma unroll 1
    for (int i = 0; i < 4 && group * 4 + i < VOCAB; i++) {
      const uint32_t word = i < 2 ? (i == 0 ? random.x : random.y) : i == 2 ? random.z : random.w;
      const int token = group * 4 + i;
      if (!(dropped >> i & 1)) best = Larger::of(best, candidate(__fadd_rn(row.adjust(row.logits[token], token), gumbel(word)), token));
    }
  }
  return best;
}

// Returns the token with the largest z + noise among those that the filters keep, to all threads of the row.
template <typename Counts>
DEVICE int draw(Row<Counts>& row, Cut cut, float log_min_p) {
  const float minus_infinity = __uint_as_float(0xFF800000u), least_z = __fadd_rn(row.maximum, log_min_p);
  const Estimates estimates(row, cut, least_z);
  Seeming seeming = {minus_infinity, minus_infinity, 0, 0};
#pragma unroll 1
  for (int group = row.first_group(); group < row.end_group(); group += kThreads) {
    float values[4], z[4];
    row.estimate(values, z, group);
    bool has_any = false, has_doubtful = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      has_any = has_any || z[i] >= estimates.least;
      has_doubtful = has_doubtful || (z[i] >= estimates.least && !(z[i] >= estimates.sure));
    }
    if (!has_any) continue;
    const uint32_t dropped = has_doubtful ? dropped_of(row, cut, least_z, group) : 0u;
    const uint4 random = philox(group, row.position, row.seed);
    const uint32_t words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool stays = z[i] >= estimates.least && !(dropped >> i & 1);
      seeming.take(stays ? z[i] + gumbel_estimate(words[i]) : minus_infinity, group * 4 + i, words[i]);
    }
  }
  const float largest = unordered(__reduce_max_sync(0xFFFFFFFFu, ordered(seeming.best)));
  const float enough = fminf(largest, 3e38f) - estimates.margin;
  uint64_t best = 0;
  if (seeming.second >= enough && seeming.second > minus_infinity) {
    best = best_of_all(row, cut, least_z);
  } else if (seeming.best >= enough && seeming.best > minus_infinity) {
    const float z = row.adjust(row.logits[seeming.token], seeming.token);
    best = candidate(__fadd_rn(z, gumbel(seeming.word)), seeming.token);
  }
  return token_of(row.template combine<Larger>(best));
}
