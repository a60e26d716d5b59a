// pick_blocks: chooses the blocks of 64 tokens that a row attends to, by their scores.
//
//   formula   a row at position i chooses if i + 1 > dense_context; own = i / 64, local = own - local_blocks. Per KV head:
//             score of block b = max(pooled[b].y, pooled[b + 1].x), init_blocks <= b < local;
//             blocks = 0 .. init_blocks - 1, those of the highest scores (of equal scores the lower block), local .. own: num_selected of
//             them, ascending
//   operands  blocks (T, K, num_selected) int32, stored for rows that choose; pooled (T, K, pages_per_sequence, 2) float32
//             by select_blocks.cu; positions, slots (T) int32
//   constants THREADS: threads of a block
//   launch    grid (T, K), block THREADS, 4 * pages_per_sequence bytes of shared memory
//   numerics  comparisons
//   oracle    reference/sparse_attention.py choose_blocks
//   source    InfLLM-v2 (arXiv 2509.24663)
//   layout    the threshold of the choice is found by digits of 10 bits, from the highest: a histogram of those scores that begin with the
//             digits found so far gives the next digit. Mostly two digits are enough. Counts in shared memory do not depend on the
//             order of their additions. Scores are not negative, so that their bits have their order. A thread reads only scores that it
//             has stored itself. Everything else waits while a row's block works alone, so what counts is how many instructions follow one
//             another
#if !defined(THREADS)
#error "a constant is not defined"
#endif
#include "types.cuh"

constexpr int kChoosers = THREADS / 32;
constexpr int kScoreBits = 31;  // a score has no sign
constexpr int kDigitBits = 10;
constexpr int kBins = 1 << kDigitBits;
constexpr int kOwnBins = kBins / THREADS;
static_assert(kBins % THREADS == 0 && kOwnBins % 2 == 0, "whole pairs of bins");

struct Counts {
  int bins[kBins];  // the histogram; zero except while a digit is looked for
  int of_warps[2][kChoosers];  // a number of each warp, for meet()
  int bin, above, inside;  // the threshold's bin, how many scores lie in higher ones, how many in it

  DEVICE void clear() {
    for (int i = threadIdx.x; i < kBins; i += THREADS) bins[i] = 0;
  }
};

// The part of the scores that the calling warp takes: a multiple of 32, except for the last ones.
struct Run {
  int begin, end;

  DEVICE explicit Run(int count) {
    const int length = (count + THREADS - 1) / THREADS * 32;
    begin = threadIdx.x / 32 * length, end = min(begin + length, count);
  }
  // Calls take(i, value_at(i)) for each of this lane's scores. AT_ONCE values are loaded together, before the first of them is taken.
  template <int AT_ONCE, typename ValueAt, typename Take>
  DEVICE void each(ValueAt value_at, Take take) const {
#pragma unroll 1
    for (int first = begin + static_cast<int>(threadIdx.x & 31); first < end; first += AT_ONCE * 32) {
      uint32_t values[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) values[i] = first + i * 32 < end ? value_at(first + i * 32) : 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        if (first + i * 32 < end) take(first + i * 32, values[i]);
      }
    }
  }
  // Calls take(score) for each of this lane's scores.
  template <typename Take>
  DEVICE void each(const uint32_t* scores, Take take) const {
    each<2>([&](int i) { return scores[i]; }, [&](int, uint32_t score) { take(score); });
  }
};

// Returns the sum of a number of each warp, and the sum over the warps before the calling one. All threads call it.
DEVICE int2 meet(int of_warp, int (&of_warps)[kChoosers]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  if (lane == 0) of_warps[warp] = of_warp;
  __syncthreads();
  const int part = lane < kChoosers ? of_warps[lane] : 0;
  return make_int2(__reduce_add_sync(0xFFFFFFFFu, part), __reduce_add_sync(0xFFFFFFFFu, lane < warp ? part : 0));
}

// Stores in `counts` the bin of the score of rank `wanted` from above, and clears the histogram. A thread has kOwnBins neighbouring bins,
// the first thread the highest. All threads call it.
DEVICE void find_bin(Counts& counts, int wanted) {
  const int lane = threadIdx.x & 31, first = kBins - kOwnBins * (threadIdx.x + 1);
  int bins[kOwnBins], own = 0;
#pragma unroll
  for (int i = 0; i < kOwnBins; i += 2) {
    int2& pair = *reinterpret_cast<int2*>(counts.bins + first + i);
    bins[i] = pair.x, bins[i + 1] = pair.y, pair = make_int2(0, 0);
    own += bins[i] + bins[i + 1];
  }
  const int of_warp = __reduce_add_sync(0xFFFFFFFFu, own);
  int above = meet(of_warp, counts.of_warps[0]).y;
  if (above < wanted && wanted <= above + of_warp) {  // the bin is one of this warp's
    int sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
      if (lane >= distance) sum += other;
    }
    above += sum - own;
#pragma unroll
    for (int i = kOwnBins - 1; i >= 0; i--) {
      if (above < wanted && wanted <= above + bins[i]) {
        counts.bin = first + i, counts.above = above, counts.inside = bins[i];
      }
      above += bins[i];
    }
  }
  __syncthreads();
}

