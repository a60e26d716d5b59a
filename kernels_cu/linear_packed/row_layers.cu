// row_layers: the layers of a step of one row with weights of 4 bits, in one launch: all of them, or the products between two attentions.
//
// For each layer: with ATTENDS attention = the result of decode_attention.cu over the layer's pages; x += scale * attention Wo^T;
// inner = silu(n Wg^T) * (n Wu^T), n the normalised x; x += scale * inner Wd^T; and, if num_products goes so far, q, k and v of the layer
// behind it, from x normalised again. All have the bits of decode_attention.cu and linear_packed.cu.
// Operands: the members of Shared and LayerOperands, in their order there: x (1, H), attention (1, A), inner (1, F), q scalar_t; counter
//   uint64, 0 at first, which only this kernel with this GRID writes; partials, arrivals as in decode_attention.cu; rope, positions,
//   slots, block_tables, num_heads and so on as in linear_packed_qkv; num_products: products of all layers, of which the last may have 3.
//   first_k_pages, first_v_pages: pages of the first layer. Of each layer: weights packed as in packed_layout.cuh; mlp_norm, norm (H), bias
//   scalar_t; norm, qkv, bias, k_pages and v_pages are those of the layer behind it
// Constants:
//   IN_FEATURES: H, the elements of a row. ATTENTION: A. INNER: F. QKV_ROWS: rows of the qkv weight. HEAD_DIM: elements of a head
//   NEXT: 1 if any layer has the product qkv. ATTENDS: 1: up to kMostLayers whole layers; 0: one, without its attention
//   GROUP: query heads of a KV head. PAGE_STAGES: places of a warp's ring of pages, 2 or more (both with ATTENDS only)
//   RUNS: 8, the parts of K of all weights but gate_up. GATE_UP_RUNS: the parts of K of gate_up, 8 or 1
//   WEIGHT_BITS: 4. SCALE_GROUP: 128. ZEROS: 0. GRID: blocks
//   SLOTS: chunks of a warp's ring of weights, 2 or more. SMEM_BYTES: dynamic shared memory of the launch
//   FATRELU: the activation is that of gated.cuh; without it SiLU
// Grid: GRID blocks, at most as many as multiprocessors, all of which must run at once; block 256; SMEM_BYTES of dynamic shared memory.
// Numerics: those of the kernels named above; a row's bits are the same, whichever kernel has computed it.
// Oracle: NumpyOps.decode_attention, project_residual, gate_up, qkv.
// Source: original; the barrier as in cooperative groups (one counter, release and acquire).
// Why so: below sm_90 no kernel begins before the one before it has ended, and each then waits for x and its first weights. Here a warp
//   knows all its chunks of all weights from the start, and its ring goes on over the end of a product: while blocks wait for each
//   other, or for those that attend, the memory fills it with the next weight. Eight warps share a tile, each has a run of K and brings
//   that part of x alone; of a gate_up weight in one run each warp has another tile. Tiles of a warp go side by side, so that several
//   products are under way. From sm_90 on dependent launches are faster (tools/log/packed_products.md).
#if !defined(IN_FEATURES) || !defined(ATTENTION) || !defined(INNER) || !defined(QKV_ROWS) || !defined(HEAD_DIM) || !defined(NEXT) || \
    !defined(RUNS) || !defined(GATE_UP_RUNS) || !defined(WEIGHT_BITS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(GRID) || \
    !defined(SLOTS) || !defined(SMEM_BYTES) || !defined(ATTENDS) || (ATTENDS && !defined(GROUP)) || (ATTENDS && !defined(PAGE_STAGES))
#error "a constant is not defined"
#endif
constexpr int kSharedBytes = SMEM_BYTES;
// The constants that the headers ask for: one row, eight warps, and room for a ring of weights, which is not used here.
#undef SMEM_BYTES
#define SMEM_BYTES (1 << 20)
#define LINEAR 0
#define ROWS 1
#define WARPS 8
#define WARPGROUPS 0
#define SHARED_RUN 0
#define NORM 1
#define PREPARED 0
#define STAGE_SLICES 0
#define STAGES 1
#define EARLY_SLOTS 1
#define CLUSTERS 0
#define RECEIVED_APART 0
#define FEEDS 0
#define KEPT_ROUNDS 1
#define PORTABLE 1
#include "grid_barrier.cuh"
#include "layer_weights.cuh"
#include "linear_epilogue.cuh"
#include "packed_activations.cuh"
#if ATTENDS
#include "../attention/row_attention.cuh"
// Attention and the rings of weights use the same memory in turn.
static_assert(kRings + attention::kMemoryBytes <= kSharedBytes, "SMEM_BYTES is too small");
#endif

static_assert(WEIGHT_BITS == 4 && SCALE_GROUP == 128 && !ZEROS && RUNS == 8, "symmetric weights of 4 bits, a scale to 128");
static_assert(GATE_UP_RUNS == 8 || GATE_UP_RUNS == 1, "runs of gate_up");
#ifdef FATRELU
static_assert((FATRELU & 0x7F800000) != 0x7F800000, "FATRELU must be the bits of a finite threshold");
#endif

// The warp's run of a row that needs no norm, on its way to shared memory a stage at a time, while the next stage waits in registers.
template <class M>
struct PlainRun {
  static constexpr int kStagePieces = (M::kStage * 16 + 31) / 32;   // pieces of a stage that a lane has
  const Lane& at;
  const scalar_t* row;
  uint4 v[kStagePieces];

  // Whether the stage from `slice` on has an i-th piece for the lane.
  DEVICE bool is_there(int i, int slice) const {
    const int piece = at.lane + i * 32;
    return piece < M::kStage * 16 && slice * 16 + piece < M::slices(at.warp) * 16;
  }
  // Loads the lane's pieces of the stage from `slice` on.
  DEVICE void ask(int slice) {
#pragma unroll
    for (int i = 0; i < kStagePieces; i++)
      if (is_there(i, slice)) v[i] = load16_past_l1(row + ((at.warp * M::kOwnSlices + slice) * 16 + at.lane + i * 32) * 8);
  }
  DEVICE uint32_t base() const { return at.shared + kRow + at.warp * M::kStage * kXSliceBytes; }
  // Returns the place of a slice in shared memory. At the first slice of a stage it puts the stage there and asks for the next one.
  DEVICE uint32_t enter(int slice) {
    const int of_stage = slice % M::kStage;
    if (of_stage > 0) return base() + of_stage * kXSliceBytes;
    enter_products(SharedRows{base()}, v, [&](int i) { return Entry{at.lane + i * 32, 0, is_there(i, slice)}; });
    __syncwarp();
    ask(slice + M::kStage);
    return base();
  }
};

// Loads the weights of a norm for the warp's eighth of the row.
DEVICE void ask_for_norm(RowPieces& pieces, const scalar_t* norm) {
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++)
    if (RowPieces::piece(i) < kPieces) pieces.norm[i] = load16_streamed(norm + RowPieces::piece(i) * 8);
}

