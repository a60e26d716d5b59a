// Rows of x in the form in which products with packed weights read them: times a norm's weights, as integers, in the order of the lanes.
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
// Rows enter the products as integers: in each slice of 128 k a value is q * quantum, with q = 256 high + low, two signed bytes. The
// quantum is the power of two with which the largest q of the token in the slice is 2^13 to 2^14.
// They lie as [32 k][token tile][lane] 16 bytes, where lane (g, t) has of token g the high and then the low bytes of k = 8 t .. + 7; with
// one row as [32 k][t] 16 bytes. With WGMMA_PRODUCTS they lie as [32 k][half][part][high, low][token tile][token][t] words, where a word
// has k = 8 t + 4 half .. + 3. The bytes of four k are always in the order k, k + 2, k + 1, k + 3.
constexpr int kPartTiles = NT < 4 ? NT : 4;                    // token tiles of a part: 64 rows have two parts
constexpr int kXBlockBytes = ROWS == 1 ? 64 : NT * 512;        // bytes of 32 k
// A slice of 128 k has four blocks of 32 k, then with ZEROS the sums of q over scale groups, [128 / SCALE_GROUP][token] float, then the
// quanta, [token] float.
constexpr int kXSumOffset = 4 * kXBlockBytes;
constexpr int kXQuantumOffset = kXSumOffset + (ZEROS ? 128 / SCALE_GROUP * kTokens * 4 : 0);
// One row has 64 bytes behind the blocks of a slice, so that sixteen lanes that read two slices find them in different banks.
constexpr int kXSliceBytes = ROWS == 1 ? kXSumOffset + 64 : kXQuantumOffset + kTokens * 4;
constexpr int kGroupLanes = SCALE_GROUP / 8;                   // neighbouring lanes that hold a scale group, a piece each
constexpr int kSlicePieces = 16;                               // pieces of a slice, which neighbouring lanes hold

#ifdef CPMRT_BF16
constexpr float kNormScale = 1.0f;                             // a factor of rows times the weights of a norm
#else
constexpr float kNormScale = 0.0625f;                          // with it large products stay finite
#endif

#ifdef ROW_PITCH
constexpr int kRowPitch = ROW_PITCH;                           // elements between rows of x
#else
constexpr int kRowPitch = IN_FEATURES;
#endif
constexpr int kPieces = IN_FEATURES / 8;                       // pieces of 16 bytes in a row of x
constexpr int kRowWarps = 8, kRowThreads = kRowWarps * 32;     // warps and threads that take a row together
constexpr int kEighthPieces = (IN_FEATURES / 128 + kRowWarps - 1) / kRowWarps * 16;
constexpr int kThreadPieces = (kEighthPieces + 31) / 32;

// Returns the byte at which piece k / 8 of a token begins; with WGMMA_PRODUCTS its four words are apart (word_offset).
DEVICE int x_offset(int piece, int token) {
  const int block = (piece >> 4) * kXSliceBytes + (piece >> 2 & 3) * kXBlockBytes;
  if (WGMMA_PRODUCTS)
    return block + (token >> 3) / kPartTiles * (kPartTiles * 256) + (token >> 3) % kPartTiles * 128 + (token & 7) * 16 + (piece & 3) * 4;
  return block + (ROWS == 1 ? 0 : (token >> 3) * 512 + (token & 7) * 64) + (piece & 3) * 16;
}

// Returns round(v * w), times kNormScale: the values that enter the product of a normalised row. Its 1 / rms comes after the product.
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

// Returns `sum` plus the squares of eight values, added in order.
DEVICE float square_sum(uint4 v, float sum) {
  const uint32_t* values = &v.x;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 a = unpack2(values[e]);
    sum = fmaf(a.y, a.y, fmaf(a.x, a.x, sum));
  }
  return sum;
}

// Loads a float that the kernel before this one wrote: not through the read-only path.
DEVICE float load_written_float(const void* source) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(source) : "memory");
  return v;
}

// Keeps all work on v behind the statements before this one, such as copies of weights, which need not wait for v.
DEVICE void stay_behind(uint4& v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)::"memory");
}

