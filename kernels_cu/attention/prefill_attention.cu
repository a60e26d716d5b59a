// prefill_attention: causal attention of the rows of one prefill chunk over the pages of their slot.
//
// out[i, h, :] = sum_j softmax_j(scale * q[i, h, :] . k[j, h / GROUP, :]) v[j, h / GROUP, :],  j = 0 .. start + i,
// or with WINDOW the last WINDOW of these
//
// out            [rows, H*D] scalar_t row-major; only rows below count are stored
// q              [rows, H*D] scalar_t row-major
// k_pages        [P, K heads, 64, D] scalar_t, the chunk's own keys already appended; v_pages likewise
// block_tables   [B, pages_per_sequence] int32
// chunk          [3] int32: slot, start, count, in device memory, so that one launch serves every chunk of a bucket;
//                slot -1 or count 0: nothing is stored. start may be -1: then out of row 0, which sees nothing, is undefined
// constants      HEAD_DIM: elements of a head: 64, 96 or 128. GROUP: query heads of a KV head. WINDOW: how many of a
//                row's last keys it sees, 0 for all
// grid           (H / kHeads, bucket rows / kRows rounded up); block 128; shared memory (128 + 4 * 64) * D * 2 bytes
// numerics       scores, softmax and sums in float32 (exp2 with the scale folded in); the unnormalised weights are
//                rounded to scalar_t for the product with v, the result is rounded once when stored
// oracle         NumpyOps.prefill_attention
// source         FlashAttention-2 (arXiv 2307.08691)
// layout         A block takes 128 query rows: 64 positions of two heads of one KV head where GROUP is even, so that a
//                page serves both and only one page in a run is cut by the diagonal; else 128 positions of one head. 4
//                warps x 32 rows: a K or V fragment feeds two m-tiles, which halves the shared-memory reads that bound
//                16-row warps; q is read again for every page, since 32 rows of scores and output fill the registers.
//                Pages are double-buffered with cp.async, one barrier a page. Long blocks come first, heads vary
//                fastest: blocks in flight share pages through the L2
#if !defined(HEAD_DIM) || !defined(GROUP) || !defined(WINDOW)
#error "a constant is not defined"
#endif
#include "attention.cuh"

// An earlier kernel writes the chunk: as __restrict__ it might be loaded before pdl_wait. Below sm_90 no kernel starts
// early, and __restrict__ saves a register that would be spilled.
#if __CUDA_ARCH__ >= 900
#define CHUNK_RESTRICT
#else
#define CHUNK_RESTRICT __restrict__
#endif

constexpr int kTileRows = 128;
constexpr int kHeads = GROUP % 2 == 0 ? 2 : 1;
constexpr int kRows = kTileRows / kHeads;  // consecutive positions of a block
constexpr int kThreads = 128;
constexpr int kPageBytes = kPageTokens * kRowBytes;
constexpr int kQueryBytes = kTileRows * kRowBytes;

// Returns the block's first row of the chunk. Blocks take rows from the end: it is negative past the beginning.
DEVICE int first_row_of_block(int count) {
  return ((count + kRows - 1) / kRows - 1 - static_cast<int>(blockIdx.y)) * kRows;
}

// Starts the copies of the block's rows of q to shared memory; rows that do not exist become zeros.
DEVICE void load_queries(uint32_t dst, const scalar_t* q, int row_stride, int first_row, int count) {
#pragma unroll
  for (int i = 0; i < kTileRows * kRowChunks / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, row = index / kRowChunks, chunk = index % kRowChunks;
    const int query = first_row + row % kRows;
    const bool exists = query < count;
    const scalar_t* src = q + (int64_t)(exists ? query : 0) * row_stride + row / kRows * HEAD_DIM + chunk * 8;
    cp_async16(dst + swizzled(row, chunk), src, exists ? 16 : 0);
  }
}

// Starts the copies of one page of K or V. Rows from `valid` on become zeros: they were never written, and 0 * NaN
// would stay NaN.
DEVICE void load_page(uint32_t dst, const scalar_t* rows, int valid) {
#pragma unroll
  for (int i = 0; i < kPageTokens * kRowChunks / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads, row = index / kRowChunks, chunk = index % kRowChunks;
    cp_async16(dst + swizzled(row, chunk), rows + index * 8, row < valid ? 16 : 0);
  }
}

// A warp's state for its 32 query rows, in two m-tiles.
struct WarpRows {
  float out[2][kDimTiles][4];
  float max[2][2];  // maxima of scale * log2(e) * score
  float sum[2][2];  // this lane's part of the sums of weights
};

// scores[m-tile][key tile] = q k for the warp's 32 rows and the 64 keys of a page.
DEVICE void score_page(float (&scores)[2][8][4], uint32_t q_tile, uint32_t k_tile) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int step = 0; step < kDimSteps; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      ldmatrix_x4(a[m], q_tile + swizzled(warp * 32 + m * 16 + lane_row_a(lane), 2 * step + lane_chunk_a(lane)));
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[4];
      ldmatrix_x4(b, k_tile + swizzled(pair * 16 + lane_row_b(lane), 2 * step + lane_chunk_b(lane)));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma(scores[m][2 * pair], a[m], {b[0], b[1]});
        mma(scores[m][2 * pair + 1], a[m], {b[2], b[3]});
      }
    }
  }
}

// Hides keys that a row does not see. first_query: position of row 0 of the block.
DEVICE void mask_page(float (&scores)[2][8][4], int first_key, int first_query) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = (warp * 32 + m * 16 + lane / 4 + (i / 2) * 8) % kRows;
        const int key = first_key + n * 8 + (lane % 4) * 2 + i % 2;
        if (is_hidden<WINDOW>(key, first_query + row)) scores[m][n][i] = kHiddenScore;
      }
    }
  }
}

