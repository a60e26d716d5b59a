// Conversion from and to e4m3 (OCP 8-bit floating point: sign, 4 bits of exponent with bias 7, 3 of mantissa, no
// infinities) in integer arithmetic, with the same bits on every architecture, and the scales of pages
// (cpmrt/reference/fp8_pages.py).
#pragma once
#include "types.cuh"

// Returns the code nearest to x, ties to even. Beyond 448 it is that of 448, and NaN stays NaN.
DEVICE uint32_t e4m3_code(float x) {
  const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-6 codes are 2^-9 apart, as floats are from 2^14 on: adding 2^14 rounds to them.
  uint32_t code = __float_as_uint(__uint_as_float(magnitude) + 16384.0f) & 0xFu;
  if (magnitude >= 0x3C800000u) code = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1)) >> 20) - (120u << 3);
  if (magnitude >= 0x43E00000u) code = magnitude > 0x7F800000u ? 0x7F : 0x7E;
  return code | (bits >> 24 & 0x80u);
}

// Returns the scale of a page from the largest magnitude of its first token: the least power of two, from 2^-8 to 2^7,
// that brings this magnitude down to 7 = 448 / 64 or less.
DEVICE float page_scale(float largest) {
  const int exponent = static_cast<int>((__float_as_uint(largest) + 0x1FFFFFu) >> 23) - 2;
  return __uint_as_float(static_cast<uint32_t>(min(max(exponent, 127 - 8), 127 + 7)) << 23);
}

// Returns the exponent of a scale, which is a power of two.
DEVICE int exponent_of(float scale) { return static_cast<int>(__float_as_uint(scale) >> 23) - 127; }

// spread_codes takes two codes in the upper bytes of a word's halves (the lower bytes may hold anything) and moves
// their bits to where they stand in scalar_t: this gives their values times 2^-kCodeShift, subnormal numbers too.
#ifdef CPMRT_BF16
constexpr int kCodeShift = 120;
#else
constexpr int kCodeShift = 8;
#endif

DEVICE uint32_t spread_codes(uint32_t upper) {
#ifdef CPMRT_BF16
  return (upper & 0x80008000u) | (upper >> 4 & 0x07F007F0u);
#else
  return (upper & 0x80008000u) | (upper >> 1 & 0x3F803F80u);
#endif
}

// Multiplies both halves by a power of two, exactly.
DEVICE uint32_t times2(uint32_t pair, uint32_t power) {
  uint32_t product;
#ifdef CPMRT_BF16
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(power), "r"(0x80008000u));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(power));
#endif
  return product;
}

// Returns 2^exponent in both halves of a word. scalar_t must be able to hold it.
DEVICE uint32_t power2(int exponent) {
#ifdef CPMRT_BF16
  return static_cast<uint32_t>(exponent + 127) * 0x00800080u;
#else
  return static_cast<uint32_t>(exponent + 15) * 0x04000400u;
#endif
}

// Returns two neighbouring codes, the lower 16 bits of `codes`, times their scale.
DEVICE uint32_t expand2(uint32_t codes, float scale) {
  return times2(spread_codes(__byte_perm(codes, 0, 0x1404)), power2(exponent_of(scale) + kCodeShift));
}
