// Lightning attention of a prompt's chunk on tensor cores, one block of 64 tokens after another.
//
//   formula   lightning_heads: normalises and rotates the q and k heads of qkv in place. lightning_prefill, for a block of n
//             rows and the state S of a head before it, with L^i = decay[h][i], r = D^-0.5:
//             out_i = r L^(i+1) q_i S + sum over j <= i of (r L^(i-j) q_i k_j) v_j
//             S = L^n S + sum over j of k_j^T (L^(n-1-j) v_j), the state before the next block; the last one is states[slot]
//   operands  out (T, H * D) scalar_t; states (B, H, D, D) float32, keys by values; qkv (T, 3 * H * D) scalar_t: q heads,
//             k heads, v heads; q_norm, k_norm (D) scalar_t or null; rope (2, max_context, D/2) float32: cos, sin, or
//             null; decay (H, 65) float32: exp(-slope i) in column i; positions, slots (T) int32; chunk (3) int32: slot,
//             start (a multiple of 64), count. Rows of slot -1, and those from count on, stay as they are
//   constants HEAD_DIM: elements of a head: 64 or 128
//   launch    lightning_heads: grid T * 2 H / 8 rounded up, block 256. lightning_prefill: grid (D / 64, H), block 128;
//             dynamic shared memory: two stages of q, k (64, D) and v (64, 64), the weights' two parts (64, 64), decay
//   numerics  products of scalar_t with float32 sums; a float32 operand enters a product as two scalar_t, its rounded value
//             and the rounded rest (fp16: S times 2^-8, so that it stays in range); S stays in float32; out is rounded once
//   oracle    NumpyOps.lightning_prefill
//   source    lightning attention (arXiv 2405.17381); simple gated linear attention in chunks (arXiv 2312.06635)
//   layout    a thread block goes through the chunk with 64 columns of S in the registers of its four warps, 16 columns each. S
//             is held transposed, so that its accumulators are the fragments of the next product. The weights q_i k_j go
//             through shared memory; each warp computes 16 rows of them, without the tiles above the diagonal
#if !defined(HEAD_DIM)
#error "a constant is not defined"
#endif
#include "lightning.cuh"
#include "mma.cuh"

constexpr int kBlock = kPageTokens, kColumns = 64, kWarps = 4, kThreads = 32 * kWarps, kHeadWarps = 8;
constexpr int kStateTiles = HEAD_DIM / 8, kTokenTiles = kBlock / 8;
constexpr int kRowBytes = HEAD_DIM * 2, kColumnBytes = kColumns * 2;
constexpr int kStageBytes = kBlock * (2 * kRowBytes + kColumnBytes);
constexpr int kWeightBytes = kBlock * kBlock * 2;
#ifdef CPMRT_FP16
constexpr float kStateScale = 1.0f / 256;
#else
constexpr float kStateScale = 1.0f;
#endif

extern "C" __global__ void __launch_bounds__(32 * kHeadWarps)
    KERNEL(lightning_heads)(scalar_t* qkv, const scalar_t* __restrict__ q_norm, const scalar_t* __restrict__ k_norm,
                            const float* __restrict__ rope, const int* positions, const int* slots, int num_rows,
                            int num_heads, int max_context, float eps) {
  pdl_begin();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kHeadWarps + threadIdx.x / 32;
  const int row = static_cast<int>(item / (2 * num_heads)), head = item % (2 * num_heads), lane = threadIdx.x % 32;
  if (row >= num_rows || slots[row] < 0) return;
  scalar_t* place = qkv + (static_cast<int64_t>(row) * 3 * num_heads + head) * HEAD_DIM;
  const HeadPart part =
      made_head(place, head < num_heads ? q_norm : k_norm, rope, positions[row], max_context, eps, lane);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float(&values)[kPairs] = half ? part.second : part.first;
    scalar_t* to = place + half * kHalf + lane * kPairs;
    if constexpr (kPairs == 2) {
      *reinterpret_cast<uint32_t*>(to) = pack2(values[0], values[1]);
    } else {
      *to = from_float(values[0]);
    }
  }
}

