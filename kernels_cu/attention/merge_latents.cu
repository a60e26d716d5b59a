// merge_latents: merges the runs of latent_attention and makes values of the weighted latents, for the rows of a step.
//
// out[t, h, :] = up[h, N:, :] sum_r w_r means[t, r, h, :] / sum_r w_r,  w_r = 2^log_sums[t, h, r],  over the row's runs
//
// out            [T, HEADS * U] scalar_t row-major, U = VALUE_DIM; a row of slot -1 becomes zeros
// means          [T, num_splits, HEADS, C] float32, C = KV_RANK: what latent_attention leaves
// log_sums       [T, HEADS, num_splits] float32, likewise; num_splits is at most 256
// up             [HEADS, NOPE_DIM + U, C] scalar_t row-major
// positions      [T] int32; slots [T] int32
// constants      HEADS: query heads. KV_RANK: elements of a latent: 256, 512 or 1024. NOPE_DIM: rows of up before those of the
//                values. VALUE_DIM: elements of a value, a multiple of 16
// grid           (HEADS, b), b at most T: block y takes the rows y, y + b and so on; block 512; 8192 + 4 C bytes of static shared
//                memory
// launched after latent_attention, which starts once all kernels before the two products in front of absorb_queries have finished: so
//                positions and slots are read before pdl_wait
// numerics       float32: each of G = 2048 / C groups of threads adds up every G-th run in order, then the groups are added in order; of a
//                product with up a lane's columns in order, then the lanes; rounded once
// oracle         NumpyOps.decode_latent_attention
// source         arXiv 2405.04434; Flash-Decoding (Dao et al. 2023)
// layout         As in absorb_queries a block holds its head's part of up in registers, read before the wait, a warp U / 16 rows. A thread
//                has four columns of every G-th run, and asks for up to 16 of these at a time. Every warp finds the shares of all runs by
//                itself, 32 at a time in its lanes, while the first of them are on their way
#if !defined(HEADS) || !defined(KV_RANK) || !defined(NOPE_DIM) || !defined(VALUE_DIM)
#error "a constant is not defined"
#endif
#include "latent_cut.cuh"

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kRunThreads = KV_RANK / 4;      // threads that take a run, four columns each
constexpr int kGroups = kThreads / kRunThreads;  // groups of kRunThreads threads
constexpr int kWarpRows = VALUE_DIM / kWarps;
constexpr int kSpans = KV_RANK / 256;         // spans of 256 columns, 8 for each lane
constexpr int kMostRuns = 256, kLaneRuns = kMostRuns / 32;   // most runs of a row; how many of them a lane keeps the share of
constexpr int kFewRuns = 32;  // with at most so many runs of a row the next kernel is released before their means are asked for
constexpr int kBatch = KV_RANK == 256 ? 16 : 8;  // runs that a thread reads at a time
static_assert(kThreads % kRunThreads == 0 && kRunThreads % 32 == 0 && KV_RANK % 256 == 0 && VALUE_DIM % kWarps == 0,
              "sizes that the kernel does not take");

DEVICE float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
  return x;
}
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
  return x;
}

// Finds each run's share of a head's result: share[i] is that of run 32 i + lane, 0 if it does not exist.
DEVICE void share_runs(float (&share)[kLaneRuns], const float* log_sums, int num_runs, int lane) {
  float top = kNoMaximum, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kLaneRuns; i++) {
    if (i * 32 >= num_runs) break;
    share[i] = i * 32 + lane < num_runs ? log_sums[i * 32 + lane] : kHiddenScore;
    top = fmaxf(top, share[i]);
  }
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < kLaneRuns; i++) {
    if (i * 32 >= num_runs) break;
    sum += share[i] = exp2_fast(share[i] - top);
  }
  const float inverse = 1.0f / warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kLaneRuns; i++) {
    if (i * 32 >= num_runs) break;
    share[i] *= inverse;
  }
}

// Asks for the thread's four columns of the runs first + group, first + group + kGroups and so on; the last run takes the place of those
// that do not exist.
DEVICE void load_runs(float4 (&values)[kBatch], const float* results, int first, int group, int num_runs) {
#pragma unroll
  for (int b = 0; b < kBatch; b++) {
    if (first + b * kGroups >= num_runs) break;
    const int run = min(first + b * kGroups + group, num_runs - 1);
    values[b] = load_now(reinterpret_cast<const float4*>(results + static_cast<int64_t>(run) * (HEADS * KV_RANK)));
  }
}

