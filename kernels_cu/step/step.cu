// Bookkeeping of steps: takes a command out of the ring, sets up the rows of the step, reports steps without tokens.
//
//   formula   admit: states[slot] = the command's state; token_counts[slot] = kBiased for tokens with a logit bias, else 0;
//             block_tables[slot][i] = pages[i] for the pages given; with drafts: capacities[slot] = positions of those pages,
//             if there are any, and carry_counts[slot] = 0;
//             recall, for each token: it counts as seen in the slot (kSeen), history[slot][position++] = the token;
//             step_begin, for each row: (token, position, slot) = (last_token, position++, slot) of its slot, or
//             (0, 0, -1) for padding and finished sequences; history[slot][position] = token;
//             certain_begin, for the j-th row of a slot: as step_begin with position + j, and for j > 0 with the row's own
//             token t, which counts as generated (num_generated++, token_counts[slot][t]++, seen). Then the slot's position is
//             the one after its newest row. Only the newest row has a sampled slot that is not -1;
//             prefill_begin, for each row i < count: (tokens[i], start + i, slot), tokens[i] counts as seen in the slot,
//             history[slot][start + i] = tokens[i];
//             first_begin: x[0] = x[count - 1]
//   operands  token_ids, positions, slots, sampled_slots (T) int32; chunk (4) int32: slot, start, count, is_last; states (B)
//             SlotState; token_counts (B, VOCAB) uint32; block_tables (B, pages_per_sequence) int32; results (16) ResultRecord
//             and commands (16, command_bytes) in mapped host memory; context StepContext; x (T, HIDDEN) scalar_t. With
//             drafts, else null: history (B, max_context) int32, the token at each position, of which the newest is added by
//             the step that reads it; capacities and carry_counts (B) int32, as in draft_tree.cuh
//   constants VOCAB: entries of the vocabulary. HIDDEN: elements of a row, a multiple of 8
//   launch    admit, recall, prefill_begin: grid 1, block 1024; step_begin, certain_begin: grid 1, block 64; prefill_end: grid 1, block 32;
//             first_begin: grid ceil(HIDDEN / 8 / 128), block 128; under 1 KB of static shared memory
//   numerics  integers; x is copied
//   oracle    reference/executor.py ReferenceExecutor: Admit, Recall, _prefill, _decode
//   source    original
//   layout    one block, except for first_begin: a launch takes at most one entry of the ring, a few KB, whose time is the latency
//             of the bus
#if !defined(VOCAB) || !defined(HIDDEN)
#error "a constant is not defined"
#endif
#include "commands.cuh"
#include "copy.cuh"

static_assert(sizeof(SlotState) / 4 <= 1024, "admit copies the state with one word a thread");
static_assert(HIDDEN % 8 == 0, "HIDDEN must be a multiple of 8");

// Takes the state and block table of a new sequence into its slot. Forgets the slot's token counts and pending rows.
extern "C" __global__ void KERNEL(admit)(SlotState* states, uint32_t* __restrict__ token_counts,
                                         int32_t* __restrict__ block_tables, int32_t* __restrict__ capacities,
                                         int32_t* __restrict__ carry_counts, ResultRecord* __restrict__ results,
                                         StepContext* context, const uint8_t* __restrict__ commands,
                                         int command_bytes, int pages_per_sequence) {
  pdl_begin();
  Command header;
  const Command* command = take_command(header, context, commands, command_bytes, kAdmit);
  const int slot = header.slot, num_pages = header.num_rows;
  int32_t* state = reinterpret_cast<int32_t*>(states + slot);
  if (threadIdx.x < sizeof(SlotState) / 4) state[threadIdx.x] = load_host(payload(command) + threadIdx.x);
  int32_t* pages = block_tables + static_cast<int64_t>(slot) * pages_per_sequence;
  for (int page = threadIdx.x; page < num_pages; page += blockDim.x) {
    pages[page] = load_host(payload(command) + sizeof(SlotState) / 4 + page);
  }
  uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  for (int token = threadIdx.x; token < VOCAB; token += blockDim.x) counts[token] = 0;
  __syncthreads();
  if (threadIdx.x < states[slot].num_logit_biases) {
    const uint32_t token = states[slot].biased_ids[threadIdx.x];
    if (token < VOCAB) counts[token] = kBiased;
  }
  if (threadIdx.x == 0 && carry_counts) {
    carry_counts[slot] = 0;
    if (num_pages > 0) capacities[slot] = num_pages * kPageTokens;
  }
  if (threadIdx.x == 0) publish(results, context->sequence, 0, kNoToken, false);
}

