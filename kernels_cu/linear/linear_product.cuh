// The rest of a skinny product beside the weights' stream: x and its RMSNorm, the tensor-core loop, the sum over K.
#pragma once
#include "weight_stream.cuh"

// x in shared memory in the order in which lanes read it, [unit][token tile][32 k][lane] 16 bytes, and its normalisation.
// Of half a tile the first 16 lanes have all: what the others would have is zero.
struct Activations {
  const Lane& at;
  const scalar_t* x;       // column 8 t of row 0
  int T;
  uint32_t base;
  int unit = 0, slot = 0;  // the next of the warp's own units to copy, and its place
  int remaining;           // units still to copy, over all groups
  float scale[NT];         // 1 / rms of token i * 8 + g

  DEVICE Activations(const Lane& lane, const scalar_t* rows, int num_rows, int passes)
      : at(lane), x(rows + lane.quarter * 8), T(num_rows), base(lane.shared + kXOffset + lane.lane * 16),
        remaining(lane.own_units * (kResident ? 1 : passes)) {}

  DEVICE const scalar_t* source(int i, int from_unit) const {
    return x + static_cast<size_t>(min(i * 8 + at.token, T - 1)) * K + from_unit * 64;
  }
  DEVICE uint32_t address(int place, int i, int j) const {
    return base + place * kXUnitBytes + i * 1024 + j * (is_half(i) ? 256 : 512);
  }
  DEVICE static bool is_half(int i) { return HALF_TILE && i + 1 == NT; }
  DEVICE bool has(int i) const { return !is_half(i) || at.lane < 16; }
  DEVICE uint4 load(int place, int i, int j) const {
    return has(i) ? load_shared(address(place, i, j)) : make_uint4(0, 0, 0, 0);
  }
  // The place of a unit of the warp's run; `turn` counts the units read so far, modulo the places.
  DEVICE int place(int u, int turn) const {
    if (kStaged) return turn;
    return SPLIT_WARPS == 1 ? u : at.warp * kXSlots + (kResident ? u : turn);
  }

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

  DEVICE void copy_norm_weights(const scalar_t* norm) const {
    for (int i = at.lane; i < at.own_units * 8; i += 32)
      cp_async16(at.shared + kNormOffset + at.warp * kOwnUnits * 128 + i * 16, norm + at.own_unit * 64 + i * 8);
  }
  // Norm weights of a unit of the block, in the order of x.
  DEVICE uint4 norm_weights(int block_unit, int j) const {
    return load_shared(at.shared + kNormOffset + block_unit * 128 + j * 64 + at.quarter * 16);
  }
  DEVICE uint4 normalised(uint4 v, uint4 w, float s) const {
    uint32_t* values = &v.x;
    const uint32_t* weights = &w.x;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 a = unpack2(values[e]), b = unpack2(weights[e]);
      values[e] = pack2(a.x * s * b.x, a.y * s * b.y);
    }
    return v;
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

  // scale[i], and x normalised where it is resident. Square sums: lane order, four lanes, then the owners in order.
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
      if (at.quarter < CLUSTER) store_peer(peer_address(to, at.quarter), sum[i]);
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

  // Before the block reads the stage that starts at unit u of its run: its own unit of it, then the next stage's copy.
  DEVICE void enter_stage(int u, int turn) {
    cp_async_wait<kPending>();
    if (NORM) normalise_in_place(turn + at.warp, u + at.warp);
    __syncthreads();
    copy_next();
  }
};

// acc += tile (16 rows) x tokens over 32 k, as two m16n8k16 products.
DEVICE void multiply(float (&acc)[NT][4], uint4 lo, uint4 hi, const uint4 (&x)[NT]) {
#pragma unroll
  for (int i = 0; i < NT; i++) {
    mma(acc[i], {lo.x, hi.x, lo.y, hi.y}, {x[i].x, x[i].y});
    mma(acc[i], {lo.z, hi.z, lo.w, hi.w}, {x[i].z, x[i].w});
  }
}

