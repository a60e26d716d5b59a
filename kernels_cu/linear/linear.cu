// Skinny matrix products of a step of 1-64 rows: y[T,N] = x[T,K] W[N,K]^T with fused prologues and epilogues.
//
// Operands: x, inner (T, K) scalar_t row-major; W (N, K) scalar_t row-major, shared with the prefill's GEMM; others below.
// Constants: LINEAR: the product, 0 qkv, 1 residual, 2 gate_up, 3 head. HEAD_DIM: of qkv only, elements of a head.
//   IN_FEATURES: K, the columns of W, a multiple of 64. TOKEN_TILES: NT, tiles of 8 tokens: 1, 2, 4 or 8. HALF_TILE: 1:
//   the last tile of tokens has at most four. GROUP: tiles of 16 weight rows that share one pass over x. CLUSTER:
//   blocks that split K: 1, or 2 from sm_90 on. SPLIT_WARPS: warps that share a tile and split its K: 8, or 1. NORM: 1
//   normalises rows of x, 0 takes them as they are. SMEM_BYTES: dynamic shared memory of the launch.
//   ONE_ROW: T is 1, TOKEN_TILES 1 and SPLIT_WARPS 8, and the row takes an eighth of the room of a tile of tokens; without it T is any.
//   HELD_CHUNKS: with ONE_ROW only: a block has one group of tiles, all of whose weights are asked for before x. So many chunks of each warp,
//   the last ones, come to registers, the others to its ring. Without it weights are streamed through the ring.
//   ROWS_FIRST: x is asked for before the weights, so that it does not wait for them: for devices where a kernel begins only when
//   the one before it has ended. FATRELU: of gate_up only, the activation is that of gated.cuh; without it SiLU. ROW_PITCH: elements
//   between rows of x, whose first K columns are taken; without it K. Rows with a pitch come from the product before this one, which
//   starts this kernel behind its own pdl_wait. So all kernels before that product have finished, and this one may start the next at once
// Grid: any multiple of CLUSTER up to CLUSTER * ceil(tiles / kBlockTiles) blocks, clusters take groups of tiles in turn;
//   block 256; SMEM_BYTES of dynamic shared memory.
// Numerics: float32 accumulation in tensor cores over 8 * CLUSTER runs of K, the runs added in order; one rounding where a
//   value is stored and one where a normalised row enters the product. Bits of a row depend on its own operands only.
// Oracle: NumpyOps.qkv, project_residual, gate_up, lm_head.
// Source: original; RMSNorm arXiv 1910.07467, RoPE arXiv 2104.09864, SwiGLU arXiv 2002.05202.
// Why so: at few rows the time is that of reading W once. Rings deep enough to cover the memory's latency are filled
//   before the kernel waits for its inputs, and a tile's 16 rows are chosen so that the two values that RoPE or SiLU
//   combine come out in one lane.
#if !defined(LINEAR) || (LINEAR == 0 && !defined(HEAD_DIM)) || !defined(IN_FEATURES) || !defined(TOKEN_TILES) || \
    !defined(HALF_TILE) || !defined(GROUP) || !defined(CLUSTER) || !defined(SPLIT_WARPS) || !defined(NORM) || \
    !defined(SMEM_BYTES) || (LINEAR != 2 && defined(FATRELU)) || (ROW_PITCH < IN_FEATURES && defined(ROW_PITCH)) || \
    (TOKEN_TILES != 1 && defined(ONE_ROW)) || (TOKEN_TILES != 1 && defined(HELD_CHUNKS)) || (CLUSTER != 1 && defined(ROWS_FIRST))
#error "a constant is not defined, or not for this product"
#endif
#include "activations.cuh"
#include "linear_epilogue.cuh"
#include "one_row.cuh"

// acc += tile (16 rows) x tokens over 32 k, as two m16n8k16 products.
DEVICE void multiply(float (&acc)[NT][4], uint4 lo, uint4 hi, const uint4 (&x)[NT]) {
#pragma unroll
  for (int i = 0; i < NT; i++) {
    mma(acc[i], {lo.x, hi.x, lo.y, hi.y}, {x[i].x, x[i].y});
    mma(acc[i], {lo.z, hi.z, lo.w, hi.w}, {x[i].z, x[i].w});
  }
}

