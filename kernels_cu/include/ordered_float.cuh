// Floats as integers of the same order, and the arg max as one of them.
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
