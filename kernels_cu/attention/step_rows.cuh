// What the rows of a step say of each other. Positions, slots and trees are older than the product before attention.
#pragma once
#include "types.cuh"

// The first location that the step writes in `slot`, to be called by whole warps. `written`: of each row, its location
// or one before.
DEVICE int first_written(const int* written, const int* slots, int slot, int num_rows) {
  int first = 0x7FFFFFFF;
#pragma unroll 1
  for (int row = threadIdx.x & 31; row < num_rows; row += 32) {
    const int other = __ldcg(slots + row), location = __ldcg(written + row);
    if (other == slot) first = min(first, location);
  }
  return __reduce_min_sync(0xFFFFFFFFu, first);
}
