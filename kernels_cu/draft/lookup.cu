// Drafts by prompt lookup: the chain is what followed the last few tokens at an earlier occurrence of them.
//
//   formula   end = the last position before the root's where an earlier occurrence of the last 3 tokens ends, else one of the
//             last 2, else one of the last; node i = history[end + 1 + (i - 1) % (position - end)], a chain of num_drafted
//             nodes. If fewer than shortest_match tokens match, the first num_kept nodes stay as they are and the others are
//             padding; with num_kept 0 only the root is set
//   operands  trees (n) DraftTree; token_ids, positions, slots, locations, base (n, num_nodes) int32 and masks
//             (n, num_nodes) uint64: the target's rows; history (B, max_context) int32
//   constants PORTABLE: 1 leaves clusters out on sm_90 and later too
//   launch    grid (blocks of a tree, n), block 1024; 8 blocks, a cluster, on sm_90 and later unless PORTABLE, else 1;
//             under 1 KB of static shared memory
//   numerics  integers
//   oracle    reference/draft_tree.py lookup, chain_nodes
//   source    prompt lookup decoding (Saxena, 2023); original
//   layout    a match is one integer, its length in the bits above its position, and the largest wins. A thread loads 8
//             positions at a time and compares the tokens before one only if it holds the newest token
#if !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "draft_tree.cuh"
#include "row_blocks.cuh"

constexpr int kThreads = 1024;
constexpr int kInFlight = 8;
constexpr int kPositionBits = 28;

// Returns the best earlier match of the tokens that end at position `last` among the thread's positions, as
// length << kPositionBits | end, or 0 without one.
DEVICE uint32_t best_match(const int32_t* history, int last) {
  uint32_t best = 0;
  const int newest = history[last];
  for (int first = blockIdx.x * kThreads + threadIdx.x; first < last; first += kInFlight * kBlocks * kThreads) {
    int tokens[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const int end = first + i * kBlocks * kThreads;
      tokens[i] = end < last ? history[end] : -1;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; i++) {
      const int end = first + i * kBlocks * kThreads;
      if (tokens[i] != newest) continue;
      uint32_t length = 1;
      if (end >= 1 && history[end - 1] == history[last - 1]) {
        length = end >= 2 && history[end - 2] == history[last - 2] ? 3 : 2;
      }
      best = max(best, length << kPositionBits | static_cast<uint32_t>(end));
    }
  }
  return best;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) ROW_BLOCKS
    KERNEL(lookup)(DraftTree* trees, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                   int32_t* __restrict__ slots, int32_t* __restrict__ locations, uint64_t* __restrict__ masks,
                   int32_t* __restrict__ base, const int32_t* history, int max_context, int num_nodes,
                   int num_drafted, int num_kept, int shortest_match) {
  __shared__ uint32_t warps[kThreads / 32];
  __shared__ uint32_t blocks[kBlocks];
  pdl_launch_dependents();
  row_arrive();  // with row_wait: a block writes into another's shared memory only once that block runs
  pdl_wait();
  row_wait();
  DraftTree* tree = trees + blockIdx.y;
  const int slot = tree->slot, last = tree->position;
  history += static_cast<int64_t>(max(slot, 0)) * max_context;
  uint32_t best = __reduce_max_sync(0xFFFFFFFFu, slot >= 0 ? best_match(history, last) : 0u);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = __reduce_max_sync(0xFFFFFFFFu, warps[threadIdx.x]);
    if (threadIdx.x == 0) store_peer(&blocks[blockIdx.x], 0, best);
  }
  row_barrier();
  const int node = threadIdx.x;
  if (blockIdx.x != 0 || node >= num_nodes) return;
  best = blocks[0];
#pragma unroll
  for (int block = 1; block < kBlocks; block++) best = max(best, blocks[block]);
  const int end = static_cast<int>(best & ((1u << kPositionBits) - 1));
  const bool is_match = static_cast<int>(best >> kPositionBits) >= shortest_match;
  const Rows rows = Rows{token_ids, positions, slots, locations, masks, base}.from(blockIdx.y * num_nodes);
  if (!is_match && node < num_kept) return;
  if (node == 0) {
    set_node(tree, rows, 0, tree->root_token, -1, 0, 1);
  } else if (!is_match || node > num_drafted) {
    set_node(tree, rows, node, 0, -1, 0, 0);
  } else {
    const uint64_t mask = ~0ull >> (63 - node);
    set_node(tree, rows, node, history[end + 1 + (node - 1) % (last - end)], node - 1, node, mask);
  }
}
