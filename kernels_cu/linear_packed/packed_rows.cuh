// Rows of x on their way to products with packed weights: normalised, scaled, in the order in which lanes read them.
#pragma once
#include "copy.cuh"

static_assert(ROWS == 1 || ROWS == 8 || ROWS == 16 || ROWS == 32 || ROWS == 64, "ROWS must be 1, 8, 16, 32 or 64");

constexpr int NT = (ROWS + 7) / 8;                             // tiles of 8 tokens
constexpr int kTokens = ROWS == 1 ? 1 : 8 * NT;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && WARPGROUPS
#define WGMMA_PRODUCTS 1
#else
#define WGMMA_PRODUCTS 0
#endif
// [32 k][token tile][lane] 16 bytes: k = 8 t .. + 7 of token g; or with one row [32 k][lane % 4]. With WGMMA_PRODUCTS
// [16 k][half][token tile][token][t] words: k = 8 t + 4 (16 k) + 2 half, + 1 of each 32.
constexpr int kXBlockBytes = ROWS == 1 ? 64 : NT * 512;        // 32 k
// A slice of 128 k: four of those, then [128 / SCALE_GROUP][token] float, x summed over a scale group times a code 8 (ZEROS: 1).
constexpr int kXSumOffset = 4 * kXBlockBytes;
// Of one row so many bytes are behind a slice that eight lanes read two slices from different banks.
constexpr int kXSliceBytes = kXSumOffset + (ROWS == 1 ? 64 : 128 / SCALE_GROUP * kTokens * 4);
constexpr int kGroupLanes = SCALE_GROUP / 8;                   // that hold a scale group together

// bf16 only: x enters the products times 2^64, exactly, so that sums of codes of 2^-133 are ordinary numbers.
#ifdef CPMRT_BF16
constexpr float kXScale = 18446744073709551616.0f;             // 2^64
constexpr float kNormScale = kXScale;                          // of rows times the weights of a norm
constexpr float kSumScale = 590295810358705651712.0f;          // 2^69
constexpr float kCodeScale = 1.0f / 36893488147419103232.0f, kCodeScale2 = 1.0f / 295147905179352825856.0f;   // 2^-65, 2^-68
#else
constexpr float kXScale = 1.0f;
constexpr float kNormScale = 0.0625f;                          // large ones stay finite
constexpr float kSumScale = 16777216.0f;                       // 2^24
constexpr float kCodeScale = 1.0f / 16777216.0f, kCodeScale2 = 1.0f;
#endif

// In 2 bits and bf16 the codes of every second step of 16 k enter the products 16 times too large, and x of these steps, the second half
// of each piece, 16 times smaller: exactly, and without shifts. fp16 would lose small x.
#if defined(WEIGHT_BITS) && WEIGHT_BITS == 2 && defined(CPMRT_BF16)
#define SCALED_STEPS 1
constexpr float kLateFactor = 0.0625f;
#else
#define SCALED_STEPS 0
constexpr float kLateFactor = 1.0f;
#endif

#ifdef ROW_PITCH
constexpr int kRowPitch = ROW_PITCH;                           // elements between rows of x
#else
constexpr int kRowPitch = IN_FEATURES;
#endif
constexpr int kPieces = IN_FEATURES / 8;                       // of 16 bytes in a row of x
constexpr int kRowWarps = 8, kRowThreads = kRowWarps * 32;     // that take a row together
constexpr int kEighthPieces = (IN_FEATURES / 128 + kRowWarps - 1) / kRowWarps * 16;
constexpr int kThreadPieces = (kEighthPieces + 31) / 32;

// Where piece k / 8 of a token begins; with WGMMA_PRODUCTS its four words are kXWordStride bytes apart.
constexpr int kXWordStride = NT * 128;
DEVICE int x_offset(int piece, int token) {
  const int block = (piece >> 4) * kXSliceBytes + (piece >> 2 & 3) * kXBlockBytes;
  if (WGMMA_PRODUCTS) return block + (token >> 3) * 128 + (token & 7) * 16 + (piece & 3) * 4;
  return block + (ROWS == 1 ? 0 : (token >> 3) * 512 + (token & 7) * 64) + (piece & 3) * 16;
}

DEVICE uint4 scaled(uint4 v) {
#ifdef CPMRT_BF16
  scalar2_t* pairs = reinterpret_cast<scalar2_t*>(&v);
#pragma unroll
  for (int e = 0; e < 4; e++) pairs[e] = __hmul2(pairs[e], __float2bfloat162_rn(e < 2 ? kXScale : kXScale * kLateFactor));
#endif
  return v;
}

// round(v * w), times kNormScale: what enters the product of a normalised row. Its 1 / rms comes after the product.
DEVICE uint4 weighted(uint4 v, uint4 w) {
#ifdef CPMRT_BF16
  scalar2_t* values = reinterpret_cast<scalar2_t*>(&v);
  const scalar2_t* weights = reinterpret_cast<const scalar2_t*>(&w);
#pragma unroll
  for (int e = 0; e < 4; e++)
    values[e] = __hmul2(values[e], __hmul2(weights[e], __float2bfloat162_rn(e < 2 ? kNormScale : kNormScale * kLateFactor)));
#else
  uint32_t* values = &v.x;
  const uint32_t* weights = &w.x;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 a = unpack2(values[e]), b = unpack2(weights[e]);
    values[e] = pack2(a.x * (b.x * kNormScale), a.y * (b.y * kNormScale));
  }
