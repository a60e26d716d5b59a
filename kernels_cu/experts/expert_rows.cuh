// Finds the rows of each expert. A pair is a row with one of its experts; its number is row * top + the expert's place in the row.
#pragma once
#include "types.cuh"

constexpr int kMaxExperts = 32;                 // one lane for each expert
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// A tile of pairs, which a block or warp multiplies together: `count` pairs of one expert, of which the first is the expert's pair
// number `first` in the order of the rows.
struct PairTile {
  int expert, first, count;   // expert -1: none
};

// Returns tile number `index`; a tile has PAIRS pairs at most, and tiles are numbered one expert after another. Its expert is -1 if
// there are not as many tiles. `count` of lane e is the number of expert e's pairs. All lanes.
template <int PAIRS>
DEVICE PairTile tile_of(int count, int index) {
  const int lane = threadIdx.x % 32, tiles = (count + PAIRS - 1) / PAIRS;
  int end = tiles;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(kAllLanes, end, distance);
    if (lane >= distance) end += before;
  }
  const uint32_t behind = __ballot_sync(kAllLanes, index < end);
  if (behind == 0) return {-1, 0, 0};
  const int expert = __ffs(behind) - 1;
  const int first = (index - __shfl_sync(kAllLanes, end - tiles, expert)) * PAIRS;
  return {expert, first, min(__shfl_sync(kAllLanes, count, expert) - first, PAIRS)};
}

// Returns, in lane e, the number of pairs of expert e. `chosen` (num_pairs) has each pair's expert. All lanes.
DEVICE int count_pairs(const int* chosen, int num_pairs, int num_experts) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int base = 0; base < num_pairs; base += 32) {
    const int own = base + lane < num_pairs ? chosen[base + lane] : -1;
    for (int expert = 0; expert < num_experts; expert++) {
      const uint32_t takers = __ballot_sync(kAllLanes, own == expert);
      if (lane == expert) count += __popc(takers);
    }
  }
  return count;
}

// Calls visit(i, pair) for every pair of the tile, i = 0 .. count - 1, each in one lane. All lanes.
template <class Visit>
DEVICE void visit_pairs(const int* chosen, int num_pairs, const PairTile& tile, Visit visit) {
  const int lane = threadIdx.x % 32;
  int before = -tile.first;
  for (int base = 0; base < num_pairs; base += 32) {
    const bool is_taker = base + lane < num_pairs && chosen[base + lane] == tile.expert;
    const uint32_t takers = __ballot_sync(kAllLanes, is_taker);
    const int place = before + __popc(takers & ((1u << lane) - 1));
    if (is_taker && place >= 0 && place < tile.count) visit(place, base + lane);
    before += __popc(takers);
  }
}
