// The products of a warp with packed weights: codes times x in tensor cores, a scale group at a time.
#pragma once
#include "mma.cuh"
#include "packed_activations.cuh"
#include "packed_exchange.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr float kZero = (1 << WEIGHT_BITS - 1) / 8.0f;            // in units of the sums of x, which are 8 times too large
constexpr float kHiFactor = WEIGHT_BITS == 8 ? 1.0f : 1 << WEIGHT_BITS;   // of hi's codes

// Scales of lo and hi in scale group `group` of a unit, and what the sums of x are multiplied by.
DEVICE void load_scales(float2& scale, float2& zero, uint32_t unit, int group, const Lane& at) {
  const uint32_t scales = unit + kCodeBytes + group * kScaleBytes;
  if (ZEROS) {
    const uint2 pairs = load_shared_words(scales + at.token * 8);
    const float2 lo = unpack2(pairs.x), hi = unpack2(pairs.y);
    scale = make_float2(lo.x, hi.x), zero = make_float2(-lo.y, -hi.y * kHiFactor);
  } else {
    scale = unpack2(load_shared_word(scales + at.token * 4)), zero = make_float2(-kZero, -kZero * kHiFactor);
  }
}

// out += scale * (sum - zero * sum of x), with minimums scale * sum - minimum * sum of x.
DEVICE void add_scaled(float& out, float sum, float scale, float zero, float ones) {
  out = ZEROS == 2 ? fmaf(zero, ones, fmaf(scale, sum, out)) : fmaf(scale, fmaf(zero, ones, sum), out);
}

// The same over scale group `group` of a slice, for token tiles `from` .. from + COUNT / 4 - 1.
template <int COUNT>
DEVICE void add_group(Sums& out, const float (&acc)[COUNT], int from, uint32_t unit, uint32_t x, int group,
                      const Lane& at) {
  const uint32_t sums = x + kXSumOffset + (group * kTokens + (ROWS == 1 ? 0 : at.quarter * 2)) * 4;
  float2 scale, zero;
  load_scales(scale, zero, unit, group, at);
#pragma unroll
  for (int i = 0; i < COUNT / 4; i++) {
    float2 ones;
    if (ROWS == 1) ones.x = ones.y = load_shared_float(sums);
    else ones = load_shared2(sums + (from + i) * 32);
#pragma unroll
    for (int c = 0; c < 4; c++)
      add_scaled(out[from + i][c], acc[i * 4 + c], c < 2 ? scale.x : scale.y, c < 2 ? zero.x : zero.y, c % 2 ? ones.y : ones.x);
  }
}

// What a group's sums of the one row's products with a tile are scaled by.
struct RowGroup {
  float2 scale, zero;   // lo, hi
  float ones;           // x summed
  RowGroup() = default;
  DEVICE RowGroup(uint32_t unit, uint32_t x, int group, const Lane& at) {
    load_scales(scale, zero, unit, group, at);
    ones = load_shared_float(x + kXSumOffset + group * kTokens * 4);
  }
};

DEVICE void add_row_group(Sums& out, float2 sum, const RowGroup& by) {
  add_scaled(out[0][0], sum.x, by.scale.x, by.zero.x, by.ones);
  add_scaled(out[0][2], sum.y, by.scale.y, by.zero.y, by.ones);
}

// The blocks of 32 k that scale group `group` lies in. Of a group of 16 half of the lanes hold the block's 8 k each, and those
// of the others stay out: a step of 16 k has four k of every lane.
constexpr int kGroupBlocks = SCALE_GROUP < 32 ? 1 : SCALE_GROUP / 32;
#if SCALE_GROUP < 32 || (WEIGHT_BITS == 8 && LINEAR != 3 && ROWS == 64)
#define UNROLLED_GROUPS _Pragma("unroll 2")   // more side by side would take too many registers
#else
#define UNROLLED_GROUPS _Pragma("unroll")
#endif
DEVICE constexpr int first_block(int group) { return group * SCALE_GROUP / 32; }
DEVICE uint32_t group_mask(int group, const Lane& at) {
  const uint32_t first = at.quarter < 2 ? ~0u : 0u;   // a register for all groups
  return SCALE_GROUP >= 32 ? ~0u : group % 2 ? ~first : first;
}

