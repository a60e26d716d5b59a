// Sets up the draft's rows of a prefill chunk, and keeps the target's hidden states that the draft will read later (pending rows,
// see draft_tree.cuh).
//
//   formula   prefill_rows: draft row i < count of a chunk at position start is (tokens[i], start + i - position_offset, slot);
//             it is padding if that position is negative or its hidden state is missing. hidden[0] = the slot's newest pending
//             row; then hidden[count] becomes the slot's only pending row.
//             carry_rows: hidden[row] is appended to the pending rows of the row's slot. A slot that has 64 drops them first.
//             Rows of one slot are consecutive
//   operands  draft_token_ids, draft_positions, draft_slots, token_ids, slots (num_rows) int32; chunk and draft_chunk (4)
//             int32: slot, start, count, is_last, of the target's chunk and of the draft's; carry_hidden (B, 64, width)
//             scalar_t; hidden scalar_t, for prefill_rows (num_rows + 1, width) with the target's state of row i in row i + 1,
//             for carry_rows (num_rows, width); both null for a draft that reads no hidden states; carry_counts (B) int32
//   launch    prefill_rows: grid 1, block 1024; carry_rows: grid num_rows, block 256; no shared memory
//   numerics  hidden is copied
//   oracle    tests/speculation_oracle.py
//   source    EAGLE (arXiv 2401.15077) pairs a hidden state with the token after it; original
//   layout    prefill_rows: the target leaves the chunk's states one row further down, so that only the pending row of the chunk
//             before has to be copied. carry_rows: the block of a slot's first row copies all rows of the slot, so that it alone
//             reads and writes the slot's count
#include "copy.cuh"
#include "draft_tree.cuh"

constexpr int kChunkThreads = 1024;
constexpr int kRowThreads = 256;

extern "C" __global__ void __launch_bounds__(kChunkThreads)
    KERNEL(prefill_rows)(int32_t* __restrict__ draft_token_ids, int32_t* __restrict__ draft_positions,
                         int32_t* __restrict__ draft_slots, int32_t* __restrict__ draft_chunk, scalar_t* hidden,
                         scalar_t* carry_hidden, int32_t* carry_counts, const int32_t* token_ids,
                         const int32_t* chunk, int num_rows, int position_offset, int width) {
  pdl_begin();
  const int slot = chunk[0], first = chunk[1] - position_offset, count = chunk[2];
  const int pending = carry_counts[slot];
  const bool has_first = first >= 0 && (pending > 0 || position_offset == 0);
  __syncthreads();
  if (threadIdx.x == 0) {
    draft_chunk[0] = slot;
    draft_chunk[1] = first;
    draft_chunk[2] = count;
    draft_chunk[3] = chunk[3];
    carry_counts[slot] = 1;
  }
  for (int row = threadIdx.x; row < num_rows; row += kChunkThreads) {
    const bool used = row < count && (row > 0 || has_first);
    draft_token_ids[row] = used ? token_ids[row] : 0;
    draft_positions[row] = used ? first + row : 0;
    draft_slots[row] = used ? slot : -1;
  }
  if (!hidden) return;
  scalar_t* carry = carry_hidden + static_cast<int64_t>(slot) * kMaxNodes * width;
  for (int column = threadIdx.x * 8; column < width; column += kChunkThreads * 8) {
    if (pending > 0) {
      store16(hidden + column, load16_written(carry + static_cast<int64_t>(pending - 1) * width + column));
    }
    store16(carry + column, load16_written(hidden + static_cast<int64_t>(count) * width + column));
  }
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
    KERNEL(carry_rows)(scalar_t* __restrict__ carry_hidden, int32_t* carry_counts, const scalar_t* hidden,
                       const int32_t* slots, int width) {
  pdl_begin();
  const int num_rows = gridDim.x, first = blockIdx.x, slot = slots[first];
  if (slot < 0 || (first > 0 && slots[first - 1] == slot)) return;
  int count = carry_counts[slot];
  __syncthreads();
#pragma unroll 1
  for (int row = first; row < num_rows && slots[row] == slot; row++, count++) {
    if (count >= kMaxNodes) count = 0;
    if (!hidden) continue;
    scalar_t* target = carry_hidden + (static_cast<int64_t>(slot) * kMaxNodes + count) * width;
#pragma unroll 1
    for (int column = threadIdx.x * 8; column < width; column += kRowThreads * 8) {
      store16(target + column, load16_written(hidden + static_cast<int64_t>(row) * width + column));
    }
  }
  if (threadIdx.x == 0) carry_counts[slot] = count;
}
