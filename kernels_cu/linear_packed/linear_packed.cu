// Skinny matrix products of a step of 1-64 rows with weights of 4 bits, or 8: y[T,N] = x[T,K] W[N,K]^T, fused as in linear.cu.
//
// W[n, k] = scale[n, k / G] * (u[n, k] - zero[n, k / G]), u in 0..15 (8 bits: 0..255); zero is 8 (128) everywhere without ZEROS.
// Operands: x, inner (T, K) scalar_t row-major, or with PREPARED what prepare_rows wrote of them; weight packed as in
//   packed_layout.cuh (repack.cu writes it); partials (tiles, 8, NT, 32) float4 and arrivals (tiles) int32, zero, with
//   SHARED_RUN = 1, RUNS = 8 and CLUSTERS = 0, else null; prepared with FEEDS what prepare_rows makes of out, else null; others as
//   in linear.cu.
// Grid: no more blocks than multiprocessors, with SHARED_RUN a multiple of RUNS, with CLUSTERS in clusters of RUNS; they take tiles
//   in turn; block 32 * WARPS; SMEM_BYTES of dynamic shared memory.
// Numerics: codes times x exactly, float32 sums over a scale group in tensor cores, groups and then RUNS runs of K added in order;
//   one rounding where a value is stored and one where a normalised row enters the product, as n = round(x * norm): 1 / rms multiplies
//   the sums. Bits of a row depend on its own operands only. bf16: |x|, |n| < 2^63, below 2^-50 they count as zero; fp16: |n| < 2^20.
// Oracle: NumpyOps.qkv, project_residual, gate_up, lm_head.
// Source: original; rings as in CUTLASS's pipelines; RMSNorm arXiv 1910.07467, RoPE 2104.09864, SwiGLU 2002.05202.
// Why so: at few rows the time is that of reading W once, so a warp's weights are one contiguous run of whole copies, and the
//   codes need almost no work: as the low bits of a 16-bit float they are subnormal numbers.
#include "packed_product.cuh"
#include "linear_epilogue.cuh"

#if LINEAR == 0
// q = rope(n Wq^T / rms + bq) of the row's position, k and v stored in the pages of its slot at its location; with NORM = 0 n is x and
// rms 1.
// Operands as in linear_qkv.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_qkv)(
    scalar_t* __restrict__ q, scalar_t* __restrict__ k_pages, scalar_t* __restrict__ v_pages, const scalar_t* x,
    const scalar_t* __restrict__ norm, const void* __restrict__ weight, float4* partials, int* arrivals,
    const scalar_t* __restrict__ bias, const float* __restrict__ rope, const int* positions, const int* locations, const int* slots,
    const int* __restrict__ block_tables, int T, int num_heads, int num_kv_heads, int pages_per_sequence, int max_context,
    float eps) {
  QkvEpilogue epilogue{q, k_pages, v_pages, bias, rope, positions, locations, slots, block_tables, T, num_heads, num_kv_heads,
                       pages_per_sequence, max_context};
  packed_product(epilogue, (num_heads + 2 * num_kv_heads) * kHeadTiles, x, norm, weight, partials, arrivals, T, eps);
}
#endif

#if LINEAR == 1
// x += scale * (inner W^T + bias), in place, rounded once.  x (T, N); inner (T, K); bias (N) or null.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_residual)(
    scalar_t* x, const scalar_t* inner, const void* __restrict__ weight, float4* partials, int* arrivals,
    const scalar_t* __restrict__ bias, int T, int N, float scale) {
  if (TRIGGER == 0) pdl_launch_dependents();
  ResidualEpilogue epilogue{x, bias, N, scale};
  packed_product(epilogue, N / 16, inner, nullptr, weight, partials, arrivals, T, 0.0f);
}
#endif

#if LINEAR == 2
// out = silu(n Wg^T / rms) * (n Wu^T / rms).  out (T, F); x (T, K); norm (K); weight of (2 F, K): gate, then up rows.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_gate_up)(
    scalar_t* __restrict__ out, scalar_t* __restrict__ prepared, const scalar_t* x, const scalar_t* __restrict__ norm,
    const void* __restrict__ weight, float4* partials, int* arrivals, int T, int F, float eps) {
  if (TRIGGER == 0) pdl_launch_dependents();
  GateUpEpilogue epilogue{out, F, reinterpret_cast<unsigned char*>(prepared)};
  packed_product(epilogue, F / 8, x, norm, weight, partials, arrivals, T, eps);
}
#endif

#if LINEAR == 3
// logits = n W^T / rms / divisor, with NORM = 0 n is x and rms 1.  logits (T, V) float32; x (T, K); norm (K); weight of (V, K), any V.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_head)(
    float* __restrict__ logits, const scalar_t* x, const scalar_t* __restrict__ norm, const void* __restrict__ weight,
    float4* partials, int* arrivals, int T, int V, float eps, float divisor) {
  if (TRIGGER == 0) pdl_launch_dependents();
  HeadEpilogue epilogue{logits, V, divisor};
  packed_product(epilogue, (V + 15) / 16, x, norm, weight, partials, arrivals, T, eps);
}
#endif
