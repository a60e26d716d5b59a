// Partial results of an attention row and their merging, also across the blocks of a cluster.
#pragma once
#include "cluster.cuh"
#include "decode_cut.cuh"

DEVICE bool is_first_thread() { return threadIdx.x == 0 && (TEAMS == 1 || threadIdx.y == 0); }

// The result of a query row over a part of its keys: a vector, four elements of the output, and the log2 of the sum of weights.
struct Partial {
  float4 out;  // normalised
  float log_sum;
};

// The weighted mean of the partials of a vector so far. `total.log_sum` is the largest of their log_sum; `total.out`, the weighted sum of
// their vectors, and `sum`, the sum of their weights, are in units of 2^total.log_sum.
struct Mean {
  Partial total = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kNoMaximum};
  float sum = 0.0f;

  template <int BATCH>
  DEVICE void add(const Partial (&parts)[BATCH]) {
    float top = total.log_sum;
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
  DEVICE Partial finished() const {
    const float inverse = reciprocal_fast(sum);
    return {make_float4(total.out.x * inverse, total.out.y * inverse, total.out.z * inverse, total.out.w * inverse),
        total.log_sum + log2_fast(sum)};
  }
};

// Adds `count` partials to the mean of each of OWN vectors, weighted by their sums of weights, in index order. load(index, own) returns one
// of them. BATCH loads of every vector are in flight at a time.
template <int BATCH, int OWN, typename Load>
DEVICE void merge(Mean (&means)[OWN], int count, Load load) {
  for (int first = 0; first < count; first += BATCH) {
    Partial parts[OWN][BATCH];
#pragma unroll
    for (int own = 0; own < OWN; ++own)
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        parts[own][i] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), kNoMaximum};
        if (first + i < count) parts[own][i] = load(first + i, own);
      }
#pragma unroll
    for (int own = 0; own < OWN; ++own) means[own].add(parts[own]);
  }
}

// Returns the mean of `count` partials of one vector.
template <int BATCH, typename Load>
DEVICE Partial merge(int count, Load load) {
  Mean mean[1];
  merge<BATCH>(mean, count, [&](int index, int) { return load(index); });
  return mean[0].finished();
}

// Sends 20 bytes to the shared memory of block `rank` of the cluster, whose barrier counts them. `out` and `log_sum`, where they go, and
// `barrier` are addresses in the caller's own shared memory, which are the same in all blocks.
DEVICE void send_partial(uint32_t out, uint32_t log_sum, uint32_t barrier, int rank, const Partial& part) {
  barrier = peer_address(barrier, rank);
  send_float4(peer_address(out, rank), barrier, part.out.x, part.out.y, part.out.z, part.out.w);
  send_float(peer_address(log_sum, rank), barrier, part.log_sum);
}

// Reads a partial that has arrived in shared memory.
DEVICE Partial received_partial(uint32_t out, uint32_t log_sum) {
  Partial part;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(part.out.x), "=f"(part.out.y), "=f"(part.out.z), "=f"(part.out.w)
               : "r"(out)
               : "memory");
  part.log_sum = load_shared_float(log_sum);
  return part;
}

// Adds `count` to a counter and returns whether it is `expected` then: true in the last block to arrive, which sets the counter back to
// zero. What the other blocks wrote before is visible to it: one thread's acquire and release stand for the block, which the barriers order
// around it.
DEVICE bool arrives_last(int* arrivals, int expected, int count = 1) {
  __shared__ bool last;
  __syncthreads();
  if (is_first_thread()) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(arrivals), "r"(count) : "memory");
    last = before + count == expected;
    if (last) *arrivals = 0;
  }
  __syncthreads();
  return last;
}
