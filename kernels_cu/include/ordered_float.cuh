// Floats as integers of the same order, the arg max as one of them, and probabilities as integers, whose sums have no order.
#pragma once
#include "types.cuh"

// Order of floats as order of integers; -0 and +0 are one.
DEVICE uint32_t ordered(float value) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

DEVICE float unordered(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// Larger for a larger value, and for a lower id among equals.
DEVICE uint64_t candidate(float value, int token) {
  return static_cast<uint64_t>(ordered(value)) << 32 | ~static_cast<uint32_t>(token);
}

DEVICE int token_of(uint64_t best) { return static_cast<int>(~static_cast<uint32_t>(best)); }

// Probability relative to the largest, in units of 2^-40.
DEVICE uint64_t mass_of(float below_maximum) { return __float2ull_rn(expf(below_maximum) * 0x1p40f); }

// Logits of four neighbouring tokens of a row; those past its end are 0.
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
