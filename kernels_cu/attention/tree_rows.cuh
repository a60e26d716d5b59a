// Where the nodes of a draft tree begin among the rows of a step: in fp8 they lie in arrays of their own, in the order of
// rows.
#pragma once
#include "types.cuh"

// The first row of a slot that has one, to be called by whole warps. Slots are older than the product before attention.
DEVICE int first_row_of(const int* slots, int slot, int num_rows) {
  int first = kMaxRows;
#pragma unroll 1
  for (int row = threadIdx.x & 31; row < num_rows; row += 32) {
    if (__ldcg(slots + row) == slot) first = min(first, row);
  }
  return __reduce_min_sync(0xFFFFFFFFu, first);
}