// Adds the products of a group of the warp's tiles with x over `units` units of K, from unit `first` of the warp's on.
template <class Stream, class X>
DEVICE void accumulate(float (&acc)[GROUP][NT][4], Stream& weights, X& x, int first, int units, int& turn) {
  constexpr int kBlocks = 2 / kUnitSplit;   // blocks of 32 k of x that are in registers at a time
  constexpr int kTurns = kStaged ? 2 * kWarps : kXSlots;
#pragma unroll 1
  for (int u = first; u < first + units; u++) {
    if constexpr (kStaged)
      if (u % kWarps == 0) x.enter_stage(u, turn);
#pragma unroll
    for (int j0 = 0; j0 < 2; j0 += kBlocks) {
      if (j0 == 0) cp_async_wait<kPending>();
      uint4 b[kBlocks][NT];
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
#pragma unroll
        for (int i = 0; i < NT; i++) {
          b[j][i] = x.load(x.place(u, turn), i, j0 + j);
          if constexpr (NORM && !kResident && !kStaged)
            b[j][i] = normalised(b[j][i], x.norm_weights(x.at.warp * kOwnUnits + u, j0 + j), x.scale[i]);
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
          if constexpr (!kResident && !kStaged)
            if (t == GROUP - 1) x.copy_next();
          cp_async_commit();
        }
      }
    }
    if (!kResident) turn = turn + 1 == kTurns ? 0 : turn + 1;
  }
}

// Adds the products of the warp's only group of tiles, whose weights were all asked for before x: in the order of `accumulate`. A chunk is
// read beside the products of the one before it, which wait for each other.
template <class Stream, class X>
DEVICE void accumulate_round(float (&acc)[GROUP][NT][4], const Stream& weights, const X& x) {
  constexpr int kChunks = GROUP * kOwnUnits;
  Chunk chunks[2];
  uint4 b[2][2][NT];
  cp_async_wait_all();
#pragma unroll
  for (int next = 0; next <= kChunks; next++) {
    if (next < kChunks && next / GROUP < x.at.own_units) {
      chunks[next % 2] = weights.chunk(next);
      if (next % GROUP == 0)
#pragma unroll
        for (int j = 0; j < 2; j++) b[next / GROUP % 2][j][0] = x.load(next / GROUP, 0, j);
    }
    const int i = next - 1, u = i / GROUP;
    if (i < 0 || u >= x.at.own_units) continue;
#pragma unroll
    for (int j = 0; j < 2; j++) multiply(acc[i % GROUP], chunks[i % 2].lo[j], chunks[i % 2].hi[j], b[u % 2][j]);
  }
}

// Returns where a warp leaves the sums of a lo row, a hi row and a token of tile t. `pair` is odd * 32 + lane for the token 2 (lane % 4) +
// odd; of one row only the pairs of token 0 have a place.
DEVICE uint32_t partial_place(const Lane& at, int warp, int t, int pair) {
  return at.shared + kPartialOffset + ((warp * GROUP + t) * kTilePairs + (kOneRow ? pair >> 2 : pair)) * 8;
}