// Returns the address of a 16-byte chunk of a row in shared memory, swizzled so that the chunks of eight rows that ldmatrix reads
// together lie in different banks.
template <int ROW_BYTES>
DEVICE uint32_t chunk_at(uint32_t base, int row, int chunk) {
  return base + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// Returns the address that a lane gives to ldmatrix for the four 8x8 matrices of a 16x16 tile whose upper left corner is at
// (row, 8 * chunk). ROWS_FIRST: the second matrix is below the first, else beside it.
template <int ROW_BYTES, bool ROWS_FIRST>
DEVICE uint32_t tile_at(uint32_t base, int row, int chunk, int lane) {
  const int low = lane / 8 & 1, high = lane / 16;
  return chunk_at<ROW_BYTES>(base, row + (ROWS_FIRST ? low : high) * 8 + lane % 8, chunk + (ROWS_FIRST ? high : low));
}

struct Pair {
  uint32_t rounded, rest;
};

// Returns two floats split into their rounded values and the rounded rests.
DEVICE Pair split2(float a, float b) {
  const uint32_t rounded = pack2(a, b);
  const float2 kept = unpack2(rounded);
  return {rounded, pack2(a - kept.x, b - kept.y)};
}

// Starts the copies of a block of tokens to a stage: q, k, and 64 columns of v. Rows from `count` on become zeros. All threads.
DEVICE void load_block(uint32_t stage, const scalar_t* rows, int count, int width, int head) {
  constexpr int kRowChunks = HEAD_DIM / 8, kColumnChunks = kColumns / 8;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    for (int item = threadIdx.x; item < kBlock * kRowChunks; item += kThreads) {
      const int row = item / kRowChunks, chunk = item % kRowChunks;
      const scalar_t* from = rows + static_cast<int64_t>(row < count ? row : 0) * 3 * width + part * width;
      cp_async16(chunk_at<kRowBytes>(stage + part * kBlock * kRowBytes, row, chunk), from + head * HEAD_DIM + chunk * 8,
                 row < count ? 16 : 0);
    }
  }
  for (int item = threadIdx.x; item < kBlock * kColumnChunks; item += kThreads) {
    const int row = item / kColumnChunks, chunk = item % kColumnChunks;
    const scalar_t* from = rows + static_cast<int64_t>(row < count ? row : 0) * 3 * width + 2 * width;
    cp_async16(chunk_at<kColumnBytes>(stage + 2 * kBlock * kRowBytes, row, chunk),
               from + head * HEAD_DIM + blockIdx.x * kColumns + chunk * 8, row < count ? 16 : 0);
  }
}

