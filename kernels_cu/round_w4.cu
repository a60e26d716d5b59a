// Rows in 16 bits rounded to 4-bit codes and scales, as tensors of the GPTQ format, while they are loaded.
//
//   formula   scale = round(max |w| / 7) over a group; u = clamp(rint(w / scale), -7, 7) + 8, or 8 where scale is 0
//   operands  codes (K/8, N) uint32, nibble i of a word is column 8 w + i; scales (K/G, N) scalar_t; fault (1) uint32, set to 1
//             if a w is not finite, else left alone (may be mapped host memory); w (N, K) scalar_t row-major, 16-byte aligned.
//             G is 32, 64 or 128 and divides K
//   launch    grid ceil(N * K / 2048), block 256, no shared memory
//   numerics  float32 division, round to nearest even, the scale rounded to scalar_t before the codes are chosen
//   oracle    weights/quantised.py round_to_nearest
//   source    original
//   layout    a thread has the 8 columns of one word; the lanes of a group find its largest value together
#include "copy.cuh"
#include "types.cuh"

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(round_w4)(uint32_t* __restrict__ codes, scalar_t* __restrict__ scales, uint32_t* __restrict__ fault,
                     const scalar_t* __restrict__ w, int N, int K, int group_size) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t words = static_cast<int64_t>(N) * (K / 8), index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const bool inside = index < words;
  const int word = static_cast<int>(index % (K / 8)), row = static_cast<int>(index / (K / 8));
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
  if (!finite) *fault = 1;
  const scalar_t scale = from_float(largest / 7.0f);
  const float divisor = to_float(scale) > 0.0f ? to_float(scale) : 1.0f;
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const float nearest = fminf(fmaxf(rintf(values[e] / divisor), -7.0f), 7.0f);
    bits |= static_cast<uint32_t>(static_cast<int>(nearest) + 8) << 4 * e;
  }
  codes[static_cast<int64_t>(word) * N + row] = bits;
  if (word % (group_size / 8) == 0) scales[static_cast<int64_t>(word / (group_size / 8)) * N + row] = scale;
}