// Operand A of 16 k, step `step` of those that begin at `words`: codes of lo and hi, two k each, then two k further; of the bits in
// `mask`.
constexpr int kLoadBlocks = 8 / WEIGHT_BITS;   // of 32 k in 16 bytes of a lane
#if WEIGHT_BITS == 2
using BlockCodes = uint32_t;      // of 32 k
DEVICE BlockCodes load_codes(uint32_t unit, int block, const Lane& at) {
  return load_shared_word(unit + at.lane * 16 + block * 4);
}
DEVICE void split_codes(uint32_t (&a)[4], const uint32_t* words, int step, uint32_t) {
  static_assert(SCALE_GROUP >= 32, "2 bits have no groups of 16");
  const int odd = step % 2 * 4, shift = SCALED_STEPS ? 0 : odd;   // with SCALED_STEPS x is as much smaller as the codes are too large
  const uint32_t lo = 0x00030003u << (SCALED_STEPS ? odd : 0), hi = lo << 2;
  const uint32_t word = words[step / 2] >> shift, high = words[step / 2] >> shift + 8;
  a[0] = word & lo, a[1] = word & hi, a[2] = high & lo, a[3] = high & hi;
}
#elif WEIGHT_BITS == 4
using BlockCodes = uint2;
DEVICE BlockCodes load_codes(uint32_t unit, int block, const Lane& at) {
  return load_shared_words(unit + block / 2 * 512 + at.lane * 16 + block % 2 * 8);
}
DEVICE void split_codes(uint32_t (&a)[4], const uint32_t* words, int step, uint32_t mask) {
  const uint32_t word = words[step], high = word >> 8, lo = mask & 0x000F000Fu, hi = mask & 0x00F000F0u;
  a[0] = word & lo, a[1] = word & hi, a[2] = high & lo, a[3] = high & hi;
}
#else
using BlockCodes = uint4;
DEVICE BlockCodes load_codes(uint32_t unit, int block, const Lane& at) {
  return load_shared(unit + block * 512 + at.lane * 16);
}
DEVICE void split_codes(uint32_t (&a)[4], const uint32_t* words, int step, uint32_t mask) {
  const uint32_t lo = words[step * 2] & mask, hi = words[step * 2 + 1] & mask;
  a[0] = __byte_perm(lo, 0, 0x4240), a[1] = __byte_perm(hi, 0, 0x4240);
  a[2] = __byte_perm(lo, 0, 0x4341), a[3] = __byte_perm(hi, 0, 0x4341);
}
#endif

// 16 k of x at `shared`: [2][token tile][8 tokens] 16 bytes. With IN_UNIFORM a shuffle tells the compiler that all lanes have the same
// address: it then keeps this and the descriptors after it in uniform registers, and adds nothing lane by lane.
template <int NT, bool IN_UNIFORM>
DEVICE uint64_t tokens_descriptor(uint32_t shared) {
  if (IN_UNIFORM) shared = __shfl_sync(0xFFFFFFFFu, shared, 0);
  return static_cast<uint64_t>(128 >> 4) << 32 | static_cast<uint64_t>(NT * 128 >> 4) << 16 | (shared & 0x3FFFF) >> 4;
}

// As multiply_slices, by four warps together (sm_90a): weights in registers, x in shared memory as eight tokens x 8 k. The sums are
// the same, bit for bit; four times as many come out in the same time. All four warps of a warpgroup, whether they have a tile or not.
template <int S>
DEVICE void multiply_together(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  constexpr int kSteps = kGroupBlocks * 2;   // of 16 k in the blocks of a scale group
  constexpr int kHeld = NT == 8 && kThreads > 512 && kSteps > 4 ? 4 : kSteps;   // with codes in registers at a time
UNROLLED_GROUPS
  for (int group = 0; group < kUnitScales; group++) {
    float acc[S][NT * 4];
    uint32_t a[S][kHeld][4];
#pragma unroll
    for (int s = 0; s < S; s++) {
      const uint64_t tokens = tokens_descriptor<NT, NT < 8 || kThreads <= 512>(x + s * kXSliceBytes);
#pragma unroll
      for (int from = 0; from < kSteps; from += kHeld) {
        if (from > 0) {
          wgmma_wait<0>();
          settle(a[s]);
        }
#pragma unroll
        for (int step = 0; step < kHeld; step += 2) {
          const int first = first_block(group) * 2 + from + step;
          const BlockCodes codes = load_codes(unit + s * kUnitBytes, first / 2, at);
          const uint32_t* const words = reinterpret_cast<const uint32_t*>(&codes);
          split_codes(a[s][step], words, 0, group_mask(group, at));
          split_codes(a[s][step + 1], words, 1, group_mask(group, at));
        }
        settle(a[s]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeld; step++)
          multiply_tile(acc[s], a[s][step], tokens + descriptor_step((first_block(group) * 2 + from + step) * 2 * kXWordStride), from + step > 0);
        wgmma_commit();
      }
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
      if (s == S - 1) wgmma_wait<0>();
      else wgmma_wait<1>();
      settle(acc[s]);
      settle(a[s]);
      add_group(out, acc[s], 0, unit + s * kUnitBytes, x + s * kXSliceBytes, group, at);
    }
  }
}

