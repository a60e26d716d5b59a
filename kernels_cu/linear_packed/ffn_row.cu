// ffn_row: the products gate_up and down of one row in one launch, up to the sums over the runs of down.
//
// formula        inner = activation(n Wg^T / rms) * (n Wu^T / rms), n = round(x * norm); sums[r] = inner[run r] down[:, run r]^T, of which the
//                kernel that reads x next makes x += scale * (sums[0] + .. + sums[7])
// sums           [RUNS][K] float32
// x              [K] scalar_t, as the kernel before wrote it; norm [K]; gate_up (2 * INNER_FEATURES, K) and down (K, INNER_FEATURES) packed as
//                in packed_layout.cuh for LINEAR = 2 and 1, with the same codes and groups
// constants      INNER_FEATURES: columns of down, a multiple of 1,024: a run of theirs are whole slices of 128
//                LINEAR: IN_FEATURES: WEIGHT_BITS: RUNS: SCALE_GROUP: ZEROS: ROWS: WARPS: WARPGROUPS: SHARED_RUN: NORM: PREPARED: STAGE_SLICES:
//                STAGES: EARLY_SLOTS: CLUSTERS: RECEIVED_APART: FEEDS: TRIGGER: KEPT_ROUNDS: SMEM_BYTES: PORTABLE: FATRELU: as in
//                linear_packed.cu for the product gate_up of one row, whose runs have a slice at most, and of which a block makes its tiles in
//                KEPT_ROUNDS rounds; SMEM_BYTES: shared memory of gate_up, a multiple of 128; the weights of down follow it
// grid           RUNS clusters of 16; block 256; dynamic shared memory SMEM_BYTES + K / 256 runs of tiles of down
// numerics       the bits of linear_packed_gate_up, and of the runs of linear_packed_residual
// oracle         NumpyOps.gate_up, then NumpyOps.project_residual
// source         original
// layout         A cluster makes the columns of inner that are a run of down: a block's tiles of gate_up are 32 columns of a small model. The
//                blocks send each other these columns, and each multiplies all of them with K / 256 tiles of down, a warp a tile, whose
//                weights were asked for before x. So one start of a kernel is spared, and inner takes the way between multiprocessors.
//                An H200 has seven places for clusters of 16, so two blocks share a multiprocessor somewhere: they have few warps for that,
//                and the sums of a cluster need no other cluster. The next kernel may start once this one's weights are there.
#if !defined(INNER_FEATURES) || !defined(LINEAR) || !defined(IN_FEATURES) || !defined(WEIGHT_BITS) || !defined(RUNS) || !defined(SCALE_GROUP) || \
    !defined(ZEROS) || !defined(ROWS) || !defined(WARPS) || !defined(WARPGROUPS) || !defined(SHARED_RUN) || !defined(NORM) || \
    !defined(PREPARED) || !defined(STAGE_SLICES) || !defined(STAGES) || !defined(EARLY_SLOTS) || !defined(CLUSTERS) || \
    !defined(RECEIVED_APART) || !defined(FEEDS) || !defined(TRIGGER) || !defined(KEPT_ROUNDS) || !defined(SMEM_BYTES) || !defined(PORTABLE) || \
    (LINEAR != 2 && defined(FATRELU))
#error "a constant is not defined, or not for this product"
#endif
#include "cluster.cuh"
#include "linear_epilogue.cuh"
#include "packed_activations.cuh"
#include "packed_multiply.cuh"

static_assert(LINEAR == 2 && ROWS == 1 && RUNS == 8 && !SHARED_RUN && NORM && !PREPARED && kRunSlices == 1, "gate_up of one row");
static_assert(kAllAreEarly && kEarlySlots >= KEPT_ROUNDS, "all weights are asked for before x");

constexpr int kTiles = KEPT_ROUNDS * kBlockTiles;               // tiles of gate_up of a block, 8 columns of inner each
constexpr int kCluster = INNER_FEATURES / RUNS / 8 / kTiles;    // blocks that make the columns of a run of down: 16
constexpr int kDownTiles = K / 16 / kCluster;                   // tiles of down of a block
constexpr int kDownSlices = INNER_FEATURES / kSliceColumns / RUNS;   // slices of a run of down
constexpr int kDownRunBytes = packed_run_bytes(kDownSlices);
constexpr int kTogetherDown = SCALE_GROUP < 32 ? 1 : kDownSlices % 4 == 0 ? 4 : kDownSlices % 2 == 0 ? 2 : 1;

static_assert(kCluster == 16 && kTiles * 128 * RUNS == INNER_FEATURES && kDownTiles * 256 == K, "blocks have all tiles");
static_assert(kDownSlices * kSliceColumns * RUNS == INNER_FEATURES, "a run of down has whole slices");
static_assert(kTiles <= kWarps && kDownTiles <= kWarps, "a warp finishes a tile");

// What lies behind the sums of gate_up, in bytes from kPartialOffset on: 16 bytes of each warp that sends, the run of inner, the same as integers.
constexpr int kSentOffset = kTiles * RUNS * 64, kInnerOffset = kSentOffset + kTiles * 16;
constexpr int kEnteringOffset = kInnerOffset + kDownSlices * kSliceColumns * 2;
static_assert(kEnteringOffset + kDownSlices * kXSliceBytes <= kPartialBytes, "the run of inner has no room");