// Notes tokens of the prompt whose keys and values the slot's shared pages already hold, and moves the slot's position past them.
extern "C" __global__ void KERNEL(recall)(SlotState* states, uint32_t* __restrict__ token_counts,
                                          int32_t* __restrict__ history, ResultRecord* __restrict__ results,
                                          StepContext* context, const uint8_t* __restrict__ commands,
                                          int command_bytes, int max_context) {
  pdl_begin();
  Command header;
  const Command* command = take_command(header, context, commands, command_bytes, kRecall);
  const int count = header.num_rows, slot = header.slot;
  const int start = states[slot].position;
  uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const int token = load_host(payload(command) + i);
    counts[token] |= kSeen;  // not atomic: other threads that write the word write the same
    if (history && start + i < max_context) history[static_cast<int64_t>(slot) * max_context + start + i] = token;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  states[slot].position = start + count;
  publish(results, context->sequence, 0, kNoToken, false);
}

// Sets up the rows of a decode step. num_rows: rows of the launches that follow; the command may have fewer.
extern "C" __global__ void KERNEL(step_begin)(int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                                              int32_t* __restrict__ slots, SlotState* states,
                                              int32_t* __restrict__ history, ResultRecord* __restrict__ results,
                                              StepContext* context, const uint8_t* __restrict__ commands,
                                              int command_bytes, int max_context, int num_rows) {
  pdl_begin();
  constexpr int kHeaderWords = sizeof(Command) / 4;
  __shared__ alignas(16) int words[kHeaderWords + kMaxRows];
  const int32_t* command = reinterpret_cast<const int32_t*>(next_command(context, commands, command_bytes));
  const int row = threadIdx.x;
  // The header and the slots take one request of a warp if they are few.
  for (int word = row; word < kHeaderWords + num_rows; word += kMaxRows) words[word] = load_host(command + word);
  __syncthreads();
  const Command& header = *reinterpret_cast<const Command*>(words);
  const int num_used = header.num_rows;
  take(context, header.kind == kDecode);
  if (row >= num_rows) return;
  int token = 0, position = 0, slot = -1;
  if (row < num_used) {
    const int listed = words[kHeaderWords + row];
    SlotState* state = states + listed;
    const int is_finished = state->finished, last_token = state->last_token, next = state->position;   // loaded together
    if (is_finished) {
      publish(results, context->sequence, row, kNoToken, false);
    } else {
      slot = listed;
      token = last_token;
      position = next;
      state->position = position + 1;
      if (history && position < max_context) history[static_cast<int64_t>(slot) * max_context + position] = token;
    }
  }
  token_ids[row] = token;
  positions[row] = position;
  slots[row] = slot;
}

