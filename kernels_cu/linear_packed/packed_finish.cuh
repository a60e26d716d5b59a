// What becomes of the sums of a block that shares them with no other: sums over runs of K, whole rows, rows for the product after it.
#pragma once
#include "packed_exchange.cuh"

// SHARED_RUN = 0: sums over the runs, in order. `visit(nt, i, tile, row, token, pair)` for what the thread finishes.
template <class Visit>
DEVICE void visit_pairs(int nt, int round, int num_tiles, int T, Visit visit) {
#pragma unroll
  for (int i = 0; i < kThreadPairs; i++) {
    const int pair = threadIdx.x + i * kThreads, token = nt * 8 + (pair & 3) * 2 + (pair >> 5 & 1), tile = Lane::tile(round, pair >> 6);
    if (pair < kPairs && tile < num_tiles && token < T) visit(i, tile, pair >> 2 & 7, token, pair);
  }
}

template <class Epilogue>
DEVICE void finish_block(const Sums& out, const Lane& at, Epilogue& epilogue, const RowScale& scale, int round,
                         bool is_last, int num_tiles, int T) {
  constexpr bool kKeeps = KEPT_ROUNDS > 1;   // sums of each round in their own place, until the last
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

// SHARED_RUN = 1 and RUNS = 1: a lane's own values.
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

// With FEEDS a gate_up product leaves its rows for the product after it as prepare_rows would write them, and as they are. A block
// has the 16 tiles of 128 neighbouring columns, a slice of the product after it, which takes the same ROWS, SCALE_GROUP, ZEROS and
// WARPGROUPS: so it sees whole scale groups, and writes whole lines.
constexpr int kFeedPitch = kSliceColumns * 2 + 16;   // bytes between tokens in shared memory: rows in other banks
static_assert(!FEEDS || (SHARED_RUN && RUNS == 1 && kBlockTiles * 8 == kSliceColumns), "FEEDS needs blocks of 16 whole tiles");
static_assert(!FEEDS || kTokens * kFeedPitch <= SMEM_BYTES - kRingOffset, "SMEM_BYTES is too small");

struct Feed {
  const Lane& at;
  scalar_t* out;             // (T, columns)
  unsigned char* prepared;
  int columns, T;

  // Where a token's row is kept: in the place of weights that have been read.
  DEVICE uint32_t row(int token) const { return at.shared + kRingOffset + token * kFeedPitch; }
  // A value of the warp's own tile.
  DEVICE void keep(int token, scalar_t value) const {
    const unsigned short& bits = reinterpret_cast<const unsigned short&>(value);
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(row(token) + (at.warp * 8 + at.token) * 2), "h"(bits) : "memory");
  }
  // Once all tiles of the slice are kept. A warp takes two tokens, of which a lane has one piece each.
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

// All warps, at the end of the block's one round.
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
