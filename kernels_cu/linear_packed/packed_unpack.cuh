// Unpacking codes of 2, 4 or 8 bits into an operand of the tensor cores, which the packed_gemm kernels share.
#pragma once
#include "copy.cuh"
#include "mma.cuh"
#include "packed_layout.cuh"
#include "packed_tiles.cuh"

static_assert(kUnitBytes % 16 == 0, "units are copied in 16 bytes");

// The 16-bit float kMagic + code has the code in its lowest bits, and differences of two such numbers are exact. With bfloat16 that is so
// up to a code of 127: of codes of 8 bits the highest bit is dealt with apart.
#ifdef CPMRT_BF16
constexpr uint32_t kMagicBits = 0x43004300u;
constexpr float kMagic = 128.0f;
constexpr bool kHasHighBit = WEIGHT_BITS == 8;
#else
constexpr uint32_t kMagicBits = 0x64006400u;
constexpr float kMagic = 1024.0f;
constexpr bool kHasHighBit = false;
#endif
constexpr bool kHasMinimums = ZEROS == 2;
constexpr float kMiddle = kHasMinimums ? 0.0f : 1 << WEIGHT_BITS - 1;   // what is subtracted from a code without a zero point

constexpr uint32_t kCodeMask = kHasHighBit ? 0x007F007Fu : 0x00010001u * ((1u << WEIGHT_BITS) - 1);
constexpr uint32_t kHighMask = 0x00800080u;
constexpr int kHalfCodeBytes = kCodeBytes / 2;   // codes of half a unit, 64 columns
// A lane's neighbouring bytes of a half's codes, and how far they lie behind those of the first half: in 2 bits beside them.
constexpr int kLaneBytes = WEIGHT_BITS == 2 ? 8 : 16, kHalfStep = WEIGHT_BITS == 2 ? kLaneBytes : kHalfCodeBytes;

// Returns kCodeMask in a register, unknown to the compiler, which would load a constant again for every instruction that already has
// another constant. `rows`: the rows of x, a number never below zero.
DEVICE uint32_t held_code_mask(int rows) { return rows < 0 ? 0 : kCodeMask; }

DEVICE scalar2_t twice(scalar_t value) {
  scalar2_t pair;
  pair.x = pair.y = value;
  return pair;
}

// What a code is scaled with, of the lane's two rows, lo (0) and hi (1), in one scale group of a unit.
struct Group {
  scalar2_t scale[2], zero[2], minimum[2];   // zero: zero point or middle, plus kMagic; of minimum the negative

  DEVICE void load(uint32_t place) {
    const uint32_t row = threadIdx.x % 32 / 4;
    if constexpr (ZEROS) {
      const uint2 words = load_shared_words(place + row * 8);
      const float2 rows[2] = {unpack2(words.x), unpack2(words.y)};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        scale[i] = twice(from_float(rows[i].x));
        zero[i] = twice(from_float(kMagic + (kHasMinimums ? kMiddle : rows[i].y)));
        minimum[i] = twice(from_float(-rows[i].y));
      }
    } else {
      const float2 rows = unpack2(load_shared_word(place + row * 4));
      scale[0] = twice(from_float(rows.x)), scale[1] = twice(from_float(rows.y));
      zero[0] = zero[1] = twice(from_float(kMagic + kMiddle));
    }
  }

  // Returns two weights of a row, of which each half of `codes` has a code in its lowest bits.
  DEVICE uint32_t weights(uint32_t codes, int row, uint32_t mask) const {
    const uint32_t bits = codes & mask | kMagicBits, low = ~codes & kHighMask;
    scalar2_t centred = zero[row];
    if constexpr (kHasHighBit) {
      // With the highest bit a code is 128 + its lower bits. What is subtracted from kMagic and these bits: 0 or 128, or with kMiddle
      // 128 or 256.
      const uint32_t subtracted = kHasMinimums ? low * 0x86 : low | kMagicBits;
      centred = reinterpret_cast<const scalar2_t&>(subtracted);
    }
    centred = __hsub2(reinterpret_cast<const scalar2_t&>(bits), centred);
    const scalar2_t value = kHasMinimums ? __hfma2(centred, scale[row], minimum[row]) : __hmul2(centred, scale[row]);
    return reinterpret_cast<const uint32_t&>(value);
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

// Half of a unit in registers, 64 columns of one tile: its codes, after `order` a word of each row for each 16 k, and its scale groups.
// In 8 bits a word has codes of one row, else of lo and hi.
struct HalfSlice {
  static constexpr int kGroups = SCALE_GROUP < 64 ? 64 / SCALE_GROUP : 1, kRows = WEIGHT_BITS == 8 ? 2 : 1;
  uint32_t words[2][kRows][2];   // of each 32 columns
  Group groups[kGroups];

  // Loads the first (0) or the second half of the unit at `unit`.
  DEVICE void load(uint32_t unit, int half) {
    load_parts(unit + half * kHalfStep, unit + kCodeBytes + half * 64 / SCALE_GROUP * kScaleBytes, 16);
  }
  // Loads the half from the addresses of its codes, `stride` bytes apart for each lane, and of its first scale group.
  DEVICE void load_parts(uint32_t its_codes, uint32_t its_groups, int stride) {
    its_codes += threadIdx.x % 32 * stride;
    if constexpr (WEIGHT_BITS == 2) {
      // Each byte has codes of two rows and two k: those of the second k go to a word of their own.
      const uint2 codes = load_shared_words(its_codes);
      words[0][0][0] = codes.x & 0x0F0F0F0Fu, words[0][0][1] = codes.x >> 4 & 0x0F0F0F0Fu;
      words[1][0][0] = codes.y & 0x0F0F0F0Fu, words[1][0][1] = codes.y >> 4 & 0x0F0F0F0Fu;
    } else if constexpr (WEIGHT_BITS == 4) {
      const uint4 codes = load_shared(its_codes);
      words[0][0][0] = codes.x, words[0][0][1] = codes.y, words[1][0][0] = codes.z, words[1][0][1] = codes.w;
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4 codes = load_shared(its_codes + i * 512);
        words[i][0][0] = codes.x, words[i][kRows - 1][0] = codes.y, words[i][0][1] = codes.z, words[i][kRows - 1][1] = codes.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kGroups; i++) groups[i].load(its_groups + i * kScaleBytes);
  }
  DEVICE void order() {
#pragma unroll
    for (int i = 0; i < 2 * kRows; i++) natural_order(words[i / kRows][i % kRows]);
  }
  // Unpacks the operand of a step of 16 k, one of four: lo and hi of the k in bytes 0 and 2, then of those in bytes 1 and 3.
  DEVICE void unpack(uint32_t (&a)[4], int step, uint32_t mask) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = i % 2, shift = i / 2 * 8 + (kRows == 2 ? 0 : row * WEIGHT_BITS);
      a[i] = groups[step * 16 / SCALE_GROUP].weights(words[step / 2][kRows == 2 ? row : 0][step % 2] >> shift, row, mask);
    }
  }
};
