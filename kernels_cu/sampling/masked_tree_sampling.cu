// The sampling chain at the nodes of a draft tree under masks. The host computes the masks once this has reported the tree to it.
//
//   formula   report_tree: nodes[node] = n << 40 | (parent & 255) << 32 | token, n the number of the command.
//             sample_masked_tree: as tree_sampling.cu, with z = -infinity for a token whose bit in the node's mask is 0;
//             log-probabilities are those of the raw logits. A node that the host cuts gets the token -1, which equals no
//             sampled token, and sampled = kCutNode
//   operands  nodes (16, 64) uint64 in mapped host memory, an entry for each entry of the command ring; context StepContext;
//             ready and bits as row_mask.cuh has them, a row for each node; else as tree_sampling.cu. A node waits for its
//             ready word, at most kPatience; after that it has no token (sampled = kNoMask)
//   constants VOCAB: entries of the vocabulary. PORTABLE: 1 leaves clusters out on sm_90 and later too
//   launch    report_tree: grid 1, block 64; sample_masked_tree as sample_tree, with the bits of a block's tokens
//   numerics  as in sampling.cu, bit for bit
//   oracle    reference/sampling.py masked, sample, token_logprobs; executor.py TreeMasks
//   source    original
//   layout    as in tree_sampling.cu. The words of nodes and ready are written whole, each with the number of the command it belongs to
#if !defined(VOCAB) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#include "draft_tree.cuh"
#include "path_counts.cuh"
#include "row_mask.cuh"

struct MaskedPathCounts : PathCounts {
  static constexpr bool kIsMasked = true;
  BlockMask mask;

  DEVICE bool allows(int token) const { return mask.allows(token); }
};

static_assert(sizeof(Shared) + 4 * (kMaskWords + kMaxNodes) < 48 * 1024, "the mask of a node does not fit shared memory");

extern "C" __global__ void KERNEL(report_tree)(uint64_t* nodes, const DraftTree* tree, const StepContext* context,
                                               int num_nodes) {
  pdl_begin();
  const int node = threadIdx.x;
  if (node >= num_nodes) return;
  const uint64_t number = context->next_entry + 1;  // `accept` counts the command
  const bool is_there = tree->slot >= 0;
  const uint64_t parent = static_cast<uint64_t>((is_there ? tree->parents[node] : -1) & 255);
  const uint32_t token = is_there ? tree->tokens[node] : 0;
  volatile uint64_t* word = nodes + (number - 1) % kRingEntries * kMaxNodes + node;
  *word = number << 40 | parent << 32 | token;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) ROW_BLOCKS
    KERNEL(sample_masked_tree)(DraftTree* tree, TokenLogprobs* __restrict__ node_logprobs, const SlotState* states,
                               const uint32_t* token_counts, const float* logits, const int32_t* slots,
                               const StepContext* context, const uint64_t* ready, const uint32_t* bits, int mask_rows,
                               int mask_words) {
  __shared__ Shared shared;
  __shared__ int path[kMaxNodes];
  __shared__ uint32_t allowed[kMaskWords];
  __shared__ uint32_t readiness;
  pdl_launch_dependents();
  announce_block(shared);
  pdl_wait();
  row_wait();
  Row<MaskedPathCounts> row;
  HeldLogits held = begin_row(row, logits);
  const int node = blockIdx.y, slot = slots[node];
  if (slot < 0) return;
  const SlotState* state = states + slot;
  set_request(row, state, &shared);
  const int depth = tree->depths[node];
  row.position = tree->position + 1 + depth;

  const uint64_t number = context->next_entry + 1;
  const int64_t entry = static_cast<int64_t>((number - 1) % kRingEntries) * mask_rows + node;
  if (row.block == 0 && threadIdx.x == 0) {
    const uint32_t seen = await(ready + entry, number);
    for (int peer = 0; peer < kBlocks; peer++) store_peer(&readiness, peer, seen);
  }
  row_barrier();
  if (readiness == kCut || readiness == kLate) {
    if (row.block == 0 && threadIdx.x == 0) {
      if (readiness == kCut) tree->tokens[node] = -1;  // of the nodes' rows only those below this one read it, and they are cut too
      tree->sampled[node] = static_cast<int>(readiness == kCut ? kCutNode : kNoMask);
    }
    return;
  }
  if (row.is_adjusted && threadIdx.x == 0) {
    for (int at = node, i = depth; i > 0; at = tree->parents[at]) path[--i] = tree->tokens[at];
  }
  const uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  row.token_counts = {{counts, path, depth},
                      copy_mask(allowed, bits + entry * mask_words, row.block, readiness, mask_words)};
  __syncthreads();
  const int token = sample_row(row, held, state->top_k, state->top_p, state->log_min_p);
  if (state->num_logprobs > 0 && token >= 0) write_logprobs(node_logprobs + node, row, token, state->num_logprobs);
  if (row.block == 0 && threadIdx.x == 0) tree->sampled[node] = token;
}
