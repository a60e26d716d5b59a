// y[T,N] = epilogue(norm(x)[T,K] W[N,K]^T) for T <= ROWS rows and packed weights: activations, products, sums over K, 1 / rms.
//
// Tensor-core operand A is a tile with codes u as they are (packed_layout.cuh), operand B eight tokens. Over a scale group the tensor
// cores sum u x; a sum grows by scale * (sum u x - 8 sum x), in 8 bits by scale * (sum u x - 128 sum x), or with ZEROS by
// scale * (sum u x - zero * sum x). The sums of x are taken once, where x is brought to shared memory. In 4 bits hi's sums are 16
// times too large until the end.
// K is cut into RUNS runs that are added in order. SHARED_RUN = 0: eight warps of a block take the runs of one tile. SHARED_RUN = 1:
// the warps take a tile each of the same run, so that a block reads an eighth of x; with RUNS = 8 the blocks exchange sums.
// Runs and the order of sums do not depend on T, ROWS, WARPS or SHARED_RUN: a row's bits are the same in every step.
#pragma once
#include "packed_activations.cuh"
#include "packed_exchange.cuh"
#include "packed_feed.cuh"
#include "packed_multiply.cuh"

#if CLUSTERS
#define PACKED_BOUNDS __cluster_dims__(RUNS, 1, 1) __launch_bounds__(kThreads, 1)
#else
#define PACKED_BOUNDS __launch_bounds__(kThreads, 1)
#endif

constexpr bool kLooksLate = LINEAR == 0;                          // `look` reads what `publish` wrote before a barrier
constexpr bool kSettlesLate = !SHARED_RUN || NT < 8;              // more tiles leave no registers for what is read before the products

// The warp's run of one tile.
DEVICE void accumulate(Sums& out, WeightStream& weights, Activations& x, const Lane& at, bool has_tile) {
  // Slices with several scale groups come one by one: the groups' sums are added slice by slice, whatever ROWS is.
  constexpr bool kCanJoin = kUnitScales == 1 && kChunkSlices % kTogetherSlices == 0 && (kResident || kStageSlices % kTogetherSlices == 0);
  constexpr int kTogether = kCanJoin ? kTogetherSlices : 1;
  uint32_t place = x.base() + (SHARED_RUN ? 0 : at.run * kRunSlices * kXSliceBytes);
  // Instructions bind where four warps multiply together: a chunk is straight code, its addresses parts of the instructions.
  constexpr int kUnrolled = !WGMMA_PRODUCTS || kThreads > 512 ? 1 : 4;
#pragma unroll 1
  for (int done = 0; done < at.slices; done += kChunkSlices) {
    uint32_t unit = has_tile ? weights.wait() : weights.ring;
    const int left = at.slices - done;
    if (left >= kChunkSlices) {
#pragma unroll kUnrolled
      for (int i = 0; i < kChunkSlices; i += kTogether) {
        if (!kResident && (kChunkSlices % kStageSlices == 0 ? i : done + i) % kStageSlices == 0) place = x.enter_stage();
        multiply<kTogether>(out, unit, place, at, has_tile);
        place += kTogether * kXSliceBytes, unit += kTogether * kUnitBytes;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < left; i++) {
        if (!kResident && (done + i) % kStageSlices == 0) place = x.enter_stage();
        multiply<1>(out, unit, place, at, has_tile);
        place += kXSliceBytes, unit += kUnitBytes;
      }
    }
    if (has_tile) weights.release();
  }
  finish_sums(out);
}

// One row, a run of one slice: the products of all rounds side by side, since those of a slice are a chain.
constexpr bool kJoinsRounds = KEPT_ROUNDS > 1 && kRunSlices == 1 && kSlots >= KEPT_ROUNDS;

