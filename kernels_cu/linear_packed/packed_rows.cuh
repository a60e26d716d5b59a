// Rows of x on their way to products with packed weights: normalised, as integers, in the order in which lanes read them.
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
// Rows enter the products as integers: in each slice of 128 k a value is q * quantum, where quantum is the power of two with which the
// largest q of the token is 2^13 to 2^14, and q = 256 high + low, two signed bytes.
// [32 k][token tile][lane] 16 bytes: of token g, high then low of k = 8 t .. + 7; or with one row [32 k][lane % 4]. With WGMMA_PRODUCTS
// [32 k][half][part][high, low][token tile][token][t] words: k = 8 t + 4 half .. + 3. Of four k the bytes are k, k + 2, k + 1, k + 3.
constexpr int kPartTiles = NT < 4 ? NT : 4;                    // token tiles of a part: 64 rows are two
constexpr int kXBlockBytes = ROWS == 1 ? 64 : NT * 512;        // 32 k
// A slice of 128 k: four of those, then with ZEROS [128 / SCALE_GROUP][token] float, q summed over a scale group, then [token] float,
// quanta.
constexpr int kXSumOffset = 4 * kXBlockBytes;
constexpr int kXQuantumOffset = kXSumOffset + (ZEROS ? 128 / SCALE_GROUP * kTokens * 4 : 0);
// Of one row so many bytes are behind a slice that sixteen lanes read two slices from different banks.
constexpr int kXSliceBytes = ROWS == 1 ? kXSumOffset + 64 : kXQuantumOffset + kTokens * 4;
constexpr int kGroupLanes = SCALE_GROUP / 8;                   // that hold a scale group together
constexpr int kSlicePieces = 16;                               // neighbouring lanes hold a slice

#ifdef CPMRT_BF16
constexpr float kNormScale = 1.0f;                             // of rows times the weights of a norm
#else
constexpr float kNormScale = 0.0625f;                          // large ones stay finite
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

// Where piece k / 8 of a token begins; with WGMMA_PRODUCTS its four words are apart (word_offset).
DEVICE int x_offset(int piece, int token) {
  const int block = (piece >> 4) * kXSliceBytes + (piece >> 2 & 3) * kXBlockBytes;
  if (WGMMA_PRODUCTS)
    return block + (token >> 3) / kPartTiles * (kPartTiles * 256) + (token >> 3) % kPartTiles * 128 + (token & 7) * 16 + (piece & 3) * 4;
  return block + (ROWS == 1 ? 0 : (token >> 3) * 512 + (token & 7) * 64) + (piece & 3) * 16;
}

// round(v * w), times kNormScale: what enters the product of a normalised row. Its 1 / rms comes after the product.
DEVICE uint4 weighted(uint4 v, uint4 w) {
#ifdef CPMRT_BF16
  scalar2_t* values = reinterpret_cast<scalar2_t*>(&v);
  const scalar2_t* weights = reinterpret_cast<const scalar2_t*>(&w);
#pragma unroll
  for (int e = 0; e < 4; e++) values[e] = __hmul2(values[e], weights[e]);
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
    return rsqrtf(fmaf(total, 1.0f / IN_FEATURES, eps)) * (1.0f / kNormScale);
  }
};

// Behind the slices of rows that prepare_rows has multiplied by the weights of a norm: what their sums are multiplied by, [token] float.
constexpr int kRowScaleOffset = IN_FEATURES / 128 * kXSliceBytes;

// Where the sum over the scale group of piece k / 8 lies.
DEVICE int sum_offset(int piece, int token) {
  return (piece >> 4) * kXSliceBytes + kXSumOffset + ((piece & 15) / kGroupLanes * kTokens + token) * 4;
}

// Where the quantum of the slice of piece k / 8 lies.
DEVICE int quantum_offset(int piece, int token) { return (piece >> 4) * kXSliceBytes + kXQuantumOffset + token * 4; }

// The larger ones of two pairs; NaN where there is one.
DEVICE uint32_t larger2(uint32_t a, uint32_t b) {
  const scalar2_t result = __hmax2_nan(reinterpret_cast<const scalar2_t&>(a), reinterpret_cast<const scalar2_t&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}

// The largest magnitudes of a piece, those of even and of odd places.
DEVICE uint32_t largest_of(uint4 v) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;
  return larger2(larger2(v.x & kMagnitudes, v.y & kMagnitudes), larger2(v.z & kMagnitudes, v.w & kMagnitudes));
}

// The quantum of a slice with this largest magnitude; NaN if that is not finite, and so are then the products.
DEVICE float quantum_for(float largest) {
  constexpr uint32_t kLeastExponent = 40, kNotFinite = 255;   // no quantum is below 2^-100
  const uint32_t exponent = __float_as_uint(largest) >> 23;
  return __uint_as_float(exponent == kNotFinite ? 0x7FC00000u : max(exponent, kLeastExponent) - 13 << 23);
}

// The quanta of the slices of COUNT pieces a lane. All lanes of a warp.
template <int COUNT>
DEVICE void find_quanta(float (&quanta)[COUNT], const uint4 (&v)[COUNT]) {
  uint32_t largest[(COUNT + 1) / 2];   // of two slices each
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    const uint32_t first = largest_of(v[i]), second = largest_of(v[i + 1 < COUNT ? i + 1 : i]);
    largest[i / 2] = larger2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
  }
