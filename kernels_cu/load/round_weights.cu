// Rounds rows in 16 bits to codes of 2, 4 or 8 bits and scales, as tensors of the GPTQ format have them, while they are loaded.
//
//   formula   scale = round(max |w| / m) over a group; u = clamp(rint(w / scale), -m, m) + m + 1, or m + 1 if scale is 0;
//             m = 7 in 4 bits, 127 in 8 bits, 1 in 2 bits
//   operands  codes (K/8, N) uint32, nibble i of word w is column 8 w + i (in 8 bits (K/4, N), byte i column 4 w + i; in 2 bits
//             (K/16, N));
//             scales (K/G, N) scalar_t; fault (1) uint32, set to 1 if a w is not finite, or in 2 bits not exactly a
//             code times the scale, else left alone (may be mapped host memory); w (N, K) scalar_t row-major, 16-byte aligned.
//             G is 32, 64 or 128 and divides K
//   constants WEIGHT_BITS: bits of a code: 2, 4 or 8
//   launch    grid ceil(N * K / 2048), block 256, no shared memory
//   numerics  float32 division, round to nearest even, the scale rounded to scalar_t before the codes are chosen
//   oracle    weights/quantised.py round_to_nearest
//   source    original
//   layout    a thread has 8 columns of a row: half a word of codes, one or two. The lanes of a group find its largest value together
#if !defined(WEIGHT_BITS)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(round_weights)(uint32_t* __restrict__ codes, scalar_t* __restrict__ scales, uint32_t* __restrict__ fault,
                     const scalar_t* __restrict__ w, int N, int K, int group_size) {
  pdl_begin();
  constexpr int kLargest = (1 << WEIGHT_BITS - 1) - 1, kWords = (WEIGHT_BITS + 3) / 4, kWordCodes = 8 / kWords;
  const int64_t pieces = static_cast<int64_t>(N) * (K / 8), index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const bool inside = index < pieces;
  const int piece = static_cast<int>(index % (K / 8)), row = static_cast<int>(index / (K / 8));
  uint4 packed = make_uint4(0, 0, 0, 0);
  if (inside) packed = load16(w + index * 8);
  float values[8], largest = 0.0f;
  bool finite = true;
#pragma unroll
  for (int pair = 0; pair < 4; pair++) {
    const float2 both = unpack2((&packed.x)[pair]);
    values[2 * pair] = both.x, values[2 * pair + 1] = both.y;
    finite = finite && isfinite(both.x) && isfinite(both.y);
    largest = fmaxf(largest, fmaxf(fabsf(both.x), fabsf(both.y)));
  }
  for (int distance = 1; distance < group_size / 8; distance *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
  if (!inside) return;
  bool fits = finite;
  for (int e = 0; e < (WEIGHT_BITS == 2 ? 8 : 0); e++) fits = fits && (values[e] == 0.0f || fabsf(values[e]) == largest);
  if (!fits) *fault = 1;
  const scalar_t scale = from_float(largest / kLargest);
  const float divisor = to_float(scale) > 0.0f ? to_float(scale) : 1.0f;
  uint32_t words[kWords] = {};
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const float nearest = fminf(fmaxf(rintf(values[e] / divisor), -kLargest), kLargest);
    words[e / kWordCodes] |= static_cast<uint32_t>(static_cast<int>(nearest) + kLargest + 1) << e % kWordCodes * WEIGHT_BITS;
  }
  if (WEIGHT_BITS == 2) {
    reinterpret_cast<uint16_t*>(codes)[(static_cast<int64_t>(piece / 2) * N + row) * 2 + piece % 2] = static_cast<uint16_t>(words[0]);
  } else {
#pragma unroll
    for (int w = 0; w < kWords; w++) codes[(static_cast<int64_t>(piece) * kWords + w) * N + row] = words[w];
  }
  if (piece % (group_size / 8) == 0) scales[static_cast<int64_t>(piece / (group_size / 8)) * N + row] = scale;
}