// Finishes a group where the warps split K: adds its sums over the warps of the block, then over the blocks of the cluster, and gives them to
// the epilogue.
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
          store_shared2(partial_place(at, at.warp, t, odd * 32 + at.lane), acc[t][nt][odd], acc[t][nt][odd + 2]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAllThread; i++) {
      const int pair = threadIdx.x + i * kThreads, t = pair >> 6, odd = pair >> 5 & 1, token = nt * 8 + (pair & 3) * 2 + odd;
      if (pair >= kAll || token >= T) continue;
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        const float2 part = load_shared2(partial_place(at, w, t, pair & 63));
        sum.x += part.x, sum.y += part.y;
      }
      if (CLUSTER == 1) {
        const int tile = group * GROUP + t;
        if (tile < num_tiles) epilogue.store(nt, i, tile, pair >> 2 & 7, token, sum.x, sum.y);
      } else {
        const uint32_t to = at.shared + kExchangeOffset + ((at.rank * NT + nt) * kPairs + t * 32 + (pair & 31)) * 8;
        store_peer(block_address(to, odd), sum.x, sum.y);
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

// Finishes a group where every warp has tiles of its own: gives a lane's sums to the epilogue.
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

// Adds to `sum` all runs of K, which one warp takes in turn, in the order in which finish_split adds the runs of eight warps.
template <class Stream, class X>
DEVICE void accumulate_runs(float (&sum)[GROUP][NT][4], Stream& weights, X& x, int& turn) {
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

// Calls visit(nt, i, tile, row, token) for each output of a group that the thread finishes, where warps split K.
template <class Tiles, class Visit>
DEVICE void visit_pairs(const Tiles& tiles, int group, int rank, int T, Visit visit) {
#pragma unroll
  for (int nt = 0; nt < NT; nt++)
#pragma unroll
    for (int i = 0; i < kThreadPairs; i++) {
      const int pair = threadIdx.x + i * kThreads, odd = CLUSTER == 1 ? pair >> 5 & 1 : rank;
      const int tile = group * GROUP + (pair >> (CLUSTER == 1 ? 6 : 5)), token = nt * 8 + (pair & 3) * 2 + odd;
      if (pair < kPairs && tile < tiles.num_tiles && token < T) visit(nt, i, tile, pair >> 2 & 7, token);
    }
}

// x of a product: `copy_first` asks for its first units, `wait_first` waits until these are in shared memory, `load` reads it for the tensor
// cores.
#ifdef ONE_ROW
using Rows = OneRow;
#else
using Rows = Activations;
#endif

constexpr bool kGuesses = LINEAR == 0 && NT == 1;   // whether the place of one row is guessed before pdl_wait

// Computes the whole product. Where warps have tiles of their own the epilogue prefetches nothing.
template <class Tiles, class Epilogue>
DEVICE void linear_product(const Tiles& tiles, Epilogue& epilogue, const scalar_t* x, const scalar_t* norm,
                           const scalar_t* weight, int T, float eps) {
  const Lane at;
  const int num_clusters = gridDim.x / CLUSTER, first_group = blockIdx.x / CLUSTER;
  Rows activations(at, x, T, (tiles.num_groups - first_group + num_clusters - 1) / num_clusters);
  if (NORM) activations.copy_norm_weights(norm);
  if constexpr (kRowsFirst) pdl_wait(), activations.copy_first();
  WeightStream<Tiles> weights(at, tiles, weight);
  group_announce();
  if constexpr (kGuesses) {
    if (T == 1) epilogue.guess();
    if (T == 1) visit_pairs(tiles, first_group, at.rank, 1, [&](int, int i, int tile, int row, int) { epilogue.guess_angle(i, tile, row); });
  }
  if constexpr (!kRowsFirst) pdl_wait(), activations.copy_first();
  if constexpr (LINEAR == 0) pdl_launch_dependents(), epilogue.prepare(at.shared + kEpilogueOffset);
  activations.wait_first();
  if constexpr (LINEAR == 0) epilogue.publish();
  if (NORM) activations.normalise(eps);
  else if (LINEAR != 1) __syncthreads();   // makes visible what `publish` wrote, and x where warps share it
  if constexpr (LINEAR == 0) epilogue.look_up();
  int turn = 0;
#pragma unroll 1
  for (int group = first_group; group < tiles.num_groups; group += num_clusters) {
    const bool last = group + num_clusters >= tiles.num_groups;
    if constexpr (kGuesses) if (group != first_group) epilogue.forget_guess();
    if (SPLIT_WARPS > 1)
      visit_pairs(tiles, group, at.rank, T, [&](int nt, int i, int tile, int row, int token) { epilogue.prefetch(nt, i, tile, row, token); });
    float acc[GROUP][NT][4] = {};
    if (SPLIT_WARPS == 1) {
      accumulate_runs(acc, weights, activations, turn);
      finish_rows(acc, at, epilogue, group, tiles.num_tiles, T);
      continue;
    }
    if constexpr (kOneRound) accumulate_round(acc, weights, activations);
    else accumulate(acc, weights, activations, 0, at.units, turn);
    if (group == first_group) epilogue.settle();  // a barrier comes before the stores
    finish_split(acc, at, epilogue, group, tiles.num_tiles, T, last);
  }
}

#if LINEAR == 0
// q = rope(n Wq^T + bq) of the row's position, k and v stored in the pages of its slot at its location; n = round(norm(x)), or
// with NORM = 0 x as it is.
//   q (T, H*D); k_pages, v_pages (P, Kv, 64, D); x (T, K); norm (K); weight ((H + 2 Kv) * D, K): q heads, k heads, v heads;
//   bias ((H + 2 Kv) * D) or null; rope (2, max_context, D/2) float32: cos, sin; positions, slots (T) int32, slot -1: the
//   row's k and v are not stored; locations (T) int32 or null: positions; block_tables (B, pages_per_sequence) int32.
// k_pages null: q (T, (H + 2 Kv) * D) takes the projection with its bias, unrotated, for models that normalise heads or keep them
// unrotated too.
// The next kernel may start only after this one's wait: decode_attention reads early what is older than this launch.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_qkv)(
    scalar_t* __restrict__ q, scalar_t* __restrict__ k_pages, scalar_t* __restrict__ v_pages, const scalar_t* x,
    const scalar_t* __restrict__ norm, const scalar_t* __restrict__ weight, const scalar_t* __restrict__ bias,
    const float* __restrict__ rope, const int* positions, const int* locations, const int* slots,
    const int* __restrict__ block_tables, int T, int num_heads, int num_kv_heads, int pages_per_sequence, int max_context,
    float eps) {
#ifdef ROW_PITCH
  pdl_launch_dependents();
#endif
  const int num_tiles = (num_heads + 2 * num_kv_heads) * kHeadTiles;
  const QkvTiles tiles{num_tiles, (num_tiles + kBlockTiles - 1) / kBlockTiles};
  QkvEpilogue<NT, kThreadPairs, kGuesses> epilogue{q, k_pages, v_pages, bias, rope, positions, locations, slots, block_tables, T,
                                                   num_heads, num_kv_heads, pages_per_sequence, max_context};
  linear_product(tiles, epilogue, x, norm, weight, T, eps);
}
#endif

#if LINEAR == 1
// x += scale * (inner W^T + bias), in place, rounded once.  x (T, N); inner (T, K); weight (N, K); bias (N) or null.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_residual)(
    scalar_t* x, const scalar_t* inner, const scalar_t* __restrict__ weight,
    const scalar_t* __restrict__ bias, int T, int N, float scale) {
  pdl_launch_dependents();
  const ConsecutiveTiles tiles{N / 16, (N / 16 + kBlockTiles - 1) / kBlockTiles};
  ResidualEpilogue<NT, kThreadPairs> epilogue{x, bias, N, scale};
  linear_product(tiles, epilogue, inner, nullptr, weight, T, 0.0f);
}
#endif

