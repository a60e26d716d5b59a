// layer_products: all that a step of one row does between two attentions, in one launch: four products with weights of 4 bits.
//
// x += scale * attention Wo^T; inner = silu(n Wg^T) * (n Wu^T), n the normalised x; x += scale * inner Wd^T; and with NEXT q, k and v
// of the layer after it, from x normalised again: each as linear_packed.cu computes it, bit for bit.
// Operands: x (1, H) scalar_t; attention (1, A), inner (1, F) scalar_t; weights o, gate_up, down and qkv packed as in packed_layout.cuh;
//   mlp_norm, norm (H) scalar_t; counter uint64, 0 at first, which only this kernel with this GRID writes; the others as in linear_packed_qkv.
// Constants:
//   IN_FEATURES: H, the elements of a row. ATTENTION: A. INNER: F. QKV_ROWS: rows of the qkv weight. HEAD_DIM: elements of a head
//   NEXT: 1 if there is a layer after this one; 0: there is no qkv product
//   RUNS: 8, the parts of K, of all weights but that of gate_up. GATE_UP_RUNS: of that, 8 or 1
//   WEIGHT_BITS: 4. SCALE_GROUP: 128. ZEROS: 0. GRID: blocks
//   SLOTS: chunks of a warp's ring of weights, 2 or more. SMEM_BYTES: dynamic shared memory of the launch
//   FATRELU: the activation is that of fatrelu.cuh; without it SiLU
// Grid: GRID blocks, at most as many as multiprocessors, all of which must run at once; block 256; SMEM_BYTES of dynamic shared memory.
// Numerics: those of linear_packed.cu; a row's bits are the same, whichever kernel has computed it.
// Oracle: NumpyOps.project_residual, gate_up, qkv.
// Source: original; the barrier as in cooperative groups (one counter, release and acquire).
// Why so: below sm_90 no kernel begins before the one before it has ended, and each then waits for x and its first weights. Here a warp
//   knows all its chunks of the four weights from the start, and its ring goes on over the end of a product: while blocks wait for each
//   other the memory fills it with the next weight. Eight warps share a tile, each has a run of K and brings that part of x alone; of a
//   gate_up weight in one run each warp has another tile. Tiles of a warp go side by side, so that products of several are under way.
#if !defined(IN_FEATURES) || !defined(ATTENTION) || !defined(INNER) || !defined(QKV_ROWS) || !defined(HEAD_DIM) || !defined(NEXT) || \
    !defined(RUNS) || !defined(GATE_UP_RUNS) || !defined(WEIGHT_BITS) || !defined(SCALE_GROUP) || !defined(ZEROS) || !defined(GRID) || \
    !defined(SLOTS) || !defined(SMEM_BYTES)
#error "a constant is not defined"
#endif
constexpr int kSharedBytes = SMEM_BYTES;
// What the headers are told: one row, eight warps, and room for a ring of weights, which is not used here.
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
#include "layer_weights.cuh"
#include "linear_epilogue.cuh"
#include "packed_activations.cuh"

static_assert(WEIGHT_BITS == 4 && SCALE_GROUP == 128 && !ZEROS && RUNS == 8, "symmetric weights of 4 bits, a scale to 128");
static_assert(GATE_UP_RUNS == 8 || GATE_UP_RUNS == 1, "runs of gate_up");
#ifdef FATRELU
static_assert((FATRELU & 0x7F800000) != 0x7F800000, "FATRELU must be the bits of a finite threshold");
#endif

// A counter that blocks add to, and wait for: its value before a launch is a multiple of what a launch adds.
struct GridBarrier {
  static constexpr uint64_t kOfLaunch = 3 * GRID;
  uint64_t* counter;
  uint64_t before = 0;   // of the first thread: read while this block has not arrived, so that no launch is complete meanwhile
  int passed = 0;