// out += S slices: units from `unit` on, x from `x` on. Each is a sum of its own, added in order; S > 1 needs one scale group a slice.
template <int S>
DEVICE void multiply_slices(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  // Token tiles whose sums over a scale group are in registers together.
  constexpr int kPart = NT < 4 ? NT : kThreads < 512 ? 4 : (kThreads == 512 ? 16 : 8) / NT;
  const uint32_t x_lane = x + (ROWS == 1 ? at.quarter : at.lane) * 16;
UNROLLED_GROUPS
  for (int part = 0; part < kUnitScales * (NT / kPart); part++) {
    const int group = part / (NT / kPart), from = part % (NT / kPart) * kPart;
    float acc[S][kPart * 4] = {};
    uint4 words[S];
#pragma unroll
    for (int j = first_block(group); j < first_block(group) + kGroupBlocks; j++) {
      uint4 b[S][kPart];
#pragma unroll
      for (int s = 0; s < S; s++) {
#pragma unroll
        for (int i = 0; i < kPart; i++) b[s][i] = load_shared(x_lane + s * kXSliceBytes + j * kXBlockBytes + (from + i) * 512);
        if (j % kLoadBlocks == 0 || j == first_block(group))
          words[s] = load_shared(unit + s * kUnitBytes + j / kLoadBlocks * 512 + at.lane * 16);
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int s = 0; s < S; s++) {
          uint32_t a[4];
          split_codes(a, &words[s].x, j % kLoadBlocks * 2 + half, group_mask(group, at));
#pragma unroll
          for (int i = 0; i < kPart; i++)
            mma(reinterpret_cast<float(&)[4]>(acc[s][i * 4]), a, {half ? b[s][i].z : b[s][i].x, half ? b[s][i].w : b[s][i].y});
        }
    }
#pragma unroll
    for (int s = 0; s < S; s++) add_group(out, acc[s], from, unit + s * kUnitBytes, x + s * kXSliceBytes, group, at);
    if (NT == 8) __syncwarp();   // keeps the next part's loads, and their registers, behind
  }
}

