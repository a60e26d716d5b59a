// The sampling chain at every node of a draft tree: samples the token that plain decoding would sample after the node's path.
//
//   formula   as in sampling.cu at position + 1 + depth of the node; for the penalties the tokens of the path, from the
//             root's child to the node itself, count as generated. sampled[node] = token, or kNonFinite
//   operands  trees (n) DraftTree; node_logprobs (64) TokenLogprobs, one for each row, written if the request asks for them;
//             states (B) SlotState and token_counts (B, VOCAB) uint32, which stay as they are; logits
//             (n * num_nodes, VOCAB) float32; slots (n * num_nodes) int32, -1: the row is skipped
//   constants VOCAB: entries of the vocabulary. PORTABLE: 1 leaves clusters out on sm_90 and later too
//   launch    grid (blocks of a row, n * num_nodes), block 512; 8 blocks of a row, a cluster, on sm_90 and later unless
//             PORTABLE, else 1; 25 KB of static shared memory
//   numerics  as in sampling.cu, bit for bit
//   oracle    reference/sampling.py sample, token_logprobs
//   source    original
//   layout    as in sampling.cu. If penalties or biases apply, each token is looked up in the node's path, which is short
#if !defined(VOCAB) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "draft_tree.cuh"
#include "path_counts.cuh"

extern "C" __global__ void __launch_bounds__(kThreads, 1) ROW_BLOCKS
    KERNEL(sample_tree)(DraftTree* trees, TokenLogprobs* __restrict__ node_logprobs, const SlotState* states,
                        const uint32_t* token_counts, const float* logits, const int32_t* slots, int num_nodes) {
  __shared__ Shared shared;
  __shared__ int path[kMaxNodes];
  pdl_launch_dependents();
  announce_block(shared);
  pdl_wait();
  row_wait();
  Row<PathCounts> row;
  HeldLogits held = begin_row(row, logits);
  const int slot = slots[blockIdx.y], node = blockIdx.y % num_nodes;
  if (slot < 0) return;
  DraftTree* tree = trees + blockIdx.y / num_nodes;
  const SlotState* state = states + slot;
  set_request(row, state, &shared);
  const int depth = tree->depths[node];
  row.position = tree->position + 1 + depth;
  row.token_counts.words = token_counts + static_cast<int64_t>(slot) * VOCAB;
  row.token_counts.path = path;
  row.token_counts.length = depth;
  if (row.is_adjusted && threadIdx.x == 0) {
    for (int at = node, i = depth; i > 0; at = tree->parents[at]) path[--i] = tree->tokens[at];
  }
  __syncthreads();
  const int token = sample_row(row, held, state->top_k, state->top_p, state->log_min_p);
  if (state->num_logprobs > 0 && token >= 0) write_logprobs(node_logprobs + blockIdx.y, row, token, state->num_logprobs);
  if (row.block == 0 && threadIdx.x == 0) tree->sampled[node] = token;
}
