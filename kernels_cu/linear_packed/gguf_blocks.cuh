// Blocks of GGUF files: the code of a weight, and the scale and offset of its group: W = scale * (code - kMiddle) + offset.
//
// FORMAT is the type's number in the file. Places and bits are those of cpmrt/weights/formats/blocks.py, which says where they are
// defined. IQ4_NL and IQ4_XS look their codes up in a table of 8-bit numbers.
#pragma once
#include <cuda_fp16.h>
#include "types.cuh"

struct BlockSizes { int weights, bytes, group, middle; };
__host__ __device__ constexpr BlockSizes block_sizes() {
  switch (FORMAT) {
    case 2: return {32, 18, 32, 8};       // Q4_0
    case 3: return {32, 20, 32, 0};       // Q4_1
    case 6: return {32, 22, 32, 16};      // Q5_0
    case 7: return {32, 24, 32, 0};       // Q5_1
    case 8: return {32, 34, 32, 128};     // Q8_0
    case 10: return {256, 84, 16, 0};     // Q2_K
    case 11: return {256, 110, 16, 4};    // Q3_K
    case 12: return {256, 144, 32, 0};    // Q4_K
    case 13: return {256, 176, 32, 0};    // Q5_K
    case 14: return {256, 210, 16, 32};   // Q6_K
    case 20: return {32, 18, 32, 128};    // IQ4_NL
    case 23: return {256, 136, 32, 128};  // IQ4_XS
    case 34: return {256, 54, 256, 1};    // TQ1_0
    case 35: return {256, 66, 256, 1};    // TQ2_0
    default: return {0, 0, 0, 0};
  }
}
constexpr BlockSizes kBlock = block_sizes();
constexpr int kMiddle = kBlock.middle;
constexpr bool kHasOffsets = FORMAT == 3 || FORMAT == 7 || FORMAT == 10 || FORMAT == 12 || FORMAT == 13;
static_assert(kBlock.weights > 0, "FORMAT must be the number of a block type");

using Bytes = const unsigned char*;
DEVICE float half_at(Bytes place) { return __half2float(__ushort_as_half(*reinterpret_cast<const unsigned short*>(place))); }

// Returns field i of BITS bits. In each run of WIDTH bytes come first the lowest fields of all bytes, then the next ones of all bytes.
template <int BITS, int WIDTH>
DEVICE uint32_t field(Bytes packed, int i) {
  constexpr int kRun = 8 / BITS * WIDTH;
  return packed[i / kRun * WIDTH + i % WIDTH] >> i % kRun / WIDTH * BITS & ((1 << BITS) - 1);
}

// Returns the value that a code of IQ4_NL or IQ4_XS stands for, plus 128.
DEVICE uint32_t iq4_value(uint32_t code) {
  constexpr unsigned char kValues[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
  return kValues[code];
}

// Returns ternary digit i of a block of TQ1_0. A byte has five digits, as a fraction of 256: times 3 it carries its first digit out.
DEVICE uint32_t tq1_digit(Bytes block, int i) {
  const int begin = i < 160 ? 0 : i < 240 ? 32 : 48, width = i < 160 ? 32 : i < 240 ? 16 : 4, of_part = i - begin * 5;
  uint32_t fraction = block[begin + of_part % width];
  for (int digit = of_part / width; digit > 0; digit--) fraction = fraction * 3 & 255;
  return fraction * 3 >> 8;
}

// Returns the code of weight i of a block.
DEVICE uint32_t block_code(Bytes block, int i) {
  switch (FORMAT) {
    case 2: return field<4, 16>(block + 2, i);
    case 3: return field<4, 16>(block + 4, i);
    case 6: return field<4, 16>(block + 6, i) | field<1, 1>(block + 2, i) << 4;
    case 7: return field<4, 16>(block + 8, i) | field<1, 1>(block + 4, i) << 4;
    case 8: return block[2 + i] ^ 128;
    case 10: return field<2, 32>(block + 16, i);
    case 11: return field<2, 32>(block + 32, i) | field<1, 32>(block, i) << 2;
    case 12: return field<4, 32>(block + 16, i);
    case 13: return field<4, 32>(block + 48, i) | field<1, 32>(block + 16, i) << 4;
    case 14: return field<4, 64>(block, i) | field<2, 32>(block + 128, i) << 4;
    case 20: return iq4_value(field<4, 16>(block + 2, i));
    case 23: return iq4_value(field<4, 16>(block + 8, i));
    case 34: return tq1_digit(block, i);
    default: return field<2, 32>(block, i);
  }
}

// Returns scale x and minimum y, of 6 bits each, of group `group` of Q4_K and Q5_K, whose twelve bytes begin at `packed`.
DEVICE float2 six_bit_scales(Bytes packed, int group) {
  if (group < 4) return make_float2(packed[group] & 63, packed[group + 4] & 63);
  const int high = packed[group + 4];
  return make_float2(high & 15 | packed[group - 4] >> 2 & 48, high >> 4 | packed[group] >> 2 & 48);
}

// Returns scale x and offset y of group `group` of a block.
DEVICE float2 block_scales(Bytes block, int group) {
  switch (FORMAT) {
    case 3: case 7: return make_float2(half_at(block), half_at(block + 2));
    case 10: return make_float2(half_at(block + 80) * (block[group] & 15), -(half_at(block + 82) * (block[group] >> 4)));
    case 11: {
      const int scale = field<4, 8>(block + 96, group) | field<2, 4>(block + 104, group) << 4;
      return make_float2(half_at(block + 108) * (scale - 32), 0.0f);
    }
    case 12: case 13: {
      const float2 small = six_bit_scales(block + 4, group);
      return make_float2(half_at(block) * small.x, -(half_at(block + 2) * small.y));
    }
    case 14: return make_float2(half_at(block + 208) * static_cast<signed char>(block[192 + group]), 0.0f);
    case 23: {
      const int scale = field<4, 1>(block + 4, group) | field<2, 1>(block + 2, group) << 4;
      return make_float2(half_at(block) * (scale - 32), 0.0f);
    }
    case 34: return make_float2(half_at(block + 52), 0.0f);
    case 35: return make_float2(half_at(block + 64), 0.0f);
    default: return make_float2(half_at(block), 0.0f);
  }
}
