// Weights of 2, 4 or 8 bits from the formats of checkpoint files to the packed layout of packed_layout.cuh, and back to 16 bits.
//
// Formula: codes u[n, j] = source(first_row + n, permutation[j]); W[n, k] = scale[n, k / G] * (u[n, k] - zero[n, k / G]).
// Operands: packed bytes, see packed_layout.cuh; the source's tensors on the device, N its rows, K its columns, G its group size:
//   FORMAT 0 GPTQ: codes int32 (K/8, N), nibble i of a word is row 8 w + i; zeros int32 (K/G, N/8); scales (K/G, N); with WEIGHT_BITS 8
//     codes (K/4, N), byte i is row 4 w + i, with 2 (K/16, N), and no zeros
//   FORMAT 1 AWQ GEMM: codes int32 (K, N/8), column c of eight in nibble {0, 4, 1, 5, 2, 6, 3, 7}[c]; zeros int32 (K/G, N/8), in the same
//     order; scales (K/G, N)
//   FORMAT 2 compressed-tensors pack-quantized: codes int32 (N, K/8); zeros int32 (N/8, K/G); scales (N, K/G)
//   FORMAT 3 Marlin: codes int32 (K/16, 2 N), 16 x 16 tiles; scales (K/G, N) permuted by 64 columns, by 32 with one group; no zeros
// Constants: LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head. HEAD_DIM: of qkv only, elements of a head.
//   FORMAT: 0 GPTQ, 1 AWQ, 2 compressed-tensors, 3 Marlin. IN_FEATURES: K, the columns of W, a multiple of 128.
//   WEIGHT_BITS: 4, or 8 with ZEROS 0 or 2, or 2 with ZEROS 0. RUNS: contiguous parts of K, summed in order: 8 or 1. SCALE_GROUP: columns that
//   share a scale: 16, 32, 64 or 128. ZEROS: 1 has zero points beside the scales, 2 minimums (repack_scales makes them of a
//   zero point in the middle of the codes' range); 0: zero points are 8, in 2 bits 2, in 8 bits 128
// Grid: any number of blocks of 256 threads; no dynamic shared memory.
// Numerics: integers as they are; a scale of another type is rounded once, to nearest; a dequantised weight is rounded once, as a product
//   or, with a minimum, as a fused multiply-add.
// Oracle: tests/packed_oracle.py; cpmrt/weights/formats/.
// Source: original; formats as in AutoGPTQ, AutoAWQ, compressed-tensors and IST-DASLab/marlin.
// Why so: a thread owns 16 bytes of the result, whatever sources its two rows come from, so sources can come one after the other.
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(FORMAT) || !defined(IN_FEATURES) || \
    !defined(WEIGHT_BITS) || !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "packed_writing.cuh"

static_assert(WEIGHT_BITS == 4 || FORMAT == 0, "codes of 2 or 8 bits come in FORMAT 0");
#include <cuda_fp16.h>
#include <cuda_bf16.h>

// Returns the code of row n and column k of a source with N rows.
DEVICE uint32_t source_code(const uint32_t* codes, int n, int k, int N) {
#if FORMAT == 0
  constexpr int kWordCodes = 32 / WEIGHT_BITS;
  return codes[static_cast<int64_t>(k / kWordCodes) * N + n] >> (k % kWordCodes * WEIGHT_BITS) & ((1 << WEIGHT_BITS) - 1);
#elif FORMAT == 1
  return codes[static_cast<int64_t>(k) * (N / 8) + n / 8] >> ((n % 2 * 4 + n % 8 / 2) * 4) & 15;
#elif FORMAT == 2
  return codes[static_cast<int64_t>(n) * (K / 8) + k / 8] >> (k % 8 * 4) & 15;
#else
  // In a run of four tiles of 16 columns lane 4 c + r has, of each tile, rows {2r, 2r+1, 2r+8, 2r+9} of column c, then of c + 8;
  // place i of these goes to nibble {0, 4, 1, 5, 2, 6, 3, 7}[i].
  const int row = k % 16, column = n % 16;
  const int lane = column % 8 * 4 + row % 8 / 2, index = column / 8 * 4 + row / 8 * 2 + row % 2;
  const int place = n / 64 * 128 + lane * 4 + n % 64 / 16;
  return codes[static_cast<int64_t>(k / 16) * (2 * N) + place] >> ((index % 2 * 4 + index / 2) * 4) & 15;
#endif
}