// Computes a warp's 16 rows of the weights r L^(i-j) q_i k_j, j <= i, and stores their rounded values and rests in shared memory.
DEVICE void store_weights(uint32_t weights, uint32_t q, uint32_t k, const float* decay, int warp, int lane) {
  float sums[kTokenTiles][4] = {};
#pragma unroll
  for (int step = 0; step < HEAD_DIM / 16; step++) {
    uint32_t a[4];
    ldmatrix_x4(a, tile_at<kRowBytes, true>(q, warp * 16, step * 2, lane));
#pragma unroll
    for (int pair = 0; pair < kTokenTiles / 2; pair++) {
      if (pair > warp) continue;
      uint32_t b[4];
      ldmatrix_x4(b, tile_at<kRowBytes, false>(k, pair * 16, step * 2, lane));
      mma(sums[2 * pair], a, {b[0], b[1]});
      mma(sums[2 * pair + 1], a, {b[2], b[3]});
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; tile++) {
    if (tile / 2 > warp) continue;
#pragma unroll
    for (int below = 0; below < 2; below++) {
      const int i = warp * 16 + below * 8 + lane / 4, j = tile * 8 + lane % 4 * 2;
      const float first = j <= i ? sums[tile][2 * below] * (kScale * decay[i - j]) : 0.0f;
      const float second = j + 1 <= i ? sums[tile][2 * below + 1] * (kScale * decay[i - j - 1]) : 0.0f;
      const Pair weight = split2(first, second);
      const uint32_t place = chunk_at<2 * kBlock>(weights, i, tile) + lane % 4 * 4;
      store_shared_word(place, weight.rounded);
      store_shared_word(place + kWeightBytes, weight.rest);
    }
  }
}

// A warp's 16 columns of S, transposed: at[n] holds their key dimensions 8 n .. 8 n + 7 in the layout of MMA accumulators.
struct State {
  float at[kStateTiles][4];

  // Returns the index of a lane's element e of tile n in the matrix (D, D): its key dimension times D plus its column.
  DEVICE static int place(int n, int e, int lane) {
    return (n * 8 + lane % 4 * 2 + e % 2) * HEAD_DIM + e / 2 * 8 + lane / 4;
  }
  DEVICE void load(const float* matrix, int lane) {
#pragma unroll
    for (int n = 0; n < kStateTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) at[n][e] = matrix[place(n, e, lane)];
    }
  }
  DEVICE void store(float* matrix, int lane) const {
#pragma unroll
    for (int n = 0; n < kStateTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) matrix[place(n, e, lane)] = at[n][e];
    }
  }
  // Adds kStateScale S^T q^T to `sums`, columns by tokens.
  DEVICE void read(float (&sums)[kTokenTiles][4], uint32_t q, int lane) const {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
      uint32_t rounded[4], rest[4];
#pragma unroll
      for (int part = 0; part < 4; part++) {
        const float(&tile)[4] = at[2 * step + part / 2];
        const Pair pair = split2(tile[part % 2 * 2] * kStateScale, tile[part % 2 * 2 + 1] * kStateScale);
        rounded[part] = pair.rounded, rest[part] = pair.rest;
      }
#pragma unroll
      for (int pair = 0; pair < kTokenTiles / 2; pair++) {
        uint32_t b[4];
        ldmatrix_x4(b, tile_at<kRowBytes, false>(q, pair * 16, step * 2, lane));
        mma(sums[2 * pair], rounded, {b[0], b[1]});
        mma(sums[2 * pair], rest, {b[0], b[1]});
        mma(sums[2 * pair + 1], rounded, {b[2], b[3]});
        mma(sums[2 * pair + 1], rest, {b[2], b[3]});
      }
    }
  }
  // Takes the block's first `count` tokens j into the state: S^T = L^count S^T + (v L^(count-1-j))^T k.
  DEVICE void take_up(uint32_t v, uint32_t k, const float* decay, int count, int warp, int lane) {
    const float kept = decay[count];
#pragma unroll
    for (int n = 0; n < kStateTiles; n++) {
#pragma unroll
      for (int e = 0; e < 4; e++) at[n][e] *= kept;
    }
#pragma unroll 1
    for (int step = 0; step < kBlock / 16; step++) {
      uint32_t columns[4], rounded[4], rest[4];
      ldmatrix_x4_transposed(columns, tile_at<kColumnBytes, false>(v, step * 16, warp * 2, lane));
#pragma unroll
      for (int part = 0; part < 4; part++) {
        const int j = step * 16 + part / 2 * 8 + lane % 4 * 2;
        const float2 values = unpack2(columns[part]);
        const Pair pair = split2(values.x * decay[max(count - 1 - j, 0)], values.y * decay[max(count - 2 - j, 0)]);
        rounded[part] = pair.rounded, rest[part] = pair.rest;
      }
#pragma unroll
      for (int pair = 0; pair < kStateTiles / 2; pair++) {
        uint32_t b[4];
        ldmatrix_x4_transposed(b, tile_at<kRowBytes, true>(k, step * 16, pair * 2, lane));
        mma(at[2 * pair], rounded, {b[0], b[1]});
        mma(at[2 * pair], rest, {b[0], b[1]});
        mma(at[2 * pair + 1], rounded, {b[2], b[3]});
        mma(at[2 * pair + 1], rest, {b[2], b[3]});
      }
    }
  }
};