// Brings the warp's eighth of x, times the norm's weights, to shared memory, and its square sum. The stream of weights goes on behind x.
DEVICE void fill_normalised(const Lane& at, Chain& stream, const scalar_t* x, const RowPieces& weights) {
  uint4 v[kThreadPieces];
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++)
    if (RowPieces::piece(i) < kPieces) v[i] = load16_past_l1(x + RowPieces::piece(i) * 8);
  stream.go_on();
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++) {
    if (RowPieces::piece(i) < kPieces) square = square_sum(v[i], square);
    v[i] = weighted(v[i], weights.norm[i]);
  }
  enter_products(SharedRows{at.shared + kRow}, v, [&](int i) { return Entry{RowPieces::piece(i), 0, RowPieces::piece(i) < kPieces}; });
  square = RowPieces::warp_square_sum(square);
  if (at.lane == 0) store_shared_float(at.shared + kSquares + at.warp * 4, square);
}

// A block's tiles of a product in eight runs, one a warp, whose sums it adds: a thread finishes at most one pair of outputs.
template <class M, class Epilogue>
struct SharedTiles {
  const Lane& at;
  Epilogue& epilogue;
  int round = at.warp * 4 + at.lane / 8, row = at.lane % 8;

  DEVICE bool finishes() const { return round < M::rounds(0); }
  // Prefetches what the epilogue needs for the thread's outputs.
  DEVICE void look() {
    if (finishes()) epilogue.prefetch(0, 0, M::tile(0, round), row, 0);
  }
  // Adds the warps' sums in the order of runs and gives them to the epilogue, multiplied by `factor()`. All threads call it.
  template <class Factor>
  DEVICE void finish(const Sums (&out)[M::kRounds], Factor factor) {
#pragma unroll
    for (int i = 0; i < M::kRounds; i++)
      if (at.quarter == 0 && i < M::rounds(0)) store_shared2(at.shared + kSums + (i * kWarps + at.warp) * 64 + at.token * 8, out[i][0][0], out[i][0][2]);
    __syncthreads();
    if (!finishes()) return;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int run = 0; run < M::kFilled; run++) {
      const float2 part = load_shared2(at.shared + kSums + (round * kWarps + run) * 64 + row * 8);
      sum.x += part.x, sum.y += part.y;
    }
    const float by = factor();
    epilogue.store(0, 0, M::tile(0, round), row, 0, sum.x * by, sum.y * by);
  }
};

