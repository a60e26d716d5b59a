// The products of a warp with packed weights: codes times x as integers in tensor cores, a scale group at a time.
#pragma once
#include "mma.cuh"
#include "packed_activations.cuh"
#include "packed_exchange.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// A code u enters as the signed byte (u - kMiddle) * kCodeFactor: the byte's highest bits are those of u, with the first one flipped (kSigns).
constexpr int kMiddle = 1 << WEIGHT_BITS - 1;
constexpr uint32_t kSigns = 0x80808080u;

// The factors of a scale group's sums, for the lane's rows of both halves of a tile.
struct Scales {
  float2 scale;       // lo, hi
  float2 by_sum;      // with ZEROS the factor of the sum of q: kCodeFactor * (kMiddle - zero), or kCodeFactor * (scale * kMiddle - minimum)

  Scales() = default;
  // Reads those of a scale group of the unit at `unit` in shared memory.
  DEVICE Scales(uint32_t unit, int group, const Lane& at) {
    const uint32_t scales = unit + kCodeBytes + group * kScaleBytes;
    if (!ZEROS) {
      scale = unpack2(load_shared_word(scales + at.token * 4));
      return;
    }
    const uint2 pairs = load_shared_words(scales + at.token * 8);
    const float2 lo = unpack2(pairs.x), hi = unpack2(pairs.y);
    scale = make_float2(lo.x, hi.x), by_sum = make_float2(beside(lo), beside(hi));
  }
  // Returns `by_sum` of one row from its scale and its zero point or minimum.
  DEVICE static float beside(float2 pair) {
    return kCodeFactor * (ZEROS == 1 ? kMiddle - pair.y : fmaf(pair.x, kMiddle, -pair.y));
  }
};

// Adds to `out` the sum of a scale group, scaled, for a token with this quantum and sum of q.
DEVICE void add_scaled(float& out, float sum, float scale, float by_sum, float quantum, float sum_of_q) {
  const float by = scale * quantum;
  if (ZEROS == 0) out = fmaf(by, sum, out);
  if (ZEROS == 1) out = fmaf(by, fmaf(by_sum, sum_of_q, sum), out);
  if (ZEROS == 2) out = fmaf(by_sum * quantum, sum_of_q, fmaf(by, sum, out));
}

// Returns the sum over q from the sums over its high and its low bytes.
DEVICE float joined(int high, int low) { return static_cast<float>(high * 256 + low); }

// Adds to `out` the sums of scale group `group` of a slice, scaled, for the COUNT token tiles from `from` on. sum(i, c) returns sum c of
// token tile from + i.
template <int COUNT, class SumOf>
DEVICE void add_group(Sums& out, int from, uint32_t unit, uint32_t x, int group, const Lane& at, SumOf sum) {
  const Scales by(unit, group, at);
  const uint32_t token = at.quarter * 8;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float2 quanta = load_shared2(x + kXQuantumOffset + (from + i) * 32 + token);
    float2 sums = {};
    if (ZEROS) sums = load_shared2(x + kXSumOffset + group * kTokens * 4 + (from + i) * 32 + token);
#pragma unroll
    for (int c = 0; c < 4; c++)
      add_scaled(out[from + i][c], sum(i, c), c < 2 ? by.scale.x : by.scale.y, c < 2 ? by.by_sum.x : by.by_sum.y,
                 c % 2 ? quanta.y : quanta.x, c % 2 ? sums.y : sums.x);
  }
}

// With one row: the factors of a scale group's sums, for a tile and the row.
struct RowGroup {
  Scales by;
  float quantum, sum_of_q = 0.0f;   // of x
  RowGroup() = default;
  DEVICE RowGroup(uint32_t weights, uint32_t x, int group, const Lane& at) : by(weights, group, at), quantum(load_shared_float(x + kXQuantumOffset)) {
    if (ZEROS) sum_of_q = load_shared_float(x + kXSumOffset + group * kTokens * 4);
  }
  // Adds the group's sums to `out`, scaled. acc: sums of lo with high and with low bytes of x, then those of hi.
  DEVICE void add(Sums& out, const int (&acc)[4]) const {
    add_scaled(out[0][0], joined(acc[0], acc[1]), by.scale.x, by.by_sum.x, quantum, sum_of_q);
    add_scaled(out[0][2], joined(acc[2], acc[3]), by.scale.y, by.by_sum.y, quantum, sum_of_q);
  }
};

