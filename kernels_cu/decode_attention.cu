// decode_attention: attention of up to 64 rows, each over the pages of its own slot (flash-decoding).
//
// out[t, h, :] = sum_j softmax_j(scale * q[t, h, :] . k[j, h / GROUP, :]) v[j, h / GROUP, :],  j = 0 .. positions[t],
// or with tree_masks: j < tree_base[t], and tree_base[t] + i for every set bit i of tree_masks[t].
//
// out            [T, H*D] scalar_t row-major; a row of slot -1 becomes zeros
// partials       float32 workspace, T * units * (num_splits / kCluster) * kHeads * D * 5 / 4 elements, where units is
//                K heads * kTiles
// arrivals       int32 workspace, T * units * kCluster, zero before the first launch and after every launch
// q              [T, H*D] scalar_t row-major
// k_pages        [P, K heads, 64, D] scalar_t; v_pages likewise
// positions      [T] int32; slots [T] int32; block_tables [B, pages_per_sequence] int32
// tree_masks     [T] uint64 or null; tree_base [T] int32, read with tree_masks only
// num_splits     into how many runs a long row's pages are cut, a multiple of kCluster
// grid           (x, units, T), x any multiple of kCluster; block 128 in clusters of kCluster along x;
//                shared memory 16 * D * 2 + STAGES * 64 * D * 4 bytes
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are
//                rounded to scalar_t for the product with v, the result is rounded once when stored
// oracle         NumpyOps.decode_attention
// source         Flash-Decoding (Dao et al. 2023), FlashAttention-2 (arXiv 2307.08691)
// layout         The query heads of a KV head are the rows of m16n8k16 tiles, so a page is read once for all of them
//                (more than 16 heads: several blocks, the later ones out of the L2). A row's pages are cut into runs
//                whose length depends on that row's length and the number of splits alone: a row's bits do not depend
//                on its neighbours. Of each page a warp takes 16 keys through a ring of its own, filled with cp.async
//                by the lanes that read it: no barrier in the stream. A partial is (normalised output, log2 of the sum
//                of weights); the four warps are merged through shared memory, the blocks of a cluster through
//                distributed shared memory, each block merging its own slice of the heads' outputs, and clusters
//                through the workspace, where the last one to arrive merges the slice: one block that reads all
//                partials, as without clusters (below sm_90), needs 10 us and more. Short rows stay in one cluster and
//                never touch the workspace. x need not cover num_splits, clusters take several turns: a grid for 64
//                rows of the longest context would be mostly blocks that start, find nothing and leave.
#include "attention.cuh"

#ifndef STAGES
#error "STAGES must be defined: depth of a warp's ring in pages, at least 2"
#endif
#ifndef PORTABLE
#error "PORTABLE must be defined: 1 leaves clusters out on sm_90 and later too"
#endif
static_assert(STAGES >= 2, "a warp's ring also holds its float32 output");

#if __CUDA_ARCH__ >= 900 && !PORTABLE
#define IN_CLUSTERS
#define CLUSTER_LAUNCH __cluster_dims__(8, 1, 1)
constexpr int kCluster = 8;
// Up to this many pages a row stays in one cluster: cheaper than merging through the workspace.
constexpr int kClusterPages = 32;
#else
#define CLUSTER_LAUNCH
constexpr int kCluster = 1;
constexpr int kClusterPages = 4;
#endif

#include "partials.cuh"

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kKeys = kPageTokens / kWarps;  // keys of a page that a warp takes
constexpr int kTiles = (GROUP + 15) / 16;    // blocks that share a KV head
constexpr int kHeads = (GROUP + kTiles - 1) / kTiles;
constexpr int kVectors = kHeads * HEAD_DIM / 4;  // float4 pieces of the block's output
constexpr int kSlice = (kVectors + kCluster - 1) / kCluster;
constexpr int kTileBytes = kKeys * kRowBytes;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kQueryBytes = 16 * kRowBytes;
constexpr int kMergeBatch = kCluster > 1 ? 8 : 16;  // clusters read at a time: without clusters there are more
constexpr int kOutStride = HEAD_DIM + 8;  // floats; the padding keeps the eight rows of a store in different banks

#include "decode_warp.cuh"

// How a row's pages are cut: pages of a run, and how many runs there are.
struct Cut {
  int num_pages, run_pages, num_runs;

  __device__ __forceinline__ Cut(int length, int num_splits) {
    num_pages = (length + kPageTokens - 1) / kPageTokens;
    const int wanted = num_pages <= kClusterPages ? kCluster : num_splits;
    run_pages = (num_pages + wanted - 1) / wanted;
    num_runs = (num_pages + run_pages - 1) / run_pages;
  }
  __device__ __forceinline__ int clusters() const { return (num_runs + kCluster - 1) / kCluster; }
};