// Returns the index of the scale of row n in scale group `group` of `groups`.
DEVICE int64_t scale_index(int n, int group, int groups, int N) {
#if FORMAT == 2
  return static_cast<int64_t>(n) * groups + group;
#elif FORMAT == 3
  if (groups > 1) return static_cast<int64_t>(group) * N + n / 64 * 64 + n % 8 * 8 + n % 64 / 8;
  // In a run of 32 scales place 8 i + e has that of row 2 i + {0, 1, 8, 9, 16, 17, 24, 25}[e].
  return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
#else
  return static_cast<int64_t>(group) * N + n;
#endif
}

// Returns the zero point of row n in scale group `group` of `groups`; `addend` is added to its word first.
DEVICE uint32_t source_zero(const uint32_t* zeros, uint32_t addend, int n, int group, int groups, int N) {
  const int64_t word = FORMAT == 2 ? static_cast<int64_t>(n / 8) * groups + group : static_cast<int64_t>(group) * (N / 8) + n / 8;
  return zeros[word] + addend >> (FORMAT == 1 ? (n % 2 * 4 + n % 8 / 2) * 4 : n % 8 * 4) & 15;
}

// Writes the codes of rows first_row .. first_row + N - 1 of a weight with num_rows rows; those of other rows stay. `permutation` (K) int32
// or null.
extern "C" __global__ void __launch_bounds__(256) KERNEL(repack_codes)(
    unsigned char* packed, const uint32_t* codes, const int* permutation, int first_row, int N, int num_rows, int num_tiles) {
  pdl_begin();
  write_codes(
      packed, first_row, N, num_rows, num_tiles,
      [=](int first, int e) { return permutation == nullptr ? first + e : permutation[first + e]; },
      [=](int n, int first, int k) { return source_code(codes, n, k, N); });
}

// Writes the scales of the same rows, and with ZEROS their zero points or minimums. `scales` is fp16 if scales_fp16, else bf16; `zeros` null: zero
// points are 8; zero_addend: added to each word of zeros (GPTQ v1 stores zero points minus one: 0x11111111).
extern "C" __global__ void __launch_bounds__(256) KERNEL(repack_scales)(
    unsigned char* packed, const uint16_t* scales, const uint32_t* zeros, int first_row, int N, int num_rows, int num_tiles,
    int group_size, int scales_fp16, int zero_addend) {
  pdl_begin();
  constexpr int kScales = kSlices * kUnitScales;
  const int groups = K / group_size;
  const int64_t total = static_cast<int64_t>(num_tiles) * kScales * 16;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < total; i += static_cast<int64_t>(gridDim.x) * 256) {
    const int row = i & 15, scale = static_cast<int>((i >> 4) % kScales), tile = static_cast<int>((i >> 4) / kScales);
    const int n = tile_row(tile, row, num_rows) - first_row, group = scale * SCALE_GROUP / group_size;
    if (n < 0 || n >= N) continue;
    unsigned char* const unit = packed + unit_offset(tile, scale / kUnitScales) + kCodeBytes + scale % kUnitScales * kScaleBytes;
    scalar_t* const to = reinterpret_cast<scalar_t*>(unit) + (row % 8 * 2 + row / 8) * (ZEROS ? 2 : 1);
    const uint16_t word = scales[scale_index(n, group, groups, N)];
    to[0] = from_float(scales_fp16 ? __half2float(__ushort_as_half(word)) : __uint_as_float(static_cast<uint32_t>(word) << 16));
    if (ZEROS == 2) to[1] = from_float(to_float(to[0]) * (1 << WEIGHT_BITS - 1));   // of random codes
    else if (ZEROS) to[1] = from_float(zeros == nullptr ? 8.0f : static_cast<float>(source_zero(zeros, zero_addend, n, group, groups, N)));
  }
}