// kGroupBlocks: blocks of 32 k in a scale group; first_block returns the first one. A group of 16 is half a block: half of the lanes hold 8 k
// of it each, and group_mask leaves the codes of the other lanes out.
constexpr int kGroupBlocks = SCALE_GROUP < 32 ? 1 : SCALE_GROUP / 32;
#if ROWS == 64 || (ROWS == 32 && SCALE_GROUP < 32)
#define UNROLLED_GROUPS _Pragma("unroll 1")   // more side by side would take too many registers
#elif SCALE_GROUP < 32
#define UNROLLED_GROUPS _Pragma("unroll 2")
#else
#define UNROLLED_GROUPS _Pragma("unroll")
#endif
DEVICE constexpr int first_block(int group) { return group * SCALE_GROUP / 32; }
DEVICE uint32_t group_mask(int group, const Lane& at) {
  const uint32_t first = at.quarter < 2 ? ~0u : 0u;   // one register serves all groups
  return SCALE_GROUP >= 32 ? ~0u : group % 2 ? ~first : first;
}

constexpr int kBlockWords = WEIGHT_BITS / 2, kLoadBlocks = 8 / WEIGHT_BITS;   // a lane's words of a block of 32 k; blocks in its 16 bytes
// Makes operand A of a block of 32 k: codes of lo and hi, four k each, then those of the next four k; zeros in lanes whose `mask` is 0.
// words: the lane's words of the block; bits: kCodeBits.
DEVICE void enter_codes(uint32_t (&a)[4], const uint32_t* words, uint32_t bits, uint32_t mask) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t codes = WEIGHT_BITS == 8 ? words[i] : WEIGHT_BITS == 2 ? words[0] << 6 - 2 * i : i % 2 ? words[i / 2] : words[i / 2] << 4;
    a[i] = codes & (WEIGHT_BITS == 8 ? mask : bits & mask) ^ (kSigns & mask);
  }
}
// Loads the lane's words of a block.
DEVICE void load_block(uint32_t* words, uint32_t unit, int block, const Lane& at) {
  const uint32_t from = unit + block / kLoadBlocks * 512 + at.lane * 16 + block % kLoadBlocks * (kBlockWords * 4);
  uint4 loaded = {};
  if (kBlockWords == 1) loaded.x = load_shared_word(from);
  if (kBlockWords == 2) reinterpret_cast<uint2&>(loaded) = load_shared_words(from);
  if (kBlockWords == 4) loaded = load_shared(from);
#pragma unroll
  for (int i = 0; i < kBlockWords; i++) words[i] = (&loaded.x)[i];
}

// The lane's codes of a scale group, from shared memory to operand A: 16 bytes at a time if the group has so many, else block by block.
struct HeldCodes {
  static constexpr bool kIsWhole = kGroupBlocks >= kLoadBlocks;
  uint32_t words[kIsWhole ? 4 : kBlockWords];

  // Loads a block of the group, where it is not loaded yet. Blocks come in order.
  DEVICE void load(uint32_t unit, int block, const Lane& at) {
    if (!kIsWhole) {
      load_block(words, unit, block, at);
    } else if (block % kLoadBlocks == 0) {
      const uint4 loaded = load_shared(unit + block / kLoadBlocks * 512 + at.lane * 16);
      words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
    }
  }
  DEVICE const uint32_t* of(int block) const { return words + (kIsWhole ? block % kLoadBlocks * kBlockWords : 0); }
};

// Returns the descriptor of 32 k of x at `shared`: [half][part][high, low][token tile][8 tokens] 16 bytes. With IN_UNIFORM a shuffle tells
// the compiler that all lanes have the same address: it then keeps this descriptor and those made from it in uniform registers, and adds
// nothing lane by lane.
template <int NT, bool IN_UNIFORM>
DEVICE uint64_t tokens_descriptor(uint32_t shared) {
  if (IN_UNIFORM) shared = __shfl_sync(0xFFFFFFFFu, shared, 0);
  return static_cast<uint64_t>(128 >> 4) << 32 | static_cast<uint64_t>(NT * 256 >> 4) << 16 | (shared & 0x3FFFF) >> 4;
}

