// Partial results of an attention row and their merging, also across the blocks of a cluster. Where IN_CLUSTERS is not
// defined a block is alone: the cluster's barrier is the block's, and its peers' memory its own.
#pragma once

#include "attention.cuh"

struct Partial {
  float4 out;  // normalised
  float log_sum;
};

// Mean of `count` partials weighted by their sums of weights, in index order. BATCH loads are in flight at a time.
template <int BATCH, typename Load>
__device__ __forceinline__ Partial merge(int count, Load load) {
  Partial total = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kNoMaximum};
  float sum = 0.0f;
  for (int first = 0; first < count; first += BATCH) {
    Partial parts[BATCH];
    float top = total.log_sum;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      parts[i] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kNoMaximum};
      if (first + i < count) parts[i] = load(first + i);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) top = fmaxf(top, parts[i].log_sum);
    const float keep = exp2_fast(total.log_sum - top);
    total = {make_float4(total.out.x * keep, total.out.y * keep, total.out.z * keep, total.out.w * keep), top};
    sum *= keep;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const float weight = exp2_fast(parts[i].log_sum - top);
      sum += weight;
      total.out.x = fmaf(weight, parts[i].out.x, total.out.x);
      total.out.y = fmaf(weight, parts[i].out.y, total.out.y);
      total.out.z = fmaf(weight, parts[i].out.z, total.out.z);
      total.out.w = fmaf(weight, parts[i].out.w, total.out.w);
    }
  }
  const float inverse = 1.0f / sum;
  return {make_float4(total.out.x * inverse, total.out.y * inverse, total.out.z * inverse, total.out.w * inverse),
      total.log_sum + log2_fast(sum)};
}

__device__ __forceinline__ void cluster_arrive() {
#ifdef IN_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void cluster_wait() {
#ifdef IN_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t peer_address(uint32_t address, int rank) {
#ifdef IN_CLUSTERS
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}

__device__ __forceinline__ Partial load_peer(uint32_t out, uint32_t log_sum) {
  Partial part;
#ifdef IN_CLUSTERS
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(part.out.x), "=f"(part.out.y), "=f"(part.out.z), "=f"(part.out.w)
                 : "r"(out) : "memory");
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part.log_sum) : "r"(log_sum) : "memory");
#else
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(part.out.x), "=f"(part.out.y), "=f"(part.out.z), "=f"(part.out.w)
                 : "r"(out) : "memory");
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part.log_sum) : "r"(log_sum) : "memory");
#endif
  return part;
}
