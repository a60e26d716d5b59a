// The products of a one-row step with its experts' weights: the row's columns in shared memory, and which experts it takes.
#pragma once
#include "expert_product.cuh"
#include "gated.cuh"
#include "route_row.cuh"

// kTogether: slices that a warp multiplies together, a turn.
constexpr int kTogether = kManyGroups ? 1 : WEIGHT_BITS == 4 ? 3 : 2, kTurns = (kSlices + kTogether - 1) / kTogether;
constexpr int kTurnBytes = kTogether * kSlotBytes;

// Returns the expert at place `place`, in ascending order, among those whose bits are set in `taken`.
DEVICE int expert_at(uint32_t taken, int place) {
#pragma unroll
  for (int i = 0; i < TOP - 1; i++)
    if (i < place) taken &= taken - 1;
  return __ffs(taken) - 1;
}

// Reads the lane's columns of the row at `row` in shared memory, from slice `slice` on.
struct RowColumns {
  uint32_t place;
  DEVICE RowColumns(uint32_t row, int slice) : place(row + slice * (kSliceColumns * 2) + threadIdx.x % 4 * 16) {}
  DEVICE uint4 operator()(int s, int j, int) const { return load_shared(place + s * (kSliceColumns * 2) + j * 64); }
};

// Adds a turn of the row's products to `sums`: `held` has the tile's slices slice, slice + 1, ..., of which those from `end` on do not
// count. IS_WHOLE: every turn is whole. The row lies at `row` in shared memory, from its slice `first` on.
template <bool IS_WHOLE>
DEVICE void multiply_turn(Sums (&sums)[1], const Slice (&held)[kTogether], uint32_t row, int slice, int first, int end) {
  if (IS_WHOLE || slice + kTogether <= end) {
    multiply<kTogether>(sums, held, RowColumns(row, slice - first), 1);
  } else {
#pragma unroll
    for (int s = 0; s < kTogether; s++)
      if (slice + s < end) multiply<1>(sums, held + s, RowColumns(row, slice + s - first), 1);
  }
}

// Returns silu(gate) * up of the tile's column lane / 4, from its sums.
DEVICE scalar_t activated(const Sums& sums) {
  const float gate = sums[0][0], up = sums[0][2];   // all tokens of the tile are the row
  return from_float(gated(gate, up));
}