// Does the same as multiply_slices with four warps together (sm_90a): weights in registers, x in shared memory as eight columns x 16 k. The
// sums are the same, bit for bit; four times as many come out in the same time. All four warps of a warpgroup call it, whether they have
// a tile or not.
template <int S>
DEVICE void multiply_together(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  // 64 tokens are multiplied in two parts, because there are registers for the sums of one. Where registers are few, operand A is made
  // anew for each part, kHeld blocks at a time.
  constexpr int kParts = NT / kPartTiles;
  constexpr bool kKeeps = NT < 8 || (kThreads <= 512 && WEIGHT_BITS < 8);
  constexpr int kHeld = kKeeps || kGroupBlocks < 2 ? kGroupBlocks : WEIGHT_BITS == 8 ? 1 : 2;   // blocks
UNROLLED_GROUPS
  for (int group = 0; group < kUnitScales; group++) {
    uint32_t a[S][kHeld][4];
    const auto enter = [&](int s, int from) {
#pragma unroll
      for (int j = 0; j < kHeld; j++) {
        uint32_t words[kBlockWords];
        load_block(words, unit + s * kUnitBytes, first_block(group) + from + j, at);
        enter_codes(a[s][j], words, at.code_bits, group_mask(group, at));
      }
      settle(a[s]);
    };
#pragma unroll
    for (int s = 0; s < S; s++)
      if (kKeeps) enter(s, 0);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      int acc[S][kPartTiles * 8];   // sums with high bytes of x, then with low ones
#pragma unroll
      for (int s = 0; s < S; s++) {
        const uint64_t tokens = tokens_descriptor<NT, NT < 8 || kThreads <= 512>(x + s * kXSliceBytes) + descriptor_step(part * kPartTiles * 256);
#pragma unroll
        for (int from = 0; from < kGroupBlocks; from += kHeld) {
          if (from > 0) wgmma_wait<0>();
          if (!kKeeps) enter(s, from);
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < kHeld; j++)
            multiply_bytes(acc[s], a[s][j], tokens + descriptor_step((first_block(group) + from + j) * kXBlockBytes), from + j > 0);
          wgmma_commit();
        }
      }
#pragma unroll
      for (int s = 0; s < S; s++) {
        if (s == S - 1) wgmma_wait<0>();
        else wgmma_wait<1>();
        settle(acc[s]);
        settle(a[s]);
        add_group<kPartTiles>(out, part * kPartTiles, unit + s * kUnitBytes, x + s * kXSliceBytes, group, at,
                          [&](int i, int c) { return joined(acc[s][i * 4 + c], acc[s][(kPartTiles + i) * 4 + c]); });
      }
      if (NT == 8) __syncwarp();   // keeps the next part's loads, and their registers, behind
    }
  }
}

// Adds to `out` the products of S slices: the units from `unit` on times x from `x` on. Each slice is a sum of its own, added in order;
// S > 1 needs one scale group a slice.
template <int S>
DEVICE void multiply_slices(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  // kPart: token tiles whose sums over a scale group are in registers together.
  constexpr int kPart = NT < 4 ? NT : kThreads < 512 ? 4 : NT == 4 && kThreads == 512 ? 2 : 1;
UNROLLED_GROUPS
  for (int group = 0; group < kUnitScales; group++) {
#pragma unroll
    for (int from = 0; from < NT; from += kPart) {
      int acc[S][kPart][2][4] = {};   // sums with high and with low bytes of x
      HeldCodes codes[S];
#pragma unroll
      for (int j = first_block(group); j < first_block(group) + kGroupBlocks; j++) {
        uint4 b[S][kPart];
#pragma unroll
        for (int s = 0; s < S; s++) {
#pragma unroll
          for (int i = 0; i < kPart; i++) b[s][i] = load_shared(x + at.lane * 16 + s * kXSliceBytes + j * kXBlockBytes + (from + i) * 512);
          codes[s].load(unit + s * kUnitBytes, j, at);
        }
#pragma unroll
        for (int s = 0; s < S; s++) {
          uint32_t a[4];
          enter_codes(a, codes[s].of(j), NT < 8 ? at.code_bits : kCodeBits, group_mask(group, at));   // registers are few with 64 rows
#pragma unroll
          for (int i = 0; i < kPart; i++) {
            mma_bytes(acc[s][i][0], a, {b[s][i].x, b[s][i].y});
            mma_bytes(acc[s][i][1], a, {b[s][i].z, b[s][i].w});
          }
        }
      }
#pragma unroll
      for (int s = 0; s < S; s++)
        add_group<kPart>(out, from, unit + s * kUnitBytes, x + s * kXSliceBytes, group, at,
                         [&](int i, int c) { return joined(acc[s][i][0][c], acc[s][i][1][c]); });
      if (NT == 8) __syncwarp();   // keeps the next part's loads, and their registers, behind
    }
  }
}