// Returns the thread's part of sum_r share_r means[r].
DEVICE float4 merge_runs(const float* results, const float* log_sums, int group, int num_runs, int lane) {
  float share[kLaneRuns];
  float4 values[kBatch], sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  load_runs(values, results, 0, group, num_runs);
  pdl_launch_dependents();
  share_runs(share, log_sums, num_runs, lane);
#pragma unroll
  for (int turn = 0; turn < kMostRuns / kGroups; turn++) {
    if (turn * kGroups >= num_runs) break;
    if (turn > 0 && turn % kBatch == 0) load_runs(values, results, turn * kGroups, group, num_runs);
    const float4 v = values[turn % kBatch];
    const float w = __shfl_sync(0xFFFFFFFFu, share[turn * kGroups / 32], turn * kGroups % 32 + group);
    sum.x = fmaf(w, v.x, sum.x), sum.y = fmaf(w, v.y, sum.y);
    sum.z = fmaf(w, v.z, sum.z), sum.w = fmaf(w, v.w, sum.w);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(merge_latents)(scalar_t* __restrict__ out, const float* means, const float* log_sums,
                          const scalar_t* __restrict__ up, const int* positions, const int* slots, int num_rows,
                          int num_splits) {
  __shared__ __align__(16) float parts[kGroups][KV_RANK];
  __shared__ __align__(16) float latent[KV_RANK];
  const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = threadIdx.x % kRunThreads * 4, group = threadIdx.x / kRunThreads;
  const int first_column = column / 16 * 16 + column % 16 / 2;   // the columns that are stored at `column`: this one, the next, and both + 8
  const scalar_t* own = up + (static_cast<int64_t>(head) * (NOPE_DIM + VALUE_DIM) + NOPE_DIM + warp * kWarpRows) * KV_RANK;
  uint4 weights[kWarpRows][kSpans];
#pragma unroll
  for (int d = 0; d < kWarpRows; d++)
#pragma unroll
    for (int span = 0; span < kSpans; span++)
      weights[d][span] = load16_past_l1(own + d * KV_RANK + span * 256 + lane * 8);
  int length = length_of(blockIdx.y, positions, slots);
  // With many runs the next kernel is released only when their first means have been asked for: its loads of weights would be in the way.
  if (LatentCut(length, num_splits).num_runs <= kFewRuns) pdl_launch_dependents();
  pdl_wait();
  for (int row = blockIdx.y; row < num_rows; row += gridDim.y) {
    if (row > static_cast<int>(blockIdx.y)) length = length_of(row, positions, slots);
    const LatentCut cut(length, num_splits);
    const float* results = means + means_of(row, num_splits) + head * KV_RANK + column;
    const float4 part = merge_runs(results, log_sums + log_sums_of(row, head, num_splits), group, cut.num_runs, lane);
    *reinterpret_cast<float2*>(&parts[group][first_column]) = make_float2(part.x, part.y);
    *reinterpret_cast<float2*>(&parts[group][first_column + 8]) = make_float2(part.z, part.w);
    __syncthreads();
    for (int c = threadIdx.x; c < KV_RANK; c += kThreads) {
      float total = parts[0][c];
#pragma unroll
      for (int other = 1; other < kGroups; other++) total += parts[other][c];
      latent[c] = total;
    }
    __syncthreads();
    float sums[kWarpRows] = {};
#pragma unroll
    for (int span = 0; span < kSpans; span++) {
      const float4* eight = reinterpret_cast<const float4*>(latent + span * 256 + lane * 8);
      const float4 low = eight[0], high = eight[1];
      const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int d = 0; d < kWarpRows; d++) {
        const uint4 held = packed(weights[d][span]);
        const uint32_t* pairs = &held.x;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 w = unpack2(pairs[e]);
          sums[d] = fmaf(w.x, values[2 * e], sums[d]);
          sums[d] = fmaf(w.y, values[2 * e + 1], sums[d]);
        }
      }
    }
#pragma unroll
    for (int d = 0; d < kWarpRows; d++) {
      sums[d] = warp_sum(sums[d]);
      if (lane == 0)
        out[(static_cast<int64_t>(row) * HEADS + head) * VALUE_DIM + warp * kWarpRows + d] = from_float(sums[d]);
    }
  }
}