// ---- merging partial results ----

// A block's published partial: rows of kOutStride floats at the start of the ring, log_sums beside it.
__device__ __forceinline__ int published_offset(int vector) {
  return (vector / (HEAD_DIM / 4) * kOutStride + vector % (HEAD_DIM / 4) * 4) * 4;
}

// The warp's normalised output and log_sums into its own part of the ring, whose copies have all been consumed.
__device__ __forceinline__ void publish_warp(WarpState& state, float* out, float* log_sums) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(state.sum[half]), inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int row = lane / 4 + half * 8;
    if (lane % 4 == 0) log_sums[row] = sum > 0.0f ? state.max[half] + log2_fast(sum) : kNoMaximum;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      const float* pair = &state.out[n][2 * half];
      *reinterpret_cast<float2*>(out + row * kOutStride + n * 8 + (lane % 4) * 2) =
        make_float2(pair[0] * inverse, pair[1] * inverse);
    }
  }
}

// The four warps' partials become the block's, in warp 0's place: a thread reads and writes the same elements.
__device__ __forceinline__ void merge_warps(unsigned char* ring, const float (&warp_log_sums)[kWarps][16],
                      float* log_sums) {
  for (int vector = threadIdx.x; vector < kVectors; vector += kThreads) {
    const int row = vector / (HEAD_DIM / 4);
    const Partial merged = merge<kWarps>(kWarps, [&](int warp) -> Partial {
      const unsigned char* part = ring + warp * STAGES * kStageBytes;
      return {*reinterpret_cast<const float4*>(part + published_offset(vector)), warp_log_sums[warp][row]};
    });
    *reinterpret_cast<float4*>(ring + published_offset(vector)) = merged.out;
    if (vector % (HEAD_DIM / 4) == 0) log_sums[row] = merged.log_sum;
  }
}

// ---- the kernel ----

// The block's heads of one row of out (or q): the first element, and how many heads there are.
struct Heads {
  int64_t offset;
  int count;
};

__device__ __forceinline__ void store_vector(scalar_t* out, const Heads& heads, int vector, float4 value) {
  if (vector / (HEAD_DIM / 4) >= heads.count) return;
  *reinterpret_cast<uint2*>(out + heads.offset + vector * 4) =
    make_uint2(pack2(value.x, value.y), pack2(value.z, value.w));
}

// True in the last of `expected` blocks that call it with the same counter, which is then zero again. What the others
// wrote before is visible: one thread's acquire and release stand for the block, which the barriers order around it.
__device__ __forceinline__ bool arrives_last(int* arrivals, int expected) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
    last = before == expected - 1;
    if (last) *arrivals = 0;
  }
  __syncthreads();
  return last;
}

__device__ __forceinline__ void load_queries(uint32_t dst, const scalar_t* q, const Heads& heads) {
  for (int index = threadIdx.x; index < 16 * kRowChunks; index += kThreads) {
    const int row = index / kRowChunks, chunk = index % kRowChunks;
    const bool exists = row < heads.count;
    cp_async16(dst + swizzled(row, chunk), q + heads.offset + (exists ? index * 8 : 0), exists ? 16 : 0);
  }
  cp_async_commit();
}