// One row: out += S slices, as multiply_slices adds them. x of slice s is column s of operand B, so one load of x serves all S products,
// each of which has its slice's sum in that column: of lane `quarter` s / 2. Lanes of quarter 0 hold the sums before and after; what
// others hold means nothing.
template <int S>
DEVICE void multiply_row(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  static_assert(S == 1 || S == 2 || S == 4 || S == 8, "S slices fill eight columns evenly");
  constexpr int kPairs = (S + 1) / 2, kOwn = S < 2 ? 1 : 2;   // slices whose sums one lane has
  const uint32_t x_lane = x + at.token % S * kXSliceBytes + at.quarter * 16;
  const int first = at.quarter % kPairs * kOwn;
  float2 held[S][kUnitScales];   // lo, hi: several groups of a slice come before those of the next
UNROLLED_GROUPS
  for (int group = 0; group < kUnitScales; group++) {
    float acc[S][4] = {};
    uint4 words[S];
#pragma unroll
    for (int j = first_block(group); j < first_block(group) + kGroupBlocks; j++) {
      const uint4 b = load_shared(x_lane + j * kXBlockBytes);
#pragma unroll
      for (int s = 0; s < S; s++)
        if (j % kLoadBlocks == 0 || j == first_block(group))
          words[s] = load_shared(unit + s * kUnitBytes + j / kLoadBlocks * 512 + at.lane * 16);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int s = 0; s < S; s++) {
          uint32_t a[4];
          split_codes(a, &words[s].x, j % kLoadBlocks * 2 + half, group_mask(group, at));
          mma(acc[s], a, {half ? b.z : b.x, half ? b.w : b.y});
        }
    }
#pragma unroll
    for (int s = 0; s < S; s++) held[s][group] = make_float2(acc[s][s % 2], acc[s][s % 2 + 2]);
    if constexpr (S == 1) add_row_group(out, held[0][group], RowGroup(unit, x, group, at));
  }
  if constexpr (S > 1) {
    RowGroup own[2][kUnitScales];
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
#pragma unroll
      for (int group = 0; group < kUnitScales; group++)
        own[odd][group] = RowGroup(unit + (first + odd) * kUnitBytes, x + (first + odd) * kXSliceBytes, group, at);
#pragma unroll
    for (int s = 0; s < S; s++) {
#pragma unroll
      for (int group = 0; group < kUnitScales; group++) add_row_group(out, held[s][group], own[s % 2][group]);
      if (S > 2 && s % 2 == 1)
        for (int c = 0; c < 4; c += 2) out[0][c] = __shfl_sync(0xFFFFFFFFu, out[0][c], at.lane & 28 | s / 2);
    }
  }
}

template <int S>
DEVICE void multiply(Sums& out, uint32_t unit, uint32_t x, const Lane& at, bool has_tile) {
  if constexpr (WGMMA_PRODUCTS) {
    multiply_together<S>(out, unit, x, at);
  } else {
    if (!has_tile) return;
    if constexpr (ROWS == 1) multiply_row<S>(out, unit, x, at);
    else multiply_slices<S>(out, unit, x, at);
  }
}

// One row: out[i] += a slice of the tile whose unit is units[i], tiles side by side, each as multiply_slices would add it.
template <int TILES>
DEVICE void multiply_tiles(Sums (&out)[TILES], const uint32_t (&units)[TILES], uint32_t x, const Lane& at) {
UNROLLED_GROUPS
  for (int group = 0; group < kUnitScales; group++) {
    float acc[TILES][4] = {};
    uint4 words[TILES];
#pragma unroll
    for (int j = first_block(group); j < first_block(group) + kGroupBlocks; j++) {
      const uint4 b = load_shared(x + at.quarter * 16 + j * kXBlockBytes);
#pragma unroll
      for (int i = 0; i < TILES; i++)
        if (j % kLoadBlocks == 0 || j == first_block(group))
          words[i] = load_shared(units[i] + j / kLoadBlocks * 512 + at.lane * 16);
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          uint32_t a[4];
          split_codes(a, &words[i].x, j % kLoadBlocks * 2 + half, group_mask(group, at));
          mma(acc[i], a, {half ? b.z : b.x, half ? b.w : b.y});
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) add_group(out[i], acc[i], 0, units[i], x, group, at);
  }
}

// Sums in units of the codes and of x as it was.
DEVICE void finish_sums(Sums& out) {
#pragma unroll
  for (int i = 0; i < NT; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) out[i][c] *= c < 2 ? kSumScale : kSumScale / kHiFactor;
}

// One row, a run of one slice: the warp's products of all rounds side by side, since those of a slice are a chain.
template <int ROUNDS>
DEVICE void accumulate_rounds(Sums (&out)[ROUNDS], const WeightStream& weights, const Activations& x, const Lane& at) {
  static_assert(ROUNDS <= kSlots && kRunSlices == 1, "a ring holds a slice of each round");
  uint32_t units[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    units[round] = weights.ring + round * kChunkBytes;
    if (kCopyEngine && at.tile(round) < weights.num_tiles) mbarrier_wait(weights.barriers + round * 8, 0);
  }
  if (!kCopyEngine) {
    cp_async_wait<0>();
    __syncwarp();
  }
  // Sums of a tile that does not exist mean nothing.
  if (at.slices > 0) multiply_tiles(out, units, x.base() + at.run * kXSliceBytes, at);
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) finish_sums(out[round]);
}
