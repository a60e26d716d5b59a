// Parts of a block of decode attention beside the reading of pages: the tile of query rows, and merging the results of
// its warps, of the blocks of a cluster, and of clusters through the workspace.
#pragma once
#include "partials.cuh"
#include "decode_warp.cuh"

constexpr int kWarps = kSlices;
constexpr int kThreads = 32 * kWarps;      // threads of a team
constexpr int kTiles = (GROUP + 15) / 16;  // blocks that share a KV head
constexpr int kHeads = (GROUP + kTiles - 1) / kTiles;
constexpr int kVectors = kHeads * HEAD_DIM / 4;  // float4 pieces of the block's output
constexpr int kSlice = kVectors / CLUSTER;       // pieces that one block of a cluster merges
static_assert(kVectors % CLUSTER == 0, "slices are equal: peers count their bytes");
constexpr int kQueryBytes = 16 * kRowBytes;
constexpr int kTeamBytes = kQueryBytes + kWarps * STAGES * kStageBytes;
static_assert(16 * HEAD_DIM * 4 == kStageBytes, "a warp's output takes a place of its ring");

// Waits for all threads of the calling thread's team.
DEVICE void team_barrier() {
  if (TEAMS == 1) {
    __syncthreads();
  } else {
    barrier_wait(1 + threadIdx.y, kThreads);
  }
}

// ---- a block's part of q and out

// The block's heads of one row of out (or q): the first element, and how many heads there are.
struct Heads {
  int64_t offset;
  int count;
};

// Stores four elements, number `vector` of the block's heads, if they belong to a head that exists.
DEVICE void store_vector(scalar_t* out, const Heads& heads, int vector, float4 value) {
  if (vector / (HEAD_DIM / 4) >= heads.count) return;
  *reinterpret_cast<uint2*>(out + heads.offset + vector * 4) =
    make_uint2(pack2(value.x, value.y), pack2(value.z, value.w));
}

// A thread's 16-byte pieces of the tile of query rows. They are read through registers, not with the copies of pages,
// so that waiting for the query does not mean waiting for pages.
struct Query {
  static constexpr int kPieces = (16 * kRowChunks + kThreads - 1) / kThreads;
  uint4 pieces[kPieces];

  template <typename Load>
  DEVICE void read(const scalar_t* q, const Heads& heads, Load load) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int index = threadIdx.x + i * kThreads;
      pieces[i] = make_uint4(0, 0, 0, 0);
      if (index / kRowChunks < heads.count) pieces[i] = load(q + heads.offset + index * 8);
    }
  }
  DEVICE void store(unsigned char* tile) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int index = threadIdx.x + i * kThreads;
      if (index < 16 * kRowChunks) store16(tile + swizzled(index / kRowChunks, index % kRowChunks), pieces[i]);
    }
  }
};

// Stores zeros as the output of the block's heads. All threads of a team call it; each team stores all of them.
DEVICE void store_zeros(scalar_t* out, const Heads& heads) {
  for (int i = threadIdx.x; i < kVectors; i += kThreads) {
    store_vector(out, heads, i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
}

// ---- merging partial results

// Byte offset of vector `vector` of a row in a warp's published output. Rows 0 to 3 and 4 to 7, which a store of 8
// bytes a lane writes together, are in different banks.
DEVICE int published_offset(int row, int vector) {
  return (row * (HEAD_DIM / 4) + (vector ^ (row % 4 * 2 + row / 4 % 2))) * 16;
}

// Stores the warp's normalised output at `out`, a place of its ring that nobody reads any more, and log2 of the sum of
// weights of each of its rows in `log_sums`.
DEVICE void publish_warp(const WarpState& state, uint32_t out, float* log_sums) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < ROW_HALVES; ++half) {
    const float sum = quad_sum(state.sum[half]), inverse = sum > 0.0f ? reciprocal_fast(sum) : 0.0f;
    const int row = lane / 4 + half * 8;
    if (lane % 4 == 0) log_sums[row] = sum > 0.0f ? state.max[half] + log2_fast(sum) : kNoMaximum;
#if FP8
    publish_row(state, half, inverse, [&](int vector) { return out + published_offset(row, vector); });
#else
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      const float* pair = &state.out[n][2 * half];
      const uint32_t to = out + published_offset(row, 2 * n + lane % 4 / 2) + lane % 2 * 8;
      store_shared2(to, pair[0] * inverse, pair[1] * inverse);
    }
#endif
  }
}

// Merges the results of the four warps and calls visit(vector, merged) for each of the thread's vectors. `results` is
// what the first warp published.
template <typename Visit>
DEVICE void merge_warps(const unsigned char* results, const float (&warp_log_sums)[kWarps][16], Visit visit) {
#pragma unroll
  for (int i = 0; i < (kVectors + kThreads - 1) / kThreads; ++i) {
    const int vector = threadIdx.x + i * kThreads;
    if (kVectors % kThreads != 0 && vector >= kVectors) continue;
    visit(vector, merge<kWarps>(kWarps, [&](int warp) -> Partial {
            const int row = vector / (HEAD_DIM / 4), offset = published_offset(row, vector % (HEAD_DIM / 4));
            return {*reinterpret_cast<const float4*>(results + warp * STAGES * kStageBytes + offset),
                    warp_log_sums[warp][row]};
          }));
  }
}