// The epilogue of x += scale * sum where other blocks of this launch have written x: it loads x past the L1.
struct AddEpilogue : ResidualEpilogue<1, 1> {
  DEVICE void prefetch(int, int, int tile, int row, int) {
    before[0][0][0] = load_now(x + tile * 16 + row), before[0][0][1] = load_now(x + tile * 16 + 8 + row);
  }
};

// Computes the block's part of x += scale * row W^T. `run`: the warp's run of the row.
template <class M>
DEVICE void add_product(const Lane& at, Chain& weights, PlainRun<M>& run, scalar_t* x, float scale) {
  AddEpilogue add{{x, nullptr, kHidden, scale}};
  SharedTiles<M, AddEpilogue> tiles{at, add};
  tiles.look();
  Sums out[M::kRounds] = {};
  multiply_run<M>(out, weights, at, [&](int slice) { return run.enter(slice); });
  tiles.finish(out, [] { return 1.0f; });
}

// Computes the warp's sums of a product with normalised x: over its eighth of x, which it brings alone, or, of a weight in one run, over all
// of x.
template <class M>
DEVICE void multiply_normalised(Sums (&out)[M::kRounds], const Lane& at, Chain& weights, const scalar_t* x, const RowPieces& norm) {
  fill_normalised(at, weights, x, norm);
  if (M::kIsWhole) __syncthreads();
  else __syncwarp();
  const uint32_t own = at.shared + kRow + M::run(at.warp) * M::kOwnSlices * kXSliceBytes;
  multiply_run<M>(out, weights, at, [&](int slice) { return own + slice * kXSliceBytes; });
}