// Returns the largest threshold that at least `wanted` scores reach, or a lower one that exactly `wanted` scores reach. The histogram must
// hold the first digits of all scores.
DEVICE uint32_t threshold(const uint32_t* scores, const Run& run, int wanted, Counts& counts) {
  int shift = kScoreBits - kDigitBits;
  find_bin(counts, wanted);
  uint32_t found = counts.bin;
  wanted -= counts.above;
#pragma unroll 1
  while (counts.inside > wanted && shift > 0) {
    const int next = max(shift - kDigitBits, 0);
    run.each(scores, [&](uint32_t score) {
      if (score >> shift == found) atomicAdd(counts.bins + (score >> next & ((1 << (shift - next)) - 1)), 1);
    });
    __syncthreads();
    find_bin(counts, wanted);
    found = found << (shift - next) | counts.bin, shift = next;
    wanted -= counts.above;
  }
  return found << shift;
}

// Positions and slots are read before pdl_wait, as in select_blocks.cu: they are older than the product that made q.
extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL(pick_blocks)(int* blocks, const float2* pooled, const int* positions, const int* slots,
                        int pages_per_sequence, int num_selected, int init_blocks, int local_blocks,
                        int dense_context) {
  extern __shared__ uint32_t scores[];  // scores of blocks init_blocks .. local - 1
  __shared__ Counts counts;
  const int row = blockIdx.x, lane = threadIdx.x & 31;
  const int position = __ldcg(positions + row);
  const bool chooses = __ldcg(slots + row) >= 0 && position + 1 > dense_context;
  counts.clear();
  __syncthreads();
  pdl_wait();
  pdl_launch_dependents();
  if (!chooses) return;
  const int64_t unit = static_cast<int64_t>(row) * gridDim.y + blockIdx.y;
  const int local = position / kPageTokens - local_blocks, count = local - init_blocks;
  const int wanted = num_selected - local_blocks - 1 - init_blocks;
  const Run run(count);
  pooled += unit * pages_per_sequence + init_blocks;
  blocks += unit * num_selected;
  run.each<4>([&](int i) { return __float_as_uint(fmaxf(pooled[i].y, pooled[i + 1].x)) & 0x7FFFFFFFu; },
              [&](int i, uint32_t score) {
                scores[i] = score;
                atomicAdd(counts.bins + (score >> (kScoreBits - kDigitBits)), 1);
              });
#pragma unroll 1
  for (int i = threadIdx.x; i < init_blocks; i += THREADS) blocks[i] = i;
#pragma unroll 1
  for (int i = threadIdx.x; i <= local_blocks; i += THREADS) blocks[init_blocks + wanted + i] = local + i;
  if (wanted == 0) return;
  __syncthreads();
  const uint32_t least = threshold(scores, run, wanted, counts);

  // A bit for each score above the threshold, and one for each equal to it. They say how many blocks are taken before a block.
  uint32_t num_above = 0, num_equal = 0;
  const auto bits_at = [&](int first, uint32_t& above, uint32_t& equal) {
    const uint32_t score = first + lane < run.end ? scores[first + lane] : 0;
    above = __ballot_sync(0xFFFFFFFFu, score > least);
    equal = __ballot_sync(0xFFFFFFFFu, first + lane < run.end && score == least);
  };
#pragma unroll 2
  for (int first = run.begin; first < run.end; first += 32) {
    uint32_t above, equal;
    bits_at(first, above, equal);
    num_above += __popc(above), num_equal += __popc(equal);
  }
  const int2 both = meet(static_cast<int>(num_above | num_equal << 16), counts.of_warps[1]);
  const int equal_taken = wanted - (both.x & 0xFFFF);  // how many of the equal ones are taken: the first
  int above_before = both.y & 0xFFFF, equal_before = static_cast<uint32_t>(both.y) >> 16;
  const uint32_t lower_lanes = (1u << lane) - 1;
#pragma unroll 2
  for (int first = run.begin; first < run.end; first += 32) {
    uint32_t above, equal;
    bits_at(first, above, equal);
    const int num_lower = above_before + __popc(above & lower_lanes), rank = equal_before + __popc(equal & lower_lanes);
    if (above >> lane & 1 || (equal >> lane & 1 && rank < equal_taken)) {
      blocks[init_blocks + num_lower + min(rank, equal_taken)] = init_blocks + first + lane;
    }
    above_before += __popc(above), equal_before += __popc(equal);
  }
}