  DEVICE explicit GridBarrier(uint64_t* shared_counter) : counter(shared_counter) {
    if (threadIdx.x == 0) asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(before) : "l"(counter) : "memory");
  }
  DEVICE uint64_t read() const {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(counter) : "memory");
    return value;
  }
  // All that the block's threads have written is visible to whoever waits. Every block, whether it has tiles or not.
  DEVICE void arrive() const {
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u64 [%0], 1;" ::"l"(counter) : "memory");
  }
  DEVICE void wait() {
    if (threadIdx.x == 0) {
      const uint64_t target = before / kOfLaunch * kOfLaunch + ++passed * GRID;
      while (read() < target) {
      }
    }
    __syncthreads();
  }
};

// The warp's run of a row as it is in memory, a stage at a time.
template <class M>
struct PlainRun {
  static constexpr int kStagePieces = (M::kStage * 16 + 31) / 32;   // of a lane
  const Lane& at;
  const scalar_t* row;
  uint4 v[kStagePieces];

  DEVICE bool is_there(int i, int slice) const {
    const int piece = at.lane + i * 32;
    return piece < M::kStage * 16 && slice * 16 + piece < M::slices(at.warp) * 16;
  }
  // Asks for the stage from `slice` on.
  DEVICE void ask(int slice) {
#pragma unroll
    for (int i = 0; i < kStagePieces; i++)
      if (is_there(i, slice)) v[i] = load16_past_l1(row + ((at.warp * M::kOwnSlices + slice) * 16 + at.lane + i * 32) * 8);
  }
  DEVICE uint32_t base() const { return at.shared + kRow + at.warp * M::kStage * kXSliceBytes; }
  // Puts it into shared memory, asks for the next one, and gives the place of the slice.
  DEVICE uint32_t enter(int slice) {
    const int of_stage = slice % M::kStage;
    if (of_stage > 0) return base() + of_stage * kXSliceBytes;
    float sums[kStagePieces];
#pragma unroll
    for (int i = 0; i < kStagePieces; i++) {
      const uint4 entering = scaled(v[i]);
      if (is_there(i, slice)) store_shared(base() + x_offset(at.lane + i * 32, 0), entering);
      sums[i] = piece_sum(entering);
    }
    sum_groups(sums, [&](int i, float sum) {
      if (is_there(i, slice)) store_shared_float(base() + sum_offset(at.lane + i * 32, 0), sum);
    });
    __syncwarp();
    ask(slice + M::kStage);
    return base();
  }
};

// The weights of a norm for the warp's eighth of the row.
DEVICE void ask_for_norm(RowPieces& pieces, const scalar_t* norm) {
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++)
    if (RowPieces::piece(i) < kPieces) pieces.norm[i] = load16_streamed(norm + RowPieces::piece(i) * 8);
}

// The warp's eighth of x, normalised, in shared memory, and its square sum.
DEVICE void fill_normalised(const Lane& at, Chain& stream, const scalar_t* x, const RowPieces& weights) {
  uint4 v[kThreadPieces];
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++)
    if (RowPieces::piece(i) < kPieces) v[i] = load16_past_l1(x + RowPieces::piece(i) * 8);
  stream.go_on();
  float sums[kThreadPieces], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreadPieces; i++) {
    const int piece = RowPieces::piece(i);
    const uint4 entering = weighted(v[i], weights.norm[i]);
    if (piece < kPieces) store_shared(at.shared + kRow + x_offset(piece, 0), entering);
    sums[i] = piece_sum(entering);
    if (piece < kPieces) square = square_sum(v[i], square);
  }
  sum_groups(sums, [&](int i, float sum) {
    if (RowPieces::piece(i) < kPieces) store_shared_float(at.shared + kRow + sum_offset(RowPieces::piece(i), 0), sum);
  });
  square = RowPieces::warp_square_sum(square);
  if (at.lane == 0) store_shared_float(at.shared + kSquares + at.warp * 4, square);
}

// A product of eight runs, whose sums this block adds: a thread finishes one pair of outputs.
template <class M, class Epilogue>
struct SharedTiles {
  const Lane& at;
  Epilogue& epilogue;
  int round = threadIdx.x / 8, row = threadIdx.x % 8;

