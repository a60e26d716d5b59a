// Writes x of a step of 1-64 rows as linear_packed.cu reads it with PREPARED: times a norm's weights, columns in the order of a permuted
// weight.
//
// Formula: v[token, j] = round(x[token, p] * norm[p]) * c, p = permutation[j], without permutation p = j; without norm norm[p] is 1; c is
//   1/16 with norm in fp16, else 1. out[token, j] = rint(v / quantum), quantum the power of two with which the largest of a slice of 128
//   columns is 2^13 to 2^14. With norm a token's scale is 1 / (c rms(x[token])).
// Operands: out (K/128 slices) as in packed_rows.cuh, with norm followed by T float scales; x (T, K) scalar_t; norm (K) scalar_t or
//   null; permutation (K) int32 or null.
// Constants: IN_FEATURES: K, the columns of W, a multiple of 128. ROWS: most rows of a step: 1, 8, 16, 32 or 64.
//   SCALE_GROUP: columns that share a scale: 16, 32, 64 or 128. ZEROS: 1 has zero points beside the scales, 2 minimums; 0: zero
//   points are 8, in 2 bits 2, in 8 bits 128. WARPGROUPS: 1 lets four warps multiply together where the architecture can. ROW_PITCH:
//   elements between rows of x, whose first K columns are taken; without it K
// Grid: T blocks of 256 threads; no dynamic shared memory.
// Numerics: rounded to 16 bits where there is a norm, then to integers of 14 bits and a sign; the square sum in the order of
//   linear_packed.cu's own. Padding rows are not written.
// Oracle: tests/kernels/test_linear_packed.py, through the products.
// Source: original.
// Why the layout: a block of the product then copies its part of x in one piece.
#if !defined(IN_FEATURES) || !defined(ROWS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(WARPGROUPS) || \
    (ROW_PITCH < IN_FEATURES && defined(ROW_PITCH))
#error "a constant is not defined"
#endif
#include "packed_rows.cuh"

extern "C" __global__ void __launch_bounds__(kRowThreads) KERNEL(prepare_rows)(
    scalar_t* __restrict__ out, const scalar_t* x, const scalar_t* __restrict__ norm, const int* __restrict__ permutation, float eps) {
  pdl_launch_dependents();
  __shared__ __align__(16) scalar_t row[IN_FEATURES];
  __shared__ __align__(16) float squares[kRowWarps];
  const int token = blockIdx.x;
  unsigned char* const to = reinterpret_cast<unsigned char*>(out);
  RowPieces row_pieces;
  if (norm != nullptr) row_pieces.prefetch_norm(norm);
  pdl_wait();
  if (norm != nullptr) row_pieces.load_norm(norm);
  uint4 v[kThreadPieces];
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++)
    if (RowPieces::piece(i) < kPieces) v[i] = load16_past_l1(x + static_cast<size_t>(token) * kRowPitch + RowPieces::piece(i) * 8);
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++) {
    const int piece = RowPieces::piece(i);
    if (piece >= kPieces) continue;
    if (norm != nullptr) square = square_sum(v[i], square), v[i] = weighted(v[i], row_pieces.norm[i]);
    if (permutation != nullptr) store16(row + piece * 8, v[i]);
  }
  if (permutation != nullptr) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kThreadPieces; i++) {
      const int piece = RowPieces::piece(i);
      if (piece >= kPieces) continue;
      __align__(16) scalar_t gathered[8];
#pragma unroll
      for (int e = 0; e < 8; e++) gathered[e] = row[permutation[piece * 8 + e]];
      v[i] = *reinterpret_cast<const uint4*>(gathered);
    }
  }
  enter_products(PreparedRows{to}, v, [&](int i) { return Entry{RowPieces::piece(i), token, RowPieces::piece(i) < kPieces}; });
  if (norm == nullptr) return;
  square = RowPieces::warp_square_sum(square);
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
  __syncthreads();
  if (threadIdx.x == 0)
    *reinterpret_cast<float*>(to + kRowScaleOffset + token * 4) = RowPieces::scale(shared_address(squares), eps);
}
