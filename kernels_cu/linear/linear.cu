// Skinny matrix products of a step of 1-64 rows: y[T,N] = x[T,K] W[N,K]^T with fused prologues and epilogues.
//
// Operands: x, inner (T, K) scalar_t row-major; W (N, K) scalar_t row-major, shared with the prefill's GEMM; others below.
// Grid: any multiple of CLUSTER up to CLUSTER * ceil(tiles / kBlockTiles) blocks, clusters take groups of tiles in turn;
//   block 256; SMEM_BYTES of dynamic shared memory.
// Numerics: float32 accumulation in tensor cores over 8 * CLUSTER runs of K, the runs added in order; one rounding where a
//   value is stored and one where a normalised row enters the product. Bits of a row depend on its own operands only.
// Oracle: NumpyOps.qkv, project_residual, gate_up, lm_head.
// Source: original; RMSNorm arXiv 1910.07467, RoPE arXiv 2104.09864, SwiGLU arXiv 2002.05202.
// Why so: at few rows the time is that of reading W once. Rings deep enough to cover the memory's latency are filled
//   before the kernel waits for its inputs, and a tile's 16 rows are chosen so that the two values that RoPE or SiLU
//   combine come out in one lane.
#include "linear_product.cuh"
#include "linear_epilogue.cuh"

#if LINEAR == 0
// q = rope(n Wq^T + bq) of the row's position, k and v stored in the pages of its slot at its location; n = round(norm(x)), or
// with NORM = 0 x as it is.
//   q (T, H*D); k_pages, v_pages (P, Kv, 64, D); x (T, K); norm (K); weight ((H + 2 Kv) * D, K): q heads, k heads, v heads;
//   bias ((H + 2 Kv) * D) or null; rope (2, max_context, D/2) float32: cos, sin; positions, slots (T) int32, slot -1: the
//   row's k and v are not stored; locations (T) int32 or null: positions; block_tables (B, pages_per_sequence) int32.
// k_pages null: q (T, (H + 2 Kv) * D) takes the projection with its bias, unrotated, for models that normalise heads or keep them
// unrotated too.
// The next kernel may start only after this one's wait: decode_attention reads early what is older than this launch.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_qkv)(
    scalar_t* __restrict__ q, scalar_t* __restrict__ k_pages, scalar_t* __restrict__ v_pages, const scalar_t* x,
    const scalar_t* __restrict__ norm, const scalar_t* __restrict__ weight, const scalar_t* __restrict__ bias,
    const float* __restrict__ rope, const int* positions, const int* locations, const int* slots,
    const int* __restrict__ block_tables, int T, int num_heads, int num_kv_heads, int pages_per_sequence, int max_context,
    float eps) {
  const int num_tiles = (num_heads + 2 * num_kv_heads) * kHeadTiles;
  const QkvTiles tiles{num_tiles, (num_tiles + kBlockTiles - 1) / kBlockTiles};
  QkvEpilogue epilogue{q, k_pages, v_pages, bias, rope, positions, locations, slots, block_tables, T, num_heads, num_kv_heads,
                       pages_per_sequence, max_context};
  linear_product(tiles, epilogue, x, norm, weight, T, eps);
}
#endif

#if LINEAR == 1
// x += scale * (inner W^T + bias), in place, rounded once.  x (T, N); inner (T, K); weight (N, K); bias (N) or null.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_residual)(
    scalar_t* x, const scalar_t* inner, const scalar_t* __restrict__ weight,
    const scalar_t* __restrict__ bias, int T, int N, float scale) {
  pdl_launch_dependents();
  const ConsecutiveTiles tiles{N / 16, (N / 16 + kBlockTiles - 1) / kBlockTiles};
  ResidualEpilogue epilogue{x, bias, N, scale};
  linear_product(tiles, epilogue, inner, nullptr, weight, T, 0.0f);
}
#endif

#if LINEAR == 2
// out = silu(n Wg^T) * (n Wu^T), n = round(norm(x)).  out (T, F); x (T, K); norm (K); weight (2 F, K): gate, then up rows.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_gate_up)(
    scalar_t* __restrict__ out, const scalar_t* x, const scalar_t* __restrict__ norm,
    const scalar_t* __restrict__ weight, int T, int F, float eps) {
  pdl_launch_dependents();
  const GateUpTiles tiles{F / 8, (F / 8 + kBlockTiles - 1) / kBlockTiles, F};
  GateUpEpilogue epilogue{out, F};
  linear_product(tiles, epilogue, x, norm, weight, T, eps);
}
#endif

#if LINEAR == 3
// logits = n W^T / divisor, n = round(norm(x)), or with NORM = 0 x as it is.  logits (T, V) float32; x (T, K); norm (K); weight (V, K), any V.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_head)(
    float* __restrict__ logits, const scalar_t* x, const scalar_t* __restrict__ norm,
    const scalar_t* __restrict__ weight, int T, int V, float eps, float divisor) {
  pdl_launch_dependents();
  const int num_tiles = (V + 15) / 16;
  const HeadTiles tiles{num_tiles, (num_tiles + kBlockTiles - 1) / kBlockTiles, V};
  HeadEpilogue epilogue{logits, V, divisor};
  linear_product(tiles, epilogue, x, norm, weight, T, eps);
}
#endif
