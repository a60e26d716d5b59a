// Finds where a draft tree begins among the rows of a step. With pages in fp8 the nodes lie in arrays of their own, in
// the order of these rows.
#pragma once
#include "types.cuh"

// Returns the first row of the step that belongs to `slot`, or kMaxRows if none does. Called by whole warps, also
// before pdl_wait: slots are written before the product before attention.
DEVICE int first_row_of(const int* slots, int slot, int num_rows) {
  int first = kMaxRows;
#pragma unroll 1
  for (int row = threadIdx.x & 31; row < num_rows; row += 32) {
    if (__ldcg(slots + row) == slot) first = min(first, row);
  }
  return __reduce_min_sync(0xFFFFFFFFu, first);
}
