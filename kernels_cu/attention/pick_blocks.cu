// The blocks of 64 tokens that a row looks at, from their scores; and which rows of a chunk look at all of them.
//
//   formula   a row at position i chooses if i + 1 > dense_context; own = i / 64, local = own - local_blocks. Per KV head:
//             score of block b = max(pooled[b].y, pooled[b + 1].x), init_blocks <= b < local;
//             blocks = 0 .. init_blocks - 1, those of the highest scores, the lower one of equals, local .. own:
//             num_selected of them, ascending;
//             dense_chunk = (slot, start, rows of the chunk that do not choose, 0)
//   operands  blocks (T, K, num_selected) int32, stored for rows that choose; pooled (T, K, pages_per_sequence, 2) float32
//             by select_blocks.cu; positions, slots (T) int32; chunk, dense_chunk (4) int32: slot, start, count
//   launch    pick_blocks: grid (T, K), block 128, 256 or 512, 4 * pages_per_sequence bytes of shared memory; dense_rows: grid 1, block 1
//   numerics  comparisons
//   oracle    reference/sparse_attention.py choose_blocks
//   source    InfLLM-v2 (arXiv 2509.24663)
//   layout    the threshold of the choice is found by digits of 11 bits, from the highest: a histogram of those keys that
//             begin as the threshold does says its next digit. Counts in shared memory have no order to depend on. Scores
//             are not negative, so that their bits have their order. A thread reads only keys that it has stored
#include "types.cuh"

constexpr int kMostWarps = 16;
constexpr int kThreads = kMostWarps * 32;
constexpr int kKeyBits = 31;  // a score has no sign
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kAtOnce = 4;
constexpr int kGroups = kBins / 4;

struct Counts {
  int4 bins[kGroups];                         // of a digit's values; zero but in `threshold`
  int first[kMostWarps], second[kMostWarps];  // of each warp
  int digit, above, inside;                   // that the threshold has; keys above it in this digit; with it
};

// A warp's part of the keys.
struct Run {
  int begin, end;

  DEVICE explicit Run(int count) {
    const int threads = blockDim.x, length = (count + threads - 1) / threads * 32;
    begin = threadIdx.x / 32 * length, end = min(begin + length, count);
  }
  // This lane's, kAtOnce at a time: take(i, value_at(i)), once the values of all of them are there.
  template <typename ValueAt, typename Take>
  DEVICE void each(ValueAt value_at, Take take) const {
#pragma unroll 1
    for (int first = begin + static_cast<int>(threadIdx.x & 31); first < end; first += kAtOnce * 32) {
      uint32_t values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) values[i] = first + i * 32 < end ? value_at(first + i * 32) : 0;
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        if (first + i * 32 < end) take(first + i * 32, values[i]);
      }
    }
  }
};

DEVICE int sum_of_warps(const int (&parts)[kMostWarps], int end) {
  const int lane = threadIdx.x & 31;
  return __reduce_add_sync(0xFFFFFFFFu, lane < end ? parts[lane] : 0);
}

DEVICE int sum_of(const int4& bins) { return bins.x + bins.y + bins.z + bins.w; }

// The digit of the key of rank `wanted` from above, out of the bins, which are cleared. A thread has the bins of some groups
// of four, the first thread the highest ones.
DEVICE void find_digit(Counts& counts, int wanted) {
  const int lane = threadIdx.x & 31, groups = kGroups / blockDim.x, highest = kGroups - 1 - threadIdx.x * groups;
  int own = 0;
  for (int group = highest; group > highest - groups; group--) own += sum_of(counts.bins[group]);
  int above = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(0xFFFFFFFFu, above, distance);
    if (lane >= distance) above += other;
  }
  if (lane == 31) counts.first[threadIdx.x / 32] = above;
  __syncthreads();
  above += sum_of_warps(counts.first, threadIdx.x / 32) - own;
  if (above < wanted && wanted <= above + own) {
    int group = highest;
    int4 bins = counts.bins[group];
    for (int sum = sum_of(bins); above + sum < wanted; sum = sum_of(bins)) above += sum, bins = counts.bins[--group];
    int digit = group * 4 + 3, inside = bins.w;
    if (above + inside < wanted) above += inside, inside = bins.z, digit--;
    if (above + inside < wanted) above += inside, inside = bins.y, digit--;
    if (above + inside < wanted) above += inside, inside = bins.x, digit--;
    counts.digit = digit, counts.above = above, counts.inside = inside;
  }
  for (int group = highest; group > highest - groups; group--) counts.bins[group] = make_int4(0, 0, 0, 0);
  __syncthreads();
}