// Scores become weights 2^(factor * score - max); output and sums are brought to the new maximum.
DEVICE void softmax_page(float (&scores)[2][8][4], WarpRows& rows, float factor) {
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float keep[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = scores[m][0][2 * half];
#pragma unroll
      for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      top = fmaxf(rows.max[m][half], quad_max(top) * factor);
      keep[half] = exp2_fast(rows.max[m][half] - top);
      rows.max[m][half] = top;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[m][n][i] = exp2_fast(fmaf(scores[m][n][i], factor, -top));
          sum += scores[m][n][i];
        }
      }
      rows.sum[m][half] = rows.sum[m][half] * keep[half] + sum;
    }
    // Most pages leave every maximum where it was: then the factors are exactly 1.
    if (!__any_sync(0xFFFFFFFFu, keep[0] != 1.0f || keep[1] != 1.0f)) continue;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.out[m][n][i] *= keep[i / 2];
  }
}

// out += weights v.
DEVICE void accumulate_page(WarpRows& rows, const float (&weights)[2][8][4], uint32_t v_tile) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < kPageTokens / 16; ++step) {
    uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &weights[m][2 * step + i / 2][(i % 2) * 2];
        a[m][i] = pack2(pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kDimSteps; ++pair) {
      uint32_t b[4];
      ldmatrix_x4_transposed(b, v_tile + swizzled(step * 16 + lane_row_a(lane), 2 * pair + lane_chunk_a(lane)));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        mma(rows.out[m][2 * pair], a[m], {b[0], b[1]});
        mma(rows.out[m][2 * pair + 1], a[m], {b[2], b[3]});
      }
    }
  }
}

// Stores the normalised output. It passes through the warp's own rows of the query tile, so that rows leave in 16-byte
// pieces.
DEVICE void store_rows(scalar_t* out, WarpRows& rows, unsigned char* q_tile, int row_stride, int first_row, int count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = 1.0f / quad_sum(rows.sum[m][half]);
      const int row = warp * 32 + m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        const float* pair = &rows.out[m][n][2 * half];
        *reinterpret_cast<uint32_t*>(q_tile + swizzled(row, n) + (lane % 4) * 4) =
            pack2(pair[0] * inverse, pair[1] * inverse);
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRowChunks; ++i) {
    const int index = lane + i * 32, row = warp * 32 + index / kRowChunks, chunk = index % kRowChunks;
    const int query = first_row + row % kRows;
    if (query >= count) continue;
    store16(out + (int64_t)query * row_stride + row / kRows * HEAD_DIM + chunk * 8,
            load16(q_tile + swizzled(row, chunk)));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
KERNEL(prefill_attention)(scalar_t* __restrict__ out, const scalar_t* __restrict__ q,
                          const scalar_t* __restrict__ k_pages, const scalar_t* __restrict__ v_pages,
                          const int* __restrict__ block_tables, const int* CHUNK_RESTRICT chunk, int num_kv_heads,
                          int pages_per_sequence, float scale) {
  pdl_begin();
  const int slot = chunk[0], start = chunk[1], count = chunk[2];
  const int first_row = first_row_of_block(count);
  if (slot < 0 || first_row < 0) return;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t q_tile = shared_address(shared), k_tiles = q_tile + kQueryBytes, v_tiles = k_tiles + 2 * kPageBytes;
  const int head = blockIdx.x * kHeads, kv_head = head / GROUP;
  const int row_stride = num_kv_heads * GROUP * HEAD_DIM;
  const int length = start + min(count, first_row + kRows);  // keys that the block's last row sees
  const int* block_table = block_tables + (int64_t)slot * pages_per_sequence;

  const auto load = [&](int page) {
    const int page_id = __ldg(block_table + page);
    const int valid = length - page * kPageTokens, stage = (page & 1) * kPageBytes;
    load_page(k_tiles + stage, page_rows(k_pages, page_id, num_kv_heads, kv_head), valid);
    load_page(v_tiles + stage, page_rows(v_pages, page_id, num_kv_heads, kv_head), valid);
  };
  load_queries(q_tile, q + head * HEAD_DIM, row_stride, first_row, count);
  const int first_page = WINDOW > 0 ? max(start + first_row + 1 - WINDOW, 0) / kPageTokens : 0;
  load(first_page);
  cp_async_commit();

  WarpRows rows = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) rows.max[i / 2][i % 2] = kNoMaximum;
  for (int page = first_page; page * kPageTokens < length; ++page) {
    cp_async_wait<0>();
    __syncthreads();
    if ((page + 1) * kPageTokens < length) load(page + 1);
    cp_async_commit();
    const int stage = (page & 1) * kPageBytes, first_key = page * kPageTokens;
    float scores[2][8][4] = {};
    score_page(scores, q_tile, k_tiles + stage);
    const bool begins_early = WINDOW > 0 && first_key < start + first_row + kRows - WINDOW;  // begins before a row's window
    if (begins_early || first_key + kPageTokens - 1 > start + first_row) {
      mask_page(scores, first_key, start + first_row);
    }
    softmax_page(scores, rows, scale * kLog2e);
    accumulate_page(rows, scores, v_tiles + stage);
  }
  // The count is read again, so that it holds no register through the loop.
  const int end = *const_cast<const volatile int*>(chunk + 2);
  store_rows(out + blockIdx.x * kHeads * HEAD_DIM, rows, shared, row_stride, first_row_of_block(end), end);
}
