// expand_latents: makes keys and values of some heads from the latents of a sequence, for the attention of a prefill chunk.
//
// k_out[p, h, j, :] = [up[first_head + h, :N, :] c, r, 0 ..],  v_out[p, h, j, :] = [up[first_head + h, N:, :] c, 0 ..] with
// [c | r] row j of page block_tables[slot, p], for the pages that the chunk sees; rows from start + count on become zeros
//
// k_out          [pages, heads, 64, HEAD_DIM] scalar_t; v_out likewise
// pages          [P, 1, 64, C + R] scalar_t, C = KV_RANK, R = ROPE_DIM, N = NOPE_DIM
// up             [all heads, N + VALUE_DIM, C] scalar_t row-major
// block_tables   [B, pages_per_sequence] int32
// chunk          [3] int32: slot, start, count, in device memory; slot -1: nothing is stored
// constants      KV_RANK: elements of a latent, a multiple of 64. NOPE_DIM: rows of up that make a key, a multiple of 16. ROPE_DIM: rotated
//                elements of a key behind them, a multiple of 16. VALUE_DIM: rows of up that make a value, a multiple of 16. HEAD_DIM:
//                elements of a row that is stored: NOPE_DIM + ROPE_DIM, at least VALUE_DIM
// grid           (a, heads): a block takes pages x, x + a and so on; block 128; shared memory (N + VALUE_DIM + 64) * C * 2 bytes
// numerics       tensor cores over k in ascending order, float32 sums, rounded once: the bits of a token's key and value depend on its
//                latent alone
// oracle         NumpyOps.prefill_latent_attention
// source         arXiv 2405.04434
// layout         A head's part of up stays in shared memory while pages pass: each warp takes 16 tokens of a page. Two blocks on a
//                multiprocessor load and multiply in turn. The stored rows have the form that attention over heads reads, with zeros behind
//                a value that is shorter than a key
#if !defined(KV_RANK) || !defined(NOPE_DIM) || !defined(ROPE_DIM) || !defined(VALUE_DIM) || !defined(HEAD_DIM)
#error "a constant is not defined"
#endif
#include "warp_tile.cuh"

constexpr int kThreads = 128;
constexpr int kCached = KV_RANK + ROPE_DIM;
constexpr int kUpRows = NOPE_DIM + VALUE_DIM;  // rows of a head's part of up
constexpr int kChunks = KV_RANK / 8;      // 16-byte chunks of a latent
constexpr int kUpTiles = kUpRows / 8;     // n-tiles
constexpr int kBatch = 8;                 // n-tiles whose sums are held at a time
static_assert(KV_RANK % 64 == 0 && NOPE_DIM % 16 == 0 && ROPE_DIM % 16 == 0 && VALUE_DIM % 16 == 0 &&
              HEAD_DIM == NOPE_DIM + ROPE_DIM && VALUE_DIM <= HEAD_DIM, "sizes that the kernel does not take");

// Byte offset of a row's 16-byte chunk in a tile of rows of KV_RANK elements: the same chunk of 8 consecutive rows lies in all 32 banks.
DEVICE int swizzled(int row, int chunk) { return row * (KV_RANK * 2) + ((chunk ^ (row & 7)) << 4); }

// sums += latents up^T, for the warp's 16 tokens and the kBatch n-tiles of up's rows from `first_tile` on.
DEVICE void multiply(float (&sums)[kBatch][4], uint32_t up_tile, uint32_t tokens, int first_tile, int lane, int warp) {
#pragma unroll 4
  for (int step = 0; step < KV_RANK / 16; step++) {
    uint32_t a[4];
    ldmatrix_x4(a, tokens + swizzled(warp * 16 + lane_row_a(lane), 2 * step + lane_chunk_a(lane)));
#pragma unroll
    for (int pair = 0; pair < kBatch / 2; pair++) {
      const int row = (first_tile + 2 * pair) * 8;
      if (row >= kUpRows) break;
      uint32_t b[4];
      ldmatrix_x4(b, up_tile + swizzled(row + lane_row_b(lane), 2 * step + lane_chunk_b(lane)));
      mma(sums[2 * pair], a, {b[0], b[1]});
      mma(sums[2 * pair + 1], a, {b[2], b[3]});
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    KERNEL(expand_latents)(scalar_t* __restrict__ k_out, scalar_t* __restrict__ v_out, const scalar_t* pages,
                           const scalar_t* __restrict__ up, const int* block_tables, const int* chunk, int first_head,
                           int pages_per_sequence) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int head = blockIdx.y, num_heads = gridDim.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t up_tile = shared_address(shared), tokens = up_tile + kUpRows * KV_RANK * 2;
  const scalar_t* own = up + static_cast<int64_t>(first_head + head) * kUpRows * KV_RANK;
  for (int index = threadIdx.x; index < kUpRows * kChunks; index += kThreads)
    cp_async16(up_tile + swizzled(index / kChunks, index % kChunks), own + index * 8);
  pdl_begin();
  const int slot = chunk[0], length = chunk[1] + chunk[2];
  if (slot < 0) return;
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  for (int p = blockIdx.x; p * kPageTokens < length; p += gridDim.x) {
    const int page = block_tables[static_cast<int64_t>(slot) * pages_per_sequence + p], valid = length - p * kPageTokens;
    const scalar_t* from = pages + static_cast<int64_t>(page) * (kPageTokens * kCached);
    for (int index = threadIdx.x; index < kPageTokens * kChunks; index += kThreads) {
      const int row = index / kChunks, column = index % kChunks;
      cp_async16(tokens + swizzled(row, column), from + row * kCached + column * 8, row < valid ? 16 : 0);
    }
    const int64_t place = (static_cast<int64_t>(p) * num_heads + head) * (kPageTokens * HEAD_DIM);
    scalar_t *keys = k_out + place, *values = v_out + place;
    constexpr int kShared = ROPE_DIM / 8, kPadding = (HEAD_DIM - VALUE_DIM) / 8;
    for (int index = threadIdx.x; index < kPageTokens * kShared; index += kThreads) {
      const int row = index / kShared, column = index % kShared * 8;
      const uint4 v = row < valid ? load16(from + row * kCached + KV_RANK + column) : zeros;
      store16(keys + row * HEAD_DIM + NOPE_DIM + column, v);
    }
    for (int index = threadIdx.x; index < kPageTokens * kPadding; index += kThreads)
      store16(values + index / kPadding * HEAD_DIM + VALUE_DIM + index % kPadding * 8, zeros);
    cp_async_wait_all();
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < kUpTiles; first += kBatch) {
      float sums[kBatch][4] = {};
      multiply(sums, up_tile, tokens, first, lane, warp);
#pragma unroll
      for (int n = 0; n < kBatch; n++) {
        const int column = (first + n) * 8 + lane % 4 * 2;
        if (column >= kUpRows) break;
        scalar_t* to = (column < NOPE_DIM ? keys + column : values + column - NOPE_DIM) + (warp * 16 + lane / 4) * HEAD_DIM;
        *reinterpret_cast<uint32_t*>(to) = pack2(sums[n][0], sums[n][1]);
        *reinterpret_cast<uint32_t*>(to + 8 * HEAD_DIM) = pack2(sums[n][2], sums[n][3]);
      }
    }
    __syncthreads();
  }
}
