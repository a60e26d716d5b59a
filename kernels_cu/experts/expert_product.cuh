// Products of a warp with the stacked weights of experts, in 16 bits or packed in 4.
//
// A weight tile has 16 rows: lo + g and hi + g, with g = lane / 4. With t = lane % 4, a lane holds eight of every 32 columns of its
// two rows, from column 8 t on, and the same columns of x. A slice is kSliceColumns columns. The sum over a slice (in 4 bits over a
// scale group) begins at zero, and these sums are added in the order of the columns. So a row's bits depend on no constants but
// those of the weight.
#pragma once
#include "copy.cuh"
#include "mma.cuh"
#include "tma.cuh"

#if WEIGHT_BITS == 16
constexpr int K = IN_FEATURES;
constexpr int kSliceColumns = 64;
constexpr int kSlices = K / kSliceColumns;
static_assert(K % kSliceColumns == 0, "K must be a multiple of 64");
constexpr bool kManyGroups = false;
#else
static_assert(WEIGHT_BITS == 4, "WEIGHT_BITS must be 4 or 16");
#include "packed_layout.cuh"
// Whether a slice has several scale groups. Slices are then multiplied one at a time, so that the groups' sums are added in order.
constexpr bool kManyGroups = kUnitScales > 1;
// Returns the byte offset of a slice in its tile, without a division if the weight has one run.
DEVICE int slice_offset(int slice) { return kFilledRuns == 1 ? slice * kUnitBytes : static_cast<int>(unit_offset(0, slice)); }
#endif
constexpr int kBlocks = kSliceColumns / 32;   // blocks of 32 columns in a slice

// A lane's MMA accumulators of a weight tile. Of token tile i: rows lo + g (elements 0, 1) and hi + g (2, 3), tokens 8 i + 2 t and
// 8 i + 2 t + 1.
using Sums = float[TOKEN_TILES][4];

#if WEIGHT_BITS == 16
constexpr int kSlotBytes = 16 * kSliceColumns * 2;   // bytes of a tile's slice in shared memory
#else
constexpr int kSlotBytes = kUnitBytes;
#endif
static_assert(kSlotBytes % 16 == 0, "slots must be whole copies");

// A lane's part of a tile's slice, in registers: weights, or codes and scales.
struct Slice {
#if WEIGHT_BITS == 16
  uint4 lo[kBlocks], hi[kBlocks];
#else
  uint4 words[2];
  uint32_t scales[kUnitScales][ZEROS ? 2 : 1];
#endif
};

// The first row of an expert's tile in the stacked weight (its row lo + 0), and the number of rows from lo to hi.
struct TileRows {
  int64_t first;
  int64_t distance;
};

// Loads a weight tile to registers slice by slice, for warps that multiply it by many rows. `rows.first` is a multiple of 8 if the
// tile's rows lo are gates and its rows hi are ups, else of 16.
struct WeightTile {
#if WEIGHT_BITS == 16
  const scalar_t *lo, *hi;
  DEVICE WeightTile(const void* weight, const TileRows& rows) {
    const int lane = threadIdx.x % 32;
    lo = static_cast<const scalar_t*>(weight) + (rows.first + lane / 4) * K + lane % 4 * 8;
    hi = lo + rows.distance * K;
  }
  DEVICE void load(Slice& out, int slice) const {
#pragma unroll
    for (int j = 0; j < kBlocks; j++) out.lo[j] = load16_streamed(lo + slice * kSliceColumns + j * 32);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) out.hi[j] = load16_streamed(hi + slice * kSliceColumns + j * 32);
  }
#else
  const unsigned char* weight;
  DEVICE WeightTile(const void* packed, const TileRows& rows) {
    const int64_t tile = rows.distance == 8 ? rows.first / 16 : rows.first / 8;
    weight = static_cast<const unsigned char*>(packed) + tile * kTileBytes;
  }
  DEVICE static uint32_t load_word(const unsigned char* source) {
    uint32_t word;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(word) : "l"(source));
    return word;
  }
  DEVICE void load(Slice& out, int slice) const {
    const int lane = threadIdx.x % 32;
    const unsigned char* const unit = weight + slice_offset(slice);
#pragma unroll
    for (int i = 0; i < 2; i++) out.words[i] = load16_streamed(unit + i * 512 + lane * 16);
    constexpr int kWords = ZEROS ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kUnitScales * kWords; i++)
      out.scales[i / kWords][i % kWords] =
          load_word(unit + kCodeBytes + i / kWords * kScaleBytes + (lane / 4 * kWords + i % kWords) * 4);
  }
#endif
};