// One group of the warp's tiles over a run of K, from unit `first` of the warp's.
template <class Stream>
DEVICE void accumulate(float (&acc)[GROUP][NT][4], Stream& weights, Activations& x, int first, int units, int& turn) {
  constexpr int kBlocks = 2 / kUnitSplit;   // 32-k blocks of x in registers at a time
  constexpr int kTurns = kStaged ? 2 * kWarps : kXSlots;
#pragma unroll 1
  for (int u = first; u < first + units; u++) {
    if (kStaged && u % kWarps == 0) x.enter_stage(u, turn);
#pragma unroll
    for (int j0 = 0; j0 < 2; j0 += kBlocks) {
      if (j0 == 0) cp_async_wait<kPending>();
      uint4 b[kBlocks][NT];
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
#pragma unroll
        for (int i = 0; i < NT; i++) {
          b[j][i] = x.load(x.place(u, turn), i, j0 + j);
          if (NORM && !kResident && !kStaged)
            b[j][i] = x.normalised(b[j][i], x.norm_weights(x.at.warp * kOwnUnits + u, j0 + j), x.scale[i]);
        }
#pragma unroll
      for (int t = 0; t < GROUP; t++) {
        if (kUnitSplit == 1 && t > 0) cp_async_wait<kPending>();
        int slot = weights.slot;
        if (kUnitSplit > 1 && j0 == 0) slot = slot + t >= kSlots ? slot + t - kSlots : slot + t;
        uint4 lo[kBlocks], hi[kBlocks];
#pragma unroll
        for (int j = 0; j < kBlocks; j++) lo[j] = weights.read(slot, 0, j0 + j), hi[j] = weights.read(slot, 1, j0 + j);
#pragma unroll
        for (int j = 0; j < kBlocks; j++) multiply(acc[t], lo[j], hi[j], b[j]);
        if (j0 + kBlocks == 2) {
          weights.copy_next();
          if (!kResident && !kStaged && t == GROUP - 1) x.copy_next();
          cp_async_commit();
        }
      }
    }
    if (!kResident) turn = turn + 1 == kTurns ? 0 : turn + 1;
  }
}

// Sums of a group where the warps split K: over the warps of the block, then over the blocks. Returns by visiting.
template <class Epilogue>
DEVICE void finish_split(const float (&acc)[GROUP][NT][4], const Lane& at, Epilogue& epilogue, int group, int num_tiles,
                         int T, bool last) {
  constexpr int kAll = GROUP * 64, kAllThread = (kAll + kThreads - 1) / kThreads;
  if (CLUSTER > 1) group_wait();   // both blocks have read the sums of the group before
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    __syncthreads();
#pragma unroll
    for (int t = 0; t < GROUP; t++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++)
        if (nt * 8 + at.quarter * 2 + odd < T)
          store_shared2(at.shared + kPartialOffset + ((at.warp * GROUP + t) * 64 + odd * 32 + at.lane) * 8, acc[t][nt][odd], acc[t][nt][odd + 2]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAllThread; i++) {
      const int pair = threadIdx.x + i * kThreads, t = pair >> 6, odd = pair >> 5 & 1, token = nt * 8 + (pair & 3) * 2 + odd;
      if (pair >= kAll || token >= T) continue;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        const float2 part = load_shared2(at.shared + kPartialOffset + (w * kAll + pair) * 8);
        sum.x += part.x, sum.y += part.y;
      }
      if (CLUSTER == 1) {
        const int tile = group * GROUP + t;
        if (tile < num_tiles) epilogue.store(nt, i, tile, pair >> 2 & 7, token, sum.x, sum.y);
      } else {
        const uint32_t to = at.shared + kExchangeOffset + ((at.rank * NT + nt) * kPairs + t * 32 + (pair & 31)) * 8;
        store_peer(peer_address(to, odd), sum.x, sum.y);
      }
    }
  }
  if (CLUSTER == 1) return;
  group_arrive();
  group_wait();
#pragma unroll
  for (int nt = 0; nt < NT; nt++) {
    const int pair = threadIdx.x, tile = group * GROUP + pair / 32, token = nt * 8 + (pair & 3) * 2 + at.rank;
    if (pair >= kPairs || tile >= num_tiles || token >= T) continue;
    const float2 first = load_shared2(at.shared + kExchangeOffset + (nt * kPairs + pair) * 8);
    const float2 second = load_shared2(at.shared + kExchangeOffset + ((NT + nt) * kPairs + pair) * 8);
    epilogue.store(nt, 0, tile, pair >> 2 & 7, token, first.x + second.x, first.y + second.y);
  }
  if (!last) group_arrive();
}

