// The router of a mixture of experts: chooses the experts of each row and computes their shares.
//
//   formula   n = round(x / sqrt(mean(x^2) + eps) * norm);  scores[e] = n . router[e];  chosen = the TOP experts with the highest
//             scores, of equal ones the lower index; shares = softmax over their scores
//   operands  chosen (T, TOP) int32, ascending, -1 in rows of slot -1; shares (T, TOP) float; normed (T, HIDDEN) scalar_t, n;
//             x (T, HIDDEN), norm (HIDDEN), router (EXPERTS, HIDDEN) scalar_t, row-major; slots (T) int32
//   constants HIDDEN: elements of a row, a multiple of 8. EXPERTS: 1 to 32. TOP: experts of a row, 1 to EXPERTS. ROUTE_WARPS: warps of
//             a block, the same in every kernel that scores rows of this size
//   launch    grid T, block 32 * ROUTE_WARPS, static shared memory
//   numerics  float32, summed as route_row.cuh says; n is rounded once. In the choice a NaN score counts as -infinity
//   oracle    NumpyOps.route
//   source    Mixture of experts with a softmax over the chosen scores, arXiv 2401.04088; RMSNorm arXiv 1910.07467
//   layout    one block for each row. Its threads start to load norm and router, which come from memory, before they wait for x
#if !defined(HIDDEN) || !defined(EXPERTS) || !defined(TOP) || !defined(ROUTE_WARPS)
#error "a constant is not defined"
#endif
#include "route_row.cuh"

extern "C" __global__ void __launch_bounds__(kRouteThreads)
    KERNEL(route)(int* __restrict__ chosen, float* __restrict__ shares, scalar_t* __restrict__ normed, const scalar_t* x,
                  const scalar_t* __restrict__ norm, const scalar_t* __restrict__ router, const int* slots, float eps) {
  __shared__ RouteSums sums;
  __shared__ __align__(16) unsigned char held[kRouteBytes > 0 ? kRouteBytes : 16];
  pdl_launch_dependents();
  const RouteWeights weights{norm, router, shared_address(held)};
  weights.begin();
  pdl_wait();
  const int64_t row = blockIdx.x;
  const bool is_padding = slots[row] < 0;
  const float score = score_row(sums, weights, x + row * HIDDEN, eps,
                                [&](int column, uint4 piece) { store16(normed + row * HIDDEN + column, piece); });
  if (threadIdx.x < 32) Choice(score).store(chosen + row * TOP, shares + row * TOP, score, is_padding);
}