#if LINEAR == 2
// out = silu(n Wg^T) * (n Wu^T), n = round(norm(x)).  out (T, F); x (T, K); norm (K); weight (2 F, K): gate, then up rows.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_gate_up)(
    scalar_t* __restrict__ out, const scalar_t* x, const scalar_t* __restrict__ norm,
    const scalar_t* __restrict__ weight, int T, int F, float eps) {
  pdl_launch_dependents();
  const GateUpTiles tiles{F / 8, (F / 8 + kBlockTiles - 1) / kBlockTiles, F};
  GateUpEpilogue epilogue{out, F};
  linear_product(tiles, epilogue, x, norm, weight, T, eps);
}
#endif

#if LINEAR == 3
// logits = n W^T / divisor, n = round(norm(x)), or with NORM = 0 x as it is.  logits (T, V) float32; x (T, K); norm (K); weight (V, K), any V.
extern "C" __global__ void LINEAR_BOUNDS KERNEL(linear_head)(
    float* __restrict__ logits, const scalar_t* x, const scalar_t* __restrict__ norm,
    const scalar_t* __restrict__ weight, int T, int V, float eps, float divisor) {
  pdl_launch_dependents();
  const int num_tiles = (V + 15) / 16;
  const HeadTiles tiles{num_tiles, (num_tiles + kBlockTiles - 1) / kBlockTiles, V};
  HeadEpilogue epilogue{logits, V, divisor};
  linear_product(tiles, epilogue, x, norm, weight, T, eps);
}
#endif