// The largest key that `wanted` keys are not below; or less, if then these are exactly so many.
DEVICE uint32_t threshold(const uint32_t* keys, const Run& run, int wanted, Counts& counts) {
  int* bins = reinterpret_cast<int*>(counts.bins);
  uint32_t found = 0;
#pragma unroll 1
  for (int end = kKeyBits, begin = 0; end > 0; end = begin) {
    begin = max(end - kDigitBits, 0);
    const auto count_digit = [&](int, uint32_t key) {
      const uint32_t digits = (key ^ found) >> begin;
      if (digits >> (end - begin) == 0) atomicAdd(bins + digits, 1);
    };
    run.each([&](int i) { return keys[i]; }, count_digit);
    __syncthreads();
    find_digit(counts, wanted);
    found |= static_cast<uint32_t>(counts.digit) << begin;
    wanted -= counts.above;
    if (counts.inside == wanted) break;
  }
  return found;
}

// Positions and slots are older than the kernel before this one's own wait, so that they are read early.
extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(pick_blocks)(int* blocks, const float2* pooled, const int* positions, const int* slots,
                        int pages_per_sequence, int num_selected, int init_blocks, int local_blocks,
                        int dense_context) {
  extern __shared__ uint32_t keys[];  // of blocks init_blocks .. local - 1
  __shared__ Counts counts;
  const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const int position = __ldcg(positions + row);
  const bool chooses = __ldcg(slots + row) >= 0 && position + 1 > dense_context;
  for (int group = threadIdx.x; group < kGroups; group += blockDim.x) counts.bins[group] = make_int4(0, 0, 0, 0);
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
  run.each([&](int i) { return __float_as_uint(fmaxf(pooled[i].y, pooled[i + 1].x)) & 0x7FFFFFFFu; },
           [&](int i, uint32_t key) { keys[i] = key; });
#pragma unroll 1
  for (int i = threadIdx.x; i < init_blocks; i += blockDim.x) blocks[i] = i;
#pragma unroll 1
  for (int i = threadIdx.x; i <= local_blocks; i += blockDim.x) blocks[init_blocks + wanted + i] = local + i;
  if (wanted == 0) return;
  const uint32_t least = threshold(keys, run, wanted, counts);

  // What is taken before a warp's run follows from the counts of the warps before.
  int num_above = 0, num_equal = 0;
  run.each([&](int i) { return keys[i]; }, [&](int, uint32_t key) { num_above += key > least, num_equal += key == least; });
  num_above = __reduce_add_sync(0xFFFFFFFFu, num_above), num_equal = __reduce_add_sync(0xFFFFFFFFu, num_equal);
  if (lane == 0) counts.first[warp] = num_above, counts.second[warp] = num_equal;
  __syncthreads();
  int above_before = sum_of_warps(counts.first, warp), equal_before = sum_of_warps(counts.second, warp);
  const int equal_taken = wanted - sum_of_warps(counts.first, blockDim.x / 32);  // of the equal ones the first
  const uint32_t lower_lanes = (1u << lane) - 1;
  for (int first = run.begin; first < run.end; first += 32) {
    const int i = first + lane;
    const uint32_t key = i < run.end ? keys[i] : 0;
    const bool is_above = key > least, is_equal = i < run.end && key == least;
    const uint32_t above_here = __ballot_sync(0xFFFFFFFFu, is_above), equal_here = __ballot_sync(0xFFFFFFFFu, is_equal);
    const int num_lower = above_before + __popc(above_here & lower_lanes);
    const int rank = equal_before + __popc(equal_here & lower_lanes);
    if (is_above || (is_equal && rank < equal_taken)) {
      blocks[init_blocks + num_lower + min(rank, equal_taken)] = init_blocks + i;
    }
    above_before += __popc(above_here), equal_before += __popc(equal_here);
  }
}

// The rows of a chunk that look at everything are its first ones: a chunk of these alone.
extern "C" __global__ void KERNEL(dense_rows)(int* dense_chunk, const int* chunk, int dense_context) {
  pdl_wait();
  pdl_launch_dependents();
  const int start = chunk[1];
  dense_chunk[0] = chunk[0], dense_chunk[1] = start, dense_chunk[3] = 0;
  dense_chunk[2] = max(min(chunk[2], dense_context - start), 0);
}
