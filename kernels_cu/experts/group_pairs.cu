// Sorts the pairs of a chunk (a pair is a row with one of its experts) by expert.
//
//   formula   starts[e] = number of pairs of experts below e;  order[starts[e] + i] = pair i of expert e, in ascending order
//   operands  starts (EXPERTS + 1) int32; order (num_pairs) int32; chosen (num_pairs) int32, -1: no expert
//   constants EXPERTS: 1 to 32
//   launch    one block of 1024, static shared memory
//   numerics  integers
//   oracle    a stable sort by expert
//   source    original; a counting sort
//   layout    each warp counts the pairs of each expert in a stretch of its own, by ballots; the lanes of warp 0 then add up
//             how many pairs of their expert come before each stretch. So the order is that of the pairs, not one that atomics
//             happen to give
#if !defined(EXPERTS)
#error "a constant is not defined"
#endif
#include "expert_rows.cuh"

constexpr int kThreads = 1024, kWarps = kThreads / 32;
static_assert(EXPERTS >= 1 && EXPERTS <= kMaxExperts, "EXPERTS must be 1 to 32");

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(group_pairs)(int* __restrict__ starts, int* __restrict__ order, const int* chosen, int num_pairs) {
  __shared__ int counts[kWarps][EXPERTS], firsts[EXPERTS + 1];
  pdl_begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stretch = (num_pairs + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const int begin = min(warp * stretch, num_pairs), length = min(stretch, num_pairs - begin);
  const int own = count_pairs(chosen + begin, length, EXPERTS);
  if (lane < EXPERTS) counts[warp][lane] = own;
  __syncthreads();
  if (warp == 0) {
    int total = 0;
    if (lane < EXPERTS)
      for (int other = 0; other < kWarps; other++) {
        const int count = counts[other][lane];
        counts[other][lane] = total, total += count;
      }
    int end = total;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += before;
    }
    if (lane < EXPERTS) {
      firsts[lane] = end - total, starts[lane] = end - total;
      if (lane == EXPERTS - 1) starts[EXPERTS] = end;
    }
  }
  __syncthreads();
  for (int expert = 0; expert < EXPERTS; expert++) {
    int place = firsts[expert] + counts[warp][expert];
    for (int base = 0; base < length; base += 32) {
      const bool is_taker = base + lane < length && chosen[begin + base + lane] == expert;
      const uint32_t takers = __ballot_sync(kAllLanes, is_taker);
      if (is_taker) order[place + __popc(takers & ((1u << lane) - 1))] = begin + base + lane;
      place += __popc(takers);
    }
  }
}
