// The mean of a window of keys: a compressed key of sparse attention.
#pragma once
#include "types.cuh"

// Returns two neighbouring elements of the mean of TOKENS keys. They are summed in float32, key by key from the first,
// so that their bits depend on nothing else. `word_of(i)` returns these two elements of key i; it is called once for
// each i, in ascending order.
template <int TOKENS, typename WordOf>
DEVICE uint32_t window_mean(WordOf word_of) {
  constexpr int kInFlight = 16;
  static_assert(TOKENS % kInFlight == 0 && (TOKENS & (TOKENS - 1)) == 0, "whole batches, and an exact quotient");
  float low = 0.0f, high = 0.0f;
#pragma unroll 1
  for (int first = 0; first < TOKENS; first += kInFlight) {
    uint32_t words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++) words[i] = word_of(first + i);
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const float2 pair = unpack2(words[i]);
      low = __fadd_rn(low, pair.x), high = __fadd_rn(high, pair.y);
    }
  }
  return pack2(low * (1.0f / TOKENS), high * (1.0f / TOKENS));
}
