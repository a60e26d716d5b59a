// Finds the k best tokens of every row of a draft's logits, with their log-probabilities.
//
//   formula   the k largest logits in descending order, the lower row of the draft's head first among equals; id =
//             token_map[row of the head], or that row itself without a map; logprob = logit - max - log sum exp(logit - max)
//   operands  ids (rows, k) int32; logprobs (rows, k) float32; logits (rows, VOCAB) float32; slots (rows) int32, -1: the
//             row is padding and gets id 0 and log-probability -infinity; token_map (VOCAB) int32, or null
//   constants VOCAB: rows of the draft's head. PORTABLE: 1 leaves clusters out on sm_90 and later too
//   launch    grid (blocks of a row, rows), block 512; 8 blocks of a row, a cluster, on sm_90 and later unless PORTABLE,
//             else 1; 9 KB of static shared memory
//   numerics  float32, no contraction; probabilities are rounded to multiples of 2^-40 of the largest and summed as
//             integers, so the order of summation does not matter
//   oracle    reference/draft_tree.py top_k
//   source    original
//   layout    the threads form 128 groups; the k-th largest of the groups' maxima is a lower bound for the k-th largest logit.
//             The logits that reach the bound, mostly little more than k, go into one list. A thread for each of them counts
//             how many go before it, which is its rank. That takes two passes over the row, the second one from L1 or L2. If
//             more than kListed logits reach the bound, the row is searched k times instead
#if !defined(VOCAB) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "ordered_float.cuh"
#include "row_blocks.cuh"

constexpr int kThreads = 512;
constexpr int kGroups = 128;  // groups that the threads of a row form
constexpr int kGroupThreads = kThreads * kBlocks / kGroups;
constexpr int kListed = 1024;
constexpr int kQuads = (VOCAB + 3) / 4;
constexpr int kBlockQuads = (kQuads + kBlocks - 1) / kBlocks;
static_assert(kGroupThreads == 4 || kGroupThreads == 32, "a group lies in one warp");

struct Shared {
  uint32_t maxima[kGroups];
  uint64_t listed[kListed];  // in the row's first block only: the logits of the row that reach the bound
  uint64_t masses[kBlocks];
  uint64_t best[2][kBlocks];
  uint64_t warps[kThreads / 32];
  uint32_t num_listed;
  uint32_t bound;
};

// Calls visit(logit, row of the head) for this thread's share of the block's tokens.
template <typename Visit>
DEVICE void for_each(const float* logits, Visit visit) {
  const int first = blockIdx.x * kBlockQuads, end = min(first + kBlockQuads, kQuads);
#pragma unroll 4
  for (int quad = first + threadIdx.x; quad < end; quad += kThreads) {
    float values[4];
    load_logits<VOCAB>(values, logits, quad);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (VOCAB % 4 == 0 || quad * 4 + i < VOCAB) visit(values[i], quad * 4 + i);
    }
  }
}

// Adds to `local` in the shared memory of the row's first block and returns the value before.
DEVICE uint32_t add_to_first(uint32_t* local, uint32_t value) {
  if constexpr (kBlocks == 1) return atomicAdd(local, value);
  uint32_t old;
  asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(peer_address(local, 0)), "r"(value)
               : "memory");
  return old;
}

