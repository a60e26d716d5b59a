// y[T,N] = epilogue(norm(x)[T,K] W[N,K]^T) for T <= ROWS rows and packed weights: activations, products, sums over K, 1 / rms.
//
// Tensor-core operand A is a tile with codes u as they are (w4_layout.cuh), operand B eight tokens. Over a scale group the tensor
// cores sum u x; a sum grows by scale * (sum u x - 8 sum x), in 8 bits by scale * (sum u x - 128 sum x), or with ZEROS by
// scale * (sum u x - zero * sum x). The sums of x are taken once, where x is brought to shared memory. In 4 bits hi's sums are 16
// times too large until the end.
// K is cut into RUNS runs that are added in order. SHARED_RUN = 0: eight warps of a block take the runs of one tile. SHARED_RUN = 1:
// the warps take a tile each of the same run, so that a block reads an eighth of x; with RUNS = 8 the blocks exchange sums.
// Runs and the order of sums do not depend on T, ROWS, WARPS or SHARED_RUN: a row's bits are the same in every step.
#pragma once
#include "mma.cuh"
#include "w4_activations.cuh"
#include "w4_exchange.cuh"
#include "w4_feed.cuh"
#if WGMMA_PRODUCTS
#include "tma.cuh"
#include "w4_wgmma.cuh"
#endif

#if CLUSTERS
#define W4_BOUNDS __cluster_dims__(RUNS, 1, 1) __launch_bounds__(kThreads, 1)
#else
#define W4_BOUNDS __launch_bounds__(kThreads, 1)
#endif

constexpr bool kLooksLate = LINEAR == 0;                          // `look` reads what `publish` wrote before a barrier
constexpr bool kSettlesLate = !SHARED_RUN || NT < 8;              // more tiles leave no registers for what is read before the products
constexpr float kZero = WEIGHT_BITS == 4 ? 1.0f : 16.0f;          // in units of the sums of x, which are 8 times too large
constexpr float kHiFactor = WEIGHT_BITS == 4 ? 16.0f : 1.0f;      // of hi's codes

// out += scale * (acc - zero * sums of x) over scale group `group` of a slice, for token tiles `from` .. from + COUNT / 4 - 1.
template <int COUNT>
__device__ __forceinline__ void add_group(Sums& out, const float (&acc)[COUNT], int from, uint32_t unit, uint32_t x, int group,
                                          const Lane& at) {
  const uint32_t scales = unit + kCodeBytes + group * kScaleBytes;
  const uint32_t sums = x + kXSumOffset + (group * kTokens + (ROWS == 1 ? 0 : at.quarter * 2)) * 4;
  float2 scale, zero;
  if (ZEROS) {
    const uint2 pairs = load_shared_words(scales + at.token * 8);
    const float2 lo = unpack2(pairs.x), hi = unpack2(pairs.y);
    scale = make_float2(lo.x, hi.x), zero = make_float2(-lo.y, -hi.y * kHiFactor);
  } else {
    scale = unpack2(load_shared_word(scales + at.token * 4)), zero = make_float2(-kZero, -kZero * kHiFactor);
  }
#pragma unroll
  for (int i = 0; i < COUNT / 4; i++) {
    float2 ones;
    if (ROWS == 1) ones.x = ones.y = load_shared_float(sums);
    else ones = load_shared2(sums + (from + i) * 32);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float difference = fmaf(c < 2 ? zero.x : zero.y, c % 2 ? ones.y : ones.x, acc[i * 4 + c]);
      out[from + i][c] = fmaf(c < 2 ? scale.x : scale.y, difference, out[from + i][c]);
    }
  }
}

// Operand A of 16 k: codes of lo and hi, two k each, then two k further.
#if WEIGHT_BITS == 4
constexpr int kLoadBlocks = 2;    // of 32 k in 16 bytes of a lane
using BlockCodes = uint2;         // of 32 k
__device__ __forceinline__ BlockCodes load_codes(uint32_t unit, int block, const Lane& at) {
  return load_shared_words(unit + block / 2 * 512 + at.lane * 16 + block % 2 * 8);
}
__device__ __forceinline__ void split_codes(uint32_t (&a)[4], const uint32_t* words) {
  const uint32_t word = words[0], high = word >> 8;
  a[0] = word & 0x000F000Fu, a[1] = word & 0x00F000F0u, a[2] = high & 0x000F000Fu, a[3] = high & 0x00F000F0u;
}
#else
constexpr int kLoadBlocks = 1;
using BlockCodes = uint4;
__device__ __forceinline__ BlockCodes load_codes(uint32_t unit, int block, const Lane& at) {
  return load_shared(unit + block * 512 + at.lane * 16);
}
__device__ __forceinline__ void split_codes(uint32_t (&a)[4], const uint32_t* words) {
  a[0] = __byte_perm(words[0], 0, 0x4240), a[1] = __byte_perm(words[1], 0, 0x4240);
  a[2] = __byte_perm(words[0], 0, 0x4341), a[3] = __byte_perm(words[1], 0, 0x4341);
}
#endif
constexpr int kStepWords = WEIGHT_BITS / 4;   // of a lane for 16 k