// Copies a weight tile slice by slice to the warp's slots in shared memory, so that weights under way take no registers. In 16 bits
// odd rows have the halves of their 128 bytes swapped: two neighbouring rows then cover all banks. The weight has COLUMNS columns,
// packed in CUT runs.
#if WEIGHT_BITS == 16
template <int COLUMNS, int CUT>
struct TileCopies {
  const unsigned char *lo, *hi;
  DEVICE TileCopies(const void* weight, const TileRows& rows) {
    const int lane = threadIdx.x % 32;
    lo = static_cast<const unsigned char*>(weight) + (rows.first + lane / 8) * (COLUMNS * 2) + lane % 8 * 16;
    hi = lo + rows.distance * (COLUMNS * 2);
  }
  // Starts the copies of a slice to the slot at `slot`. All lanes.
  DEVICE void copy(uint32_t slot, int slice) const {
    const int row = threadIdx.x % 32 / 8, piece = threadIdx.x % 8;
    const uint32_t place = slot + row * 128 + (piece ^ row % 2 * 4) * 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
      cp_async16_lines(place + i * 512, (i < 2 ? lo : hi) + slice * 128 + i % 2 * 4 * (COLUMNS * 2));
  }
  DEVICE static void read(Slice& out, uint32_t slot) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kBlocks; j++) {
      const uint32_t place = slot + lane / 4 * 128 + ((j * 4 + lane % 4) ^ lane / 4 % 2 * 4) * 16;
      out.lo[j] = load_shared(place), out.hi[j] = load_shared(place + 1024);
    }
  }
};
using TileSource = TileCopies<K, 1>;
#else
template <int COLUMNS, int CUT>
struct TileCopies {
  static constexpr int kAll = COLUMNS / kSliceColumns, kOfRun = (kAll + CUT - 1) / CUT, kFilled = (kAll + kOfRun - 1) / kOfRun;
  static constexpr int kStride = packed_run_bytes(kOfRun);
  static constexpr int64_t kBytes = (kFilled - 1) * kStride + packed_run_bytes(kAll - (kFilled - 1) * kOfRun);
  static_assert(COLUMNS % kSliceColumns == 0, "whole slices");

  const unsigned char* tile;
  DEVICE TileCopies(const void* packed, const TileRows& rows) {
    const int64_t index = rows.distance == 8 ? rows.first / 16 : rows.first / 8;
    tile = static_cast<const unsigned char*>(packed) + index * kBytes;
  }
  // Returns the byte offset of a slice in its tile, without a division if the weight has one run.
  DEVICE static int offset(int slice) {
    return kFilled == 1 ? slice * kUnitBytes : slice / kOfRun * kStride + slice % kOfRun * kUnitBytes;
  }
  // Starts the copies of a slice to the slot at `slot`. All lanes.
  DEVICE void copy(uint32_t slot, int slice) const {
    const unsigned char* const unit = tile + offset(slice);
#pragma unroll
    for (int i = 0; i < (kUnitBytes + 511) / 512; i++) {
      const int place = (i * 32 + threadIdx.x % 32) * 16;
      if (place < kUnitBytes) cp_async16_lines(slot + place, unit + place);
    }
  }
  // Has the copy engine (sm_90) copy `count` slices to consecutive slots from `slot` on; `barrier` counts the bytes. One thread.
  DEVICE void copy_together(uint32_t slot, int slice, int count, uint32_t barrier) const {
    const bool are_neighbours = offset(slice + count - 1) - offset(slice) == (count - 1) * kUnitBytes;
    const int each = are_neighbours ? count : 1;
    for (int i = 0; i < count; i += each) copy_bytes(slot + i * kUnitBytes, tile + offset(slice + i), each * kUnitBytes, barrier);
  }
  DEVICE static void read(Slice& out, uint32_t slot) {
    const int lane = threadIdx.x % 32;
    constexpr int kWords = ZEROS ? 2 : 1;
#pragma unroll
    for (int i = 0; i < 2; i++) out.words[i] = load_shared(slot + i * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < kUnitScales * kWords; i++)
      out.scales[i / kWords][i % kWords] =
          load_shared_word(slot + kCodeBytes + i / kWords * kScaleBytes + (lane / 4 * kWords + i % kWords) * 4);
  }
};
using TileSource = TileCopies<K, RUNS>;
#endif

// Group: the scales of a scale group, of rows lo + g and hi + g; weights of 16 bits have none. load_operand: MMA operand A of 16
// columns, half `half` of block j of the slice.
#if WEIGHT_BITS == 16
struct Group {
  DEVICE Group(const Slice&, int) {}
  DEVICE void add(float& sum, float acc, int) const { sum += acc; }
};

