// The draft's first rows of a speculative step: what it has not seen of the sequence, its pending rows.
//
//   formula   row r < num_rows holds position q = P - num_rows + r, if that is pending: token history[slot][q + 1], draft
//             position q + 1 - position_offset, hidden carry_hidden[slot][r - num_rows + count]; else padding;
//             catch_up_end: of what is pending only the newest row stays
//   operands  tree DraftTree; token_ids, positions, slots, locations (num_rows) int32; hidden (num_rows, width) and
//             carry_hidden (B, 64, width) scalar_t, or null; history (B, max_context), carry_counts and capacities (B)
//             int32; states (B) SlotState; results (16) ResultRecord and commands (16, command_bytes) in mapped host
//             memory; context StepContext
//   launch    speculate_begin: grid ceil(num_rows * width / 8 / 1024), 1 to 4, block 1024; catch_up_end: grid 1, block
//             256; no dynamic shared memory
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

DEVICE void begin_tree(DraftTree* tree, const SlotState* state, int slot, int capacity, int max_context) {
  tree->slot = slot;
  tree->position = state->position;
  tree->root_token = state->last_token;
  tree->capacity = capacity;
  tree->max_context = max_context;
  tree->num_generated = state->num_generated;
}

// kind: of the command that must come next, kSpeculate or kCatchUp.
extern "C" __global__ void __launch_bounds__(kThreads)
    KERNEL(speculate_begin)(DraftTree* tree, int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                            int32_t* __restrict__ slots, int32_t* __restrict__ locations,
                            scalar_t* __restrict__ hidden, int32_t* history, const scalar_t* carry_hidden,
                            const int32_t* carry_counts, const int32_t* capacities, const SlotState* states,
                            const StepContext* context, const uint8_t* __restrict__ commands, int command_bytes,
                            int kind, int max_context, int num_rows, int position_offset, int width) {
  pdl_begin();
  const Command header = read_header(next_command(context, commands, command_bytes));
  const int slot = header.slot;
  if (header.kind != kind) __trap();
  const SlotState* state = states + slot;
  const int position = state->position, root = state->last_token, unseen = state->finished ? 0 : carry_counts[slot];
  if (blockIdx.x == 0) {
    int32_t* own_history = history + static_cast<int64_t>(slot) * max_context;
    if (threadIdx.x == 0) {
      begin_tree(tree, state, state->finished ? -1 : slot, capacities[slot], max_context);
      if (kind == kSpeculate) tree->num_steps++;
      if (!state->finished && position < max_context) own_history[position] = root;
    }
    for (int row = threadIdx.x; row < num_rows; row += kThreads) {
      const bool used = row >= num_rows - unseen;
      const int next = position - num_rows + row + 1;  // the position of the token
      token_ids[row] = !used ? 0 : next == position ? root : own_history[next];
      positions[row] = used ? next - position_offset : 0;
      locations[row] = used ? next - position_offset : 0;
      slots[row] = used ? slot : -1;
    }
  }
  if (!hidden) return;
  // The rows that are pending stand behind one another on both sides.
  const int count = min(unseen, num_rows);
  const scalar_t* from = carry_hidden + (static_cast<int64_t>(slot) * kMaxNodes + unseen - count) * width;
  scalar_t* to = hidden + static_cast<int64_t>(num_rows - count) * width;
  for (int i = (blockIdx.x * kThreads + threadIdx.x) * 8; i < count * width; i += gridDim.x * kThreads * 8) {
    store16(to + i, load16_written(from + i));
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