// Stores a warp's 16 columns of the outputs. They go through the warp's own columns of v in shared memory, which are not read again,
// so that rows are stored 16 bytes at a time.
DEVICE void store_outputs(scalar_t* out, const float (&sums)[kTokenTiles][4], uint32_t v, int count, int width, int warp,
                          int lane) {
  __syncwarp();
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; tile++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int token = tile * 8 + lane % 4 * 2 + e % 2, chunk = warp * 2 + e / 2;
      const scalar_t value = from_float(sums[tile][e]);
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(chunk_at<kColumnBytes>(v, token, chunk) + lane / 4 * 2),
                   "h"(reinterpret_cast<const uint16_t&>(value))
                   : "memory");
    }
  }
  __syncwarp();
#pragma unroll
  for (int turn = 0; turn < kBlock * 2 / 32; turn++) {
    const int token = turn * 16 + lane / 2, chunk = warp * 2 + lane % 2;
    const uint4 words = load_shared(chunk_at<kColumnBytes>(v, token, chunk));
    if (token < count) store16(out + static_cast<int64_t>(token) * width + chunk * 8, words);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    KERNEL(lightning_prefill)(scalar_t* out, float* states, const scalar_t* qkv, const float* __restrict__ decay,
                              const int* chunk, int num_heads) {
  extern __shared__ unsigned char shared[];
  const uint32_t stages = shared_address(shared), weights = stages + 2 * kStageBytes;
  float* powers = reinterpret_cast<float*>(shared + 2 * kStageBytes + 2 * kWeightBytes);
  pdl_begin();
  const int slot = chunk[0], count = chunk[2], head = blockIdx.y, width = num_heads * HEAD_DIM;
  if (slot < 0 || count <= 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < kDecays; i += kThreads) powers[i] = decay[head * kDecays + i];
  load_block(stages, qkv, min(count, kBlock), width, head);
  cp_async_commit();
  float* matrix = state_of(states, slot, num_heads, head) + blockIdx.x * kColumns + warp * 16;
  State state;
  state.load(matrix, lane);
  for (int first = 0; first < count; first += kBlock) {
    const int n = min(count - first, kBlock), turn = first / kBlock % 2, next = first + kBlock;
    if (next < count) {
      load_block(stages + (turn ^ 1) * kStageBytes, qkv + static_cast<int64_t>(next) * 3 * width,
                 min(count - next, kBlock), width, head);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const uint32_t q = stages + turn * kStageBytes, k = q + kBlock * kRowBytes, v = k + kBlock * kRowBytes;
    store_weights(weights, q, k, powers, warp, lane);
    float sums[kTokenTiles][4] = {};
    state.read(sums, q, lane);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; tile++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        sums[tile][e] *= kScale / kStateScale * powers[tile * 8 + lane % 4 * 2 + e % 2 + 1];
      }
    }
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kBlock / 16; step++) {
      uint32_t columns[4];
      ldmatrix_x4_transposed(columns, tile_at<kColumnBytes, false>(v, step * 16, warp * 2, lane));
#pragma unroll
      for (int pair = step; pair < kTokenTiles / 2; pair++) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
          uint32_t b[4];
          ldmatrix_x4(b, tile_at<2 * kBlock, false>(weights + part * kWeightBytes, pair * 16, step * 2, lane));
          mma(sums[2 * pair], columns, {b[0], b[1]});
          mma(sums[2 * pair + 1], columns, {b[2], b[3]});
        }
      }
    }
    state.take_up(v, k, powers, n, warp, lane);
    store_outputs(out + static_cast<int64_t>(first) * width + head * HEAD_DIM + blockIdx.x * kColumns, sums, v, n, width,
                  warp, lane);
    __syncthreads();
  }
  state.store(matrix, lane);
}
