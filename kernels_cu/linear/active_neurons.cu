// The gated mlp of a step of 1-64 rows whose gates are mostly zero (FATReLU): what a closed gate would multiply is not read.
//
//   formula   active_gate_up: out[t, f] = g * u where g > FATRELU, else 0; g = n[t] Wg[f], u = n[t] Wu[f], n = round(norm(x))
//             active_down: x[t, c] += scale * sum over f of inner[t, f] * W[f, c], of the f with inner[t, f] != 0
//   operands  active_gate_up: out (T, F) scalar_t; x (T, K) scalar_t; norm (K) scalar_t; weight (2 F, K) scalar_t: gate, up rows.
//             active_down: x (T, C) scalar_t; inner (T, F) scalar_t; weight (F, C) scalar_t, the transpose of the checkpoint's;
//             F and K multiples of 8, C of 16
//   constants IN_FEATURES: K of active_gate_up, F of active_down
//             ROWS: rows that active_gate_up takes at a time: 1, 2, 4 or 8
//             FATRELU: the threshold, as in fatrelu.cuh
//   launch    active_gate_up: grid ceil(F / 8), block 256, (8 + ROWS) * K * 2 bytes of dynamic shared memory.
//             active_down: grid (C / 16, T), block 256, F * 2 bytes of dynamic shared memory
//   numerics  float32: a lane sums its own columns in ascending order, then lanes and warps add up in one tree; one rounding where
//             a value is stored and one where a normalised row enters the product. A term of 0 changes no bit of a sum, so bits
//             of a row depend on its own operands only, whatever other rows of the step need
//   oracle    NumpyOps.gate_up with fatrelu, project_residual
//   source    original; FATReLU arXiv 2402.13516; skipping by activity arXiv 2310.17157
//   layout    a warp has a neuron: its gate row is on the way to shared memory before the kernel waits for x, its up row is read
//             only if a gate opens. The down product finds its columns side by side in memory as rows of the transpose: 32 bytes of
//             each active one make the 16 outputs of a block, so blocks need not exchange sums
#if !defined(IN_FEATURES) || !defined(ROWS) || !defined(FATRELU)
#error "a constant is not defined"
#endif
#include "copy.cuh"
#include "fatrelu.cuh"

constexpr int K = IN_FEATURES, kWarps = 8, kThreads = kWarps * 32;
constexpr int kPieces = (K / 8 + 31) / 32;   // of 8 columns that a lane has of a row

static_assert(K % 8 == 0, "IN_FEATURES must be a multiple of 8");
static_assert(ROWS == 1 || ROWS == 2 || ROWS == 4 || ROWS == 8, "ROWS must be 1, 2, 4 or 8");

DEVICE float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  return value;
}

// The column where a lane's piece of a row begins, and whether the row is that long.
DEVICE int column_of(int piece) { return (piece * 32 + static_cast<int>(threadIdx.x % 32)) * 8; }
DEVICE bool exists(int piece) { return K % 256 == 0 || column_of(piece) < K; }

// Eight float32 of a piece.
DEVICE void widen(float (&out)[8], uint4 piece) {
  const uint32_t* words = &piece.x;
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float2 pair = unpack2(words[e]);
    out[2 * e] = pair.x, out[2 * e + 1] = pair.y;
  }
}

// Starts the copy of a row of weights to the warp's place in shared memory. A lane copies what it will read, so the lane's own
// wait is enough.
DEVICE void copy_row(uint32_t to, const scalar_t* row) {
#pragma unroll
  for (int i = 0; i < kPieces; i++)
    if (exists(i)) cp_async16_lines(to + column_of(i) * 2, row + column_of(i));
}

// Row `x` normalised by one warp, as it enters a product, to shared memory; a lane reads back what it has stored.
DEVICE void normalise(uint32_t to, const scalar_t* x, const scalar_t* norm, float eps) {
  float sum = 0.0f;
#pragma unroll(kPieces <= 8 ? kPieces : 4)
  for (int i = 0; i < kPieces; i++) {
    if (!exists(i)) continue;
    const uint4 piece = load16_written(x + column_of(i));
    float values[8];
    widen(values, piece);
#pragma unroll
    for (int e = 0; e < 8; e++) sum = fmaf(values[e], values[e], sum);
    store_shared(to + column_of(i) * 2, piece);
  }
  const float scale = rsqrtf(fmaf(warp_sum(sum), 1.0f / K, eps));
#pragma unroll 2
  for (int i = 0; i < kPieces; i++) {
    if (!exists(i)) continue;
    uint4 piece = load_shared(to + column_of(i) * 2);
    const uint4 weights = load16_streamed(norm + column_of(i));
    uint32_t* words = &piece.x;
    const uint32_t* factors = &weights.x;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 value = unpack2(words[e]), factor = unpack2(factors[e]);
      words[e] = pack2(value.x * scale * factor.x, value.y * scale * factor.y);
    }
    store_shared(to + column_of(i) * 2, piece);
  }
}

