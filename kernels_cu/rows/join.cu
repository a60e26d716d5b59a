// Joins two rows side by side, each normalised if it has a norm weight: a token's row and the target's hidden state, as a draft reads
// them.
//
//   formula   joined[t, :A] = norm(a[t]), joined[t, A:] = norm(b[t]), norm(x)[c] = round(x[c] / sqrt(mean(x^2) + eps) * weight[c]);
//             without a weight a half is copied
//   operands  joined (T, A_COLUMNS + B_COLUMNS), a (T, A_COLUMNS), b (T, B_COLUMNS) scalar_t; a_norm (A_COLUMNS), b_norm (B_COLUMNS)
//             scalar_t or null; row-major
//   constants A_COLUMNS: elements of a row of a, a multiple of 8. B_COLUMNS: elements of a row of b, a multiple of 8
//   launch    grid (T, 2), block 256, 64 bytes of static shared memory
//   numerics  as in norm.cu: the halves have the bits that rms_norm gives them
//   oracle    NumpyOps.join
//   source    arXiv 1910.07467; EAGLE (arXiv 2401.15077)
//   layout    one block for each half of a row
#if !defined(A_COLUMNS) || !defined(B_COLUMNS)
#error "a constant is not defined"
#endif
#include "norm_row.cuh"

static_assert(A_COLUMNS % 8 == 0 && B_COLUMNS % 8 == 0, "A_COLUMNS and B_COLUMNS must be multiples of 8");

template <int COLUMNS>
DEVICE void join_half(scalar_t* out, const scalar_t* x, const scalar_t* weight, float eps) {
  if (weight != nullptr) {
    normalise_row<COLUMNS>(out, x, weight, eps);
    return;
  }
  for (int column = threadIdx.x * 8; column < COLUMNS; column += kThreads * 8) store16(out + column, load16(x + column));
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(join)(scalar_t* __restrict__ joined, const scalar_t* a, const scalar_t* __restrict__ a_norm, const scalar_t* b,
                 const scalar_t* __restrict__ b_norm, float eps) {
  pdl_begin();
  const int64_t row = blockIdx.x;
  scalar_t* const out = joined + row * (A_COLUMNS + B_COLUMNS);
  if (blockIdx.y == 0) {
    join_half<A_COLUMNS>(out, a + row * A_COLUMNS, a_norm, eps);
  } else {
    join_half<B_COLUMNS>(out + A_COLUMNS, b + row * B_COLUMNS, b_norm, eps);
  }
}