#if WEIGHT_BITS < 8 || LINEAR != 3   // a head in 8 bits never meets a chunk of rows
constexpr int kLaneWords = kCodeBytes / 128;   // a lane's words of codes in a unit
// Returns a code of a lane's words of a unit: k = 32 block + 8 t + e, half 0 for lo's row and 1 for hi's.
DEVICE uint32_t unit_code(const uint32_t (&words)[kLaneWords], int block, int e, int half) {
  const int place = e % 4 / 2 * 8 + e % 2 * 16 + half * (WEIGHT_BITS % 8);
  if (WEIGHT_BITS == 2) return words[block] >> place + e / 4 * 4 & 3;
  if (WEIGHT_BITS == 8) return words[block * 4 + e / 4 * 2 + half] >> place & 255;
  return words[block * 2 + e / 4] >> place & 15;
}

// Returns a * b + c of pairs of 16-bit floats, rounded once.
DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  const scalar2_t v = __hfma2(reinterpret_cast<const scalar2_t&>(a), reinterpret_cast<const scalar2_t&>(b), reinterpret_cast<const scalar2_t&>(c));
  return reinterpret_cast<const uint32_t&>(v);
}

// Writes weights in 16 bits: out (count, K) scalar_t = rows first_row .. + count - 1 of the weight, columns in stored order. first_row is a
// multiple of 8.
extern "C" __global__ void __launch_bounds__(256) KERNEL(dequantize)(
    scalar_t* out, const unsigned char* packed, int first_row, int count, int num_rows) {
  pdl_begin();
  const int lane = threadIdx.x % 32;
  const int64_t total = static_cast<int64_t>((count + 7) / 8) * kSlices;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) / 32; i < total; i += static_cast<int64_t>(gridDim.x) * 8) {
    const int slice = static_cast<int>(i % kSlices), block = static_cast<int>(i / kSlices);
    const int2 place = tile_half(first_row + block * 8, num_rows);
    const unsigned char* const unit = packed + unit_offset(place.x, slice);
    uint32_t words[kLaneWords];
#pragma unroll
    for (int w = 0; w < kLaneWords; w += 4)
      *reinterpret_cast<uint4*>(words + w) = load16_streamed(unit + w * 128 + lane * 16);
    const int row = block * 8 + lane / 4;
    if (row >= count) continue;
    scalar_t* const to = out + static_cast<int64_t>(row) * K + slice * kSliceColumns + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int group = SCALE_GROUP < 32 ? j * 2 + lane % 4 / 2 : j * 32 / SCALE_GROUP;
      const scalar_t* const scales = reinterpret_cast<const scalar_t*>(unit + kCodeBytes + group * kScaleBytes) +
                                     (lane / 4 * 2 + place.y) * (ZEROS ? 2 : 1);
      const float scale = to_float(scales[0]), beside = ZEROS ? to_float(scales[1]) : 1 << WEIGHT_BITS - 1;
      const float zero = 8388608.0f + (ZEROS == 2 ? 0.0f : beside);
      float centred[8];
#pragma unroll
      for (int e = 0; e < 8; e++)   // an integer below 2^23 is the low bits of the float 2^23 + it
        centred[e] = __uint_as_float(0x4B000000u | unit_code(words, j, e, place.y)) - zero;
      uint32_t pairs[4];
#pragma unroll
      for (int e = 0; e < 8; e += 2)
        pairs[e / 2] = ZEROS == 2 ? fma_pair(pack2(centred[e], centred[e + 1]), pack2(scale, scale), pack2(-beside, -beside))
                                  : pack2(centred[e] * scale, centred[e + 1] * scale);
      store16(to + j * 32, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
  }
}
#endif
