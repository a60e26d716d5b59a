// Rows of x for a product with 16-bit weights: copied to shared memory in the order in which lanes read them, and normalised there.
#pragma once
#include "norm_values.cuh"
#include "weight_stream.cuh"

// x in shared memory in the order in which lanes read it, [unit][token tile][32 k][lane] 16 bytes, and its normalisation.
// With HALF_TILE the first 16 lanes hold the four tokens of the last tile; the other lanes have zeros there.
struct Activations {
  const Lane& at;
  const scalar_t* x;       // column 8 t of row 0 (t = lane % 4)
  int T;
  uint32_t base;
  int unit = 0, slot = 0;  // the next of the warp's own units to copy, and where it goes
  int remaining;           // units still to copy, over all groups
  float scale[NT];         // 1 / rms of token i * 8 + g (g = lane / 4)

  DEVICE Activations(const Lane& lane, const scalar_t* rows, int num_rows, int passes)
      : at(lane), x(rows + lane.quarter * 8), T(num_rows), base(lane.shared + kXOffset + lane.lane * 16),
        remaining(lane.own_units * (kResident ? 1 : passes)) {}

  // Returns where unit `from_unit` of the lane's token in tile i begins in x; in place of tokens from T on, that of the last one.
  DEVICE const scalar_t* source(int i, int from_unit) const {
    return x + static_cast<size_t>(min(i * 8 + at.token, T - 1)) * kRowPitch + from_unit * 64;
  }
  // Returns the address of the lane's 16 bytes of token tile i and its j-th 32 k (j = 0 or 1) in the unit at `place`.
  DEVICE uint32_t address(int place, int i, int j) const {
    return base + place * kXUnitBytes + i * 1024 + j * (is_half(i) ? 256 : 512);
  }
  DEVICE static bool is_half(int i) { return HALF_TILE && i + 1 == NT; }
  DEVICE bool has(int i) const { return !is_half(i) || at.lane < 16; }
  DEVICE uint4 load(int place, int i, int j) const {
    return has(i) ? load_shared(address(place, i, j)) : make_uint4(0, 0, 0, 0);
  }
  // Returns the place in shared memory of a unit of the warp's run; `turn` counts the units read so far, modulo the places.
  DEVICE int place(int u, int turn) const {
    if (kStaged) return turn;
    return SPLIT_WARPS == 1 ? u : at.warp * kXSlots + (kResident ? u : turn);
  }

  // Starts the copy of the warp's next own unit of x, if one is left. The caller commits.
  DEVICE void copy_next() {
    if (remaining-- <= 0) return;
    const int from = kStaged ? (at.rank * kOwnUnits + unit) * kWarps + at.warp : at.own_unit + unit;
    const int to = kStaged ? slot * kWarps + at.warp : at.warp * kXSlots + slot;
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (has(i)) cp_async16(address(to, i, j), source(i, from) + j * 32, i * 8 + at.token < T ? 16 : 0);
    unit = unit + 1 == at.own_units ? 0 : unit + 1;
    slot = slot + 1 == kXSlots ? 0 : slot + 1;
  }
  DEVICE void copy_first() {
    for (int i = 0; i < (kStaged ? 1 : kXSlots); i++) copy_next();
    cp_async_commit();
  }
  DEVICE void wait_first() const {
    cp_async_wait<kRowsFirst ? kSlots : 0>();   // kSlots chunks of weights were asked for behind x; else x came last
    __syncwarp();
  }

  DEVICE void copy_norm_weights(const scalar_t* norm) const {
    for (int i = at.lane; i < at.own_units * 8; i += 32)
      cp_async16(at.shared + kNormOffset + at.warp * kOwnUnits * 128 + i * 16, norm + at.own_unit * 64 + i * 8);
  }
  // Returns the lane's 16 bytes of norm weights for a unit of the block, in the order of x.
  DEVICE uint4 norm_weights(int block_unit, int j) const {
    return load_shared(at.shared + kNormOffset + block_unit * 128 + j * 64 + at.quarter * 16);
  }
  DEVICE void normalise_in_place(int at_place, int block_unit) const {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint4 w = norm_weights(block_unit, j);
#pragma unroll
      for (int i = 0; i < NT; i++)
        if (has(i)) store_shared(address(at_place, i, j), normalised(load_shared(address(at_place, i, j)), w, scale[i]));
    }
  }

  // Finds scale[i] of the lane's tokens, and normalises x in place if it is resident. Squares are summed in the lane's order, then over
  // the four lanes of a token, then over the owners in order.
  DEVICE void normalise(float eps) {
    float sum[NT];
#pragma unroll
    for (int i = 0; i < NT; i++) sum[i] = 0.0f;
    for (int u = 0; u < at.own_units; u++)
#pragma unroll
      for (int i = 0; i < NT; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint4 v = kResident ? load(at.warp * kXSlots + u, i, j) : load16_past_l1(source(i, at.own_unit + u) + j * 32);
          const uint32_t* values = &v.x;
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float2 a = unpack2(values[e]);
            sum[i] = fmaf(a.y, a.y, fmaf(a.x, a.x, sum[i]));
          }
        }
    if (CLUSTER > 1) group_wait();   // the peer has started
#pragma unroll
    for (int i = 0; i < NT; i++) {
      sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], 2);
      const uint32_t to = at.shared + kSquareOffset + ((at.rank * kWarps + at.warp) * kTokens + i * 8 + at.token) * 4;
      if (at.quarter < CLUSTER) store_peer(block_address(to, at.quarter), sum[i]);
    }
    group_arrive();
    group_wait();
    group_announce();
#pragma unroll
    for (int i = 0; i < NT; i++) {
      float total = 0.0f;
#pragma unroll
      for (int p = 0; p < kOwners; p++) total += load_shared_float(at.shared + kSquareOffset + (p * kTokens + i * 8 + at.token) * 4);
      scale[i] = rsqrtf(fmaf(total, 1.0f / K, eps));
    }
    if constexpr (kResident) {
      for (int u = 0; u < at.own_units; u++) normalise_in_place(at.warp * kXSlots + u, at.warp * kOwnUnits + u);
      if (SPLIT_WARPS == 1) __syncthreads();
    }
  }

  // Normalises the warp's unit of the stage that starts at unit u, then starts the next stage's copy.
  DEVICE void enter_stage(int u, int turn) {
    cp_async_wait<kPending>();
    if (NORM) normalise_in_place(turn + at.warp, u + at.warp);
    __syncthreads();
    copy_next();
  }
};