// The block's part of the product down: the run of its cluster, with tiles of their own for its first kDownTiles warps.
struct Down {
  const Lane& at;
  uint32_t inner_barrier, weight_barrier;   // of the run of inner, and of the weights of the warp's tile
  int rank;

  DEVICE uint32_t place(int offset) const { return at.shared + kPartialOffset + offset; }
  DEVICE uint32_t weights() const { return at.shared + SMEM_BYTES + at.warp * kDownRunBytes; }
  DEVICE int tile() const { return rank * kDownTiles + at.warp; }
  // Prepares the barriers, and asks for the weights.
  DEVICE void start(const void* weight, int run) const {
    if (at.lane == 0 && at.warp < kDownTiles) {
      mbarrier_init(weight_barrier, 1);
      if (at.warp == 0) mbarrier_init(inner_barrier, 1);
      mbarrier_init_fence();
      if (at.warp == 0) mbarrier_arrive_expect(inner_barrier, kDownSlices * kSliceColumns * 2);
      copy_bulk(weights(), static_cast<const unsigned char*>(weight) + (static_cast<int64_t>(tile()) * RUNS + run) * kDownRunBytes,
                kDownSlices * kUnitBytes, weight_barrier);
    }
    __syncwarp();
    cluster_announce();
  }
  // Sends eight columns of inner, which lanes 0 to 7 hold, to all blocks of the cluster. Each tile's warp calls it.
  DEVICE void send(scalar_t value) const {
    const uint32_t sent = place(kSentOffset) + at.warp * 16;
    if (at.lane < 8) store_shared_element(sent + at.lane * 2, value);
    __syncwarp();
    if (at.lane >= kCluster) return;
    send_piece(load_shared(sent), place(kInnerOffset) + (rank * kTiles + at.warp) * 16, inner_barrier, at.lane);
  }
  // Multiplies the run of inner, once it has come, with the warp's tile. The warps with tiles call it.
  DEVICE void multiply(Sums& out) const {
    mbarrier_wait(inner_barrier, 0);
    for (int slice = at.warp; slice < kDownSlices; slice += kDownTiles) {
      const int piece = slice * kSlicePieces + at.lane % kSlicePieces;
      const bool exists = at.lane < kSlicePieces;
      uint4 v[1] = {};
      if (exists) v[0] = load_shared(place(kInnerOffset) + piece * 16);
      enter_products<true>(SharedRows{place(kEnteringOffset)}, v, [&](int) { return Entry{piece, 0, exists}; });
    }
    barrier_wait(1, kDownTiles * 32);
    mbarrier_wait(weight_barrier, 0);
#pragma unroll
    for (int slice = 0; slice < kDownSlices; slice += kTogetherDown)
      multiply_row<kTogetherDown, 1>(&out, {weights() + slice * kUnitBytes}, place(kEnteringOffset) + slice * kXSliceBytes, at);
    finish_sums(out);
  }
};

extern "C" __global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 2)
    KERNEL(ffn_row)(float* __restrict__ sums, const scalar_t* x, const scalar_t* __restrict__ norm, const void* __restrict__ gate_up,
                    const void* __restrict__ down, float eps) {
  __shared__ uint64_t barriers[1 + kDownTiles];
  const Lane at;
  const int rank = blockIdx.x % kCluster, run = blockIdx.x / kCluster;
  WeightStream weights(at, gate_up, INNER_FEATURES / 8);
  RowPieces::prefetch_norm(norm);
  const Down second{at, shared_address(barriers), shared_address(barriers) + 8 + at.warp * 8, rank};
  second.start(down, run);
  weights.wait_for_rounds(KEPT_ROUNDS);
  cluster_wait();   // the peers' barriers exist
  pdl_launch_dependents();   // only now: the next kernel's beginning takes time from the one before this, if they share a multiprocessor
  pdl_wait();

  const RowScale scale{at, eps};
  const Activations activations{at, nullptr};
  activations.fill_normalised(x, norm, scale, weights, 1);
  __syncthreads();
  Sums out[KEPT_ROUNDS] = {};
  accumulate_rounds(out, weights, activations, at);
  // The tile's eight sums of a run, pairs of gate and up.
  if (at.quarter == 0)
#pragma unroll
    for (int round = 0; round < KEPT_ROUNDS; round++)
      store_shared2(second.place(((round * kBlockTiles + at.warp / RUNS) * RUNS + at.run) * 64 + at.token * 8), out[round][0][0], out[round][0][2]);
  __syncthreads();
  if (at.warp < kTiles) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int of = 0; of < kFilledRuns; of++) {
      const float2 part = load_shared2(second.place((at.warp * RUNS + of) * 64 + at.lane % 8 * 8));
      sum.x += part.x, sum.y += part.y;
    }
    const float factor = scale.of(0);
    second.send(GateUpEpilogue::value(sum.x * factor, sum.y * factor));
  }
  if (at.warp >= kDownTiles) return;
  Sums added = {};
  second.multiply(added);
  float* const to = sums + run * K + second.tile() * 16 + at.token;
  if (at.quarter == 0) to[0] = added[0][0], to[8] = added[0][2];
}
