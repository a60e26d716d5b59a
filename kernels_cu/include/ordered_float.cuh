// Floats as integers of the same order, a value with its token as one such integer (for the arg max), and probabilities as integers, whose
// sums do not depend on the order of additions.
#pragma once
#include "types.cuh"

// Returns an integer that has the order of the float; -0 and +0 give the same one.
DEVICE uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Returns the float of such an integer.
DEVICE float unordered(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Returns an integer that is larger for a larger value, and among equal values for a lower token id.
DEVICE uint64_t candidate(float value, int token) {
  return static_cast<uint64_t>(ordered(value)) << 32 | ~static_cast<uint32_t>(token);
}

DEVICE int token_of(uint64_t best) { return static_cast<int>(~static_cast<uint32_t>(best)); }

// Returns a token's probability relative to the largest one, in units of 2^-40, from its logit less the largest logit.
DEVICE uint64_t mass_of(float below_maximum) { return __float2ull_rn(expf(below_maximum) * 0x1p40f); }

// Loads the logits of four neighbouring tokens of a row, 4 * group and up; those past the row's end are 0.
template <int VOCABULARY>
DEVICE void load_logits(float (&values)[4], const float* logits, int group) {
  if (VOCABULARY % 4 == 0) {
    const float4 v = *reinterpret_cast<const float4*>(logits + group * 4);
    values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = group * 4 + i < VOCABULARY ? logits[group * 4 + i] : 0.0f;
  }
}