// Returns the sum (SUM) or the maximum of the values of the block's threads, to all of them.
template <bool SUM>
DEVICE uint64_t block_combine(Shared* shared, uint64_t value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    value = SUM ? value + other : (value > other ? value : other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared->warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared->warps[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / 32; warp++) {
    const uint64_t other = shared->warps[warp];
    value = SUM ? value + other : (value > other ? value : other);
  }
  return value;
}

// The results of a row. `maximum` and `log_sum` turn a logit into its log-probability.
struct Output {
  int32_t* ids;
  float* logprobs;
  const int32_t* token_map;
  float maximum, log_sum;

  DEVICE void write(int rank, uint64_t best) const {
    const int row = token_of(best);
    ids[rank] = token_map ? token_map[row] : row;
    logprobs[rank] = __fsub_rn(__fsub_rn(unordered(static_cast<uint32_t>(best >> 32)), maximum), log_sum);
  }
};

// Finds the k best tokens one after another: each is the largest candidate below the one before. All blocks of the row.
DEVICE void search(Shared* shared, const float* logits, int k, const Output& output) {
  uint64_t previous = ~0ull;
#pragma unroll 1
  for (int rank = 0; rank < k; rank++) {
    uint64_t best = 0;
    for_each(logits, [&](float logit, int row) {
      const uint64_t other = candidate(logit, row);
      if (other < previous && other > best) best = other;
    });
    best = block_combine<false>(shared, best);
    // Two sets take turns: a block may store its next value while another still reads this one.
    if (threadIdx.x < kBlocks) store_peer(&shared->best[rank % 2][blockIdx.x], threadIdx.x, best);
    row_barrier();
    previous = 0;
    for (int block = 0; block < kBlocks; block++) previous = max(previous, shared->best[rank % 2][block]);
    if (blockIdx.x == 0 && threadIdx.x == 0) output.write(rank, previous);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) ROW_BLOCKS
    KERNEL(draft_top_k)(int32_t* __restrict__ ids, float* __restrict__ logprobs, const float* logits,
                        const int32_t* slots, const int32_t* __restrict__ token_map, int k) {
  __shared__ Shared shared;
  pdl_launch_dependents();
  row_arrive();  // with row_wait: a block writes into another's shared memory only once that block runs
  if (threadIdx.x == 0) shared.num_listed = 0;
  pdl_wait();
  row_wait();
  ids += blockIdx.y * k;
  logprobs += blockIdx.y * k;
  logits += static_cast<int64_t>(blockIdx.y) * VOCAB;
  if (slots[blockIdx.y] < 0) {
    if (blockIdx.x == 0 && threadIdx.x < k) ids[threadIdx.x] = 0, logprobs[threadIdx.x] = __uint_as_float(0xFF800000u);
    return;
  }
  uint32_t largest = 0;
  for_each(logits, [&](float logit, int) { largest = max(largest, ordered(logit)); });
#pragma unroll
  for (int distance = kGroupThreads / 2; distance > 0; distance /= 2) {
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
  }
  const int group = (blockIdx.x * kThreads + threadIdx.x) / kGroupThreads;
  if (threadIdx.x % kGroupThreads < kBlocks) store_peer(&shared.maxima[group], threadIdx.x % kGroupThreads, largest);
  row_barrier();
  if (threadIdx.x < kGroups) {
    const uint32_t own = shared.maxima[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < kGroups; i++) rank += shared.maxima[i] > own || (shared.maxima[i] == own && i < threadIdx.x);
    if (rank == k - 1) shared.bound = own;
    if (rank == 0) shared.warps[0] = own;
  }
  __syncthreads();
  const uint32_t bound = shared.bound;
  const float maximum = unordered(static_cast<uint32_t>(shared.warps[0]));
  uint64_t mass = 0;
  for_each(logits, [&](float logit, int row) {
    mass += mass_of(__fsub_rn(logit, maximum));
    if (ordered(logit) < bound) return;
    const uint32_t place = add_to_first(&shared.num_listed, 1);
    if (place < kListed) store_peer(&shared.listed[place], 0, candidate(logit, row));
  });
  mass = block_combine<true>(&shared, mass);
  if (threadIdx.x < kBlocks) store_peer(&shared.masses[blockIdx.x], threadIdx.x, mass);
  row_barrier();
  mass = 0;
  for (int block = 0; block < kBlocks; block++) mass += shared.masses[block];
  const Output output = {ids, logprobs, token_map, maximum, logf(static_cast<float>(mass) * 0x1p-40f)};
  // All blocks branch on the first block's count; the barrier keeps that block alive until they have read it.
  const uint32_t count = load_peer(&shared.num_listed, 0);
  row_barrier();
  if (count > kListed) {
    search(&shared, logits, k, output);
  } else if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint64_t own = shared.listed[i];
      int rank = 0;
      for (int other = 0; other < count; other++) rank += shared.listed[other] > own;
      if (rank < k) output.write(rank, own);
    }
  }
}
