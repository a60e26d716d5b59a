// The rows of a weight that the tiles of its packed layout hold: the same as in the Tiles structs of linear_epilogue.cuh.
#pragma once
#include "types.cuh"

// Returns the weight's row that is row `row` of a tile: 0 to 7 of lo, 8 to 15 of hi. num_rows: rows of the whole weight.
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

// Returns where eight rows from first_row on lie, the inverse of tile_row: the tile (x), in its lo (y = 0) or hi (y = 1).
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