// weights . row i in lane i, the last one in those after it; all in shared memory.
DEVICE float multiply(uint32_t weights, uint32_t rows) {
  float dot[ROWS] = {};
#pragma unroll(ROWS == 1 ? 2 : 1)
  for (int piece = 0; piece < kPieces; piece++) {
    if (!exists(piece)) continue;
    float w[8];
    widen(w, load_shared(weights + column_of(piece) * 2));
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      float x[8];
      widen(x, load_shared(rows + (i * K + column_of(piece)) * 2));
#pragma unroll
      for (int e = 0; e < 8; e++) dot[i] = fmaf(w[e], x[e], dot[i]);
    }
  }
  float own = 0.0f;
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const float sum = warp_sum(dot[i]);
    if (threadIdx.x % 32 >= i) own = sum;
  }
  return own;
}

extern "C" __global__ void __launch_bounds__(kThreads, 4)
    KERNEL(active_gate_up)(scalar_t* __restrict__ out, const scalar_t* x, const scalar_t* __restrict__ norm,
                           const scalar_t* __restrict__ weight, int T, int F, float eps) {
  pdl_launch_dependents();
  extern __shared__ __align__(16) unsigned char memory[];
  const uint32_t rows = shared_address(memory) + kWarps * K * 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, neuron = blockIdx.x * kWarps + warp;
  const bool is_there = neuron < F;
  const scalar_t* row = weight + static_cast<int64_t>(is_there ? neuron : 0) * K;
  const uint32_t kept = shared_address(memory) + warp * K * 2;
  copy_row(kept, row);
  pdl_wait();
#pragma unroll 1
  for (int first = 0; first < T; first += ROWS) {
    if (warp < ROWS) normalise(rows + warp * K * 2, x + static_cast<int64_t>(min(first + warp, T - 1)) * K, norm, eps);
    cp_async_wait_all();
    __syncthreads();
    const float gate = multiply(kept, rows);
    const bool is_last = first + ROWS >= T;
    float up = 0.0f;
    if (__any_sync(0xFFFFFFFFu, gate > __int_as_float(FATRELU))) {
      copy_row(kept, row + static_cast<int64_t>(F) * K);
      cp_async_wait_all();
      up = multiply(kept, rows);
      if (!is_last) copy_row(kept, row);
    }
    if (lane < ROWS && is_there && first + lane < T)
      out[static_cast<int64_t>(first + lane) * F + neuron] = from_float(fatrelu_mul(gate, up));
    if (!is_last) __syncthreads();
  }
}

constexpr int kTurns = (K / 8 + kThreads / 2 - 1) / (kThreads / 2);   // pieces of 8 inner values that two threads share
constexpr int kMaskTurns = kTurns < 4 ? kTurns : 4;                  // as many as a mask of 32 bits has
constexpr int kTogether = 4;                                         // rows of the weight on their way at a time

DEVICE uint32_t nonzero_bits(uint4 piece) {
  const uint32_t* words = &piece.x;
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < 4; e++)
    bits |= ((words[e] & 0x7FFFu) != 0) << (2 * e) | ((words[e] & 0x7FFF0000u) != 0) << (2 * e + 1);
  return bits;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(active_down)(scalar_t* x, const scalar_t* inner, const scalar_t* __restrict__ weight, int C, float scale) {
  pdl_begin();
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ float partial[kWarps][16];
  const uint32_t values = shared_address(memory);
  const int lane = threadIdx.x % 32, half = threadIdx.x % 2, owner = threadIdx.x / 2;
  const int64_t row = blockIdx.y;
  const scalar_t* column = weight + blockIdx.x * 16 + half * 8;
  for (int piece = threadIdx.x; piece < K / 8; piece += kThreads)
    store_shared(values + piece * 16, load16_written(inner + row * K + piece * 8));
  __syncthreads();
  float sum[8] = {};
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kMaskTurns) {
    uint32_t active = 0;
#pragma unroll
    for (int i = 0; i < kMaskTurns; i++) {
      const int piece = (turn + i) * (kThreads / 2) + owner;
      if (turn + i < kTurns && piece < K / 8) active |= nonzero_bits(load_shared(values + piece * 16)) << (8 * i);
    }
#pragma unroll 1
    while (active) {
      uint4 w[kTogether];
      float v[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        v[i] = 0.0f, w[i] = make_uint4(0, 0, 0, 0);
        if (!active) continue;
        const int bit = __ffs(active) - 1, f = ((turn + bit / 8) * (kThreads / 2) + owner) * 8 + bit % 8;
        active &= active - 1;
        w[i] = load16_streamed(column + static_cast<int64_t>(f) * C);
        v[i] = to_float(reinterpret_cast<const scalar_t*>(memory)[f]);
      }
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        float wide[8];
        widen(wide, w[i]);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] = fmaf(v[i], wide[e], sum[e]);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 8; e++) {
#pragma unroll
    for (int distance = 16; distance > 1; distance /= 2) sum[e] += __shfl_xor_sync(0xFFFFFFFFu, sum[e], distance);
    if (lane < 2) partial[threadIdx.x / 32][half * 8 + e] = sum[e];
  }
  __syncthreads();
  if (threadIdx.x >= 16) return;
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) total += partial[warp][threadIdx.x];
  scalar_t* out = x + row * C + blockIdx.x * 16 + threadIdx.x;
  *out = from_float(fmaf(scale, total, to_float(*out)));
}