// One row of x in eight warps, each with an eighth of its slices: lane i has the pieces i, i + 32, ... of the eighth. Squares are summed
// in the order of a lane's pieces, over the lanes by halves, then over the eighths: for every T, in prepare_rows and in clusters too.
struct RowPieces {
  uint4 norm[kThreadPieces];
  // Prefetches the norm's weights to the L2 before pdl_wait: they come from memory, while x comes from the L2.
  DEVICE static void prefetch_norm(const scalar_t* weights) {
    const int line = threadIdx.x * 64;
    if (line < IN_FEATURES) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights + line));
  }
  // Returns which 16-byte piece of the row is the thread's i-th; kPieces or more if it has no such piece.
  DEVICE static int piece(int i) {
    const int of_eighth = threadIdx.x % 32 + i * 32;
    return of_eighth < kEighthPieces ? threadIdx.x / 32 % kRowWarps * kEighthPieces + of_eighth : kPieces;
  }
  DEVICE void load_norm(const scalar_t* weights) {
#pragma unroll
    for (int i = 0; i < kThreadPieces; i++)
      if (piece(i) < kPieces) norm[i] = load16(weights + piece(i) * 8);
  }
  // Returns the sum over the lanes of the warp, in each of them.
  DEVICE static float warp_square_sum(float sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    return sum;
  }
  // Returns what a row's sums are multiplied by, from the warps' sums of squares at `squares` in shared memory: 1 / rms, divided by
  // kNormScale.
  DEVICE static float scale(uint32_t squares, float eps) {
    const uint4 of_warps[2] = {load_shared(squares), load_shared(squares + 16)};
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kRowWarps; warp++) total += __uint_as_float((&of_warps[warp / 4].x)[warp % 4]);
    return rsqrtf(fmaf(total, 1.0f / IN_FEATURES, eps)) * (1.0f / kNormScale);
  }
};

// The byte behind the slices at which prepare_rows leaves RowPieces::scale of rows that it has multiplied by a norm's weights, [token] float.
constexpr int kRowScaleOffset = IN_FEATURES / 128 * kXSliceBytes;

// Returns at which byte the sum of q over the scale group of piece k / 8 lies.
DEVICE int sum_offset(int piece, int token) {
  return (piece >> 4) * kXSliceBytes + kXSumOffset + ((piece & 15) / kGroupLanes * kTokens + token) * 4;
}

// Returns at which byte the quantum of the slice of piece k / 8 lies.
DEVICE int quantum_offset(int piece, int token) { return (piece >> 4) * kXSliceBytes + kXQuantumOffset + token * 4; }

// Returns the larger values of two pairs; NaN where one of the two is NaN.
DEVICE uint32_t larger2(uint32_t a, uint32_t b) {
  const scalar2_t result = __hmax2_nan(reinterpret_cast<const scalar2_t&>(a), reinterpret_cast<const scalar2_t&>(b));
  return reinterpret_cast<const uint32_t&>(result);
}

// Returns the largest magnitudes of a piece: of its even elements in the lower half, of its odd ones in the upper half.
DEVICE uint32_t largest_of(uint4 v) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFFu;
  return larger2(larger2(v.x & kMagnitudes, v.y & kMagnitudes), larger2(v.z & kMagnitudes, v.w & kMagnitudes));
}

// Returns the quantum of a slice with this largest magnitude; NaN if that is not finite, which makes the slice's products NaN.
DEVICE float quantum_for(float largest) {
  constexpr uint32_t kLeastExponent = 40, kNotFinite = 255;   // no quantum is below 2^-100
  const uint32_t exponent = __float_as_uint(largest) >> 23;
  return __uint_as_float(exponent == kNotFinite ? 0x7FC00000u : max(exponent, kLeastExponent) - 13 << 23);
}