// The values of a group where every warp has tiles of its own.
template <class Epilogue>
DEVICE void finish_rows(const float (&sum)[GROUP][NT][4], const Lane& at, Epilogue& epilogue, int group, int num_tiles,
                        int T) {
#pragma unroll
  for (int t = 0; t < GROUP; t++)
#pragma unroll
    for (int nt = 0; nt < NT; nt++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const int tile = at.tile(group) + t, token = nt * 8 + at.quarter * 2 + odd;
        if (tile < num_tiles && token < T) epilogue.store(nt, odd, tile, at.token, token, sum[t][nt][odd], sum[t][nt][odd + 2]);
      }
}

// sum += all runs of K in one warp, added as finish_split adds those of eight.
template <class Stream>
DEVICE void accumulate_runs(float (&sum)[GROUP][NT][4], Stream& weights, Activations& x, int& turn) {
#pragma unroll 1
  for (int run = 0; run < kWarps; run++) {
    float acc[GROUP][NT][4] = {};
    accumulate(acc, weights, x, run * kOwnUnits, kOwnUnits, turn);
#pragma unroll
    for (int t = 0; t < GROUP; t++)
#pragma unroll
      for (int i = 0; i < NT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) sum[t][i][c] += acc[t][i][c];
  }
}

// The whole product. `epilogue` gives prepare(shared), publish(), look_up() and settle(), in this order, the last with a barrier
// before the first store; prefetch(nt, i, tile, row, token) for each output that a thread will finish (not where warps
// have tiles of their own); and store(nt, i, tile, row, token, lo, hi).
template <class Tiles, class Epilogue>
DEVICE void linear_product(const Tiles& tiles, Epilogue& epilogue, const scalar_t* x, const scalar_t* norm,
                           const scalar_t* weight, int T, float eps) {
  const Lane at;
  const int num_clusters = gridDim.x / CLUSTER, first_group = blockIdx.x / CLUSTER;
  Activations activations(at, x, T, (tiles.num_groups - first_group + num_clusters - 1) / num_clusters);
  if (NORM) activations.copy_norm_weights(norm);
  WeightStream<Tiles> weights(at, tiles, weight);
  group_announce();
  pdl_wait();
  activations.copy_first();
  epilogue.prepare(at.shared + kEpilogueOffset);
  cp_async_wait<0>();
  __syncwarp();
  epilogue.publish();
  if (NORM) activations.normalise(eps);
  else if (LINEAR != 1) __syncthreads();   // what `publish` wrote, and x where warps share it
  epilogue.look_up();
  int turn = 0;
#pragma unroll 1
  for (int group = first_group; group < tiles.num_groups; group += num_clusters) {
    const bool last = group + num_clusters >= tiles.num_groups;
    if (SPLIT_WARPS > 1) {
#pragma unroll
      for (int nt = 0; nt < NT; nt++)
#pragma unroll
        for (int i = 0; i < kThreadPairs; i++) {
          const int pair = threadIdx.x + i * kThreads, odd = CLUSTER == 1 ? pair >> 5 & 1 : at.rank;
          const int tile = group * GROUP + (pair >> (CLUSTER == 1 ? 6 : 5)), token = nt * 8 + (pair & 3) * 2 + odd;
          if (pair < kPairs && tile < tiles.num_tiles && token < T) epilogue.prefetch(nt, i, tile, pair >> 2 & 7, token);
        }
    }
    float acc[GROUP][NT][4] = {};
    if (SPLIT_WARPS == 1) {
      accumulate_runs(acc, weights, activations, turn);
      finish_rows(acc, at, epilogue, group, tiles.num_tiles, T);
      continue;
    }
    accumulate(acc, weights, activations, 0, at.units, turn);
    if (group == first_group) epilogue.settle();   // a barrier comes before the stores
    finish_split(acc, at, epilogue, group, tiles.num_tiles, T, last);
  }
}
