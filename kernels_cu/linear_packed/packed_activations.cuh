// Bringing x of a product with packed weights to shared memory, and the scales of rows that are normalised.
#pragma once
#include "packed_stream.cuh"

// The scale that a token's sums are multiplied by: with NORM that of RowPieces::scale, because rows enter the product without their 1 / rms;
// else 1.
struct RowScale {
  const Lane& at;
  float eps;

  // Addresses in shared memory: of a token's square sums, one for each eighth of x; with PREPARED of its finished scale, in the same place.
  DEVICE uint32_t squares(int token) const { return at.shared + kSquareOffset + token * kRowWarps * 4; }
  DEVICE uint32_t prepared(int token) const { return at.shared + kSquareOffset + token * 4; }
  // `load` returns the scale that prepare_rows wrote for token threadIdx.x (else 1), `keep` puts it into shared memory, before a barrier.
  DEVICE float load(const scalar_t* x, int T) const {
    float scale = 1.0f;
    if (NORM && PREPARED && threadIdx.x < T)
      scale = load_written_float(reinterpret_cast<const unsigned char*>(x) + kRowScaleOffset + threadIdx.x * 4);
    return scale;
  }
  DEVICE void keep(float scale, int T) const {
    if (NORM && PREPARED && threadIdx.x < T) store_shared_float(prepared(threadIdx.x), scale);
  }
  // Returns the scale of a token; a barrier must have come after `keep` or after the square sums.
  DEVICE float of(int token) const {
    if (!NORM) return 1.0f;
    return PREPARED ? load_shared_float(prepared(token)) : RowPieces::scale(squares(token), eps);
  }
};

// Whether a warp has at most one slice of the one row, in its lower half (RowPieces::piece).
constexpr bool kHasWarpSlices = ROWS == 1 && IN_FEATURES <= 128 * kRowWarps;
// Whether each thread has just one piece of the one row: no branch comes before its load.
constexpr bool kHasThreadPieces = ROWS == 1 && kPieces == kRowThreads;

// x in shared memory: all that the block reads of it, or a few stages of it at a time.
struct Activations {
  const Lane& at;
  const unsigned char* prepared;   // the block's part of what prepare_rows wrote
  unsigned stage = 0, last = 0;    // the stage that is read next; the number of stages in all rounds

  DEVICE uint32_t base() const { return at.shared + kXOffset; }
  DEVICE SharedRows rows() const { return {base()}; }

