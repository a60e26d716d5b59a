// Which rows of a prefill chunk's bucket a product leaves out: those behind the chunk's last one, as they are there for padding alone.
#pragma once
#include "copy.cuh"

// The kernels of products leave out whole groups of rows, the same ones; those of a library compute all rows, also from what was left out.
// So a row behind the chunk's last one may be anything, and nothing may read it but to compute another such row.
constexpr int kChunkGroup = 128;

// Returns whether a block whose first row is `first_row`, and which has rows of one group, has none of the chunk's rows. `chunk`: slot, start,
// count, or null if every row is one of the chunk's. Behind pdl_wait.
DEVICE bool is_behind_chunk(const int* chunk, int first_row) {
  return chunk != nullptr && first_row / kChunkGroup * kChunkGroup >= load_now(chunk + 2);
}
