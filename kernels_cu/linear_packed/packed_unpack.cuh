// What the products of short chunks with packed weights share: 4-bit codes to 16 bits, and what becomes of a sum.
#pragma once
#include "copy.cuh"
#include "packed_layout.cuh"
#include "packed_tiles.cuh"

static_assert(WEIGHT_BITS == 4, "WEIGHT_BITS must be 4");
static_assert(kUnitBytes % 16 == 0, "units are copied in 16 bytes");

// The 16-bit float kMagic + code has the code in its lowest bits, and differences of two such numbers are exact.
#ifdef CPMRT_BF16
constexpr uint32_t kMagicBits = 0x43004300u;
constexpr float kMagic = 128.0f;
#else
constexpr uint32_t kMagicBits = 0x64006400u;
constexpr float kMagic = 1024.0f;
#endif

DEVICE scalar2_t twice(scalar_t value) {
  scalar2_t pair;
  pair.x = pair.y = value;
  return pair;
}

// Scale and zero point (kMagic added) of the lane's rows in one scale group of a unit: lo, hi.
struct Group {
  scalar2_t scale[2], zero[2];

  DEVICE void load(uint32_t unit, int group) {
    const uint32_t place = unit + kCodeBytes + group * kScaleBytes, row = threadIdx.x % 32 / 4;
    if constexpr (ZEROS) {
      const uint2 words = load_shared_words(place + row * 8);
      const float2 lo = unpack2(words.x), hi = unpack2(words.y);
      scale[0] = twice(from_float(lo.x)), zero[0] = twice(from_float(kMagic + lo.y));
      scale[1] = twice(from_float(hi.x)), zero[1] = twice(from_float(kMagic + hi.y));
    } else {
      const float2 rows = unpack2(load_shared_word(place + row * 4));
      scale[0] = twice(from_float(rows.x)), scale[1] = twice(from_float(rows.y));
      zero[0] = zero[1] = twice(from_float(kMagic + 8.0f));
    }
  }

  // Pairs of weights from a word of four k of lo and hi: lo and hi of the pair in bytes 0 and 2, then of that in 1 and 3.
  DEVICE void unpack(uint32_t (&pairs)[4], uint32_t codes) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t bits = codes >> i * 4 & 0x000F000Fu | kMagicBits;
      const scalar2_t value = __hmul2(__hsub2(reinterpret_cast<const scalar2_t&>(bits), zero[i % 2]), scale[i % 2]);
      pairs[i] = reinterpret_cast<const uint32_t&>(value);
    }
  }
};

// Two sums as they are stored at `place`: round(alpha * sum), then beta times what is there is added and rounded again.
DEVICE uint32_t scaled_sum(float low, float high, float alpha, float beta, const uint32_t* place) {
  const uint32_t product = pack2(alpha * low, alpha * high);
  if (beta == 0.f) return product;
  const float2 value = unpack2(product), old = unpack2(*place);
  return pack2(fmaf(beta, old.x, value.x), fmaf(beta, old.y, value.y));
}
