// Sets up the draft's first rows of a speculative step: the pending rows, which the draft has not seen of the sequence
// (see draft_tree.cuh).
//
//   formula   speculate_begin: in each tree row r < num_rows stands for position q = P - num_rows + r, P being the root's. If q
//             is pending, the row holds token history[slot][q + 1], draft position q + 1 - position_offset and hidden
//             carry_hidden[slot][r - num_rows + count]; else it is padding.
//             catch_up_end: only the newest pending row stays
//   operands  trees (num_trees) DraftTree; token_ids, positions, slots, locations (num_rows, num_trees) int32; hidden
//             (num_rows, num_trees, width) and carry_hidden (B, 64, width) scalar_t, or null; history (B, max_context),
//             carry_counts and capacities (B) int32; states (B) SlotState; results (16) ResultRecord and commands
//             (16, command_bytes) in mapped host memory; context StepContext
//   launch    speculate_begin: grid ceil(num_rows * num_trees * width / 8 / 1024), 1 to 4, block 1024; catch_up_end: grid 1,
//             block 256; no dynamic shared memory
//   numerics  integers; hidden is copied
//   oracle    tests/speculation_oracle.py
//   source    EAGLE (arXiv 2401.15077) pairs a hidden state with the token after it; original
//   layout    every block reads the command by itself. The step's last launch counts it, so that no block can find the next
//             command instead. The blocks are few, because their reads of host memory are served one after another. The newest
//             row is the last one, at an address that does not depend on how many rows are pending
#include "commands.cuh"
#include "copy.cuh"
#include "draft_tree.cuh"

constexpr int kThreads = 1024;
constexpr int kEndThreads = 256;

// The root of a sequence's tree and the number of its pending rows; slot -1 if there is no sequence or it has finished.
struct Root {
  int slot, position, token, num_pending;
};

// Returns the root for the slot `listed` in the command (-1: none). Block 0 also writes the tree's first fields.
DEVICE Root begin_tree(DraftTree* tree, const SlotState* states, const int32_t* carry_counts, const int32_t* capacities,
                       int listed, int max_context) {
  const int slot = max(listed, 0);
  const SlotState* state = states + slot;
  const int is_finished = state->finished, num_pending = carry_counts[slot], capacity = capacities[slot];   // loaded together
  const bool is_there = listed >= 0 && !is_finished;
  const Root root = {is_there ? listed : -1, state->position, state->last_token, is_there ? num_pending : 0};
  if (blockIdx.x != 0) return root;
  tree->slot = root.slot;
  tree->position = root.position;
  tree->root_token = root.token;
  tree->capacity = capacity;
  tree->max_context = max_context;
  tree->num_generated = state->num_generated;
  return root;
}

// Sets up the rows for the next command, which must be of kind `kind`: kSpeculate or kCatchUp.
extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(speculate_begin)(DraftTree* trees, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                            int32_t* __restrict__ slots, int32_t* __restrict__ locations,
                            scalar_t* __restrict__ hidden, int32_t* history, const scalar_t* carry_hidden,
                            const int32_t* carry_counts, const int32_t* capacities, const SlotState* states,
                            const StepContext* context, const uint8_t* __restrict__ commands, int command_bytes,
                            int kind, int num_trees, int max_context, int num_rows, int position_offset, int width) {
  pdl_begin();
  constexpr int kHeaderWords = sizeof(Command) / 4;
  __shared__ alignas(16) int words[kHeaderWords + kMaxTrees];
  __shared__ Root roots[kMaxTrees];
  const int32_t* command = reinterpret_cast<const int32_t*>(next_command(context, commands, command_bytes));
  // One request reads the header and the slots.
  if (threadIdx.x < kHeaderWords + kMaxTrees) words[threadIdx.x] = load_host(command + threadIdx.x);
  __syncthreads();
  const Command& header = *reinterpret_cast<const Command*>(words);
  if (header.kind != kind) __trap();
  const int own = threadIdx.x;
  if (own < num_trees) {
    const int listed = own < header.num_rows ? words[kHeaderWords + own] : -1;
    const Root root = begin_tree(trees + own, states, carry_counts, capacities, listed, max_context);
    roots[own] = root;
    if (blockIdx.x == 0) {
      trees[own].sequence = context->next_entry + 1;
      if (kind == kSpeculate && listed >= 0) trees[own].num_steps++;
      if (root.slot >= 0 && root.position < max_context) {
        history[static_cast<int64_t>(root.slot) * max_context + root.position] = root.token;
      }
    }
  }
  __syncthreads();
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int row = threadIdx.x; row < num_rows * num_trees; row += kThreads) {
      const Root root = roots[row % num_trees];
      const int behind = num_rows - row / num_trees - 1;  // positions from the row's token to the root
      const int next = root.position - behind;
      const bool used = behind < root.num_pending;
      const int32_t* own_history = history + static_cast<int64_t>(root.slot) * max_context;
      token_ids[row] = !used ? 0 : behind == 0 ? root.token : own_history[next];
      positions[row] = used ? next - position_offset : 0;
      locations[row] = used ? next - position_offset : 0;
      slots[row] = used ? root.slot : -1;
    }
  }
  if (!hidden) return;
  const int chunks = width / 8;
#pragma unroll 1
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < num_rows * num_trees * chunks; i += gridDim.x * kThreads) {
    const int row = i / chunks, column = i % chunks * 8, behind = num_rows - row / num_trees - 1;
    const Root root = roots[row % num_trees];
    if (behind >= root.num_pending) continue;
    const int64_t pending = static_cast<int64_t>(root.slot) * kMaxNodes + root.num_pending - 1 - behind;
    store16(hidden + static_cast<int64_t>(row) * width + column, load16_written(carry_hidden + pending * width + column));
  }
}

// Counts the catch-up command, reports that it is done, and drops all pending rows but the newest.
extern "C" __global__ void __launch_bounds__(kEndThreads)
    KERNEL(catch_up_end)(scalar_t* carry_hidden, int32_t* carry_counts, ResultRecord* __restrict__ results,
                         StepContext* context, const uint8_t* __restrict__ commands, int command_bytes, int width) {
  pdl_begin();
  Command header;
  take_command(header, context, commands, command_bytes, kCatchUp);
  const int slot = header.slot;
  const int count = carry_counts[slot];
  if (carry_hidden && count > 1) {
    scalar_t* rows = carry_hidden + static_cast<int64_t>(slot) * kMaxNodes * width;
    for (int column = threadIdx.x * 8; column < width; column += kEndThreads * 8) {
      store16(rows + column, load16_written(rows + static_cast<int64_t>(count - 1) * width + column));
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (count > 1) carry_counts[slot] = 1;
  publish(results, context->sequence, 0, kNoToken, false);
}
