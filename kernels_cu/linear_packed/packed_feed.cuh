// What a gate_up product leaves for the product after it (FEEDS = 1): its rows as prepare_rows would write them, and as they are.
//
// A block has the 16 tiles of 128 neighbouring columns, a slice of the product after it, which takes the same ROWS, SCALE_GROUP,
// ZEROS and WARPGROUPS: so it sees whole scale groups, and writes whole lines.
#pragma once
#include "packed_stream.cuh"

constexpr int kFeedPitch = kSliceColumns * 2 + 16;   // bytes between tokens in shared memory: rows in other banks
static_assert(!FEEDS || (SHARED_RUN && RUNS == 1 && kBlockTiles * 8 == kSliceColumns), "FEEDS needs blocks of 16 whole tiles");
static_assert(!FEEDS || kTokens * kFeedPitch <= SMEM_BYTES - kRingOffset, "SMEM_BYTES is too small");

struct Feed {
  const Lane& at;
  scalar_t* out;             // (T, columns)
  unsigned char* prepared;
  int columns, T;

  // In place of weights that have been read.
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
      uint4 v = load_shared(row(token) + of_slice * 16);
      if (is_there) store16(out + static_cast<size_t>(token) * columns + piece * 8, v);
      v = scaled(v);
      if (is_there) store_prepared(prepared, piece, token, v);
      float sums[1] = {piece_sum(v)};
      sum_groups(sums, [&](int, float sum) {
        if (is_there) *reinterpret_cast<float*>(prepared + sum_offset(piece, token)) = sum;
      });
    }
  }
};