// Sets up the rows of a decode step with certain tokens. num_rows: as for step_begin. In the command the rows of a slot are
// consecutive; the first of them has the token -1.
extern "C" __global__ void KERNEL(certain_begin)(int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                                                 int32_t* __restrict__ slots, int32_t* __restrict__ sampled_slots,
                                                 SlotState* states, uint32_t* token_counts,
                                                 int32_t* __restrict__ history, ResultRecord* __restrict__ results,
                                                 StepContext* context, const uint8_t* __restrict__ commands,
                                                 int command_bytes, int max_context, int num_rows) {
  pdl_begin();
  constexpr int kHeaderWords = sizeof(Command) / 4;
  __shared__ alignas(16) int words[kHeaderWords + 2 * kMaxRows];
  const int32_t* command = reinterpret_cast<const int32_t*>(next_command(context, commands, command_bytes));
  const int row = threadIdx.x;
  for (int word = row; word < kHeaderWords + 2 * num_rows; word += kMaxRows) words[word] = load_host(command + word);
  __syncthreads();
  const Command& header = *reinterpret_cast<const Command*>(words);
  const int2* given = reinterpret_cast<const int2*>(words + kHeaderWords);  // slot and token of each row
  const int num_used = header.num_rows;
  take(context, header.kind == kDecodeCertain);
  int token = 0, position = 0, slot = -1, sampled = -1, before = 0;
  if (row < num_used) {
    const int listed = given[row].x;
    const SlotState* state = states + listed;
    const int is_finished = state->finished, last_token = state->last_token, next = state->position;   // loaded together
    while (given[row - before].y >= 0) before++;
    const bool is_newest = row + 1 == num_used || given[row + 1].y < 0;
    if (is_finished || !is_newest) publish(results, context->sequence, row, kNoToken, false);
    if (!is_finished) {
      slot = listed;
      sampled = is_newest ? listed : -1;
      token = before > 0 ? given[row].y : last_token;
      position = next + before;
      if (history && position < max_context) history[static_cast<int64_t>(slot) * max_context + position] = token;
      if (before > 0) {
        uint32_t* count = token_counts + static_cast<int64_t>(slot) * VOCAB + token;
        atomicAdd(count, 1u);
        atomicOr(count, kSeen);
      }
    }
  }
  __syncthreads();  // all rows have read the state
  if (sampled >= 0) {
    states[sampled].position = position + 1;
    states[sampled].num_generated += before;
  }
  if (row >= num_rows) return;
  token_ids[row] = token;
  positions[row] = position;
  slots[row] = slot;
  sampled_slots[row] = sampled;
}

// Sets up the rows of a prefill chunk. num_rows: rows of the bucket.
extern "C" __global__ void KERNEL(prefill_begin)(int32_t* __restrict__ token_ids, int32_t* __restrict__ positions,
                                                 int32_t* __restrict__ slots, int32_t* __restrict__ chunk,
                                                 SlotState* states, uint32_t* __restrict__ token_counts,
                                                 int32_t* __restrict__ history, StepContext* context,
                                                 const uint8_t* __restrict__ commands, int command_bytes,
                                                 int max_context, int num_rows) {
  pdl_begin();
  Command header;
  const Command* command = take_command(header, context, commands, command_bytes, kPrefill);
  const int count = header.num_rows, slot = header.slot, start = header.start;
  uint32_t* counts = token_counts + static_cast<int64_t>(slot) * VOCAB;
  for (int row = threadIdx.x; row < num_rows; row += blockDim.x) {
    const bool used = row < count;
    const int token = used ? load_host(payload(command) + row) : 0;
    token_ids[row] = token;
    positions[row] = used ? start + row : 0;
    slots[row] = used ? slot : -1;
    if (!used) continue;
    counts[token] |= kSeen;  // not atomic: other threads that write the word write the same
    if (history && start + row < max_context) history[static_cast<int64_t>(slot) * max_context + start + row] = token;
  }
  if (threadIdx.x == 0) {
    states[slot].position = start + count;
    chunk[0] = slot;
    chunk[1] = start;
    chunk[2] = count;
    chunk[3] = header.is_last;
  }
}

// Ends a prefill step: reports a chunk that is not the prompt's last as done, without a token. The sampler reports the last one.
extern "C" __global__ void KERNEL(prefill_end)(ResultRecord* __restrict__ results, const int32_t* chunk,
                                               const StepContext* context) {
  pdl_begin();
  if (threadIdx.x == 0 && !chunk[3]) publish(results, context->sequence, 0, kNoToken, false);
}

// Copies the chunk's last row to row 0, from which the first token is sampled; slots[0] is the chunk's slot already.
extern "C" __global__ void KERNEL(first_begin)(scalar_t* x, const int32_t* chunk) {
  pdl_begin();
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8, last = chunk[2] - 1;
  if (column < HIDDEN && last > 0) store16(x + column, load16(x + static_cast<int64_t>(last) * HIDDEN + column));
}