DEVICE void accumulate_rounds(Sums (&out)[KEPT_ROUNDS], const WeightStream& weights, const Activations& x,
                              const Lane& at) {
  uint32_t units[KEPT_ROUNDS];
#pragma unroll
  for (int round = 0; round < KEPT_ROUNDS; round++) {
    units[round] = weights.ring + round * kChunkBytes;
#if COPY_ENGINE
    if (at.tile(round) < weights.num_tiles) mbarrier_wait(weights.barriers + round * 8, 0);
#endif
  }
#if !COPY_ENGINE
  cp_async_wait<0>();
  __syncwarp();
#endif
  // Sums of a tile that does not exist mean nothing.
  if (at.slices > 0) multiply_tiles(out, units, x.base() + at.run * kXSliceBytes, at);
#pragma unroll
  for (int round = 0; round < KEPT_ROUNDS; round++) finish_sums(out[round]);
}

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
      if (nt * 8 + at.quarter * 2 + odd < T)
        store_shared2(to + odd * 256, out[nt][odd], out[nt][odd + 2]);
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
#if FEEDS
// All warps, at the end of the block's one round.
template <class Epilogue>
DEVICE void finish_rows(const Sums& out, const Lane& at, const Epilogue& epilogue, const RowScale& scale, int, int T) {
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
#else
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
#endif

// The whole product; the epilogue as in linear_product.cuh. x (T, K), or with PREPARED what prepare_rows wrote.
template <class Epilogue>
DEVICE void packed_product(Epilogue& epilogue, int num_tiles, const scalar_t* x, const scalar_t* norm,
                           const void* weight, float4* partials, int* arrivals, int T, float eps) {
  constexpr bool kNormalises = NORM && !PREPARED;
  static_assert(!kNormalises || !SHARED_RUN || RUNS == 1 || CLUSTERS, "a block that sees one run of x cannot normalise it");
  const Lane at;
  const int first = Lane::tile(0, 0), step = Lane::tile(1, 0) - first;
  const int rounds = FEEDS ? 1 : (num_tiles - first + step - 1) / step;   // known: that leaves registers for straight code
  WeightStream weights(at, weight, num_tiles);
  if (kNormalises) RowPieces::prefetch_norm(norm);
  Activations activations{at, reinterpret_cast<const unsigned char*>(x) + (SHARED_RUN ? at.run * kRunSlices * kXSliceBytes : 0)};
#if CLUSTERS
  const Exchange exchange{at, num_tiles, T};
  exchange.prepare();
#endif
  if (!kResident) {
    activations.last = rounds * ((at.slices + kStageSlices - 1) / kStageSlices);
    activations.prepare_stages();
  }
  pdl_wait();
  if (!kResident) activations.start_stages();
#if CLUSTERS
  cluster_wait();
#endif
  const RowScale scale{at, eps};
  const float prepared_scale = scale.load(x, T);
  epilogue.prepare(at.shared + kEpilogueOffset);
  const auto look = [&](int round) {
#pragma unroll
    for (int nt = 0; nt < (SHARED_RUN ? 0 : NT); nt++)
      visit_pairs(nt, round, num_tiles, T, [&](int i, int tile, int row, int token, int) { epilogue.prefetch(nt, i, tile, row, token); });
  };
  if (kNormalises && SHARED_RUN && RUNS > 1) {
#if CLUSTERS
    activations.fill_run_normalised(x, norm, scale, weights, T);
#endif
  } else if (kNormalises) {
    activations.fill_normalised(x, norm, scale, weights, T);
  } else if (!PREPARED) {
    activations.fill(x, weights, T, [&] { if (!kLooksLate) look(0); });
  } else {
    if (kResident) activations.copy_prepared();
    weights.fill_ring();
  }
  epilogue.publish();
  epilogue.look_up();
  if (!kSettlesLate) epilogue.settle(), scale.keep(prepared_scale, T);
  if (PREPARED && kResident) cp_async_wait<COPY_ENGINE ? 0 : kSlots - kEarlySlots>();
#if WGMMA_PRODUCTS
  async_proxy_fence();
#endif
  if (kOwnRuns && !kLooksLate) __syncwarp();
  else __syncthreads();
  if constexpr (kJoinsRounds) {
    if (PREPARED || kLooksLate) look(0);
    Sums out[KEPT_ROUNDS] = {};
    accumulate_rounds(out, weights, activations, at);
    epilogue.settle(), scale.keep(prepared_scale, T);
#pragma unroll
    for (int round = 0; round < KEPT_ROUNDS; round++)
      finish_block(out[round], at, epilogue, scale, round, round + 1 == KEPT_ROUNDS, num_tiles, T);
  }
#pragma unroll 1
  for (int round = 0; round < (kJoinsRounds ? 0 : rounds); round++) {
    const int tile = at.tile(round);
    if (round == 0 ? PREPARED || kLooksLate : KEPT_ROUNDS == 1) look(round);
#if CLUSTERS
    if (kLooksEarly) exchange.look(epilogue, round);
#endif
    Sums out = {};
    accumulate(out, weights, activations, at, tile < num_tiles);
    if (kSettlesLate && round == 0) epilogue.settle(), scale.keep(prepared_scale, T);   // a barrier comes before the stores
    if (kSettlesLate && SHARED_RUN && round == 0 && (LINEAR == 0 || (NORM && PREPARED && !FEEDS))) __syncthreads();
    if (!SHARED_RUN) {
      finish_block(out, at, epilogue, scale, round, round + 1 == rounds, num_tiles, T);
    } else if (RUNS > 1) {
#if CLUSTERS
      exchange.finish(out, epilogue, scale, round, round + 1 == rounds);
#else
      finish_grid(out, at, epilogue, scale, round, num_tiles, T, partials, arrivals);
#endif
    } else if (FEEDS || tile < num_tiles) {
      finish_rows(out, at, epilogue, scale, tile, T);
    }
  }
}
