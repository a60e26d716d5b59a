// Normalises the rows of a step for the head, with the bits that linear.cu gives them, and computes upper bounds of their lengths.
//
//   formula   n = round(x rsqrt(mean(x^2) + eps) norm); norms[t] >= |n[t]| + sqrt(K) 2^-30, |n| the Euclidean norm
//   operands  n (T, K) scalar_t; norms (T) float32; x (T, K) scalar_t; norm (K) scalar_t
//   constants IN_FEATURES: K, a multiple of 64, at most 16384. OWNERS: runs of K in linear.cu, 8 or 16
//   launch    grid T, block 256, no dynamic shared memory
//   numerics  float32; the squares are added in the order of Activations::normalise in linear.cu. The second term of norms
//             stands for elements that linear_packed.cu takes for zero
//   oracle    reference/ops.py rms_norm; bit for bit the rows that linear_head makes of x
//   source    original; RMSNorm arXiv 1910.07467
//   layout    for the sum of squares a thread does the chain of additions of one lane of linear.cu; all threads share the rest
#if !defined(IN_FEATURES) || !defined(OWNERS)
#error "a constant is not defined"
#endif
#include "copy.cuh"

constexpr int K = IN_FEATURES, kThreads = 256, kPieces = K / 8;
constexpr int kUnits = K / 64, kOwnUnits = (kUnits + OWNERS - 1) / OWNERS;
constexpr int kOwnPieces = (kPieces + kThreads - 1) / kThreads;
static_assert(K % 64 == 0 && K <= 16384, "K must be a multiple of 64, at most 16384");
static_assert(OWNERS == 8 || OWNERS == 16, "OWNERS must be 8 or 16");

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(head_rows)(scalar_t* __restrict__ n, float* __restrict__ norms, const scalar_t* x, const scalar_t* __restrict__ norm,
                      float eps) {
  __shared__ uint4 row[kPieces];
  __shared__ float squares[OWNERS], lengths[kThreads / 32];
  pdl_launch_dependents();
  uint4 values[kOwnPieces], weights[kOwnPieces];
#pragma unroll
  for (int i = 0; i < kOwnPieces; i++) {
    const int piece = i * kThreads + threadIdx.x;
    if (piece < kPieces) weights[i] = load16_streamed(norm + piece * 8);
  }
  pdl_wait();
  const scalar_t* from = x + static_cast<int64_t>(blockIdx.x) * K;
  scalar_t* to = n + static_cast<int64_t>(blockIdx.x) * K;
#pragma unroll
  for (int i = 0; i < kOwnPieces; i++) {
    const int piece = i * kThreads + threadIdx.x;
    if (piece < kPieces) values[i] = row[piece] = load16_written(from + piece * 8);
  }
  __syncthreads();
  if (threadIdx.x < OWNERS * 4) {
    const int owner = threadIdx.x / 4, quarter = threadIdx.x % 4;
    float sum = 0.0f;
#pragma unroll 4
    for (int u = 0; u < kOwnUnits; u++) {
      const int unit = owner * kOwnUnits + u;
      if (unit >= kUnits) break;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint4 v = row[unit * 8 + j * 4 + quarter];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 a = unpack2((&v.x)[e]);
          sum = fmaf(a.y, a.y, fmaf(a.x, a.x, sum));
        }
      }
    }
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (quarter == 0) squares[owner] = sum;
  }
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int owner = 0; owner < OWNERS; owner++) total += squares[owner];
  const float scale = rsqrtf(fmaf(total, 1.0f / K, eps));
  float length = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwnPieces; i++) {
    const int piece = i * kThreads + threadIdx.x;
    if (piece >= kPieces) break;
    uint4 v = values[i];
    const uint4 w = weights[i];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 a = unpack2((&v.x)[e]), b = unpack2((&w.x)[e]);
      (&v.x)[e] = pack2(a.x * scale * b.x, a.y * scale * b.y);
      const float2 rounded = unpack2((&v.x)[e]);
      length = fmaf(rounded.x, rounded.x, fmaf(rounded.y, rounded.y, length));
    }
    store16(to + piece * 8, v);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) length += __shfl_xor_sync(0xFFFFFFFFu, length, distance);
  if (threadIdx.x % 32 == 0) lengths[threadIdx.x / 32] = length;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; warp++) length += lengths[warp];
  norms[blockIdx.x] = sqrtf(length) * (1.0f + 0x1p-9f) + sqrtf(static_cast<float>(K)) * 0x1p-30f;
}