#endif
  return v;
}

DEVICE float square_sum(uint4 v, float sum) {
  const uint32_t* values = &v.x;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 a = unpack2(values[e]);
    sum = fmaf(a.y, a.y, fmaf(a.x, a.x, sum));
  }
  return sum;
}

// Written by the kernel before this one: not through the read-only path.
DEVICE float load_written_float(const void* source) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(source) : "memory");
  return v;
}

// Keeps all work on v behind the statements before this one, such as copies of weights, which need not wait for v.
DEVICE void stay_behind(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
}

// One row of x in eight warps, each with an eighth of its slices: lane i has the pieces i, i + 32, ... of them. Square sums are added in
// the order of a lane's pieces, over the lanes by halves, then over the eighths: for every T, in prepare_rows and in clusters too.
struct RowPieces {
  uint4 norm[kThreadPieces];
  // Asks for the norm's weights before pdl_wait: they come from memory, x comes from the L2.
  DEVICE static void prefetch_norm(const scalar_t* weights) {
    const int line = threadIdx.x * 64;
    if (line < IN_FEATURES) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights + line));
  }
  // kPieces or more: the thread has none.
  DEVICE static int piece(int i) {
    const int of_eighth = threadIdx.x % 32 + i * 32;
    return of_eighth < kEighthPieces ? threadIdx.x / 32 % kRowWarps * kEighthPieces + of_eighth : kPieces;
  }
  DEVICE void load_norm(const scalar_t* weights) {
#pragma unroll
    for (int i = 0; i < kThreadPieces; i++)
      if (piece(i) < kPieces) norm[i] = load16(weights + piece(i) * 8);
  }
  DEVICE static float warp_square_sum(float sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    return sum;
  }
  // What a row's sums are multiplied by, from the square sums of the warps at `squares`: 1 / rms, and what kNormScale leaves.
  DEVICE static float scale(uint32_t squares, float eps) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kRowWarps; warp++) total += load_shared_float(squares + warp * 4);
    return rsqrtf(fmaf(total, 1.0f / IN_FEATURES, eps)) * (kXScale / kNormScale);
  }
};

// Behind the slices of rows that prepare_rows has multiplied by the weights of a norm: what their sums are multiplied by, [token] float.
constexpr int kRowScaleOffset = IN_FEATURES / 128 * kXSliceBytes;

// Where the sum over the scale group of piece k / 8 lies.
DEVICE int sum_offset(int piece, int token) {
  return (piece >> 4) * kXSliceBytes + kXSumOffset + ((piece & 15) / kGroupLanes * kTokens + token) * 4;
}

// The sum of a piece, which is part of that over its scale group.
DEVICE float piece_sum(uint4 v) {
  const float2 a = unpack2(v.x), b = unpack2(v.y), c = unpack2(v.z), d = unpack2(v.w);
  if (SCALED_STEPS) return ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y)) * (1.0f / kLateFactor);
  return ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
}

// A piece of what prepare_rows writes, in its place.
DEVICE void store_prepared(unsigned char* prepared, int piece, int token, uint4 v) {
  unsigned char* const place = prepared + x_offset(piece, token);
  if (WGMMA_PRODUCTS) {
#pragma unroll
    for (int e = 0; e < 4; e++) *reinterpret_cast<uint32_t*>(place + e * kXWordStride) = (&v.x)[e];
  } else {
    store16(place, v);
  }
}

// The sum of a scale group times a code of 8 (ZEROS: 1).
DEVICE float group_sum(float sum) { return sum * kCodeScale * (ZEROS ? kCodeScale2 : kCodeScale2 * 8.0f); }

// Sums over scale groups, times a code of 8 (ZEROS: 1), of COUNT pieces a lane: kGroupLanes neighbouring lanes hold a group. All lanes
// of a warp. `store(i, sum)` for piece i, in one lane of each group. Neighbours are added first, whatever COUNT is; with more than
// one piece each lane goes on with half of them.
template <int COUNT, class Store, int DISTANCE = 1, int HELD = COUNT>
DEVICE void sum_groups(float (&sums)[COUNT], Store store, int first = 0, bool stores = true) {
  const bool is_upper = threadIdx.x & DISTANCE;
  if constexpr (DISTANCE == kGroupLanes) {
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (stores) store(first + i, group_sum(sums[i]));
  } else if constexpr (HELD % 2 == 0) {
    constexpr int kKept = HELD / 2;
#pragma unroll
    for (int i = 0; i < kKept; i++) {
      const float low = sums[i], high = sums[i + kKept];
      sums[i] = (is_upper ? high : low) + __shfl_xor_sync(0xFFFFFFFFu, is_upper ? low : high, DISTANCE);
    }
    sum_groups<COUNT, Store, DISTANCE * 2, kKept>(sums, store, is_upper ? first + kKept : first, stores);
  } else {
#pragma unroll
    for (int i = 0; i < HELD; i++) sums[i] += __shfl_xor_sync(0xFFFFFFFFu, sums[i], DISTANCE);
    sum_groups<COUNT, Store, DISTANCE * 2, HELD>(sums, store, first, stores && !is_upper);
  }
}