  DEVICE bool finishes() const { return round < M::rounds(0); }
  // At what an output needs besides.
  DEVICE void look() {
    if (finishes()) epilogue.prefetch(0, 0, M::tile(0, round), row, 0);
  }
  // `factor()` is what the sums are multiplied by.
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

// x, which other blocks of this launch have written.
struct AddEpilogue : ResidualEpilogue<1, 1> {
  DEVICE void prefetch(int, int, int tile, int row, int) {
    before[0][0][0] = load_now(x + tile * 16 + row), before[0][0][1] = load_now(x + tile * 16 + 8 + row);
  }
};

// x += scale * row W^T.
template <class M>
DEVICE void add_product(const Lane& at, Chain& weights, PlainRun<M>& run, AddEpilogue& add) {
  SharedTiles<M, AddEpilogue> tiles{at, add};
  tiles.look();
  Sums out[M::kRounds] = {};
  multiply_run<M>(out, weights, at, [&](int slice) { return run.enter(slice); });
  tiles.finish(out, [] { return 1.0f; });
}

// The warp's run of a normalised product: of its part of x, or of all of it.
template <class M>
DEVICE void multiply_normalised(Sums (&out)[M::kRounds], const Lane& at, Chain& weights, const scalar_t* x, const RowPieces& norm) {
  fill_normalised(at, weights, x, norm);
  if (M::kIsWhole) __syncthreads();
  else __syncwarp();
  const uint32_t own = at.shared + kRow + M::run(at.warp) * M::kOwnSlices * kXSliceBytes;
  multiply_run<M>(out, weights, at, [&](int slice) { return own + slice * kXSliceBytes; });
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) KERNEL(layer_products)(
    scalar_t* x, const scalar_t* attention, scalar_t* inner, const void* __restrict__ o, const scalar_t* __restrict__ mlp_norm,
    const void* __restrict__ gate_up, const void* __restrict__ down, uint64_t* counter, float scale, float eps,
    const scalar_t* __restrict__ norm, const void* __restrict__ qkv, scalar_t* q, scalar_t* k_pages, scalar_t* v_pages,
    const scalar_t* __restrict__ bias, const float* __restrict__ rope, const int* positions, const int* locations, const int* slots,
    const int* __restrict__ block_tables, int num_heads, int num_kv_heads, int pages_per_sequence, int max_context) {
  pdl_wait();
  const Lane at;
  PlainRun<Output> o_run{at, attention};
  o_run.ask(0);
  GridBarrier grid(counter);
  Chain weights(at, o, gate_up, down, qkv);
  RowPieces pieces;
  ask_for_norm(pieces, mlp_norm);
  AddEpilogue add{{x, nullptr, kHidden, scale}};
  GateUpEpilogue activate{inner, INNER, nullptr};
  QkvEpilogue<1, 1> append{q, k_pages, v_pages, bias, rope, positions, locations, slots, block_tables, 1, num_heads, num_kv_heads,
                           pages_per_sequence, max_context};
  const auto of_rms = [&] { return RowPieces::scale(at.shared + kSquares, eps); };
  pdl_launch_dependents();
  if (NEXT) append.prepare(at.shared + kPlace);

  add_product(at, weights, o_run, add);
  grid.arrive();
  grid.wait();
  {
    Sums out[GateUp::kRounds] = {};
    multiply_normalised<GateUp>(out, at, weights, x, pieces);
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
  if (NEXT) append.publish(), append.look_up(), append.settle(), ask_for_norm(pieces, norm);
  grid.wait();
  PlainRun<Down> down_run{at, inner};
  down_run.ask(0);
  weights.go_on();
  add_product(at, weights, down_run, add);
  grid.arrive();
  if (!NEXT) return;
  SharedTiles<Qkv, QkvEpilogue<1, 1>> tiles{at, append};
  tiles.look();
  grid.wait();
  Sums out[Qkv::kRounds] = {};
  multiply_normalised<Qkv>(out, at, weights, x, pieces);
  tiles.finish(out, of_rms);
}