  // Brings all of x, times the weights of the norm, to shared memory, and the square sums of its rows. Groups of 256 threads take tokens in
  // turn. The rest of the ring of weights is asked for behind x. A barrier must follow.
  DEVICE void fill_normalised(const scalar_t* x, const scalar_t* norm, const RowScale& scale, WeightStream& weights,
                              int T) const {
    fill_normalised(scale, weights, T, [&](int token, int piece) { return load16_past_l1(x + static_cast<size_t>(token) * kRowPitch + piece * 8); },
                    [&](RowPieces& pieces) { pieces.load_norm(norm); });
  }
  // The same with `load(token, piece)` for a piece of x, and then load_norm(pieces) for the weights of the norm.
  template <class Load, class LoadNorm>
  DEVICE void fill_normalised(const RowScale& scale, WeightStream& weights, int T, Load load, LoadNorm load_norm) const {
    constexpr int kTeams = kThreads < kRowThreads ? 1 : kThreads / kRowThreads;
    constexpr int kBatch = ROWS == 1 ? 1 : (ROWS + kTeams - 1) / kTeams;   // tokens of a team
    const int team = threadIdx.x / kRowThreads;
    const bool in_team = kThreads % kRowThreads == 0 || team < kTeams;
    if (ROWS == 1 && kThreads > kRowThreads && team > 0) {   // the one row is that of the first team
      weights.fill_ring();
      return;
    }
    uint4 v[kBatch][kThreadPieces];
#pragma unroll
    for (int b = 0; b < kBatch; b++)
#pragma unroll
      for (int i = 0; i < kThreadPieces; i++) {
        const int token = b * kTeams + team;
        const bool exists = RowPieces::piece(i) < kPieces;
        if (kHasThreadPieces) v[b][i] = load(0, RowPieces::piece(i));
        else if (token < T && in_team && exists) v[b][i] = load(token, RowPieces::piece(i));
      }
    RowPieces row_pieces;
    load_norm(row_pieces);
    weights.fill_ring();
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int token = b * kTeams + team;
      const bool is_mine = token < T && in_team;
      uint4 entering[kThreadPieces];
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < kThreadPieces; i++) {
        stay_behind(v[b][i]);
        entering[i] = weighted(v[b][i], row_pieces.norm[i]);
      }
#pragma unroll
      for (int i = 0; i < kThreadPieces; i++) square = RowPieces::piece(i) < kPieces ? square_sum(v[b][i], square) : square;
      enter_products<kHasWarpSlices>(rows(), entering, [&](int i) { return Entry{RowPieces::piece(i), token, is_mine && RowPieces::piece(i) < kPieces}; });
      square = RowPieces::warp_square_sum(square);
      if (at.lane == 0 && is_mine) store_shared_float(scale.squares(token) + at.warp % kRowWarps * 4, square);
    }
  }

  // Brings the block's run of x, times the weights of the norm, to shared memory: warps take tokens in turn, and the blocks of the cluster
  // send each other the square sums of their runs. The rest of the ring of weights is asked for behind x. A barrier must follow.
  DEVICE void fill_run_normalised(const scalar_t* x, const scalar_t* norm, const RowScale& scale, WeightStream& weights,
                                  int T) const {
    constexpr int kBatch = (ROWS + kWarps - 1) / kWarps;   // tokens of a warp
    const int first = at.run * kEighthPieces, count = at.slices * 16;
    uint4 v[kBatch][kThreadPieces], weight[kThreadPieces];
#pragma unroll
    for (int b = 0; b < kBatch; b++)
#pragma unroll
      for (int i = 0; i < kThreadPieces; i++) {
        const int token = b * kWarps + at.warp, piece = at.lane + i * 32;
        if (token < T && piece < count) v[b][i] = load16_past_l1(x + static_cast<size_t>(token) * kRowPitch + (first + piece) * 8);
      }
#pragma unroll
    for (int i = 0; i < kThreadPieces; i++)
      if (at.lane + i * 32 < count) weight[i] = load16(norm + (first + at.lane + i * 32) * 8);
    weights.fill_ring();
    uint4 entering[kBatch * kThreadPieces];
    float square[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; b++)
#pragma unroll
      for (int i = 0; i < kThreadPieces; i++) {
        stay_behind(v[b][i]);
        entering[b * kThreadPieces + i] = weighted(v[b][i], weight[i]);
        if (at.lane + i * 32 < count) square[b] = square_sum(v[b][i], square[b]);
      }
    enter_products(rows(), entering, [&](int i) {
      const int token = i / kThreadPieces * kWarps + at.warp, piece = at.lane + i % kThreadPieces * 32;
      return Entry{piece, token, token < T && piece < count};
    });
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int token = b * kWarps + at.warp;
      const float sum = RowPieces::warp_square_sum(square[b]);
      if (token < T && at.lane < RUNS)
        send_float(peer_address(scale.squares(token) + at.run * 4, at.lane), peer_address(at.shared + kSquareBarrier, at.lane), sum);
    }
  }

  // Waits, with kOwnRuns, until the warps that share a run have brought it.
  DEVICE void wait_for_run() const {
    if constexpr (kRunWarps > 1) barrier_wait(1 + at.run, kRunWarps * 32);
    else __syncwarp();
  }

  // Brings the block's part of x to shared memory, without a norm. The rest of the ring of weights is asked for behind x, and `look()` is
  // called while x is on its way. A barrier must follow.
  template <class Look>
  DEVICE void fill(const scalar_t* x, WeightStream& weights, int T, Look look) const {
    constexpr int kRowPieces = kBlockSlices * 16;   // pieces of a token that the block reads
    constexpr int kNeeded = (ROWS * kRowPieces + kThreads - 1) / kThreads;
    constexpr int kBatch = kOwnRuns ? (kThreadPieces + kRunWarps - 1) / kRunWarps : kNeeded <= 2 ? kNeeded : kNeeded <= 4 || ROWS == 64 ? 4 : 8;
    if (ROWS == 1 && kThreadPieces == 2) T = 1;   // code without the loop below is faster with two pieces, and slower with one or three
    const int first = SHARED_RUN ? at.run * kRowPieces : 0, pieces = SHARED_RUN ? at.slices * 16 : kPieces;
#pragma unroll 1
    for (int start = 0; start < kRowPieces * T; start += kOwnRuns ? kRowPieces : kBatch * kThreads) {
      const auto item_of = [&](int i) { return kOwnRuns ? RowPieces::piece(kRunWarps > 1 ? at.warp / RUNS * kBatch + i : i) : start + i * kThreads + static_cast<int>(threadIdx.x); };
      const auto is_there = [&](int item) { return item < kRowPieces * T && (item % kRowPieces < pieces || kSlices % RUNS == 0); };
      uint4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int item = item_of(i);
        if (kHasThreadPieces) v[i] = load16_past_l1(x + (is_there(item) ? (first + item) * 8 : 0));
        else if (is_there(item)) v[i] = load16_past_l1(x + static_cast<size_t>(item / kRowPieces) * kRowPitch + (first + item % kRowPieces) * 8);
      }
      if (start == 0) weights.fill_ring(), look();
#pragma unroll
      for (int i = 0; i < kBatch; i++) stay_behind(v[i]);
      enter_products<kHasWarpSlices && kOwnRuns && kRunWarps == 1>(rows(), v, [&](int i) {
        const int item = item_of(i);
        return Entry{item % kRowPieces, item / kRowPieces, is_there(item)};
      });
    }
  }

  // Starts copies of all that prepare_rows wrote for the block. A wait for them and a barrier must follow.
  DEVICE void copy_prepared() const {
    const int bytes = (SHARED_RUN ? at.slices : kSlices) * kXSliceBytes;
    for (int i = threadIdx.x * 16; i < bytes; i += kThreads * 16) cp_async16(base() + i, prepared + i);
    cp_async_commit();
  }

  // Bytes of a stage, its source, and its place in shared memory. `index` counts the stages of all rounds.
  DEVICE int stage_bytes(unsigned index) const {
    const unsigned stages = (at.slices + kStageSlices - 1) / kStageSlices;
    const int left = at.slices - index % stages * kStageSlices;
    return (left < kStageSlices ? left : kStageSlices) * kXSliceBytes;
  }
  DEVICE const unsigned char* stage_source(unsigned index) const {
    const unsigned stages = (at.slices + kStageSlices - 1) / kStageSlices;
    return prepared + static_cast<size_t>(index % stages) * kStageSlices * kXSliceBytes;
  }
  DEVICE uint32_t stage_place(unsigned index) const { return base() + index % kStages * kStageSlices * kXSliceBytes; }
  // Barriers in shared memory of a stage: `full` when its bytes have come, `empty`, with the copy engine, when all warps have read it.
  DEVICE uint32_t full(unsigned index) const { return at.shared + kXBarrier + index % kStages * 16; }
  DEVICE uint32_t empty(unsigned index) const { return full(index) + 8; }
  // Starts the copy of a stage, if there is one, into a place that all warps have read: with the copy engine the block's first thread waits
  // until they have, without it they must have, and each thread copies its part.
  DEVICE void start_stage(unsigned index) const {
    if (index >= last) return;
    if constexpr (kCopyEngine) {
      if (threadIdx.x != 0) return;
      if (index >= kStages) mbarrier_wait(empty(index), index / kStages - 1 & 1);
      copy_bulk(stage_place(index), stage_source(index), stage_bytes(index), full(index));
    } else {
      for (int i = threadIdx.x * 16; i < stage_bytes(index); i += kThreads * 16) cp_async16(stage_place(index) + i, stage_source(index) + i);
      cp_async_arrive(full(index));
    }
  }
  // Prepares the barriers of all stages, before pdl_wait. A barrier of the block must come before anyone reads.
  DEVICE void prepare_stages() const {
    if (threadIdx.x == 0)
      for (int i = 0; i < kStages; i++) mbarrier_init(full(i), kCopyEngine ? 1 : kThreads), mbarrier_init(empty(i), kWarps);
    if constexpr (kCopyEngine) mbarrier_init_fence();
  }
  DEVICE void start_stages() const {
    if constexpr (!kCopyEngine) __syncthreads();   // every thread arrives at the barriers, and must find them prepared
    for (int i = 0; i < kStages - 1; i++) start_stage(i);
  }
  // Starts the copy of a later stage, waits for the next one and returns where it lies. The calling warp has read the stage before it.
  DEVICE uint32_t enter_stage() {
    if constexpr (kCopyEngine) {
      __syncwarp();
      if (stage > 0 && at.lane == 0) mbarrier_arrive(empty(stage - 1));
    } else {
      __syncthreads();
    }
    start_stage(stage + kStages - 1);
    if constexpr (kCopyEngine) mbarrier_wait(full(stage), stage / kStages & 1);
    else mbarrier_poll(full(stage), stage / kStages & 1);
    return stage_place(stage++);
  }
};