// The operands and sizes that all layers share.
struct Shared {
  scalar_t *x, *attention, *inner, *q;
  uint64_t* counter;
  float* partials;
  int* arrivals;
  const float* rope;
  const int *positions, *slots, *block_tables;
  float residual_scale, eps, score_scale;
  int num_layers, num_products, num_splits, num_heads, num_kv_heads, pages_per_sequence, max_context;
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) KERNEL(row_layers)(
    const __grid_constant__ Shared given, const scalar_t* first_k_pages, const scalar_t* first_v_pages,
    const __grid_constant__ Layers layers) {
  pdl_wait();
  Lane at;
#if !ATTENDS
  PlainRun<Output> o_run{at, given.attention};
  o_run.ask(0);
#endif
  GridBarrier<kThreads> grid(given.counter, GRID);
  Chain weights(at, layers, given.num_products, ATTENDS ? -1 : 0);
#if ATTENDS
  if (threadIdx.x == 0) store_shared_words(at.shared + kRowPlace, load_now(given.slots), load_now(given.positions));
  __syncthreads();
  // A RowAttention is made anew wherever it is needed: registers are few.
  const auto row_now = [&] {
    const uint2 place = load_shared_words(at.shared + kRowPlace);
    return attention::RowAttention(given.attention, given.q, given.partials, given.arrivals, given.block_tables, place.x, place.y,
                                   given.num_splits, given.num_kv_heads, given.pages_per_sequence, given.score_scale);
  };
  const int page = row_now().first_page();
  if (row_now().has_run()) weights.barred = 0;
#endif
  weights.fill();
  RowPieces pieces;
  GateUpEpilogue activate{given.inner, INNER, nullptr};
  const auto append_to = [&](const LayerOperands& of) {
    return QkvEpilogue<1, 1>{given.q, of.k_pages, of.v_pages, of.bias, given.rope, given.positions, nullptr, given.slots,
                             given.block_tables, 1, given.num_heads, given.num_kv_heads, given.pages_per_sequence, given.max_context,
                             at.shared + kPlace};
  };
  QkvEpilogue<1, 1> place = append_to(layers.of[0]);
  const auto of_rms = [&] { return RowPieces::scale(at.shared + kSquares, given.eps); };
  pdl_launch_dependents();
  if (NEXT) place.prepare(at.shared + kPlace);
  if (NEXT && ATTENDS) place.publish(), place.look_up(), place.settle();

#pragma unroll 1
  for (int layer = 0;; layer++) {
    const LayerOperands& of = layers.of[layer];
    renew(at);
#if ATTENDS
    const attention::RowAttention row = row_now();
    row.attend(ring_memory(), page, layer == 0 ? first_k_pages : layers.of[layer - 1].k_pages,
               layer == 0 ? first_v_pages : layers.of[layer - 1].v_pages, [&] {
                 if (layer > 0) grid.wait();
                 if (!row.has_run()) weights.go_on();
               });
    grid.arrive();
    if (row.has_run()) weights.barred += kOfLayer, weights.go_on();
    ask_for_norm(pieces, of.mlp_norm);
    grid.wait();
    PlainRun<Output> o_run{at, given.attention};
    o_run.ask(0);
#else
    ask_for_norm(pieces, of.mlp_norm);
#endif
    add_product(at, weights, o_run, given.x, given.residual_scale);
    grid.arrive();
    grid.wait();
    {
      Sums out[GateUp::kRounds] = {};
      multiply_normalised<GateUp>(out, at, weights, given.x, pieces);
      if constexpr (GateUp::kIsWhole) {
        const float by = of_rms();
#pragma unroll
        for (int round = 0; round < GateUp::kRounds; round++)
          if (at.quarter == 0 && round < GateUp::rounds(at.warp))
            activate.store(0, 0, GateUp::tile(at.warp, round), at.token, 0, out[round][0][0] * by, out[round][0][2] * by);
      } else {
        SharedTiles<GateUp, GateUpEpilogue>{at, activate}.finish(out, of_rms);
      }
    }
    grid.arrive();
    const bool has_qkv = NEXT && layer * kOfLayer + 3 < given.num_products;
    if (has_qkv && !ATTENDS) place.publish(), place.look_up(), place.settle();
    if (has_qkv) ask_for_norm(pieces, of.norm);
    grid.wait();
    PlainRun<Down> down_run{at, given.inner};
    down_run.ask(0);
    weights.go_on();
    add_product(at, weights, down_run, given.x, given.residual_scale);
    if (!has_qkv) return;
    grid.arrive();
    QkvEpilogue<1, 1> append = append_to(of);
    SharedTiles<Qkv, QkvEpilogue<1, 1>> tiles{at, append};
    tiles.look();
    grid.wait();
    Sums out[Qkv::kRounds] = {};
    multiply_normalised<Qkv>(out, at, weights, given.x, pieces);
    tiles.finish(out, of_rms);
    if (layer + 1 == given.num_layers) return;
    grid.arrive();
  }
}
