// Parts of the attention kernels that multiply with warpgroups: rows of queries, tiles of keys and of values as the
// copy engine lays them out in shared memory, and the products and the softmax between them.
#pragma once
#include "attention.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;

// A tile is stored as panels, each with kSwizzle bytes of every row.
constexpr int kSwizzle = HEAD_DIM == 96 ? 64 : 128;
constexpr int kPanel = kSwizzle / 2;  // elements
constexpr int kPanels = HEAD_DIM / kPanel;
constexpr int kPanelChunks = kSwizzle / 16;
constexpr int kQueryBytes = kWarpgroupRows * kRowBytes;  // bytes of a warpgroup's queries

// Byte offset of a row's 16-byte chunk in the 64 query rows of a warpgroup.
DEVICE int query_offset(int row, int chunk) {
  const int permuted = chunk % kPanelChunks ^ (kSwizzle == 128 ? row & 7 : (row >> 1) & 3);
  return chunk / kPanelChunks * (kWarpgroupRows * kSwizzle) + row * kSwizzle + permuted * 16;
}

// ---- copies

// Starts the copies of page `page`, rows of one KV head, to place `i` of a tile of KEYS keys. One thread calls it;
// `barrier` counts the bytes.
template <int KEYS>
DEVICE void copy_page(uint32_t tile, int i, const TensorMap& map, int num_kv_heads, int kv_head, int page,
                      uint32_t barrier) {
  const int row = (page * num_kv_heads + kv_head) * kPageTokens;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    copy_box(tile + (panel * KEYS + i * kPageTokens) * kSwizzle, map, row, panel * kPanel, barrier);
  }
}

// Clears the rows of a tile of values from `first` on: they were never written, and 0 * NaN would stay NaN. Called by a
// whole warp.
template <int KEYS>
DEVICE void clear_rows(unsigned char* tile, int first) {
  for (int panel = 0; panel < kPanels; ++panel) {
    for (int i = first * kPanelChunks + (threadIdx.x & 31); i < KEYS * kPanelChunks; i += 32) {
      store16(tile + panel * (KEYS * kSwizzle) + i * 16, make_uint4(0, 0, 0, 0));
    }
  }
  async_proxy_fence();
  __syncwarp();
}

// The place of a warpgroup's row in q and in out: `offset` elements from their beginning. A row without a query does
// not exist.
struct RowPlace {
  int64_t offset;
  bool exists;
};

// Starts the copies of the warpgroup's rows of q to shared memory; rows that do not exist become zeros. place_of(row)
// returns a RowPlace.
template <typename PlaceOf>
DEVICE void load_queries(uint32_t tile, const scalar_t* q, const PlaceOf& place_of) {
#pragma unroll
  for (int i = 0; i < kWarpgroupRows * kRowChunks / kWarpgroupThreads; ++i) {
    const int index = threadIdx.x % kWarpgroupThreads + i * kWarpgroupThreads;
    const int row = index / kRowChunks, chunk = index % kRowChunks;
    const RowPlace place = place_of(row);
    cp_async16(tile + query_offset(row, chunk), q + place.offset + chunk * 8, place.exists ? 16 : 0);
  }
  cp_async_commit();
}

// Waits until the rows that load_queries copies are there, for the products of all warps of the warpgroup. `barrier` is
// the number of a barrier of these warps.
DEVICE void wait_for_queries(int barrier) {
  cp_async_wait<0>();
  async_proxy_fence();
  barrier_wait(barrier, kWarpgroupThreads);
}

// ---- products and softmax

// A lane's part of the warpgroup's rows: sums of both its rows, lane / 4 and lane / 4 + 8 of its warp's 16, their
// maxima, and its part of their sums of weights.
struct Rows {
  float out[HEAD_DIM / 2];
  float max[2];  // maxima of scale * log2(e) * score
  float sum[2];  // this lane's part of the sums of weights
};

// Starts scores = q k of the warpgroup's rows and 2 * HALF keys.
template <int HALF>
DEVICE void start_scores(float (&scores)[HALF], uint64_t queries, uint64_t keys) {
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    const int panel = step * 16 / kPanel, within = step * 16 % kPanel * 2;
    wgmma_shared(scores, queries + descriptor_step(panel * kWarpgroupRows * kSwizzle + within),
                 keys + descriptor_step(panel * (2 * HALF * kSwizzle) + within), step > 0);
  }
  wgmma_commit();
}

// Starts out += weights v, for part `part` of PARTS parts of the keys.
template <int PARTS = 1, int STEPS>
DEVICE void start_sums(Rows& rows, const uint32_t (&weights)[STEPS][4], uint64_t values, int part = 0) {
  constexpr int kSteps = STEPS / PARTS;
#pragma unroll
  for (int step = part * kSteps; step < (part + 1) * kSteps; ++step) {
    wgmma_registers(rows.out, weights[step], values + descriptor_step(step * 16 * kSwizzle));
  }
  wgmma_commit();
}

// Brings the output to new maxima: `keep` is the factor of each of the lane's rows.
DEVICE void rescale(Rows& rows, const float (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) rows.out[i] *= keep[i / 2 % 2];
}

// Stores the normalised output. It passes through the warpgroup's query tile in shared memory, so that rows leave in
// 16-byte pieces; all products with this tile must have been waited for.
template <typename PlaceOf>
DEVICE void store_rows(scalar_t* out, const Rows& rows, unsigned char* tile, int barrier, const PlaceOf& place_of) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x / 32 % 4;
  barrier_wait(barrier, kWarpgroupThreads);  // every warp's products have read the queries
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = 1.0f / quad_sum(rows.sum[half]);
    const int row = warp * 16 + half * 8 + lane / 4;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      const float* pair = &rows.out[4 * n + 2 * half];
      *reinterpret_cast<uint32_t*>(tile + query_offset(row, n) + lane % 4 * 4) =
          pack2(pair[0] * inverse, pair[1] * inverse);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRowChunks / 2; ++i) {
    const int index = lane + i * 32, row = warp * 16 + index / kRowChunks, chunk = index % kRowChunks;
    const RowPlace place = place_of(row);
    if (place.exists) store16(out + place.offset + chunk * 8, load16(tile + query_offset(row, chunk)));
  }
}
