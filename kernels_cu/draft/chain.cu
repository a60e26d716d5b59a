// Joins a small model's own speculative steps, which draft a chain, to the target's step, which verifies the chain.
//
//   formula   The small model's last pass had num_rows rows, of which the first ones may be padding.
//             chain_begin: the inner draft's row r is (token, position - position_offset, slot) of row r. The first row that is
//             no padding is left out if its hidden state is missing; the newest row is left out if no chain is drafted (ids is
//             null), because it runs again in the next pass. hidden[first row that is no padding] = carry_hidden[slot][0]; then
//             carry_hidden[slot][0] = the state of the last row taken. If ids is not null, a chain begins: a greedy sequence
//             whose first token, ids[0], follows the root.
//             chain_goes_on: tells the WHILE node whether the chain goes on; it ends at `length` tokens or when the slot has no
//             more room.
//             chain_end: the target's node i is the chain's token i; carry_hidden[slot][0] is restored to what chain_begin
//             left there, since the rest of the chain may never be accepted
//   operands  states (B) SlotState, of the chains; tree DraftTree, of the target's step; history (B, max_context) int32;
//             inner_token_ids, inner_positions, inner_slots (num_rows) int32: the inner draft's rows; token_ids, positions,
//             slots (num_rows) int32 of chain_begin: the small model's; hidden (num_rows + 1, width) scalar_t with the small
//             model's state of row r in row r + 1, carry_hidden (B, 64, width) and kept (width) scalar_t, or null for an inner
//             draft that reads no states; carry_counts (B) int32; ids (1) int32 or null; the target's rows of chain_end as in
//             draft_tree.cuh; loop: the conditional handle of the WHILE node, 0 without one
//   launch    grid 1, block 256, chain_goes_on 1; no dynamic shared memory
//   numerics  integers; hidden is copied
//   oracle    reference/inner_draft.py ChainDrafter
//   source    a small model and its EAGLE draft, as CPM.cu stacks them; CUDA Programming Guide, "Conditional Graph
//             Nodes"; original
//   layout    these kernels have a file of their own, because a driver without conditional nodes cannot load it
#include "copy.cuh"
#include "draft_tree.cuh"

constexpr int kThreads = 256;

// The driver provides this function when it loads the kernel; no device library is linked.
extern "C" __device__ void cudaGraphSetConditional(uint64_t handle, unsigned value);

// Returns the number of positions that the slot has room for, in its pages and in max_context.
DEVICE int room(const DraftTree* tree) { return min(tree->capacity, tree->max_context); }

// Makes `state` that of a greedy sequence of at most `length` tokens, whose first, `token`, follows the root.
DEVICE void begin_chain(SlotState* state, const DraftTree* tree, int token, int length) {
  state->last_token = token;
  state->position = tree->position + 1;
  state->num_generated = 1;
  state->max_new_tokens = length;
  state->finished = length == 1 || state->position >= room(tree);
  state->top_k = 0;
  state->temperature = 0.0f;
  state->top_p = 1.0f;
  state->log_min_p = __uint_as_float(0xFF800000u);
  state->repetition_penalty = 1.0f;
  state->presence_penalty = state->frequency_penalty = 0.0f;
  state->num_logprobs = state->num_stop_ids = state->num_logit_biases = 0;
}

DEVICE void copy_row(scalar_t* target, const scalar_t* source, int width) {
  for (int column = threadIdx.x * 8; column < width; column += kThreads * 8) {
    store16(target + column, load16_written(source + column));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(chain_begin)(SlotState* states, int32_t* history, int32_t* __restrict__ inner_token_ids,
                        int32_t* __restrict__ inner_positions, int32_t* __restrict__ inner_slots, scalar_t* hidden,
                        scalar_t* carry_hidden, scalar_t* __restrict__ kept, int32_t* carry_counts,
                        const DraftTree* tree, const int32_t* token_ids, const int32_t* positions,
                        const int32_t* slots, const int32_t* ids, int num_rows, int max_context, int position_offset,
                        int length, int width) {
  pdl_begin();
  const int slot = tree->slot, row = threadIdx.x, end = ids ? num_rows : num_rows - 1;
  const bool is_row = row < end && slots[row] >= 0;
  const int first = end - __syncthreads_count(is_row);
  const bool has_first = position_offset == 0 || (slot >= 0 && carry_counts[slot] > 0);
  if (row < num_rows) {
    const bool used = is_row && (row > first || has_first);
    inner_token_ids[row] = used ? token_ids[row] : 0;
    inner_positions[row] = used ? positions[row] - position_offset : 0;
    inner_slots[row] = used ? slot : -1;
  }
  __syncthreads();
  if (slot < 0 || first == end) return;
  if (row == 0) {
    carry_counts[slot] = 1;
    if (ids) {
      const int position = tree->position + 1;
      begin_chain(states + slot, tree, ids[0], length);
      if (position < max_context) history[static_cast<int64_t>(slot) * max_context + position] = ids[0];
    }
  }
  if (!hidden) return;
  scalar_t* carry = carry_hidden + static_cast<int64_t>(slot) * kMaxNodes * width;
  const scalar_t* newest = hidden + static_cast<int64_t>(end) * width;
  copy_row(hidden + static_cast<int64_t>(first) * width, carry, width);
  copy_row(carry, newest, width);
  if (ids) copy_row(kept, newest, width);
}

extern "C" __global__ void KERNEL(chain_goes_on)(SlotState* states, const DraftTree* tree, uint64_t loop) {
  pdl_begin();
  bool goes_on = false;
  if (tree->slot >= 0) {
    SlotState* state = states + tree->slot;
    goes_on = !state->finished && state->position < room(tree);
    state->finished = !goes_on;
  }
  if (loop) cudaGraphSetConditional(loop, goes_on);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(chain_end)(DraftTree* tree, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                      int32_t* __restrict__ slots, int32_t* __restrict__ locations, uint64_t* __restrict__ masks,
                      int32_t* __restrict__ base, scalar_t* __restrict__ carry_hidden, int32_t* __restrict__ carry_counts,
                      const SlotState* states, const int32_t* history, const scalar_t* kept, int max_context,
                      int tree_size, int width) {
  pdl_begin();
  const int slot = tree->slot, node = threadIdx.x, position = tree->position + node;
  const int length = slot < 0 ? 0 : states[slot].num_generated;
  const Rows rows = {token_ids, positions, slots, locations, masks, base};
  if (node == 0) {
    set_node(tree, rows, 0, tree->root_token, -1, 0, 1);
  } else if (node <= length && node < tree_size && position < max_context) {
    const int token = history[static_cast<int64_t>(slot) * max_context + position];
    set_node(tree, rows, node, token, node - 1, node, ~0ull >> (63 - node));
  } else if (node < tree_size) {
    set_node(tree, rows, node, 0, -1, 0, 0);
  }
  if (slot < 0) return;
  if (node == 0) carry_counts[slot] = 1;
  if (carry_hidden) copy_row(carry_hidden + static_cast<int64_t>(slot) * kMaxNodes * width, kept, width);
}
