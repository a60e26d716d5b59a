// Which rows of a weight the tiles of its packed layout hold, as the Tiles structs of linear_epilogue.cuh have them.
#pragma once
#include "types.cuh"

// Row `row` (0 to 15, from 8 on hi) of a tile; num_rows: of the whole weight.
DEVICE int tile_row(int tile, int row, int num_rows) {
#if LINEAR == 0
  constexpr int kHeadTiles = HEAD_DIM / 16;
  return tile / kHeadTiles * HEAD_DIM + tile % kHeadTiles * 8 + row % 8 + row / 8 * (HEAD_DIM / 2);
#elif LINEAR == 2
  return tile * 8 + row % 8 + row / 8 * (num_rows / 2);
#else
  return tile * 16 + row;
#endif
}

// The inverse for eight rows: x tile, y 0 for lo and 1 for hi.
DEVICE int2 tile_half(int first_row, int num_rows) {
#if LINEAR == 0
  constexpr int kHalf = HEAD_DIM / 2;
  return make_int2(first_row / HEAD_DIM * (HEAD_DIM / 16) + first_row % kHalf / 8, first_row % HEAD_DIM / kHalf);
#elif LINEAR == 2
  return make_int2(first_row % (num_rows / 2) / 8, first_row / (num_rows / 2));
#else
  return make_int2(first_row / 16, first_row / 8 % 2);
#endif
}
