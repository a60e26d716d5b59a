// What the attention kernels of warpgroups share: rows of queries, tiles of keys and of values as the copy engine lays
// them out in shared memory, and the products and the softmax between them.
//
// The including file defines kTilePages, the pages of a tile of keys.
#pragma once
#include "attention.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;
constexpr int kKeys = kTilePages * kPageTokens;  // of a tile

// Rows of a tile lie in panels of kSwizzle bytes a row.
constexpr int kSwizzle = HEAD_DIM == 96 ? 64 : 128;
constexpr int kPanel = kSwizzle / 2;  // elements
constexpr int kPanels = HEAD_DIM / kPanel;
constexpr int kPanelChunks = kSwizzle / 16;
constexpr int kQueryBytes = kWarpgroupRows * kRowBytes;  // of a warpgroup
constexpr int kTileBytes = kKeys * kRowBytes;
constexpr int kTilePanelBytes = kKeys * kSwizzle;
constexpr int kPagePanelBytes = kPageTokens * kSwizzle;

// Byte offset of a 16-byte chunk in the 64 rows of a warpgroup.
DEVICE int query_offset(int row, int chunk) {
  const int permuted = chunk % kPanelChunks ^ (kSwizzle == 128 ? row & 7 : (row >> 1) & 3);
  return chunk / kPanelChunks * (kWarpgroupRows * kSwizzle) + row * kSwizzle + permuted * 16;
}

// ---- copies

// Starts the copies of page `page`, rows of one KV head, to place `i` of a tile; one thread.
DEVICE void copy_page(uint32_t tile, int i, const TensorMap& map, int num_kv_heads, int kv_head, int page,
                      uint32_t barrier) {
  const int row = (page * num_kv_heads + kv_head) * kPageTokens;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    copy_box(tile + panel * kTilePanelBytes + i * kPagePanelBytes, map, row, panel * kPanel, barrier);
  }
}

// Rows of a tile of values from `first` on become zeros: they were never written, and 0 * NaN would stay.
DEVICE void clear_rows(unsigned char* tile, int first) {
  for (int panel = 0; panel < kPanels; ++panel) {
    for (int i = first * kPanelChunks + (threadIdx.x & 31); i < kKeys * kPanelChunks; i += 32) {
      store16(tile + panel * kTilePanelBytes + i * 16, make_uint4(0, 0, 0, 0));
    }
  }
  async_proxy_fence();
  __syncwarp();
}

// Where row `row` of a warpgroup lies in q and in out: `offset` elements from their beginning, if it exists.
struct RowPlace {
  int64_t offset;
  bool exists;
};

// q rows of the warpgroup into shared memory; rows that do not exist become zeros. place_of(row) is a RowPlace.
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

// Until they are there, for the products of all warps of the warpgroup.
DEVICE void wait_for_queries(int barrier) {
  cp_async_wait<0>();
  async_proxy_fence();
  barrier_wait(barrier, kWarpgroupThreads);
}

// ---- products and softmax

struct Rows {
  float out[HEAD_DIM / 2];
  float max[2];  // of scale * log2(e) * score
  float sum[2];  // this lane's part
};
using Scores = float[kKeys / 2];
using Weights = uint32_t[kKeys / 16][4];

// Starts scores = q k.
DEVICE void start_scores(Scores& scores, uint64_t queries, uint64_t keys) {
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    const int panel = step * 16 / kPanel, within = step * 16 % kPanel * 2;
    wgmma_shared(scores, queries + descriptor_step(panel * kWarpgroupRows * kSwizzle + within),
                 keys + descriptor_step(panel * kTilePanelBytes + within), step > 0);
  }
  wgmma_commit();
}

// Starts out += weights v, of one of PARTS parts of the keys.
template <int PARTS = 1>
DEVICE void start_sums(Rows& rows, const Weights& weights, uint64_t values, int part = 0) {
  constexpr int kSteps = kKeys / 16 / PARTS;
#pragma unroll
  for (int step = part * kSteps; step < (part + 1) * kSteps; ++step) {
    wgmma_registers(rows.out, weights[step], values + descriptor_step(step * 16 * kSwizzle));
  }
  wgmma_commit();
}

// Scores become weights 2^(factor * score - max). keep: what brings earlier weights to the new maximum.
DEVICE void softmax(Scores& scores, Rows& rows, float (&keep)[2], float factor) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = scores[2 * half];
#pragma unroll
    for (int i = 2 * half; i < kKeys / 2; i += 4) top = fmaxf(top, fmaxf(scores[i], scores[i + 1]));
    top = fmaxf(rows.max[half], quad_max(top) * factor);
    keep[half] = exp2_fast(rows.max[half] - top);
    rows.max[half] = top;
    float sum = 0.0f;
#pragma unroll
    for (int i = 2 * half; i < kKeys / 2; i += 4) {
      scores[i] = exp2_fast(fmaf(scores[i], factor, -top));
      scores[i + 1] = exp2_fast(fmaf(scores[i + 1], factor, -top));
      sum += scores[i] + scores[i + 1];
    }
    rows.sum[half] = rows.sum[half] * keep[half] + sum;
  }
}

DEVICE void rescale(Rows& rows, const float (&keep)[2]) {
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) rows.out[i] *= keep[i / 2 % 2];
}

// The sums of a column-tile pair are the a operand of a product over 16 keys.
DEVICE void pack(Weights& weights, const Scores& scores) {
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = pack2(scores[2 * i], scores[2 * i + 1]);
}

// Through the warpgroup's rows of shared memory, whose products have been waited for, so that rows leave in 16-byte
// pieces.
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