#if WGMMA_PRODUCTS
// As multiply_slices. All four warps of a warpgroup, whether they have a tile or not.
template <int S>
__device__ __forceinline__ void multiply_together(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  constexpr int kSteps = SCALE_GROUP / 16;   // of 16 k in a scale group
  constexpr int kHeld = NT == 8 && kThreads > 512 && kSteps > 4 ? 4 : kSteps;   // with codes in registers at a time
#pragma unroll
  for (int group = 0; group < kUnitScales; group++) {
    float acc[S][NT * 4];
    uint32_t a[S][kHeld][4];
#pragma unroll
    for (int s = 0; s < S; s++) {
      const uint64_t tokens = tokens_descriptor<NT, NT < 8 || kThreads <= 512>(x + s * kXSliceBytes);
#pragma unroll
      for (int from = 0; from < kSteps; from += kHeld) {
        if (from > 0) {
          wgmma_wait<0>();
          settle(a[s]);
        }
#pragma unroll
        for (int step = 0; step < kHeld; step += 2) {
          const BlockCodes codes = load_codes(unit + s * kUnitBytes, (group * kSteps + from + step) / 2, at);
          split_codes(a[s][step], &codes.x), split_codes(a[s][step + 1], &codes.x + kStepWords);
        }
        settle(a[s]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeld; step++)
          multiply_tile(acc[s], a[s][step], tokens + descriptor_step((group * kSteps + from + step) * 2 * kXWordStride), from + step > 0);
        wgmma_commit();
      }
    }
#pragma unroll
    for (int s = 0; s < S; s++) {
      if (s == S - 1) wgmma_wait<0>();
      else wgmma_wait<1>();
      settle(acc[s]);
      settle(a[s]);
      add_group(out, acc[s], 0, unit + s * kUnitBytes, x + s * kXSliceBytes, group, at);
    }
  }
}
#endif

// out += S slices: units from `unit` on, x from `x` on. Each is a sum of its own, added in order; S > 1 needs one scale group a slice.
template <int S>
__device__ __forceinline__ void multiply_slices(Sums& out, uint32_t unit, uint32_t x, const Lane& at) {
  constexpr int kGroupBlocks = SCALE_GROUP / 32;
  // Token tiles whose sums over a scale group are in registers together.
  constexpr int kPart = NT < 4 ? NT : kThreads < 512 ? 4 : (kThreads == 512 ? 16 : 8) / NT;
  const uint32_t x_lane = x + (ROWS == 1 ? at.quarter : at.lane) * 16;
#pragma unroll
  for (int part = 0; part < kUnitScales * (NT / kPart); part++) {
    const int group = part / (NT / kPart), from = part % (NT / kPart) * kPart;
    float acc[S][kPart * 4] = {};
    uint4 words[S];
#pragma unroll
    for (int j = group * kGroupBlocks; j < (group + 1) * kGroupBlocks; j++) {
      uint4 b[S][kPart];
#pragma unroll
      for (int s = 0; s < S; s++) {
#pragma unroll
        for (int i = 0; i < kPart; i++) b[s][i] = load_shared(x_lane + s * kXSliceBytes + j * kXBlockBytes + (from + i) * 512);
        if (j % kLoadBlocks == 0 || j == group * kGroupBlocks)
          words[s] = load_shared(unit + s * kUnitBytes + j / kLoadBlocks * 512 + at.lane * 16);
      }
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int s = 0; s < S; s++) {
          uint32_t a[4];
          split_codes(a, &words[s].x + (j % kLoadBlocks * 2 + half) * kStepWords);
#pragma unroll
          for (int i = 0; i < kPart; i++)
            mma(reinterpret_cast<float(&)[4]>(acc[s][i * 4]), a, {half ? b[s][i].z : b[s][i].x, half ? b[s][i].w : b[s][i].y});
        }
    }
#pragma unroll
    for (int s = 0; s < S; s++) add_group(out, acc[s], from, unit + s * kUnitBytes, x + s * kXSliceBytes, group, at);
    if (NT == 8) __syncwarp();   // keeps the next part's loads, and their registers, behind
  }
}

template <int S>
__device__ __forceinline__ void multiply(Sums& out, uint32_t unit, uint32_t x, const Lane& at, bool has_tile) {
#if WGMMA_PRODUCTS
  multiply_together<S>(out, unit, x, at);
#else
  if (has_tile) multiply_slices<S>(out, unit, x, at);
#endif
}

// The warp's run of one tile.
__device__ __forceinline__ void accumulate(Sums& out, WeightStream& weights, Activations& x, const Lane& at, bool has_tile) {
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
#pragma unroll
  for (int i = 0; i < NT; i++)
#pragma unroll
    for (int c = 0; c < 4; c++) out[i][c] *= c < 2 ? kSumScale : kSumScale / kHiFactor;
}

// SHARED_RUN = 0: sums over the runs, in order. `visit(nt, i, tile, row, token, pair)` for what the thread finishes.
template <class Visit>
__device__ __forceinline__ void visit_pairs(int nt, int round, int num_tiles, int T, Visit visit) {
#pragma unroll
  for (int i = 0; i < kThreadPairs; i++) {
    const int pair = threadIdx.x + i * kThreads, token = nt * 8 + (pair & 3) * 2 + (pair >> 5 & 1), tile = Lane::tile(round, pair >> 6);
    if (pair < kPairs && tile < num_tiles && token < T) visit(i, tile, pair >> 2 & 7, token, pair);
  }
}

template <class Epilogue>
__device__ __forceinline__ void finish_block(const Sums& out, const Lane& at, Epilogue& epilogue, const RowScale& scale, int round,
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
__device__ __forceinline__ void finish_rows(const Sums& out, const Lane& at, const Epilogue& epilogue, const RowScale& scale, int, int T) {
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
__device__ __forceinline__ void finish_rows(const Sums& out, const Lane& at, Epilogue& epilogue, const RowScale& scale, int tile, int T) {
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

// The whole product; the epilogue as in linear_product.cuh. x (T, K), or with PREPARED what prepare_w4 wrote.
template <class Epilogue>
__device__ __forceinline__ void w4_product(Epilogue& epilogue, int num_tiles, const scalar_t* x, const scalar_t* norm,
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
  if (TRIGGER == 1) pdl_launch_dependents();
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
#pragma unroll 1
  for (int round = 0; round < rounds; round++) {
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
