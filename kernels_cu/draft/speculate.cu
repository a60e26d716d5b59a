// The draft's first rows of a speculative step: what it has not seen of the sequence, its pending rows.
//
//   formula   of each tree, row r < num_rows holds position q = P - num_rows + r, if that is pending: token
//             history[slot][q + 1], draft position q + 1 - position_offset, hidden carry_hidden[slot][r - num_rows + count];
//             else padding;
//             catch_up_end: of what is pending only the newest row stays
//   operands  trees (num_trees) DraftTree; token_ids, positions, slots, locations (num_rows, num_trees) int32; hidden
//             (num_rows, num_trees, width) and carry_hidden (B, 64, width) scalar_t, or null; history (B, max_context),
//             carry_counts and capacities (B) int32; states (B) SlotState; results (16) ResultRecord and commands
//             (16, command_bytes) in mapped host memory; context StepContext
//   launch    speculate_begin: grid ceil(num_rows * num_trees * width / 8 / 1024), 1 to 4, block 1024; catch_up_end: grid 1,
//             block 256; no dynamic shared memory
//   numerics  integers; hidden is copied
//   oracle    tests/speculation_oracle.py
//   source    EAGLE (arXiv 2401.15077) pairs a hidden state with the token after it; original
//   layout    every block looks at the command by itself; it is counted by the last launch of the step, so that no block
//             can find it gone; they are few, since each waits for the host's memory behind the ones before. The newest
//             row is the last one, at an address that does not depend on how many there are
#include "commands.cuh"
#include "copy.cuh"
#include "draft_tree.cuh"

constexpr int kThreads = 1024;
constexpr int kEndThreads = 256;

// What a sequence has that is drafted for; slot -1: there is none, or it has finished.
struct Root {
  int slot, position, token, num_pending;
};

DEVICE Root begin_tree(DraftTree* tree, const SlotState* states, const int32_t* carry_counts, const int32_t* capacities,
                       int listed, int max_context) {
  const int slot = max(listed, 0);
  const SlotState* state = states + slot;
  const int is_finished = state->finished, num_pending = carry_counts[slot], capacity = capacities[slot];   // at once
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

// kind: of the command that must come next, kSpeculate or kCatchUp.
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
  // Header and slots in one request.
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
      const int behind = num_rows - row / num_trees - 1;  // how many positions the token is before the root
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
