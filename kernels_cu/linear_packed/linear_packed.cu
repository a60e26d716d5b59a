// Skinny matrix products of a step of 1-64 rows with weights of 2, 4 or 8 bits: y[T,N] = x[T,K] W[N,K]^T, fused as in linear.cu.
//
// W[n, k] = scale[n, k / G] * (u[n, k] - zero[n, k / G]), u in 0..15 (2 bits: 0..3, 8 bits: 0..255). Without ZEROS zero is 8 everywhere (2
//   bits: 2, 8 bits: 128). With ZEROS 2 W[n, k] = scale[n, k / G] * u[n, k] - minimum[n, k / G].
// Operands: x, inner (T, K) scalar_t row-major, or with PREPARED the buffer that prepare_rows wrote from them; weight packed as in
//   packed_layout.cuh (repack.cu writes it); partials (tiles, 8, NT, 32) float4 and arrivals (tiles) int32, zero, with
//   SHARED_RUN = 1, RUNS = 8 and CLUSTERS = 0, else null; prepared: with FEEDS it takes what prepare_rows would make of out, else null;
//   others as in linear.cu.
// Constants:
//   LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head, 4 latent_queries, which has one row
//   KV_RANK: NOPE_DIM: ROPE_DIM: VALUE_DIM: of latent_queries only, as in absorb_queries.cu
//   HEAD_DIM: of qkv only, elements of a head
//   IN_FEATURES: K, the columns of W, a multiple of 128
//   WEIGHT_BITS: 4, or 8 with ZEROS 0 or 2, or 2 with ZEROS 0
//   RUNS: contiguous parts of K, summed in order: 8 or 1
//   SCALE_GROUP: columns that share a scale: 16, 32, 64 or 128
//   ZEROS: 1 has zero points beside the scales, 2 minimums, 0 nothing: zero points are then 8, in 2 bits 2, in 8 bits 128
//   ROWS: most rows of a step: 1, 8, 16, 32 or 64
//   WARPS: warps of a block, with SHARED_RUN 0 a multiple of 8
//   WARPGROUPS: 1 lets four warps multiply together where the architecture can
//   SHARED_RUN: 1: the warps of a block have different tiles, all of one run of K; 0: eight warps share a tile, each has one of its runs
//   NORM: 1 normalises rows of x
//   PREPARED: 1: x comes from prepare_rows; 0: as the kernel before wrote it
//   STAGE_SLICES: slices of x in a stage; 0: all of a block's x at once
//   STAGES: stages of x in shared memory: 3 or more, or with STAGE_SLICES 0 any
//   EARLY_SLOTS: chunks of a warp that are copied before x is asked for
//   CLUSTERS: 1: the eight blocks with the runs of the same tiles are a cluster, which needs sm_90
//   RECEIVED_APART: 1: sums that the peers of a cluster send have shared memory of their own; 0: they are written over weights and x, and all
//     blocks take tiles only once
//   FEEDS: 1: a gate_up product also writes what prepare_rows would make of its rows for the product after it
//   TRIGGER: when the next kernel may start: 0 once this one has started, of qkv once it is behind its pdl_wait; 1 at this one's end; 2 once x
//     is there, or with STAGE_SLICES once its first stages are asked for: these copies then do not queue behind what the next kernel
//     reads early; 3, of qkv only, once this one has started. Then the next kernel may begin while others before this one still run
//   KEPT_ROUNDS: with SHARED_RUN 0 and one row, the rounds whose runs are added only after the products of all of them; else 1
//   SMEM_BYTES: dynamic shared memory of the launch
//   PORTABLE: 1 leaves the copy engine out on sm_90 and later too
//   FATRELU: of gate_up only, the activation is that of gated.cuh; without it SiLU
//   ROW_PITCH: elements between rows of x, whose first K columns are taken; without it K. Rows with a pitch come from the product before
//     this one, which starts this kernel behind its own pdl_wait. So all kernels before that product have finished, and this one may
//     start the next at once
//   EARLY_WARPS: how many warps of a block, its first ones, copy the chunks of EARLY_SLOTS; without it all warps do
//   SMALL_CHUNKS: where lanes copy, the slices of a chunk, 1 or 2; without it a chunk is a multiple of 128 bytes
//   OWN_RUNS: 1, for one row with SHARED_RUN, NORM and PREPARED 0: only the warps that share a run of x wait for each other; without it all
//     warps of the block do, unless it has eight, each with a run of its own
//   TILE_COPIES: 1, for one row with SHARED_RUN 0, NORM 1 and KEPT_ROUNDS for all weights: one copy brings the chunks of all eight warps of a tile
//   AHEAD: 1: once x is there, a residual product prefetches what the product after it reads first: the memory would have nothing to do until
//     the blocks of that product find room
// Grid: no more blocks than multiprocessors, with SHARED_RUN a multiple of RUNS, with CLUSTERS in clusters of RUNS; they take tiles
//   in turn; block 32 * WARPS; SMEM_BYTES of dynamic shared memory.
// Numerics: x enters as integers of 14 bits and a sign in quanta of its slice of 128 columns: this changes an element by at most 2^-14 of
//   the slice's largest, and those below 2^-101 count as zero. Codes times integers are summed exactly over a scale group; the sum is
//   rounded to float32, scaled, and added in order: the groups of a run, then the RUNS runs of K. One rounding where a value is stored and
//   one where a normalised row becomes n = round(x * norm): 1 / rms multiplies the sums. Bits of a row depend on its own operands only.
//   fp16: |n| < 2^20. Values of x that are not finite make its sums NaN.
// Oracle: NumpyOps.qkv, project_residual, gate_up, lm_head.
// Source: original; rings as in CUTLASS's pipelines; RMSNorm arXiv 1910.07467, RoPE 2104.09864, SwiGLU 2002.05202.
// Why so: at few rows the time is that of reading W once, so a warp's weights are one contiguous run of whole copies, and the
//   codes need almost no work: a mask leaves them as the highest bits of signed bytes, one instruction for four weights. Masks that
//   make 16-bit floats of them cost five instructions for eight weights, which limited these products.
//   Tensor-core operand A is a tile of codes, operand B columns of x: each token has a column of high bytes and one of low bytes of
//   its integers, whose sums are added as 256 high + low. A sum grows by scale * quantum * (sum u q - zero * sum q); where zero is not the
//   middle code the sums of q are taken once, when x is brought to shared memory. Integers are exact: all ways to sum a group
//   have the same bits. K is cut into RUNS runs that are added in order: by eight warps of a
//   block, or, with RUNS = 8 and SHARED_RUN = 1, by eight blocks that read an eighth of x each and exchange sums.
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || \
    !defined(RUNS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(ROWS) || !defined(WARPS) || !defined(WARPGROUPS) || \
    !defined(SHARED_RUN) || !defined(NORM) || !defined(PREPARED) || !defined(STAGE_SLICES) || !defined(STAGES) || !defined(EARLY_SLOTS) || \
    !defined(CLUSTERS) || !defined(RECEIVED_APART) || !defined(FEEDS) || !defined(TRIGGER) || !defined(KEPT_ROUNDS) || \
    !defined(SMEM_BYTES) || !defined(PORTABLE) || (EARLY_WARPS > WARPS && defined(EARLY_WARPS)) || (ROWS > 1 && defined(OWN_RUNS)) || \
    (LINEAR == 4 && !defined(KV_RANK)) || (LINEAR == 4 && !defined(NOPE_DIM)) || (LINEAR == 4 && !defined(ROPE_DIM)) || \
    (LINEAR == 4 && !defined(VALUE_DIM)) || (LINEAR != 2 && defined(FATRELU)) || (LINEAR != 1 && defined(AHEAD)) || (ROW_PITCH < IN_FEATURES && defined(ROW_PITCH)) || \
    (SMALL_CHUNKS > 2 && defined(SMALL_CHUNKS)) || (ROWS > 1 && defined(TILE_COPIES))
#error "a constant is not defined, or not for this product"
#endif
#if LINEAR == 4
#include "absorb_head.cuh"
#endif
#include "linear_epilogue.cuh"
#include "packed_activations.cuh"
#include "packed_finish.cuh"
#include "packed_multiply.cuh"

// The most registers of a thread. NVRTC knows this bound from 12.4 on.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define REGISTERS(most) __maxnreg__(most)
#else
#define REGISTERS(most) __launch_bounds__(kThreads, 1)
#endif

#if CLUSTERS
#define PACKED_BOUNDS __cluster_dims__(RUNS, 1, 1) __launch_bounds__(kThreads, 1)
#elif ROWS > 1 || WEIGHT_BITS != 4 || SCALE_GROUP != 128 || ZEROS || PORTABLE || __CUDA_ARCH__ < 900
#define PACKED_BOUNDS __launch_bounds__(kThreads, 1)
#elif LINEAR == 1 && IN_FEATURES == 2048 && WARPS == 8 && KEPT_ROUNDS == 1
// While attention has multiprocessors to itself, two blocks of this product may share another one. They are compiled for so few registers that a
// block of the next product finds room beside both.
#define PACKED_BOUNDS __launch_bounds__(kThreads, 6)
// A model 2,048 wide: a block of gate_up with 24 warps and one of down have all registers of a multiprocessor together. With four more for a
// thread of one of them, down would wait until gate_up has ended.
#elif LINEAR == 2 && IN_FEATURES == 2048 && WARPS == 24
#define PACKED_BOUNDS REGISTERS(56)
#elif LINEAR == 1 && IN_FEATURES == 6144 && WARPS == 8
#define PACKED_BOUNDS REGISTERS(88)
#else
#define PACKED_BOUNDS __launch_bounds__(kThreads, 1)
#endif

#ifdef AHEAD
constexpr bool kFetchesAhead = true;
#else
constexpr bool kFetchesAhead = false;
#endif
constexpr bool kLooksLate = LINEAR == 0;                          // `look` reads what `publish` writes: it comes behind a barrier
constexpr bool kGuesses = LINEAR == 0 && ROWS == 1 && !SHARED_RUN;   // whether the row's place is guessed before pdl_wait
// Whether `settle` and `keep` come behind the products: with SHARED_RUN, 64 rows leave no registers for what is read before these.
constexpr bool kSettlesLate = !SHARED_RUN || NT < 8;

// Computes a warp's sums of one tile over its run of K.
DEVICE void accumulate(Sums& out, WeightStream& weights, Activations& x, const Lane& at, bool has_tile) {
  // Slices with several scale groups are multiplied one by one: the groups' sums must be added slice by slice, whatever ROWS is. With one row
  // and groups of 32 columns or more slices can still be joined, because their sums are kept and added in that order.
  constexpr bool kCanJoin = (kUnitScales == 1 || (ROWS == 1 && SCALE_GROUP >= 32)) && kChunkSlices % kTogetherSlices == 0 && (kResident || kStageSlices % kTogetherSlices == 0);
  constexpr int kTogether = kCanJoin ? kTogetherSlices : 1;
  uint32_t place = x.base() + (SHARED_RUN ? 0 : at.run * kRunSlices * kXSliceBytes);
  // Where four warps multiply together the number of instructions is the limit: a chunk is unrolled, so that addresses are parts of them.
  constexpr int kUnrolled = !WGMMA_PRODUCTS || kThreads > 512 || (WEIGHT_BITS == 8 && NT == 8) ? 1 : 4;
  // Whether the last chunk of every run has two slices, which can be joined.
  constexpr bool kJoinsRest = ROWS == 1 && kTogether > 1 && kResident && kSlices % kRunSlices == 0 && kRunSlices % kChunkSlices == 2;
  constexpr bool kAreWhole = ROWS == 1 && kSlices % kRunSlices + kRunSlices % kChunkSlices == 0;   // no chunk has fewer slices
#pragma unroll 1
  for (int done = 0; done < at.slices; done += kChunkSlices) {
    uint32_t unit = has_tile ? weights.wait() : weights.ring;
    const int left = at.slices - done;
    if (kAreWhole || left >= kChunkSlices) {
#pragma unroll kUnrolled
      for (int i = 0; i < kChunkSlices; i += kTogether) {
        if (!kResident && (kChunkSlices % kStageSlices == 0 ? i : done + i) % kStageSlices == 0) place = x.enter_stage();
        multiply<kTogether>(out, unit, place, at, has_tile);
        place += kTogether * kXSliceBytes, unit += kTogether * kUnitBytes;
      }
    } else if constexpr (kJoinsRest) {
      multiply<2>(out, unit, place, at, has_tile);
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

// Whether the products of all rounds go side by side.
constexpr bool kJoinsRounds = KEPT_ROUNDS > 1 && kAreRunsJoined && kSlots >= KEPT_ROUNDS;
// Whether all warps have asked for their weights of all rounds before x, a slice of each: then these come long before it, and nobody waits for
// them behind it.
constexpr bool kWaitsBeforeX = kJoinsRounds && kRunSlices == 1 && kAllAreEarly && kEarlySlots >= KEPT_ROUNDS;
static_assert(!kTileCopies || (kJoinsRounds && !kWaitsBeforeX), "a warp may wait for a copy of another one only behind a barrier of the block");

// Whether the compiler is told that T is 1 with one row: code without tests of it is faster with 4,096 columns, and slower with 2,048.
constexpr bool kKnowsRows = ROWS == 1 && NORM && IN_FEATURES >= 4096;

// Computes the whole product. x is (T, K), or with PREPARED the buffer that prepare_rows wrote; num_tiles: tiles of W, of latent_queries
// those up to the end of the block's head.
template <class Epilogue>
DEVICE void packed_product(Epilogue& epilogue, int num_tiles, const scalar_t* x, const scalar_t* norm,
                           const void* weight, float4* partials, int* arrivals, int T, float eps, const Ahead& ahead = {}) {
  constexpr bool kNormalises = NORM && !PREPARED;
  if (kKnowsRows) T = 1;
  static_assert(!kNormalises || !SHARED_RUN || RUNS == 1 || CLUSTERS, "a block that sees one run of x cannot normalise it");
  const Lane at;
  const int first = Lane::tile(0, 0), step = Lane::tile(1, 0) - first;
  const int rounds = FEEDS ? 1 : (num_tiles - first + step - 1) / step;   // with FEEDS a constant: that leaves registers for unrolled code
  WeightStream weights(at, weight, num_tiles);
  if (kNormalises) RowPieces::prefetch_norm(norm);
  Activations activations{at, reinterpret_cast<const unsigned char*>(x) + (SHARED_RUN ? at.run * kRunSlices * kXSliceBytes : 0)};
  const Exchange exchange{at, num_tiles, T};
  if constexpr (CLUSTERS) exchange.prepare();
  if (!kResident) {
    activations.last = rounds * ((at.slices + kStageSlices - 1) / kStageSlices);
    activations.prepare_stages();
  }
  if constexpr (kGuesses) {
    epilogue.guess();
    visit_pairs(0, 0, num_tiles, T, [&](int i, int tile, int row, int, int) { epilogue.guess_angle(i, tile, row); });
  }
  if constexpr (LINEAR == 4) epilogue.look_up();
  if constexpr (kWaitsBeforeX) weights.wait_for_rounds(KEPT_ROUNDS);
  pdl_wait();
  if (!kResident) activations.start_stages();
  if constexpr (CLUSTERS) cluster_wait();
  const RowScale scale{at, eps};
  const float prepared_scale = scale.load(x, T);
  if constexpr (LINEAR == 0 && TRIGGER == 0) pdl_launch_dependents();
  if constexpr (LINEAR == 0) epilogue.prepare(at.shared + kEpilogueOffset);
  const auto look = [&](int round) {
#pragma unroll
    for (int nt = 0; nt < (SHARED_RUN ? 0 : NT); nt++)
      visit_pairs(nt, round, num_tiles, T, [&](int i, int tile, int row, int token, int) { epilogue.prefetch(nt, i, tile, row, token); });
  };
  if constexpr (kNormalises && CLUSTERS) {
    activations.fill_run_normalised(x, norm, scale, weights, T);
  } else if (kNormalises) {
    activations.fill_normalised(x, norm, scale, weights, T);
  } else if (!PREPARED) {
    activations.fill(x, weights, T, [&] { if (!kLooksLate) look(0); });
  } else {
    if (kResident) activations.copy_prepared();
    weights.fill_ring();
  }
  if constexpr (LINEAR == 0) epilogue.publish();
  if constexpr (LINEAR == 0) epilogue.look_up();
  if (!kSettlesLate) epilogue.settle(), scale.keep(prepared_scale, T);
  if (PREPARED && kResident) cp_async_wait<kCopyEngine ? 0 : kSlots - kEarlySlots>();
  if constexpr (WGMMA_PRODUCTS) async_proxy_fence();
  if (!kOwnRuns || kLooksLate) __syncthreads();
  else activations.wait_for_run();
  if constexpr (TRIGGER == 2) pdl_launch_dependents();
  if constexpr (kFetchesAhead) ahead.fetch(at);
  if constexpr (kJoinsRounds) {
    if (PREPARED || kLooksLate) look(0);
    if constexpr (!kWaitsBeforeX) weights.wait_for_rounds(KEPT_ROUNDS);
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
    if constexpr (kGuesses) if (round > 0) epilogue.forget_guess();
    if (round == 0 ? PREPARED || kLooksLate : KEPT_ROUNDS == 1) look(round);
    if (CLUSTERS && kLooksEarly) exchange.look(epilogue, round);
    Sums out = {};
    accumulate(out, weights, activations, at, tile < num_tiles);
    if (kSettlesLate && round == 0) epilogue.settle(), scale.keep(prepared_scale, T);   // a barrier comes before the stores
    if (kSettlesLate && SHARED_RUN && round == 0 && (LINEAR == 0 || (NORM && PREPARED && !FEEDS))) __syncthreads();
    if constexpr (!SHARED_RUN) {
      finish_block(out, at, epilogue, scale, round, round + 1 == rounds, num_tiles, T);
    } else if constexpr (CLUSTERS) {
      exchange.finish(out, epilogue, scale, round, round + 1 == rounds);
    } else if constexpr (RUNS > 1) {
      finish_grid(out, at, epilogue, scale, round, num_tiles, T, partials, arrivals);
    } else if constexpr (FEEDS) {
      feed_rows(out, at, epilogue, scale, T);
    } else if (tile < num_tiles) {
      finish_rows(out, at, epilogue, scale, tile, T);
    }
  }
}

#if LINEAR == 0
// The number of token tiles whose angles the epilogue keeps. Blocks that exchange their sums finish one tile after another, and need one.
constexpr int kEpilogueTiles = SHARED_RUN && RUNS > 1 ? 1 : NT;

// q = rope(n Wq^T / rms + bq) of the row's position, k and v stored in the pages of its slot at its location; with NORM = 0 n is x and
// rms 1.
// Operands as in linear_qkv.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_qkv)(
    scalar_t* __restrict__ q, scalar_t* __restrict__ k_pages, scalar_t* __restrict__ v_pages, const scalar_t* x,
    const scalar_t* __restrict__ norm, const void* __restrict__ weight, float4* partials, int* arrivals,
    const scalar_t* __restrict__ bias, const float* __restrict__ rope, const int* positions, const int* locations, const int* slots,
    const int* __restrict__ block_tables, int T, int num_heads, int num_kv_heads, int pages_per_sequence, int max_context,
    float eps) {
#if defined(ROW_PITCH) || TRIGGER == 3
  pdl_launch_dependents();
#endif
  QkvEpilogue<kEpilogueTiles, kThreadPairs, kGuesses> epilogue{q, k_pages, v_pages, bias, rope, positions, locations, slots, block_tables, T,
                                                               num_heads, num_kv_heads, pages_per_sequence, max_context};
  packed_product(epilogue, (num_heads + 2 * num_kv_heads) * kHeadTiles, x, norm, weight, partials, arrivals, T, eps);
}
#endif

#if LINEAR == 1
// x += scale * (inner W^T + bias), in place, rounded once.  x (T, N); inner (T, K); bias (N) or null.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_residual)(
    scalar_t* x, const scalar_t* inner, const void* __restrict__ weight, float4* partials, int* arrivals,
    const scalar_t* __restrict__ bias, int T, int N, float scale
#ifdef AHEAD
    , const unsigned char* ahead, int ahead_pieces, int ahead_stride, int ahead_bytes
#endif
) {
  if (TRIGGER == 0) pdl_launch_dependents();
  ResidualEpilogue<NT, kThreadPairs> epilogue{x, bias, N, scale};
#ifdef AHEAD
  const Ahead next = {ahead, ahead_pieces, ahead_stride, ahead_bytes};
#else
  constexpr Ahead next = {};
#endif
  packed_product(epilogue, N / 16, inner, nullptr, weight, partials, arrivals, T, 0.0f, next);
}
#endif

#if LINEAR == 2
// out = silu(n Wg^T / rms) * (n Wu^T / rms).  out (T, F); x (T, K); norm (K); weight of (2 F, K): gate, then up rows.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_gate_up)(
    scalar_t* __restrict__ out, scalar_t* __restrict__ prepared, const scalar_t* x, const scalar_t* __restrict__ norm,
    const void* __restrict__ weight, float4* partials, int* arrivals, int T, int F, float eps) {
  if (TRIGGER == 0) pdl_launch_dependents();
  GateUpEpilogue epilogue{out, F, reinterpret_cast<unsigned char*>(prepared)};
  packed_product(epilogue, F / 8, x, norm, weight, partials, arrivals, T, eps);
}
#endif

#if LINEAR == 3
// logits = n W^T / rms / divisor, with NORM = 0 n is x and rms 1.  logits (T, V) float32; x (T, K); norm (K); weight of (V, K), any V.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_head)(
    float* __restrict__ logits, const scalar_t* x, const scalar_t* __restrict__ norm, const void* __restrict__ weight,
    float4* partials, int* arrivals, int T, int V, float eps, float divisor) {
  if (TRIGGER == 0) pdl_launch_dependents();
  HeadEpilogue epilogue{logits, V, divisor};
  packed_product(epilogue, (V + 15) / 16, x, norm, weight, partials, arrivals, T, eps);
}
#endif

