// The blocks of 64 tokens that a row looks at, from their scores; and which rows of a chunk look at all of them.
//
//   formula   a row at position i chooses if i + 1 > dense_context; own = i / 64, local = own - local_blocks. Per KV head:
//             score of block b = max(pooled[b].y, pooled[b + 1].x), init_blocks <= b < local;
//             blocks = 0 .. init_blocks - 1, those of the highest scores, the lower one of equals, local .. own:
//             num_selected of them, ascending;
//             dense_chunk = (slot, start, rows of the chunk that do not choose, 0)
//   operands  blocks (T, K, num_selected) int32, stored for rows that choose; pooled (T, K, pages_per_sequence, 2) float32
//             by select_blocks.cu; positions, slots (T) int32; chunk, dense_chunk (4) int32: slot, start, count
//   launch    pick_blocks: grid (T, K), block 512, 4 * pages_per_sequence bytes of shared memory; dense_rows: grid 1, block 1
//   numerics  comparisons
//   oracle    reference/sparse_attention.py choose_blocks
//   source    InfLLM-v2 (arXiv 2509.24663)
//   layout    the threshold of the choice is found bit by bit, by counting: no atomics, and no order to depend on. Scores
//             are not negative, so that their bits have their order
#include "types.cuh"

constexpr int kPageTokens = 64;
constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;

// Of all threads; everyone gets it. Two sets of partial counts in turns: a warp may be here again while another still reads.
__device__ __forceinline__ int block_count(int count, int (&counts)[2][kWarps], int turn) {
  const int lane = threadIdx.x & 31;
  count = __reduce_add_sync(0xFFFFFFFFu, count);
  if (lane == 0) counts[turn & 1][threadIdx.x / 32] = count;
  __syncthreads();
  return __reduce_add_sync(0xFFFFFFFFu, lane < kWarps ? counts[turn & 1][lane] : 0);
}

// The largest key that `wanted` of `count` keys are not below; or less, if then these are exactly so many.
__device__ __forceinline__ uint32_t threshold(const uint32_t* keys, int count, int wanted, int (&counts)[2][kWarps]) {
  uint32_t found = 0;
#pragma unroll 1
  for (int bit = 30; bit >= 0; bit--) {  // a score has no sign
    const uint32_t key = found | 1u << bit;
    int mine = 0;
    for (int i = threadIdx.x; i < count; i += kThreads) mine += keys[i] >= key;
    const int kept = block_count(mine, counts, bit);
    if (kept >= wanted) found = key;
    if (kept == wanted) break;
  }
  return found;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(pick_blocks)(int* blocks, const float2* pooled, const int* positions, const int* slots,
                        int pages_per_sequence, int num_selected, int init_blocks, int local_blocks,
                        int dense_context) {
  extern __shared__ uint32_t keys[];  // of blocks init_blocks .. local - 1
  __shared__ int counts[2][kWarps], above[kWarps], equal[kWarps];
  pdl_wait();
  pdl_launch_dependents();
  const int row = blockIdx.x, position = positions[row], lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  if (slots[row] < 0 || position + 1 <= dense_context) return;
  const int64_t unit = static_cast<int64_t>(row) * gridDim.y + blockIdx.y;
  const int local = position / kPageTokens - local_blocks, count = local - init_blocks;
  const int wanted = num_selected - local_blocks - 1 - init_blocks;
  pooled += unit * pages_per_sequence + init_blocks;
  blocks += unit * num_selected;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    keys[i] = __float_as_uint(fmaxf(pooled[i].y, pooled[i + 1].x)) & 0x7FFFFFFFu;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < init_blocks; i += kThreads) blocks[i] = i;
  for (int i = threadIdx.x; i <= local_blocks; i += kThreads) blocks[init_blocks + wanted + i] = local + i;
  if (wanted == 0) return;
  const uint32_t least = threshold(keys, count, wanted, counts);

  // Every warp has a run of blocks; what is taken before it follows from the counts of the warps before.
  const int run = (count + kThreads - 1) / kThreads * 32, begin = warp * run, end = min(begin + run, count);
  int num_above = 0, num_equal = 0;
  for (int i = begin + lane; i < end; i += 32) num_above += keys[i] > least, num_equal += keys[i] == least;
  num_above = __reduce_add_sync(0xFFFFFFFFu, num_above), num_equal = __reduce_add_sync(0xFFFFFFFFu, num_equal);
  if (lane == 0) above[warp] = num_above, equal[warp] = num_equal;
  __syncthreads();
  int above_before = 0, equal_before = 0, all_above = 0;
  for (int other = 0; other < kWarps; other++) {
    if (other < warp) above_before += above[other], equal_before += equal[other];
    all_above += above[other];
  }
  const int equal_taken = wanted - all_above;  // of the equal ones the first
  const uint32_t lower_lanes = (1u << lane) - 1;
  for (int first = begin; first < end; first += 32) {
    const int i = first + lane;
    const bool is_above = i < end && keys[i] > least, is_equal = i < end && keys[i] == least;
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
