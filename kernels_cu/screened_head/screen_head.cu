// Makes the 8-bit copy of a 16-bit output head with which rescore.cu screens tokens, and a bound of the error of each row's logits.
//
//   formula   scale = round(max |w| / 127) over 128 columns, u = clamp(rint(w / scale), -127, 127) + 128, w' = scale (u - 128);
//             bounds[v] = (1 + 2^-8) (|w - w'| + (STEPS 2^-18 + 2^-18 + 1.5625 2^-11) |w|) + 2^-40, with Euclidean norms
//             over row v: then |exact logit - screened logit| <= bounds[v] * (norm of the normalised row, as head_rows gives it)
//   operands  packed: 8 bits in the layout of packed_layout.cuh, of which every byte but padding is written; bounds (V) float32;
//             w (V, K) scalar_t row-major, 16-byte aligned
//   constants IN_FEATURES: K, a multiple of 128. RUNS: runs of the layout. SCALE_GROUP: 128. WEIGHT_BITS: 8. ZEROS: 0. STEPS:
//             tensor-core products of 16 columns that linear.cu chains in a run of K
//   launch    grid ceil(V / 64), block 128, no shared memory
//   numerics  float32. The norm |w - w'| covers the rounding to 8 bits (Cauchy-Schwarz). The factor of |w| covers, first, the error
//             of linear.cu's sums: a tensor-core step of 16 products and a sum errs by at most 17 * 2^-23 of what it adds up, |w| |n|
//             at most, and the sums of its runs by 2^-20. Its last part, 1.5625 2^-11, covers linear_packed.cu: an element of n
//             enters as an integer, at most 2^-14 of its slice's largest element away, so a slice of n is off by at most
//             2^-14 sqrt(128) |n| = 1.414 2^-11 |n|. Float32 sums of slices err by less than 2^-16 |w'| |n|. The factor
//             1 + 2^-8 covers the rounding of all this, and that |w'| <= |w| + |w - w'|; 2^-40 covers what underflows. Slices of n
//             below 2^-87 are covered by the second term of head_rows' norms
//   oracle    tests/reference/test_head_screen.py; the codes and scales are those of weights/quantised.py round_to_nearest
//   source    original
//   layout    a warp has a tile of 16 rows, whose units it writes as linear_packed.cu's lanes read them
#if !defined(IN_FEATURES) || !defined(RUNS) || !defined(SCALE_GROUP) || !defined(WEIGHT_BITS) || !defined(ZEROS) || \
    !defined(STEPS)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "packed_layout.cuh"

static_assert(WEIGHT_BITS == 8 && SCALE_GROUP == 128 && !ZEROS, "a screen has 8 bits and a scale for 128 columns");

constexpr int kLargest = 127, kWarps = 4;

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    KERNEL(screen_head)(unsigned char* __restrict__ packed, float* __restrict__ bounds, const scalar_t* __restrict__ w, int V) {
  pdl_begin();
  const int lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
  const int tile = blockIdx.x * kWarps + threadIdx.x / 32;
  if (tile * 16 >= V) return;
  float difference[2] = {}, square[2] = {};
#pragma unroll 1
  for (int slice = 0; slice < kSlices; slice++) {
    unsigned char* unit = packed + unit_offset(tile, slice);
    uint4 values[2][4];
    float largest[2] = {}, divisor[2];
    scalar_t scale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = tile * 16 + half * 8 + row;
      const scalar_t* from = w + static_cast<int64_t>(at) * K + slice * kSliceColumns + quarter * 8;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        values[half][j] = at < V ? load16_streamed(from + j * 32) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
          const float2 both = unpack2((&values[half][j].x)[pair]);
          largest[half] = fmaxf(largest[half], fmaxf(fabsf(both.x), fabsf(both.y)));
          square[half] = fmaf(both.x, both.x, fmaf(both.y, both.y, square[half]));
        }
      }
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xFFFFFFFFu, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xFFFFFFFFu, largest[half], 2));
      scale[half] = from_float(largest[half] / kLargest);
      divisor[half] = to_float(scale[half]) > 0.0f ? to_float(scale[half]) : 1.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t words[4] = {};
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
          const float2 both = unpack2((&values[half][j].x)[pair]);
#pragma unroll
          for (int odd = 0; odd < 2; odd++) {
            const float value = odd ? both.y : both.x;
            const float nearest = fminf(fmaxf(rintf(value / divisor[half]), -kLargest), kLargest);
            const float apart = fmaf(-nearest, to_float(scale[half]), value);
            difference[half] = fmaf(apart, apart, difference[half]);
            // Bytes of a word: k, k + 2, k + 1, k + 3.
            const int byte = pair % 2 + 2 * odd;
            words[pair / 2 * 2 + half] |= static_cast<uint32_t>(static_cast<int>(nearest) + kLargest + 1) << byte * 8;
          }
        }
      store16(unit + (j * 32 + lane) * 16, make_uint4(words[0], words[1], words[2], words[3]));
    }
    if (quarter == 0) *reinterpret_cast<uint32_t*>(unit + kCodeBytes + row * 4) = pack2(to_float(scale[0]), to_float(scale[1]));
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
      difference[half] += __shfl_xor_sync(0xFFFFFFFFu, difference[half], distance);
      square[half] += __shfl_xor_sync(0xFFFFFFFFu, square[half], distance);
    }
    const int at = tile * 16 + half * 8 + row;
    const float sums = ((STEPS + 1) * 0x1p-18f + 0x1.9p-11f) * sqrtf(square[half]);
    if (quarter == 0 && at < V) bounds[at] = (1.0f + 0x1p-8f) * (sqrtf(difference[half]) + sums) + 0x1p-40f;
  }
}
