// x of a product of one row: it lies in shared memory in its own order, in an eighth of the room that a tile of tokens takes. So rings of
// weights are deeper, and in narrow models blocks of the next product find room beside this one's and ask for their weights early.
#pragma once
#include "norm_values.cuh"
#include "weight_stream.cuh"

// The row of x, with the interface of Activations. Each warp holds the run of the row that its weights are multiplied by. All eight tokens
// of the tensor cores' operand are this row; of their sums only those of token 0 count.
struct OneRow {
  static constexpr int kPieces = (kOwnUnits * 8 + 31) / 32;   // pieces of 16 bytes that a lane brings and normalises

  const Lane& at;
  const scalar_t* run;   // the warp's run, in global memory
  uint32_t place_of_run;   // in shared memory
  uint4 pieces[kPieces];
  float scale;           // 1 / rms

  DEVICE OneRow(const Lane& lane, const scalar_t* x, int, int)
      : at(lane), run(x + lane.own_unit * 64), place_of_run(lane.shared + kXOffset + lane.warp * kOwnUnits * 128) {}

  DEVICE uint32_t piece(int i) const { return place_of_run + (i * 32 + at.lane) * 16; }
  DEVICE bool has(int i) const { return i * 32 + at.lane < at.own_units * 8; }
  DEVICE int place(int u, int) const { return u; }
  DEVICE uint4 load(int u, int, int j) const { return load_shared(place_of_run + u * 128 + j * 64 + at.quarter * 16); }

  // Loads the run to registers: a wait for copies to shared memory would be one for the weights, too.
  DEVICE void copy_first() {
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      if (has(i)) pieces[i] = load16_past_l1(run + (i * 32 + at.lane) * 8);
  }
  // Puts the run into shared memory; with NORM it also waits for the norm's weights.
  DEVICE void wait_first() const {
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      if (has(i)) store_shared(piece(i), pieces[i]);
    if (NORM) cp_async_wait<kSlots - 1>();
    __syncwarp();
  }

  DEVICE uint32_t norm_piece(int i) const { return at.shared + kNormOffset + at.warp * kOwnUnits * 128 + (i * 32 + at.lane) * 16; }
  // Starts copies of the norm's weights, which become part of the commit group of the first chunk of weights.
  DEVICE void copy_norm_weights(const scalar_t* norm) const {
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      if (has(i)) cp_async16(norm_piece(i), norm + at.own_unit * 64 + (i * 32 + at.lane) * 8);
  }

  // Normalises the run in place. Squares are summed in the order of Activations: the lane's, over four lanes, then over the owners in order.
  DEVICE void normalise(float eps) {
    float sum = 0.0f;
    for (int u = 0; u < at.own_units; u++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const uint4 v = load(u, 0, j);
        const uint32_t* values = &v.x;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float2 a = unpack2(values[e]);
          sum = fmaf(a.y, a.y, fmaf(a.x, a.x, sum));
        }
      }
    if (CLUSTER > 1) group_wait();   // the peer has started
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    const uint32_t to = at.shared + kSquareOffset + (at.rank * kWarps + at.warp) * 4;
    if (at.lane < CLUSTER) store_peer(block_address(to, at.lane), sum);
    group_arrive();
    group_wait();
    group_announce();
    float total = 0.0f;
#pragma unroll
    for (int p = 0; p < kOwners; p++) total += load_shared_float(at.shared + kSquareOffset + p * 4);
    scale = rsqrtf(fmaf(total, 1.0f / K, eps));
#pragma unroll
    for (int i = 0; i < kPieces; i++)
      if (has(i)) store_shared(piece(i), normalised(load_shared(piece(i)), load_shared(norm_piece(i)), scale));
    __syncwarp();
  }
};