#if LINEAR == 4
static_assert(ROWS == 1 && !SHARED_RUN && kWarps == 16 && kHeadTiles == KEPT_ROUNDS * kBlockTiles, "a block takes a head of one row");
static_assert(QueryEpilogue::kSumBytes <= kPartialBytes, "the partial sums have no room for those of a head");

// Computes q = n Wq^T / rms of one row, rounded, and from it what absorb_queries makes of such a row, with the same bits. A block makes a head
// of q and keeps it in shared memory; the block behind the last head appends the row's latent. Operands and grid as in absorb_queries.cu;
// x (1, ROW_PITCH) are the latents, of which the first IN_FEATURES columns make q.
extern "C" __global__ void PACKED_BOUNDS KERNEL(linear_packed_latent_queries)(
    scalar_t* __restrict__ queries, scalar_t* pages, const scalar_t* x, const scalar_t* __restrict__ norm, const void* __restrict__ weight,
    const scalar_t* __restrict__ up, const scalar_t* __restrict__ rope, const scalar_t* __restrict__ kv_norm, const int* positions,
    const int* locations, const int* slots, const int* block_tables, int num_heads, int max_context, int pages_per_sequence, float norm_eps) {
  __shared__ float query[NOPE_DIM + ROPE_DIM];
  const int head = blockIdx.x;
  pdl_launch_dependents();
  if (head == num_heads) {
    Append{pages, x, kv_norm, rope, positions, locations, slots, block_tables, 1, max_context, IN_FEATURES, pages_per_sequence, norm_eps}.run(0, kWarps);
    return;
  }
  QueryEpilogue epilogue{query, up, rope, positions, slots, head, max_context};
  packed_product(epilogue, (head + 1) * kHeadTiles, x, norm, weight, nullptr, nullptr, 1, norm_eps);
  __syncthreads();
  epilogue.absorb(queries + head * kCached, Lane().shared + kPartialOffset);
}
#endif
