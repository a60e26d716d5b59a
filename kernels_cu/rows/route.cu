// The router of a mixture of experts: which experts each row takes, and their shares.
//
//   formula   n = round(x / sqrt(mean(x^2) + eps) * norm);  scores[e] = n . router[e];  the TOP highest, of equal ones the lower
//             index; shares = softmax over their scores
//   operands  chosen (T, TOP) int32, ascending, -1 in rows of slot -1; shares (T, TOP) float; normed (T, HIDDEN) scalar_t, n;
//             x (T, HIDDEN), norm (HIDDEN), router (EXPERTS, HIDDEN) scalar_t, row-major; slots (T) int32
//   constants HIDDEN: elements of a row, a multiple of 8. EXPERTS: 1 to 32. TOP: experts of a row, 1 to EXPERTS
//   launch    grid T, block 256, static shared memory
//   numerics  float32: a thread's products in order, then lanes, then warps; n is rounded once. A score that is no number
//             counts as lowest
//   oracle    NumpyOps.route
//   source    Mixture of experts with a softmax over the chosen scores, arXiv 2401.04088; RMSNorm arXiv 1910.07467
//   layout    a block a row. Its threads ask for x and for their columns of norm and router at once, and keep them
#if !defined(HIDDEN) || !defined(EXPERTS) || !defined(TOP)
#error "a constant is not defined"
#endif
#include "norm_row.cuh"
#include "ordered_float.cuh"

static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");
static_assert(EXPERTS >= 1 && EXPERTS <= 32 && TOP >= 1 && TOP <= EXPERTS, "EXPERTS must be 1 to 32, TOP at most as many");

constexpr int kTurns = (HIDDEN / 8 + kThreads - 1) / kThreads, kWarps = kThreads / 32;
// Columns of the router that a thread asks for together with x; those of more experts are read when they are needed.
constexpr int kHeldExperts = EXPERTS * kTurns <= 16 ? EXPERTS : 0;

DEVICE float dot(uint4 a, uint4 b, float sum) {
  const uint32_t *left = &a.x, *right = &b.x;
#pragma unroll
  for (int word = 0; word < 4; word++) {
    const float2 v = unpack2(left[word]), w = unpack2(right[word]);
    sum = fmaf(v.y, w.y, fmaf(v.x, w.x, sum));
  }
  return sum;
}

// Chooses among the scores of the lanes below EXPERTS and writes what the row takes. One warp.
DEVICE void choose(float score, bool is_padding, int* chosen, float* shares) {
  constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
  const int lane = threadIdx.x;
  // As integers of the same order: not a number counts as minus infinity, which is above 0, a lane that takes no part.
  uint32_t key = lane < EXPERTS ? ordered(score == score ? score : __int_as_float(0xFF800000)) : 0;
  uint32_t taken = 0, highest = 0;
#pragma unroll
  for (int turn = 0; turn < TOP; turn++) {
    const uint32_t best = __reduce_max_sync(kAllLanes, key);
    const int winner = __ffs(__ballot_sync(kAllLanes, key == best)) - 1;
    if (turn == 0) highest = best;
    if (lane == winner) key = 0;
    taken |= 1u << winner;
  }
  const bool is_taken = taken >> lane & 1;
  const float weight = is_taken ? expf(score - unordered(highest)) : 0.0f;
  float total = weight;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(kAllLanes, total, distance);
  const int place = __popc(taken & ((1u << lane) - 1));
  if (is_taken) {
    chosen[place] = is_padding ? -1 : lane;
    shares[place] = weight / total;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(route)(int* __restrict__ chosen, float* __restrict__ shares, scalar_t* __restrict__ normed, const scalar_t* x,
                  const scalar_t* __restrict__ norm, const scalar_t* __restrict__ router, const int* slots, float eps) {
  __shared__ float sums[kWarps], scores[kWarps][EXPERTS];
  pdl_launch_dependents();
  const int64_t row = blockIdx.x;
  pdl_wait();
  uint4 held[kTurns], weights[kTurns], columns[kHeldExperts > 0 ? kHeldExperts : 1][kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    if (column >= HIDDEN) continue;
    weights[turn] = load16_streamed(norm + column);
#pragma unroll
    for (int expert = 0; expert < kHeldExperts; expert++)
      columns[expert][turn] = load16_streamed(router + expert * HIDDEN + column);
  }
  float sum = 0.0f;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    held[turn] = column < HIDDEN ? load16_written(x + row * HIDDEN + column) : make_uint4(0, 0, 0, 0);
  }
  const bool is_padding = slots[row] < 0;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++)
    sum += squares(held[turn].x) + squares(held[turn].y) + squares(held[turn].z) + squares(held[turn].w);
  const float scale = 1.0f / sqrtf(block_sum(sum, sums) / HIDDEN + eps);
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const int column = (turn * kThreads + threadIdx.x) * 8;
    if (column >= HIDDEN) continue;
    const uint4 v = held[turn], w = weights[turn];
    held[turn] = make_uint4(normalised(v.x, w.x, scale), normalised(v.y, w.y, scale), normalised(v.z, w.z, scale),
                            normalised(v.w, w.w, scale));
    store16(normed + row * HIDDEN + column, held[turn]);
  }
#pragma unroll
  for (int expert = 0; expert < EXPERTS; expert++) {
    float score = 0.0f;
#pragma unroll
    for (int turn = 0; turn < kTurns; turn++) {
      const int column = (turn * kThreads + threadIdx.x) * 8;
      if (column < HIDDEN)
        score = dot(held[turn], kHeldExperts > 0 ? columns[expert][turn] : load16(router + expert * HIDDEN + column), score);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) score += __shfl_xor_sync(0xFFFFFFFFu, score, distance);
    if (threadIdx.x % 32 == 0) scores[threadIdx.x / 32][expert] = score;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  float total = 0.0f;
  if (threadIdx.x < EXPERTS)
    for (int warp = 0; warp < kWarps; warp++) total += scores[warp][threadIdx.x];
  choose(total, is_padding, chosen + row * TOP, shares + row * TOP);
}