// The destination of a row's values: `out`, or the workspace, by cluster, if several clusters share the row.
struct Target {
  scalar_t* out;
  float* partials;
  int cluster, used_clusters;

  DEVICE float* log_sums() const { return partials + used_clusters * kVectors * 4; }

  // Stores a vector: to `out` if the row has no other cluster, else to the workspace.
  DEVICE void keep(const Heads& heads, int vector, const Partial& merged) const {
    if (used_clusters == 1) {
      store_vector(out, heads, vector, merged.out);
    } else {
      __stcg(reinterpret_cast<float4*>(partials) + cluster * kVectors + vector, merged.out);
      __stcg(log_sums() + cluster * kVectors + vector, merged.log_sum);
    }
  }

  // Merges the partials of all clusters and stores the result in `out`. In clusters the last block to arrive of each
  // rank calls it, for the slice of this rank; without clusters THREADS threads of the last block do, for all vectors.
  template <int THREADS = kThreads>
  DEVICE void merge_clusters(const Heads& heads, int rank) const {
#if IN_CLUSTERS
    for (int vector = rank * kSlice + threadIdx.x; vector < (rank + 1) * kSlice; vector += kThreads)
      store_vector(out, heads, vector, merge<kMergeBatch>(used_clusters, [&](int i) { return partial(i, vector); }).out);
#else
    // There are more partials, and a thread has several vectors: their loads wait together. kBatch, the number of
    // partials that are added at a time, decides a result's last bits.
    constexpr int kOwn = (kVectors + THREADS - 1) / THREADS, kBatch = 32 / ((kVectors + kThreads - 1) / kThreads);
    const auto vector_of = [&](int own) { return own * THREADS + static_cast<int>(threadIdx.x); };
    Mean means[kOwn];
    merge<kBatch>(means, used_clusters, [&](int i, int own) { return partial(i, min(vector_of(own), kVectors - 1)); });
#pragma unroll
    for (int own = 0; own < kOwn; ++own)
      if (vector_of(own) < kVectors) store_vector(out, heads, vector_of(own), means[own].finished().out);
#endif
  }
  DEVICE Partial partial(int index, int vector) const {
    return {__ldcg(reinterpret_cast<const float4*>(partials) + index * kVectors + vector),
            __ldcg(log_sums() + index * kVectors + vector)};
  }
};

// ---- in clusters

constexpr int kReceivedOffset = TEAMS * kTeamBytes;  // offset of what peers send: outputs [run][vector of the slice], then log sums
constexpr int kReceivedSums = kCluster * kSlice * 16;
constexpr int kReceivedBytes = 20 * kSlice;          // bytes that arrive for each run

// Initialises the barrier that counts what peers send, and announces it to the cluster. All threads call it.
DEVICE void prepare_received(uint32_t barrier) {
  if (is_first_thread()) {
    mbarrier_init(barrier, 1);
    mbarrier_init_fence();
  }
  __syncwarp();  // racecheck takes the initialisation, an instruction of the warp, for other lanes' too
  cluster_announce();
}

// Merges the warps' results of a run and sends each slice to the peer that merges it; `first_peer` is the rank of the
// first of these peers, `member` the run's place among the eight that they merge.
DEVICE void send_slices(const unsigned char* shared, const unsigned char* results, const float (&log_sums)[kWarps][16],
                        uint32_t barrier, int member, int first_peer = 0) {
  const uint32_t received = shared_address(shared) + kReceivedOffset;
  merge_warps(results, log_sums, [&](int vector, const Partial& part) {
    const int place = member * kSlice + vector % kSlice;
    send_partial(received + place * 16, received + kReceivedSums + place * 4, barrier, first_peer + vector / kSlice, part);
  });
}

// Calls visit(i, merged) for each vector of the block's slice, merged from `members` runs that have been received.
template <typename Visit>
DEVICE void merge_received(const unsigned char* shared, int members, Visit visit) {
  const uint32_t received = shared_address(shared) + kReceivedOffset;
  for (int i = (TEAMS == 1 ? 0 : threadIdx.y * kThreads) + threadIdx.x; i < kSlice; i += TEAMS * kThreads) {
    visit(i, merge<8>(members, [&](int member) {
            const int place = member * kSlice + i;
            return received_partial(received + place * 16, received + kReceivedSums + place * 4);
          }));
  }
}

// Merges the vectors of the block's slice from `members` runs and keeps them where the row's values go.
DEVICE void merge_slices(const unsigned char* shared, const Heads& heads, const Target& target, int rank, int members) {
  merge_received(shared, members, [&](int i, const Partial& merged) { target.keep(heads, rank * kSlice + i, merged); });
}
