// Unpacking codes of 4 bits into an operand of the tensor cores, which the packed_gemm kernels share.
#pragma once
#include "copy.cuh"
#include "mma.cuh"
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

constexpr uint32_t kCodeMask = 0x000F000Fu;
constexpr int kHalfCodeBytes = kCodeBytes / 2;   // codes of half a unit, 64 columns

// Returns kCodeMask in a register, unknown to the compiler, which would load a constant again for every instruction that already has
// another constant. `rows`: the rows of x, a number never below zero.
DEVICE uint32_t held_code_mask(int rows) { return rows < 0 ? 0 : kCodeMask; }

DEVICE scalar2_t twice(scalar_t value) {
  scalar2_t pair;
  pair.x = pair.y = value;
  return pair;
}

// Scales, and zero points plus kMagic, of the lane's two rows, lo and hi, in one scale group of a unit.
struct Group {
  scalar2_t scale[2], zero[2];

  DEVICE void load(uint32_t place) {
    const uint32_t row = threadIdx.x % 32 / 4;
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

  // Unpacks a word that has four k of lo and hi into pairs of weights: lo and hi of the k in bytes 0 and 2, then of those in bytes 1 and 3.
  DEVICE void unpack(uint32_t (&pairs)[4], uint32_t codes, uint32_t mask) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t bits = codes >> i * 4 & mask | kMagicBits;
      const scalar2_t value = __hmul2(__hsub2(reinterpret_cast<const scalar2_t&>(bits), zero[i % 2]), scale[i % 2]);
      pairs[i] = reinterpret_cast<const uint32_t&>(value);
    }
  }
};

// Takes codes from the packed order of k to the natural one. In: lane t of a quad has the codes of k = 8 t .. 8 t + 7 of 32 (two words, four
// k each, as packed_layout.cuh has them). Out: word f has those of k = 16 f + 2 t, + 1 (bytes 0 and 2) and
// k = 16 f + 8 + 2 t, + 1 (bytes 1 and 3): operand A of two mma.
// The bits of k trade places with those of the lane in two exchanges: words with lane ^ 2, pairs of k with lane ^ 1.
DEVICE void natural_order(uint32_t (&words)[2]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  const uint32_t word = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[0] : words[1], 2);
  const uint32_t first = upper ? word : words[0], second = upper ? words[1] : word;
  // Bytes 0 and 2 of a word are a pair of k, bytes 1 and 3 the pair after it.
  const uint32_t sent = __byte_perm(first, second, odd ? 0x6420 : 0x7531);
  const uint32_t pairs = __shfl_xor_sync(0xFFFFFFFFu, sent, 1);   // the lower half belongs to `first`
  words[0] = __byte_perm(first, pairs, odd ? 0x3514 : 0x5240);
  words[1] = __byte_perm(second, pairs, odd ? 0x3716 : 0x7260);
}

// Half of a unit in registers, 64 columns of one tile: its codes, after `order` a word for each 16 k, and its scale groups.
struct HalfSlice {
  static constexpr int kGroups = SCALE_GROUP < 64 ? 64 / SCALE_GROUP : 1;
  uint32_t words[2][2];
  Group groups[kGroups];

  // Loads the first (0) or the second half of the unit at `unit`.
  DEVICE void load(uint32_t unit, int half) {
    load_parts(unit + half * kHalfCodeBytes, unit + kCodeBytes + half * 64 / SCALE_GROUP * kScaleBytes);
  }
  // Loads the half from the addresses of its codes and of its first scale group.
  DEVICE void load_parts(uint32_t its_codes, uint32_t its_groups) {
    const uint4 codes = load_shared(its_codes + threadIdx.x % 32 * 16);
    words[0][0] = codes.x, words[0][1] = codes.y, words[1][0] = codes.z, words[1][1] = codes.w;
#pragma unroll
    for (int i = 0; i < kGroups; i++) groups[i].load(its_groups + i * kScaleBytes);
  }
  DEVICE void order() { natural_order(words[0]), natural_order(words[1]); }
  // Unpacks the operand of a step of 16 k, one of four.
  DEVICE void unpack(uint32_t (&a)[4], int step, uint32_t mask) const {
    groups[step * 16 / SCALE_GROUP].unpack(a, words[step / 2][step % 2], mask);
  }
};
