// Adds the outputs of each row's experts, weighted by their shares, to the residual stream.
//
//   formula   x[t, c] = round(x[t, c] + scale * sum_i shares[t, i] * y[t * top + i, c]), in ascending i
//   operands  x (T, HIDDEN), y (T * top, HIDDEN) scalar_t; shares (T, top) float; chosen (T, top) int32, -1: the row stays as it is
//   constants HIDDEN: elements of a row, a multiple of 8
//   launch    grid ceil(T * HIDDEN / 8 / 256), block 256, no shared memory
//   numerics  float32, rounded once
//   oracle    NumpyOps.experts_down
//   source    original
//   layout    16 bytes a thread: memory-bound, each element is touched once
#if !defined(HIDDEN)
#error "a constant is not defined"
#endif
#include "copy.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

extern "C" __global__ void __launch_bounds__(256)
    KERNEL(combine)(scalar_t* x, const scalar_t* y, const float* shares, const int* chosen, int num_rows, int top,
                    float scale) {
  pdl_begin();
  constexpr int kPieces = HIDDEN / 8;
  const int64_t piece = blockIdx.x * static_cast<int64_t>(256) + threadIdx.x;
  const int64_t row = piece / kPieces, column = piece % kPieces * 8;
  if (row >= num_rows || chosen[row * top] < 0) return;
  float sums[8] = {};
  for (int place = 0; place < top; place++) {
    const int64_t pair = row * top + place;
    const uint4 v = load16_written(y + pair * HIDDEN + column);
    const uint32_t* words = &v.x;
    const float share = shares[pair];
#pragma unroll
    for (int word = 0; word < 4; word++) {
      const float2 both = unpack2(words[word]);
      sums[word * 2] = fmaf(share, both.x, sums[word * 2]), sums[word * 2 + 1] = fmaf(share, both.y, sums[word * 2 + 1]);
    }
  }
  const uint4 old = load16_written(x + row * HIDDEN + column);
  uint4 made;
  const uint32_t* before = &old.x;
  uint32_t* after = &made.x;
#pragma unroll
  for (int word = 0; word < 4; word++) {
    const float2 both = unpack2(before[word]);
    after[word] = pack2(fmaf(scale, sums[word * 2], both.x), fmaf(scale, sums[word * 2 + 1], both.y));
  }
  store16(x + row * HIDDEN + column, made);
}
