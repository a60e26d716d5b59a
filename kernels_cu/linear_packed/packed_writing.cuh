// Writing packed codes, whatever format their source has: a thread owns 16 bytes of the result.
#pragma once
#include "packed_layout.cuh"
#include "packed_tiles.cuh"

// The fields of a lane's 16 bytes. A unit has kParts parts of 16 bytes a lane, each for kPartColumns columns; word w of four has kWordColumns
// columns from word_column(w) on, and code e of the word begins at bit code_shift(e), in hi kHiShift bits further.
constexpr int kParts = kCodeBytes / 512, kPartColumns = kSliceColumns / kParts, kHiShift = WEIGHT_BITS % 8;
constexpr uint32_t kLoBits = WEIGHT_BITS == 2 ? 0x33333333u : WEIGHT_BITS == 4 ? 0x0F0F0F0Fu : ~0u, kHiBits = kLoBits << kHiShift;
constexpr int kWordColumns = WEIGHT_BITS == 2 ? 8 : 4;
DEVICE constexpr int word_column(int w) {
  return WEIGHT_BITS == 2 ? w * 32 : WEIGHT_BITS == 4 ? w / 2 * 32 + w % 2 * 4 : w / 2 * 4;
}
DEVICE int code_shift(int e) { return e % 4 / 2 * 8 + e % 2 * 16 + e / 4 * 4; }
// In 8 bits lo and hi have words of their own.
DEVICE constexpr bool holds_lo(int w) { return WEIGHT_BITS < 8 || w % 2 == 0; }
DEVICE constexpr bool holds_hi(int w) { return WEIGHT_BITS < 8 || w % 2 == 1; }

// Writes the codes of rows first_row .. first_row + N - 1 of a weight with num_rows rows; those of other rows stay. Of a word that begins at
// column `first`, `place(first, e)` returns where the source has its e-th column, and `code(n, first, place)` the code there in row n of
// the source. For blocks of 256 threads.
template <class Place, class Code>
DEVICE void write_codes(unsigned char* packed, int first_row, int N, int num_rows, int num_tiles, Place place, Code code) {
  const int64_t total = static_cast<int64_t>(num_tiles) * kSlices * kParts * 32;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < total; i += static_cast<int64_t>(gridDim.x) * 256) {
    const int lane = i & 31, part = i >> 5 & kParts - 1;
    const int slice = static_cast<int>(i / (kParts * 32) % kSlices), tile = static_cast<int>(i / (kParts * 32) / kSlices);
    const int lo = tile_row(tile, lane / 4, num_rows) - first_row, hi = tile_row(tile, lane / 4 + 8, num_rows) - first_row;
    const bool has_lo = lo >= 0 && lo < N, has_hi = hi >= 0 && hi < N;
    if (!has_lo && !has_hi) continue;
    uint4* const to = reinterpret_cast<uint4*>(packed + unit_offset(tile, slice) + part * 512 + lane * 16);
    uint4 words = *to;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const bool takes_lo = has_lo && holds_lo(w), takes_hi = has_hi && holds_hi(w);
      const int first = slice * kSliceColumns + part * kPartColumns + lane % 4 * 8 + word_column(w);
      uint32_t word = (&words.x)[w] & ~((takes_lo ? kLoBits : 0) | (takes_hi ? kHiBits : 0));
#pragma unroll
      for (int e = 0; e < kWordColumns; e++) {
        const int where = place(first, e), shift = code_shift(e);
        if (takes_lo) word |= code(lo, first, where) << shift;
        if (takes_hi) word |= code(hi, first, where) << shift + kHiShift;
      }
      (&words.x)[w] = word;
    }
    *to = words;
  }
}
