// Packed weights of 2, 4 or 8 bits: the order in which warps of a skinny product stream them.
//
// A tile is 16 rows of W, lo .. lo+7 and hi .. hi+7, which the product's Tiles struct chooses. K is cut into slices of 128 columns, and the
// slices into RUNS runs. A unit is one tile x one slice: 16 rows x 128 k. Units lie in memory as [tile][run][slice of the run], each
// run padded to 128 bytes. u[n][k] is the code of row n and column k. In 4 bits a unit begins with
//   [2][32 lanes][4] words: word s of lane (g, t) = lane / 4, lane % 4 (s = 0..7) holds k0 = 128 slice + 32 (s / 2) + 8 t + 4 (s % 2):
//     bits  0-3 u[lo+g][k0]    4-7 u[hi+g][k0]     8-11 u[lo+g][k0+2]  12-15 u[hi+g][k0+2]
//     bits 16-19 u[lo+g][k0+1] 20-23 u[hi+g][k0+1] 24-27 u[lo+g][k0+3] 28-31 u[hi+g][k0+3]
// In 8 bits, symmetric or with minimums, it begins with
//   [4 j][32 lanes][4] words: words 2 s and 2 s + 1 (s = 0, 1) of lane (g, t) hold lo+g and hi+g, k0 = 128 slice + 32 j + 8 t + 4 s:
//     bits  0-7 u[k0]    8-15 u[k0+2]    16-23 u[k0+1]    24-31 u[k0+3]
// In 2 bits, symmetric ones only, it begins with
//   [32 lanes][4 j] words: word j of lane (g, t) holds k0 = 128 slice + 32 j + 8 t:
//     bits  0-1 u[lo+g][k0]    2-3 u[hi+g][k0]      4-5 u[lo+g][k0+4]    6-7 u[hi+g][k0+4]
//     bits  8-15 the same with k0+2, bits 16-31 as bits 0-15 with k one further
// In any number of bits it goes on with
//   [128 / SCALE_GROUP][8] for each row pair g: scale of lo+g and of hi+g, scalar_t; with ZEROS: scale of lo+g, zero point (ZEROS 1) or
//     minimum (ZEROS 2) of lo+g, scale of hi+g, zero point or minimum of hi+g, all as scalar_t.
// Why so: a byte of a word has the codes of two rows of one k (in 2 bits of two k), so that one mask, for some codes after a shift, leaves
// four codes as the highest bits of four bytes, the form in which tensor cores take integers. Also, `word & 0x000f000f` (and the same
// after a shift by 8) is a pair of lo's codes as the 16-bit floats u * 2^-133 (bf16) or u * 2^-24 (fp16), and `word & 0x00f000f0` is a
// pair of hi's codes times 16. Tensor cores multiply these floats exactly too: numbers below twice the smallest normal one are linear in
// their bits.
#pragma once
#include "types.cuh"

constexpr int K = IN_FEATURES;
constexpr int kSliceColumns = 128;
constexpr int kSlices = K / kSliceColumns;
constexpr int kRunSlices = (kSlices + RUNS - 1) / RUNS;        // slices of a run; the last run that has any may have fewer
constexpr int kFilledRuns = (kSlices + kRunSlices - 1) / kRunSlices;   // runs that have any slices
constexpr int kCodeBytes = 256 * WEIGHT_BITS;                  // bytes of a unit's codes
constexpr int kScaleBytes = ZEROS ? 64 : 32;                   // bytes of a scale group's scales in a unit
constexpr int kUnitScales = kSliceColumns / SCALE_GROUP;
constexpr int kUnitBytes = kCodeBytes + kUnitScales * kScaleBytes;

__host__ __device__ constexpr int packed_run_bytes(int slices) { return (slices * kUnitBytes + 127) / 128 * 128; }
constexpr int kRunBytes = packed_run_bytes(kRunSlices);
constexpr int64_t kTileBytes = (kFilledRuns - 1) * kRunBytes + packed_run_bytes(kSlices - (kFilledRuns - 1) * kRunSlices);

static_assert(K % kSliceColumns == 0, "K must be a multiple of 128");
static_assert(WEIGHT_BITS == 4 || (WEIGHT_BITS == 8 && ZEROS != 1) || (WEIGHT_BITS == 2 && !ZEROS), "WEIGHT_BITS must be 4, or 8 without zero points, or 2 without ZEROS");
static_assert(RUNS == 1 || RUNS == 8, "RUNS must be 1 or 8");
static_assert(SCALE_GROUP == 16 || SCALE_GROUP == 32 || SCALE_GROUP == 64 || SCALE_GROUP == 128, "SCALE_GROUP must be 16, 32, 64 or 128");

// Returns at which byte of the packed matrix a unit begins.
DEVICE int64_t unit_offset(int tile, int slice) {
  return tile * kTileBytes + slice / kRunSlices * kRunBytes + slice % kRunSlices * kUnitBytes;
}
