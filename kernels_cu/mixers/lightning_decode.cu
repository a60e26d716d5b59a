// Lightning attention of a step's rows: each row adds its key and value to the state of its slot, then applies its query to the state.
//
//   formula   for head h of row t of slot s, with q, k, v its heads, q and k normalised and rotated, all rounded:
//             S = decay[h][1] S + k^T v; out[t, h] = D^-0.5 q S, S being states[s, h]
//             CHAIN 1: the rows are a chain of drafted tokens in one slot, each after the one before; S is not stored;
//             instead chain[t] = k heads, v heads. lightning_accept: updates states by the first tree.path_length rows of chain
//   operands  out (T, H * D) scalar_t; states (B, H, D, D) float32, keys by values, lightning_accept: (layers, B, ...);
//             chain (J, 2 * H * D) scalar_t, lightning_accept: (layers, J, ...), else null; qkv (T, 3 * H * D) scalar_t:
//             q heads, k heads, v heads; q_norm, k_norm (D) scalar_t or null; rope (2, max_context, D/2) float32: cos,
//             sin, or null; decay (H, 65) float32: exp(-slope i) in column i; positions, slots (T) int32. A row of slot
//             -1 changes nothing; in a chain, neither do the rows after it
//   constants HEAD_DIM: elements of a head: 64 or 128. CHAIN: 1 for rows of a chain
//   launch    grid (D / 32, H, CHAIN ? 1 : T), lightning_accept (D / 32, H, layers); block 256; static shared memory
//   numerics  float32, S = fma(k, v, round(decay S)) in either kernel; a product q S is summed over a thread's rows, lanes,
//             then warps; rounded once
//   oracle    NumpyOps.lightning_decode, NumpyOps.lightning_accept
//   source    lightning attention (arXiv 2405.17381)
//   layout    a block holds 32 columns of S in registers, a thread four of them in every 32nd row, so that each access
//             takes whole lines and a chain needs no barrier between its rows. S is read before pdl_wait: the product
//             before this kernel starts it only after its own wait, so that all kernels that may write S have ended
#if !defined(HEAD_DIM) || !defined(CHAIN)
#error "a constant is not defined"
#endif
#include "draft_tree.cuh"
#include "lightning.cuh"

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = 32;                 // columns of S of a block
constexpr int kGroups = kColumns / 4;        // groups of four columns
constexpr int kStride = kThreads / kGroups;  // distance between a thread's rows of S
constexpr int kRows = HEAD_DIM / kStride;
constexpr int kTurn = CHAIN ? 16 : 1;        // rows of the step whose heads are in shared memory at a time

// A thread's elements of S.
struct Columns {
  float4 at[kRows];

  DEVICE static float* first(float* matrix) {
    return matrix + threadIdx.x / kGroups * HEAD_DIM + blockIdx.x * kColumns + threadIdx.x % kGroups * 4;
  }
  // Reads past the L1, which may hold older values: lightning_decode calls this before pdl_wait.
  DEVICE void load(float* matrix) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const uint4 words = load16_past_l1(first(matrix) + i * kStride * HEAD_DIM);
      at[i] = reinterpret_cast<const float4&>(words);
    }
  }
  DEVICE void store(float* matrix) const {
#pragma unroll
    for (int i = 0; i < kRows; i++) *reinterpret_cast<float4*>(first(matrix) + i * kStride * HEAD_DIM) = at[i];
  }
  // Takes a token into the thread's i-th row of S: S = decay S + k v.
  DEVICE void take_up(int i, float k, float4 v, float decay) {
    at[i].x = fmaf(k, v.x, __fmul_rn(decay, at[i].x));
    at[i].y = fmaf(k, v.y, __fmul_rn(decay, at[i].y));
    at[i].z = fmaf(k, v.z, __fmul_rn(decay, at[i].z));
    at[i].w = fmaf(k, v.w, __fmul_rn(decay, at[i].w));
  }
};

// Returns the four elements of a head of values that belong to this thread's columns.
DEVICE uint2 load_values(const scalar_t* head) {
  return *reinterpret_cast<const uint2*>(head + blockIdx.x * kColumns + threadIdx.x % kGroups * 4);
}