__device__ __forceinline__ void store_zeros(scalar_t* out, const Heads& heads) {
  for (int i = threadIdx.x; i < kVectors; i += kThreads) {
    store_vector(out, heads, i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
}

// A run of pages, by all warps: the block's partial stands at the start of the ring and in log_sums.
__device__ __forceinline__ void attend_run(unsigned char* shared, float (&log_sums)[16], const scalar_t* q,
                                           const Heads& heads, Stream stream, const Keys& keys, float scale) {
  __shared__ float warp_log_sums[kWarps][16];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  unsigned char* ring = shared + kQueryBytes;
  load_queries(shared_address(shared), q, heads);
  for (int page = 0; page < STAGES; ++page) {
    const int64_t offset = stream.locate(page);
    stream.load(stream.k_tile(page), stream.k_rows + offset, page, keys.length);
    stream.load(stream.k_tile(page) + kTileBytes, stream.v_rows + offset, page, keys.length);
  }
  WarpState state = {};
  state.max[0] = state.max[1] = kNoMaximum;
  cp_async_wait<2 * STAGES>();
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    ldmatrix_x4(state.q[step], shared_address(shared) + swizzled(lane_row_a(lane), 2 * step + lane_chunk_a(lane)));
  }
  attend(state, stream, keys, scale * kLog2e);
  publish_warp(state, reinterpret_cast<float*>(ring + warp * STAGES * kStageBytes), warp_log_sums[warp]);
  __syncthreads();
  merge_warps(ring, warp_log_sums, log_sums);
}

// Merges `members` published partials, this block its slice, and stores them: to out if the row has no other cluster,
// else to the workspace, from where the last cluster to arrive merges them into out.
__device__ __forceinline__ void merge_item(scalar_t* out, float* partials, int* arrivals, const unsigned char* ring,
                                           const float (&log_sums)[16], const Heads& heads, int rank, int members,
                                           int cluster, int used_clusters) {
  float* sums = partials + used_clusters * kVectors * 4;
  const int first = rank * kSlice + threadIdx.x, end = min(kVectors, (rank + 1) * kSlice);
  for (int vector = first; vector < end; vector += kThreads) {
    const uint32_t out_address = shared_address(ring) + published_offset(vector);
    const uint32_t sum_address = shared_address(&log_sums[vector / (HEAD_DIM / 4)]);
    const Partial merged = merge<8>(members, [&](int i) {
      return load_peer(peer_address(out_address, i), peer_address(sum_address, i));
    });
    if (used_clusters == 1) {
      store_vector(out, heads, vector, merged.out);
    } else {
      __stcg(reinterpret_cast<float4*>(partials) + cluster * kVectors + vector, merged.out);
      __stcg(sums + cluster * kVectors + vector, merged.log_sum);
    }
  }
  cluster_arrive();
  if (used_clusters > 1 && arrives_last(arrivals + rank, used_clusters)) {
    for (int vector = first; vector < end; vector += kThreads) {
      const Partial merged = merge<kMergeBatch>(used_clusters, [&](int i) -> Partial {
        return {__ldcg(reinterpret_cast<const float4*>(partials) + i * kVectors + vector),
                __ldcg(sums + i * kVectors + vector)};
      });
      store_vector(out, heads, vector, merged.out);
    }
  }
}

extern "C" __global__ void CLUSTER_LAUNCH __launch_bounds__(kThreads, 2)
KERNEL(decode_attention)(scalar_t* __restrict__ out, float* partials, int* arrivals,
                         const scalar_t* q, const scalar_t* k_pages, const scalar_t* v_pages, const int* positions,
                         const int* slots, const int* __restrict__ block_tables, const uint64_t* tree_masks,
                         const int* tree_base, int num_splits,
                         int num_kv_heads, int pages_per_sequence, float scale) {
  pdl_launch_dependents();
  pdl_wait();
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float log_sums[16];
  unsigned char* ring = shared + kQueryBytes;
  const int rank = blockIdx.x % kCluster, warp = threadIdx.x >> 5;
  const int row = blockIdx.z, kv_head = blockIdx.y / kTiles, tile = blockIdx.y % kTiles;
  const int slot = slots[row], position = positions[row];
  const Heads heads = {(((int64_t)row * num_kv_heads + kv_head) * GROUP + tile * kHeads) * HEAD_DIM,
                       min(kHeads, GROUP - tile * kHeads)};
  const Keys keys = keys_of_row(position, tree_masks, tree_base, row);
  if (slot < 0 || keys.length <= 0) {
    if (blockIdx.x == 0) store_zeros(out, heads);
    return;
  }
  const Cut cut(keys.length, num_splits);
  const int64_t head_offset = (int64_t)(kv_head * kPageTokens + warp * kKeys) * HEAD_DIM;
  Stream stream = {k_pages + head_offset,
                   v_pages + head_offset,
                   (int64_t)num_kv_heads * kPageTokens * HEAD_DIM,
                   nullptr,
                   shared_address(ring) + warp * STAGES * kStageBytes,
                   0,
                   0,
                   0};
  const int64_t unit = (int64_t)row * gridDim.y + blockIdx.y;
  for (int cluster = blockIdx.x / kCluster; cluster < cut.clusters(); cluster += gridDim.x / kCluster) {
    const int run = cluster * kCluster + rank, first_page = run * cut.run_pages;
    if (run < cut.num_runs) {
      stream.block_table = block_tables + (int64_t)slot * pages_per_sequence + first_page;
      stream.first_key = first_page * kPageTokens + warp * kKeys;
      stream.num_pages = min(cut.run_pages, cut.num_pages - first_page);
      attend_run(shared, log_sums, q, heads, stream, keys, scale);
    }
    cluster_arrive();
    cluster_wait();
    merge_item(out, partials + unit * (num_splits / kCluster) * kVectors * 5, arrivals + unit * kCluster, ring,
               log_sums, heads, rank, min(kCluster, cut.num_runs - cluster * kCluster), cluster, cut.clusters());
    cluster_wait();
  }
}