// Finds the quanta of the slices that a lane's COUNT pieces are in. All lanes of a warp call it; 16 neighbours have the pieces of a slice.
// With HAS_ONE_SLICE the lower half of the warp has a slice, and the upper half none.
template <bool HAS_ONE_SLICE, int COUNT>
DEVICE void find_quanta(float (&quanta)[COUNT], const uint4 (&v)[COUNT]) {
  if constexpr (HAS_ONE_SLICE) {
    static_assert(COUNT == 1, "a slice has a piece for each lane of half a warp");
    // Magnitudes of 16 bits have the order of their bits. Where a warp has more slices, shuffles are faster.
    const uint32_t pair = largest_of(v[0]), own = threadIdx.x % 32 < kSlicePieces ? max(pair & 0xFFFFu, pair >> 16) : 0u;
    quanta[0] = quantum_for(unpack2(__reduce_max_sync(0xFFFFFFFFu, own)).x);
  } else {
    uint32_t largest[(COUNT + 1) / 2];   // those of two slices in a word
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
}

// Returns a piece as integers q: the high bytes of its first four elements, those of the others, then the low bytes of both.
DEVICE uint4 in_quanta(uint4 v, float quantum) {
  const float inverse = __uint_as_float(0x7F000000u - __float_as_uint(quantum));   // exact: the quantum is a power of two
  uint32_t pairs[4];   // q + 128, in 16 bits
#pragma unroll
  for (int e = 0; e < 4; e++) {
    // A float of 2^23 to 2^24 has its last place at 1: its lowest bits are an integer.
    const float2 values = unpack2((&v.x)[e]);
    const float even = fmaf(values.x, inverse, 12582912.0f + 128.0f), odd = fmaf(values.y, inverse, 12582912.0f + 128.0f);
    pairs[e] = __byte_perm(__float_as_uint(even), __float_as_uint(odd), 0x5410);
  }
  const auto bytes = [&](int half, uint32_t which) { return __byte_perm(pairs[half * 2], pairs[half * 2 + 1], which); };
  return make_uint4(bytes(0, 0x7351), bytes(1, 0x7351), bytes(0, 0x6240) ^ 0x80808080u, bytes(1, 0x6240) ^ 0x80808080u);
}

// Returns the exact sum of a piece's q.
DEVICE float sum_of_q(uint4 q) {
  constexpr int kOnes = 0x01010101;
  const int high = __dp4a(static_cast<int>(q.x), kOnes, __dp4a(static_cast<int>(q.y), kOnes, 0));
  return static_cast<float>(__dp4a(static_cast<int>(q.z), kOnes, __dp4a(static_cast<int>(q.w), kOnes, high * 256)));
}

// With WGMMA_PRODUCTS the four words of a piece lie apart, in the order [half][high, low]: word_of returns the word of a place in this order,
// word_offset how many bytes it lies behind the first.
DEVICE uint32_t word_of(uint4 q, int place) { return place == 0 ? q.x : place == 1 ? q.z : place == 2 ? q.y : q.w; }
DEVICE constexpr int word_offset(int place) { return place / 2 * (NT * 256) + place % 2 * (kPartTiles * 128); }

// Sums values of COUNT pieces a lane over their scale groups, which kGroupLanes neighbouring lanes hold, and calls `store(i, sum)` for piece
// i in one lane of each group. All lanes of a warp call it. Neighbours are added first, whatever COUNT is; while a lane has an even
// number of pieces it goes on with half of them, and its neighbour with the other half.
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

// A piece's place among the rows; `exists` is false where a lane has no piece.
struct Entry {
  int piece, token;
  bool exists;
};

// The memory that enter_products stores rows in: a block's shared memory, or the buffer that prepare_rows writes.
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

// Stores COUNT pieces a lane in `rows` as integers, in the form in which products read them, with their quanta and, with ZEROS, their sums.
// `entry(i)` returns the place of piece i. All lanes of a warp call it, of which 16 neighbours have the pieces of a slice in order.
template <bool HAS_ONE_SLICE = false, int COUNT, class Rows, class EntryOf>
DEVICE void enter_products(const Rows& rows, const uint4 (&v)[COUNT], EntryOf entry) {
  float quanta[COUNT], sums[COUNT];
  find_quanta<HAS_ONE_SLICE>(quanta, v);
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
