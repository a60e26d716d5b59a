// Rows of a step by their experts: a pair is a row with one of its experts, row * top + place.
#pragma once
#include "types.cuh"

constexpr int kMaxExperts = 32;                 // a lane each
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Some pairs of one expert that a block or warp takes together: those numbered first, first + 1, ... in order of their rows.
struct PairTile {
  int expert, first, count;   // expert -1: none
};

// Tile `index` of all experts, one expert after the other, where lane e has the number of e's pairs. All lanes.
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

// The number of pairs of expert `lane`, for all lanes; `chosen` (num_pairs) has each pair's expert.
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

// Calls visit(i, pair) in one lane for pair i of the tile. All lanes.
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