#pragma unroll
  for (int distance = 1; distance < kSlicePieces; distance *= 2)
#pragma unroll
    for (uint32_t& both : largest) both = larger2(both, __shfl_xor_sync(0xFFFFFFFFu, both, distance));
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const float2 both = unpack2(largest[i / 2]);
    quanta[i] = quantum_for(i % 2 ? both.y : both.x);
  }
}

// A piece as q: high of its first four elements, high of the others, low of both.
DEVICE uint4 in_quanta(uint4 v, float quantum) {
  const float inverse = __uint_as_float(0x7F000000u - __float_as_uint(quantum));   // of a power of two
  uint32_t pairs[4];   // q + 128, in 16 bits
#pragma unroll
  for (int e = 0; e < 4; e++) {
    // Where a float's last place is 1 its lowest bits are an integer.
    const float2 values = unpack2((&v.x)[e]);
    const float even = fmaf(values.x, inverse, 12582912.0f + 128.0f), odd = fmaf(values.y, inverse, 12582912.0f + 128.0f);
    pairs[e] = __byte_perm(__float_as_uint(even), __float_as_uint(odd), 0x5410);
  }
  const auto bytes = [&](int half, uint32_t which) { return __byte_perm(pairs[half * 2], pairs[half * 2 + 1], which); };
  return make_uint4(bytes(0, 0x7351), bytes(1, 0x7351), bytes(0, 0x6240) ^ 0x80808080u, bytes(1, 0x6240) ^ 0x80808080u);
}

// The sum of a piece's q, exactly.
DEVICE float sum_of_q(uint4 q) {
  constexpr int kOnes = 0x01010101;
  const int high = __dp4a(static_cast<int>(q.x), kOnes, __dp4a(static_cast<int>(q.y), kOnes, 0));
  return static_cast<float>(__dp4a(static_cast<int>(q.z), kOnes, __dp4a(static_cast<int>(q.w), kOnes, high * 256)));
}

// The four words of q where they are apart, by half, then high and low, and how many bytes behind the first.
DEVICE uint32_t word_of(uint4 q, int place) { return place == 0 ? q.x : place == 1 ? q.z : place == 2 ? q.y : q.w; }
DEVICE constexpr int word_offset(int place) { return place / 2 * (NT * 256) + place % 2 * (kPartTiles * 128); }

// Sums over scale groups of COUNT pieces a lane: kGroupLanes neighbouring lanes hold a group. All lanes of a warp. `store(i, sum)` for
// piece i, in one lane of each group. Neighbours are added first, whatever COUNT is; with more than one piece each lane goes on with half
// of them.
template <int COUNT, class Store, int DISTANCE = 1, int HELD = COUNT>
DEVICE void sum_groups(float (&sums)[COUNT], Store store, int first = 0, bool stores = true) {
  const bool is_upper = threadIdx.x & DISTANCE;
  if constexpr (DISTANCE == kGroupLanes) {
#pragma unroll
    for (int i = 0; i < HELD; i++)
      if (stores) store(first + i, sums[i]);
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

// Where a piece of a row belongs.
struct Entry {
  int piece, token;
  bool exists;
};

// Where rows as the products take them lie: in shared memory, or in the memory of prepare_rows.
struct SharedRows {
  uint32_t to;

  DEVICE void store(int offset, uint4 value) const { store_shared(to + offset, value); }
  DEVICE void store(int offset, uint32_t value) const { store_shared_word(to + offset, value); }
  DEVICE void store(int offset, float value) const { store_shared_float(to + offset, value); }
};
struct PreparedRows {
  unsigned char* to;

  DEVICE void store(int offset, uint4 value) const { store16(to + offset, value); }
  DEVICE void store(int offset, uint32_t value) const { *reinterpret_cast<uint32_t*>(to + offset) = value; }
  DEVICE void store(int offset, float value) const { *reinterpret_cast<float*>(to + offset) = value; }
};

// Gives COUNT pieces a lane to the products: stores them in `rows` as these take them; `entry(i)` is where piece i belongs. All lanes of a
// warp, of which 16 neighbours have the pieces of a slice in order.
template <int COUNT, class Rows, class EntryOf>
DEVICE void enter_products(const Rows& rows, const uint4 (&v)[COUNT], EntryOf entry) {
  float quanta[COUNT], sums[COUNT];
  find_quanta(quanta, v);
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const Entry at = entry(i);
    const uint4 q = in_quanta(v[i], quanta[i]);
    if (at.exists) {
      const int offset = x_offset(at.piece, at.token);
      if (WGMMA_PRODUCTS) {
#pragma unroll
        for (int e = 0; e < 4; e++) rows.store(offset + word_offset(e), word_of(q, e));
      } else {
        rows.store(offset, q);
      }
    }
    if (at.exists && at.piece % kSlicePieces == 0) rows.store(quantum_offset(at.piece, at.token), quanta[i]);
    if (ZEROS) sums[i] = sum_of_q(q);
  }
  if constexpr (ZEROS) {
    sum_groups(sums, [&](int i, float sum) {
      const Entry at = entry(i);
      if (at.exists) rows.store(sum_offset(at.piece, at.token), sum);
    });
  }
}