// With one row: how S slices share operand B. Its columns 2 s and 2 s + 1 are the high and low bytes of x in slice s, so that one load of x
// serves the products of all S slices. Lanes whose quarter is s modulo S get the sums of slice s; what they get of other slices means nothing.
template <int S>
struct RowSlices {
  static_assert(S == 1 || S == 2 || S == 4, "S slices fill eight columns evenly");
  const Lane& at;
  DEVICE int own() const { return at.quarter % S; }
  // Loads the lane's part of operand B for block `block` of 32 k. x: the place of the first slice.
  DEVICE uint2 load(uint32_t x, int block) const {
    return load_shared_words(x + at.token / 2 % S * kXSliceBytes + at.token % 2 * 8 + at.quarter * 16 + block * kXBlockBytes);
  }
  // Copies `out` from the lanes that have the sums of slice s, and have added them, to all lanes of the same row.
  DEVICE void share(Sums& out, int s) const {
    if constexpr (S > 1) {
#pragma unroll
      for (int c = 0; c < 4; c += 2) out[0][c] = __shfl_sync(0xFFFFFFFFu, out[0][c], at.lane & 28 | s);
    }
  }
};

// With one row: adds to out[i] the products of S slices of a tile, whose first unit lies at units[i], in the order of multiply_slices. The
// TILES tiles go side by side.
template <int S, int TILES>
DEVICE void multiply_row(Sums* out, const uint32_t (&units)[TILES], uint32_t x, const Lane& at) {
  constexpr int kKept = S > 1 ? kUnitScales : 1;   // groups whose sums are kept, to add all groups of a slice before those of the next
  const RowSlices<S> slices{at};
  int acc[TILES][S][kKept][4];
  RowGroup by[TILES][kKept];
UNROLLED_GROUPS
  for (int group = 0; group < kUnitScales; group++) {
    const int kept = S > 1 ? group : 0;
    HeldCodes codes[TILES][S];
#pragma unroll
    for (int j = first_block(group); j < first_block(group) + kGroupBlocks; j++) {
      const uint2 b = slices.load(x, j);
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int s = 0; s < S; s++) codes[i][s].load(units[i] + s * kUnitBytes, j, at);
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int s = 0; s < S; s++) {
          int(&sums)[4] = acc[i][s][kept];
          if (j == first_block(group)) sums[0] = sums[1] = sums[2] = sums[3] = 0;
          uint32_t a[4];
          enter_codes(a, codes[i][s].of(j), at.code_bits, group_mask(group, at));
          mma_bytes(sums, a, {b.x, b.y});
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      by[i][kept] = RowGroup(units[i] + slices.own() * kUnitBytes, x + slices.own() * kXSliceBytes, group, at);
      if (S == 1) by[i][0].add(out[i], acc[i][0][0]);
    }
  }
  if constexpr (S > 1) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int s = 0; s < S; s++) {
#pragma unroll
        for (int group = 0; group < kKept; group++) by[i][group].add(out[i], acc[i][s][group]);
        slices.share(out[i], s);
      }
  }
}

// Adds to `out` the products of S slices, in the way that the constants choose. has_tile: whether the warp has a tile in this round.
template <int S>
DEVICE void multiply(Sums& out, uint32_t unit, uint32_t x, const Lane& at, bool has_tile) {
  if constexpr (WGMMA_PRODUCTS) {
    multiply_together<S>(out, unit, x, at);
  } else {
    if (!has_tile) return;
    if constexpr (ROWS == 1) multiply_row<S, 1>(&out, {unit}, x, at);
    else multiply_slices<S>(out, unit, x, at);
  }
}

// Divides sums by the factor by which codes have grown.
DEVICE void finish_sums(Sums& out) {
#pragma unroll
  for (int i = 0; i < NT; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) out[i][c] *= 1.0f / kCodeFactor;
}

// Whether a warp multiplies its whole run of one row at once: a slice, or a chunk of two.
constexpr bool kAreRunsJoined = kRunSlices == 1 || (ROWS == 1 && kRunSlices == 2 && kChunkSlices == 2 && SCALE_GROUP >= 32 && kSlices % 2 == 0);

// With one row and such runs: computes the warp's sums of all rounds side by side, because the products of one slice depend on each other.
// With the copy engine WeightStream::wait_for_rounds must have waited for their chunks.
template <int ROUNDS>
DEVICE void accumulate_rounds(Sums (&out)[ROUNDS], const WeightStream& weights, const Activations& x, const Lane& at) {
  static_assert(ROUNDS <= kSlots && kAreRunsJoined, "a ring holds a run of each round");
  uint32_t units[ROUNDS];
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) units[round] = weights.ring + round * kSlotPitch;
  if (!kCopyEngine) {
    cp_async_wait<0>();
    __syncwarp();
  }
  // Sums of a tile that does not exist mean nothing.
  if (at.slices > 0) multiply_row<kRunSlices>(out, units, x.base() + at.run * kRunSlices * kXSliceBytes, at);
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) finish_sums(out[round]);
}