DEVICE void load_operand(uint32_t (&a)[4], const Slice& slice, int, int j, int half) {
  const uint4 &lo = slice.lo[j], &hi = slice.hi[j];
  a[0] = half ? lo.z : lo.x, a[1] = half ? hi.z : hi.x, a[2] = half ? lo.w : lo.y, a[3] = half ? hi.w : hi.y;
}
#else
// A code in the lowest four bits of a 16-bit float is the number code * 2^-133 (fp16: 2^-24): subnormal, or one of the smallest
// normal numbers, which have the same steps. A code in the next four bits is 16 times as much. kLoFactor and kHiFactor turn either
// into code * kCodeUnit, so that code - zero point is computed exactly.
#ifdef CPMRT_BF16
constexpr uint32_t kLoFactor = 0x7F007F00u, kHiFactor = 0x7D007D00u;   // 2^127, 2^123
constexpr float kCodeUnit = 0x1p-6f;
#else
constexpr uint32_t kLoFactor = 0x78007800u, kHiFactor = 0x68006800u;   // 2^15, 2^11
constexpr float kCodeUnit = 0x1p-9f;
#endif

struct Group {
  float lo_scale, hi_scale;   // for codes in units of kCodeUnit
  uint32_t lo_zero, hi_zero;  // -zero point * kCodeUnit, twice: added to a pair of codes
  DEVICE Group(const Slice& slice, int group) {
    const float2 lo = unpack2(slice.scales[group][0]), hi = unpack2(slice.scales[group][ZEROS]);
    lo_scale = lo.x * (1.0f / kCodeUnit), hi_scale = (ZEROS ? hi.x : lo.y) * (1.0f / kCodeUnit);
    lo_zero = both(ZEROS ? lo.y : 8.0f), hi_zero = both(ZEROS ? hi.y : 8.0f);
  }
  DEVICE static uint32_t both(float zero) { return pack2(-kCodeUnit * zero, -kCodeUnit * zero); }
  DEVICE void add(float& sum, float acc, int c) const { sum = fmaf(c < 2 ? lo_scale : hi_scale, acc, sum); }
};

// Returns (code - zero point) * kCodeUnit of the pair of codes, of row lo or hi, that `codes` holds; its other bits are 0.
DEVICE uint32_t less_zero(uint32_t codes, uint32_t factor, uint32_t zero) {
  const scalar2_t value = __hfma2(reinterpret_cast<const scalar2_t&>(codes), reinterpret_cast<const scalar2_t&>(factor),
                                  reinterpret_cast<const scalar2_t&>(zero));
  return reinterpret_cast<const uint32_t&>(value);
}

DEVICE void load_operand(uint32_t (&a)[4], const Slice& slice, int group, int j, int half) {
  const Group codes(slice, group);
  const uint32_t word = (&slice.words[j / 2].x)[j % 2 * 2 + half], high = word >> 8;
  a[0] = less_zero(word & 0x000F000Fu, kLoFactor, codes.lo_zero), a[1] = less_zero(word & 0x00F000F0u, kHiFactor, codes.hi_zero);
  a[2] = less_zero(high & 0x000F000Fu, kLoFactor, codes.lo_zero), a[3] = less_zero(high & 0x00F000F0u, kHiFactor, codes.hi_zero);
}
#endif

// Adds to sums[w] the products of weight tile w over S slices, for the token tiles below `used`. slices[s * TILES + w] is slice s of
// tile w; `x(s, j, i)` returns 16 bytes of x: the lane's columns of block j of slice s, of token g of token tile i.
template <int S, int TILES, class X>
DEVICE void multiply(Sums (&sums)[TILES], const Slice* slices, const X& x, int used) {
  static_assert(S == 1 || !kManyGroups, "the sums of groups would be added in another order");
  constexpr int kProducts = S * TILES;   // independent chains of MMAs for each token tile
#if WEIGHT_BITS == 16
  constexpr int kGroups = 1;
#else
  constexpr int kGroups = kUnitScales;
#endif
#pragma unroll
  for (int group = 0; group < kGroups; group++) {
    float acc[kProducts][TOKEN_TILES][4] = {};
#pragma unroll
    for (int j = group * (kBlocks / kGroups); j < (group + 1) * (kBlocks / kGroups); j++) {
      uint32_t a[2][kProducts][4];
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int m = 0; m < kProducts; m++) load_operand(a[half][m], slices[m], group, j, half);
#pragma unroll
      for (int i = 0; i < TOKEN_TILES; i++) {
        if (TOKEN_TILES > 1 && i >= used) continue;
        uint4 b[S];
#pragma unroll
        for (int s = 0; s < S; s++) b[s] = x(s, j, i);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int m = 0; m < kProducts; m++) {
            const uint4& v = b[m / TILES];
            mma(acc[m][i], a[half][m], {half ? v.z : v.x, half ? v.w : v.y});
          }
      }
    }
#pragma unroll
    for (int m = 0; m < kProducts; m++) {
      const Group scale(slices[m], group);
#pragma unroll
      for (int i = 0; i < TOKEN_TILES; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) scale.add(sums[m % TILES][i][c], acc[m][i][c], c);
    }
  }
}
