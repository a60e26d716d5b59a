// Philox4x32-10 and the Gumbel noise of the sampling chain, bit for bit as cpmrt/reference/philox.py except for the
// logarithms.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), constants of the Random123 library.
#pragma once
#include "fast_math.cuh"

// Returns the four random words of the counter (group, position, 0, 0).
DEVICE uint4 philox(uint32_t group, uint32_t position, uint64_t seed) {
  uint4 c = make_uint4(group, position, 0u, 0u);
  uint32_t key_low = static_cast<uint32_t>(seed), key_high = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = 0xD2511F53ull * c.x, product1 = 0xCD9E8D57ull * c.z;
    c = make_uint4(static_cast<uint32_t>(product1 >> 32) ^ c.y ^ key_low, static_cast<uint32_t>(product1),
                   static_cast<uint32_t>(product0 >> 32) ^ c.w ^ key_high, static_cast<uint32_t>(product0));
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return c;
}

// Returns (word + 1/2) / 2^32, rounded, never 0 or 1. Small values, which make the largest noise, keep all 32 bits.
DEVICE float uniform(uint32_t word) {
  return fminf((static_cast<float>(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

// Returns the Gumbel noise of a random word, as the oracle defines it.
DEVICE float gumbel(uint32_t word) { return -logf(-log1pf(-uniform(word))); }

// Returns gumbel(word) to within 2e-5, in a third of its instructions. The error of lg2.approx is 2^-22 relative, but near an argument
// of 1 it is 2^-22 absolute. That is too much for 1 - u if u is small, so a series takes its place.
DEVICE float gumbel_estimate(uint32_t word) {
  constexpr float kLog2 = 0.69314718f;
  const float u = uniform(word);
  const float series = u * fmaf(u, fmaf(u, fmaf(u, 0.25f, 1.0f / 3.0f), 0.5f), 1.0f);
  return -kLog2 * log2_fast(u < 0.03125f ? series : -kLog2 * log2_fast(1.0f - u));
}
