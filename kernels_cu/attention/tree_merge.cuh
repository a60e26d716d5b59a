// Merges the partial results of a block's tiles in three stages. Those of the four slices of pages are merged by an exchange in the layout
// of accumulators. Those of the runs of a cluster are merged by sending each block the vectors that it merges, those of clusters through
// the workspace.
//
// A vector is four elements of one query row that a lane holds of a pair of accumulator tiles (output_vector).
#pragma once
#include "partials.cuh"
#include "tree_group.cuh"

constexpr int kPairs = kDimTiles / 2;
constexpr int kVectors = kPairs * 2 * 32;  // vectors of a tile: [pair][half][lane]
constexpr int kRowVectors = kVectors / kPacked;  // vectors of one row of the step
constexpr int kSlice = kVectors / CLUSTER;  // vectors of each tile that a block merges
static_assert(kVectors % CLUSTER == 0, "slices are equal: peers count their bytes");
constexpr int kExchangeBytes = kPairs * 2 * 3 * 512;  // bytes of a tile: [pair][half][a slice that does not merge the pair][lane]
// The layout of what a block receives: outputs [run][tile][vector of its slice], then log sums [run][tile][16].
constexpr int kReceivedOutputs = kCluster * ROW_TILES * kSlice * 16;
constexpr int kRunBytes = ROW_TILES * (kSlice * 16 + 64);

// The place of a vector in its tile.
struct VectorPlace {
  int pair, half, lane;

  DEVICE explicit VectorPlace(int vector) : pair(vector / 64), half(vector / 32 % 2), lane(vector % 32) {}
  // The query row, the first of the vector's elements, and the vector's number among those of its row of the step.
  DEVICE int query() const { return lane / 4 + 8 * half; }
  DEVICE int element() const { return first_element(pair, lane); }
  DEVICE int of_row() const { return kPacked == 2 ? pair * 32 + lane : pair * 64 + half * 32 + lane; }
};

// The shared memory through which the warps of a tile, and the blocks of a cluster, exchange their results.
struct Exchange {
  unsigned char* memory;
  float (*log_sums)[kSlices][16];  // of each tile: by slice and query row
  uint32_t received, barrier;

  // Merges the four slices of each tile and sends the result to the blocks of the cluster, as that of run `member` of
  // the cluster. All warps call it, each with the state of its own slice and tile.
  DEVICE void finish_run(const WarpState& state, int member) const {
    const int lane = threadIdx.x & 31, slice = threadIdx.x / 32 % kSlices, tile = threadIdx.x / 128;
    float4 own[(kPairs + 3) / 4][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(state.sum[half]), inverse = sum > 0.0f ? reciprocal_fast(sum) : 0.0f;
      if (lane % 4 == 0) {
        log_sums[tile][slice][lane / 4 + half * 8] = sum > 0.0f ? state.max[half] + log2_fast(sum) : kNoMaximum;
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const float4 vector = output_vector(state, pair, half, inverse);
        if (slice == pair % 4) {
          own[pair / 4][half] = vector;
        } else {
          *piece(tile, pair, half, slice) = vector;
        }
      }
    }
    barrier_wait(1 + tile, 128);
#pragma unroll
    for (int i = 0; i < (kPairs + 3) / 4; ++i) {
      const int pair = slice + 4 * i;
      if (kPairs % 4 != 0 && pair >= kPairs) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Partial merged = merge<kSlices>(kSlices, [&](int from) -> Partial {
          return {from == slice ? own[i][half] : *piece(tile, pair, half, from), log_sums[tile][from][lane / 4 + half * 8]};
        });
        send((pair * 2 + half) * 32 + lane, member, tile, merged);
        if (pair == 0 && lane % 4 == 0) send_log_sum(lane / 4 + half * 8, member, tile, merged.log_sum);
      }
    }
  }

  // Returns vector `index` of the block's slice of a tile, merged from all `members` runs; `place` is the vector's
  // place in the tile.
  DEVICE Partial merge_runs(int tile, int index, const VectorPlace& place, int members) const {
    return merge<kCluster>(members, [&](int member) {
      const int part = member * ROW_TILES + tile;
      return received_partial(received + (part * kSlice + index) * 16,
                              received + kReceivedOutputs + (part * 16 + place.query()) * 4);
    });
  }

 private:
  // Returns where a slice leaves its vector of a pair; the slice that merges the pair is number pair % 4.
  DEVICE float4* piece(int tile, int pair, int half, int slice) const {
    const int place = ((tile * kPairs + pair) * 2 + half) * 3 + ((slice - pair) & 3) - 1;
    return reinterpret_cast<float4*>(memory) + place * 32 + (threadIdx.x & 31);
  }
  // Sends a vector to the block whose slice it belongs to.
  DEVICE void send(int vector, int member, int tile, const Partial& part) const {
    const int peer = vector / kSlice, place = (member * ROW_TILES + tile) * kSlice + vector % kSlice;
    send_float4(peer_address(received + place * 16, peer), peer_address(barrier, peer), part.out.x, part.out.y,
                part.out.z, part.out.w);
  }
  // Sends the log sum of a query row to all blocks of the cluster.
  DEVICE void send_log_sum(int query, int member, int tile, float log_sum) const {
    const uint32_t to = received + kReceivedOutputs + ((member * ROW_TILES + tile) * 16 + query) * 4;
#pragma unroll
    for (int peer = 0; peer < CLUSTER; ++peer) send_float(peer_address(to, peer), peer_address(barrier, peer), log_sum);
  }
};

// A row's partial results in the workspace, by cluster of its runs: outputs, then log sums.
struct RowPartials {
  float* memory;
  int num_clusters;

  DEVICE void put(int cluster, int vector, const Partial& part) const {
    __stcg(reinterpret_cast<float4*>(memory) + cluster * kRowVectors + vector, part.out);
    __stcg(log_sums() + cluster * kRowVectors + vector, part.log_sum);
  }
  DEVICE Partial merged(int vector) const {
    return merge<kMergeBatch>(num_clusters, [&](int cluster) -> Partial {
      return {__ldcg(reinterpret_cast<const float4*>(memory) + cluster * kRowVectors + vector),
              __ldcg(log_sums() + cluster * kRowVectors + vector)};
    });
  }

 private:
  DEVICE float* log_sums() const { return memory + num_clusters * kRowVectors * 4; }
};
