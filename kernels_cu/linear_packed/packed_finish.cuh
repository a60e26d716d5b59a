// Finishing sums that a block exchanges with no other: they are added over the runs of K, or are those of whole rows, or become rows for the
// next product.
#pragma once
#include "packed_exchange.cuh"

// With SHARED_RUN = 0: calls visit(i, tile, row, token, pair) for each output of token tile nt that the thread finishes; `pair` is the
// output's number among those of the block's tiles.
template <class Visit>
DEVICE void visit_pairs(int nt, int round, int num_tiles, int T, Visit visit) {
#pragma unroll
  for (int i = 0; i < kThreadPairs; i++) {
    const int pair = threadIdx.x + i * kThreads, token = nt * 8 + (pair & 3) * 2 + (pair >> 5 & 1), tile = Lane::tile(round, pair >> 6);
    if (pair < kPairs && tile < num_tiles && token < T) visit(i, tile, pair >> 2 & 7, token, pair);
  }
}

// With SHARED_RUN = 0: adds the sums of the eight warps of each tile in the order of their runs, and gives them to the epilogue. With
// KEPT_ROUNDS > 1 sums are only kept until the last round, which finishes those of all rounds.
template <class Epilogue>
DEVICE void finish_block(const Sums& out, const Lane& at, Epilogue& epilogue, const RowScale& scale, int round,
                         bool is_last, int num_tiles, int T) {
  constexpr bool kKeeps = KEPT_ROUNDS > 1;   // each round's sums have a place of their own
  const uint32_t to = at.shared + kPartialOffset + ((kKeeps ? round * kWarps : 0) + at.warp) * 512 + at.lane * 8;
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    if (!kKeeps && (nt > 0 || round > 0)) __syncthreads();
#pragma unroll
    for (int odd = 0; odd < kLaneTokens; odd++)
      if (nt * 8 + at.quarter * 2 + odd < T) store_shared2(to + odd * 256, out[nt][odd], out[nt][odd + 2]);
    if (kKeeps && !is_last) return;
    __syncthreads();
    visit_pairs(nt, kKeeps ? 0 : round, num_tiles, T, [&](int i, int tile, int row, int token, int pair) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int run = 0; run < kFilledRuns; run++) {
        const float2 part = load_shared2(at.shared + kPartialOffset + (((pair >> 6) * RUNS + run) * 64 + (pair & 63)) * 8);
        sum.x += part.x, sum.y += part.y;
      }
      const float factor = scale.of(token);
      epilogue.store(nt, i, tile, row, token, sum.x * factor, sum.y * factor);
    });
  }
}

// With SHARED_RUN = 1 and RUNS = 1: gives a lane's own sums, which are those of whole rows, to the epilogue.
template <class Epilogue>
DEVICE void finish_rows(const Sums& out, const Lane& at, Epilogue& epilogue, const RowScale& scale, int tile, int T) {
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int pass = 0; pass < 2; pass++)
#pragma unroll
      for (int odd = 0; odd < kLaneTokens; odd++) {
        const int token = nt * 8 + at.quarter * 2 + odd;
        if (token >= T) continue;
        if (pass == 0) {
          epilogue.prefetch(nt, odd, tile, at.token, token);
        } else {
          const float factor = scale.of(token);
          epilogue.store(nt, odd, tile, at.token, token, out[nt][odd] * factor, out[nt][odd + 2] * factor);
        }
      }
}

// With FEEDS a gate_up product writes its rows as they are, and also as prepare_rows would write them for the product after it. A block
// has the 16 tiles of 128 neighbouring columns, which are a slice of that product's x: so it sees whole scale groups, and writes whole
// lines. That product has the same ROWS, SCALE_GROUP, ZEROS and WARPGROUPS.
constexpr int kFeedPitch = kSliceColumns * 2 + 16;   // bytes between tokens in shared memory, which puts them into different banks
static_assert(!FEEDS || (SHARED_RUN && RUNS == 1 && kBlockTiles * 8 == kSliceColumns), "FEEDS needs blocks of 16 whole tiles");
static_assert(!FEEDS || kTokens * kFeedPitch <= SMEM_BYTES - kRingOffset, "SMEM_BYTES is too small");

// The block's slice of the rows: first kept in shared memory tile by tile, then written in both forms.
struct Feed {
  const Lane& at;
  scalar_t* out;             // (T, columns)
  unsigned char* prepared;
  int columns, T;

  // Returns where a token's values are kept: in the place of weights that have been read.
  DEVICE uint32_t row(int token) const { return at.shared + kRingOffset + token * kFeedPitch; }
  // Keeps the lane's value of the warp's own tile.
  DEVICE void keep(int token, scalar_t value) const {
    store_shared_element(row(token) + (at.warp * 8 + at.token) * 2, value);
  }
  // Writes the slice in both forms, once all its tiles are kept. A warp takes two tokens at a time; a lane has a piece of one of them.
  DEVICE void pass_on(int slice) const {
    for (int first = at.warp * 2; first < T; first += kWarps * 2) {
      const int token = first + at.lane / 16, of_slice = at.lane % 16, piece = slice * 16 + of_slice;
      const bool is_there = token < T;
      const uint4 v[1] = {load_shared(row(token) + of_slice * 16)};
      if (is_there) store16(out + static_cast<size_t>(token) * columns + piece * 8, v[0]);
      enter_products(PreparedRows{prepared}, v, [&](int) { return Entry{piece, token, is_there}; });
    }
  }
};

// Finishes the block's one round with FEEDS. All warps call it.
template <class Epilogue>
DEVICE void feed_rows(const Sums& out, const Lane& at, const Epilogue& epilogue, const RowScale& scale, int T) {
  const Feed feed{at, epilogue.out, epilogue.prepared, epilogue.F, T};
  __syncthreads();
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int odd = 0; odd < kLaneTokens; odd++) {
      const int token = nt * 8 + at.quarter * 2 + odd;
      const float factor = scale.of(token);
      if (token < T) feed.keep(token, epilogue.value(out[nt][odd] * factor, out[nt][odd + 2] * factor));
    }
  __syncthreads();
  feed.pass_on(blockIdx.x);
}