DEVICE int read_past_l1(const int* source) {
  int value;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

DEVICE float4 unpack4(uint2 words) {
  const float2 a = unpack2(words.x), b = unpack2(words.y);
  return make_float4(a.x, a.y, b.x, b.y);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    KERNEL(lightning_decode)(scalar_t* out, float* states, scalar_t* chain, const scalar_t* qkv,
                             const scalar_t* __restrict__ q_norm, const scalar_t* __restrict__ k_norm,
                             const float* __restrict__ rope, const float* decay, const int* positions,
                             const int* slots, int num_rows, int num_heads, int max_context, float eps) {
  __shared__ float heads[kTurn][2][HEAD_DIM];
  __shared__ float4 sums[kTurn][kWarps][kGroups];
  pdl_launch_dependents();
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = num_heads * HEAD_DIM;
  const int first_row = CHAIN ? 0 : blockIdx.z, slot = read_past_l1(slots + first_row);
  if (slot < 0) return;
  float* matrix = state_of(states, slot, num_heads, head);
  Columns s;
  s.load(matrix);
  pdl_wait();
  const float factor = decay[head * kDecays + 1];
  int end = first_row + 1;
  if (CHAIN) {
    while (end < num_rows && slots[end] >= 0) end++;
  }
  for (int begin = first_row; begin < end; begin += kTurn) {
    const int count = min(end - begin, kTurn);
    for (int item = warp; item < 2 * count; item += kWarps) {
      const int row = begin + item / 2, is_key = item % 2;
      const scalar_t* source = qkv + static_cast<int64_t>(row) * 3 * width + is_key * width + head * HEAD_DIM;
      const HeadPart part =
          made_head(source, is_key ? k_norm : q_norm, rope, positions[row], max_context, eps, lane);
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        heads[item / 2][is_key][lane * kPairs + i] = to_float(from_float(part.first[i]));
        heads[item / 2][is_key][kHalf + lane * kPairs + i] = to_float(from_float(part.second[i]));
      }
    }
    __syncthreads();
    for (int turn = 0; turn < count; turn++) {
      const int64_t row = begin + turn;
      const uint2 words = load_values(qkv + row * 3 * width + 2 * width + head * HEAD_DIM);
      const float4 v = unpack4(words);
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int d = threadIdx.x / kGroups + i * kStride;
        const float q = heads[turn][0][d];
        s.take_up(i, heads[turn][1][d], v, factor);
        sum.x = fmaf(q, s.at[i].x, sum.x), sum.y = fmaf(q, s.at[i].y, sum.y);
        sum.z = fmaf(q, s.at[i].z, sum.z), sum.w = fmaf(q, s.at[i].w, sum.w);
      }
#pragma unroll
      for (int distance = kGroups; distance < 32; distance *= 2) {
        sum.x += __shfl_xor_sync(0xFFFFFFFFu, sum.x, distance), sum.y += __shfl_xor_sync(0xFFFFFFFFu, sum.y, distance);
        sum.z += __shfl_xor_sync(0xFFFFFFFFu, sum.z, distance), sum.w += __shfl_xor_sync(0xFFFFFFFFu, sum.w, distance);
      }
      if (lane < kGroups) sums[turn][warp][lane] = sum;
      if (CHAIN && threadIdx.x < kGroups) {
        scalar_t* values = chain + row * 2 * width + width + head * HEAD_DIM + blockIdx.x * kColumns;
        *reinterpret_cast<uint2*>(values + threadIdx.x * 4) = words;
      }
    }
    __syncthreads();
    for (int item = threadIdx.x; item < count * kColumns; item += kThreads) {
      const int turn = item / kColumns, column = item % kColumns;
      float total = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; w++) total += reinterpret_cast<const float*>(sums[turn][w])[column];
      out[static_cast<int64_t>(begin + turn) * width + head * HEAD_DIM + blockIdx.x * kColumns + column] =
          from_float(kScale * total);
    }
    if (CHAIN && blockIdx.x == 0) {
      for (int item = threadIdx.x; item < count * HEAD_DIM; item += kThreads) {
        const int turn = item / HEAD_DIM, d = item % HEAD_DIM;
        chain[static_cast<int64_t>(begin + turn) * 2 * width + head * HEAD_DIM + d] = from_float(heads[turn][1][d]);
      }
    }
    if (CHAIN) __syncthreads();  // the next rows' heads take the place of these
  }
  if (!CHAIN) s.store(matrix);
}

#if CHAIN
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    KERNEL(lightning_accept)(float* states, const scalar_t* chain, const float* __restrict__ decay,
                             const DraftTree* tree, int num_slots, int num_heads, int chain_rows) {
  pdl_begin();
  const int head = blockIdx.y, layer = blockIdx.z, width = num_heads * HEAD_DIM, slot = tree->slot;
  if (slot < 0) return;
  float* matrix = state_of(states, layer * num_slots + slot, num_heads, head);
  const scalar_t* rows = chain + static_cast<int64_t>(layer) * chain_rows * 2 * width + head * HEAD_DIM;
  const float factor = decay[head * kDecays + 1];
  Columns s;
  s.load(matrix);
  for (int row = 0; row < tree->path_length; row++) {
    const scalar_t* k = rows + static_cast<int64_t>(row) * 2 * width;
    const float4 v = unpack4(load_values(k + width));
#pragma unroll
    for (int i = 0; i < kRows; i++) s.take_up(i, to_float(k[threadIdx.x / kGroups + i * kStride]), v, factor);
  }
  s.store(matrix);
}
#endif
