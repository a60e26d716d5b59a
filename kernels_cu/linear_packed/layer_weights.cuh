// The weights of all products of row_layers.cu in one stream: a ring in shared memory for each warp, and the warp's share of a product.
#pragma once
#include "packed_activations.cuh"
#include "packed_multiply.cuh"

constexpr int kHidden = IN_FEATURES, kOfLayer = 4;   // products of a layer: o, gate_up, down, and qkv of the layer behind it
constexpr int kMostChunk = 2;      // the most slices of a chunk
constexpr int kAhead = 3;          // chunks of a warp that are copied before x of their product is asked for: more would keep x waiting
constexpr int kMostStage = 4;      // the most slices of a run of x in shared memory at a time; rows that are normalised lie there whole

// A weight with ROWS_ rows of COLUMNS elements in RUNS_ runs. Tiles are dealt out in turn: to the blocks, whose warps have a run each, or,
// with one run, to the warps of all blocks.
template <int ROWS_, int COLUMNS, int RUNS_>
struct Matrix {
  static constexpr bool kIsWhole = RUNS_ == 1;                                    // a warp has whole rows
  static constexpr int kTiles = ROWS_ / 16, kColumns = COLUMNS, kNumSlices = COLUMNS / 128;
  static constexpr int kOwnSlices = (kNumSlices + RUNS_ - 1) / RUNS_;             // slices of a run
  static constexpr int kFilled = (kNumSlices + kOwnSlices - 1) / kOwnSlices;      // runs that have any slices
  static constexpr int kOwnBytes = packed_run_bytes(kOwnSlices);
  static constexpr int kBytes = (kFilled - 1) * kOwnBytes + packed_run_bytes(kNumSlices - (kFilled - 1) * kOwnSlices);   // bytes of a tile
  static constexpr int kStep = kIsWhole ? GRID * kWarps : GRID, kRounds = (kTiles + kStep - 1) / kStep;
  static constexpr int kChunk = kOwnSlices < kMostChunk ? kOwnSlices : kMostChunk;
  static constexpr int kStage = kOwnSlices < kMostStage ? kOwnSlices : kMostStage;
  static_assert(ROWS_ % 16 == 0 && COLUMNS % 128 == 0, "whole tiles and slices");
  static_assert(static_cast<int64_t>(kStep) * kRounds * kBytes < 1LL << 31, "places are integers");
  static_assert(kIsWhole || kRounds * 8 <= kThreads, "a thread finishes one pair of outputs");

  // tile(): the tile of a round, the warp's own (kIsWhole) or its block's; past the last tile where there is none. rounds(): the rounds that
  // have one. run(), slices(): the warp's run, and the slices in it.
  DEVICE static int tile(int warp, int round) { return round * kStep + (kIsWhole ? warp * GRID : 0) + static_cast<int>(blockIdx.x); }
  DEVICE static int rounds(int warp) { return tile(warp, kRounds - 1) < kTiles ? kRounds : kRounds - 1; }
  DEVICE static int run(int warp) { return kIsWhole ? 0 : warp; }
  DEVICE static int slices(int warp) { return max(0, min(kOwnSlices, kNumSlices - run(warp) * kOwnSlices)); }
};
using Output = Matrix<kHidden, ATTENTION, RUNS>;
using GateUp = Matrix<2 * INNER, kHidden, GATE_UP_RUNS>;
using Down = Matrix<kHidden, INNER, RUNS>;
using Qkv = Matrix<QKV_ROWS, kHidden, RUNS>;

DEVICE constexpr int most(int a, int b) { return a > b ? a : b; }

// Shared memory: square sums of the warps | the row's position and place (kPlace) | its slot and position (kRowPlace) | sums | x | rings.
constexpr int kSlotBytes = kMostChunk * kUnitBytes;
constexpr int kSquares = 0, kPlace = kSquares + kRowWarps * 4, kRowPlace = kPlace + 8, kSums = 64;
constexpr int kMostRounds = most(most(Output::kRounds, Down::kRounds), most(GateUp::kIsWhole ? 1 : GateUp::kRounds, Qkv::kRounds));
constexpr int kRow = kSums + kMostRounds * kWarps * 64;
constexpr int kRowSlices = most(kHidden / 128, kWarps * most(Output::kStage, Down::kStage));
constexpr int kRings = (kRow + kRowSlices * kXSliceBytes + 127) / 128 * 128;
static_assert(kRings + kWarps * SLOTS * kSlotBytes <= kSharedBytes, "SMEM_BYTES is too small");
static_assert(SLOTS >= 2, "two tiles go side by side");

DEVICE unsigned char* ring_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory + kRings;
}

// Makes `at` another one in the compiler's eyes: what follows from it is then not kept in registers from one layer to the next.
DEVICE void renew(Lane& at) {
  asm volatile("" : "+r"(at.shared), "+r"(at.warp), "+r"(at.lane), "+r"(at.token), "+r"(at.quarter));
}

// The operands of a layer's products o, gate_up (with mlp_norm) and down, and of the product qkv of the layer behind it: qkv, norm, bias, and
// the pages that its keys and values go to.
struct LayerOperands {
  const void *o, *gate_up, *down, *qkv;
  const scalar_t *mlp_norm, *norm, *bias;
  scalar_t *k_pages, *v_pages;
};
constexpr int kMostLayers = ATTENDS ? 54 : 1;   // layers whose operands a launch takes, at most: 4 KB
struct Layers {
  LayerOperands of[kMostLayers];
};

// The warp's stream of the weights of all products through its ring. The order: product by product, in a product chunk by chunk of the warp's
// run, for each chunk the tiles of all its rounds.
struct Chain {
  static constexpr int kNever = 1 << 30;
  const Lane& at;
  const Layers& layers;
  int num_products;                     // of all layers
  uint32_t ring;
  int slot = 0;                         // the next chunk to read, and where the next copy goes
  int product = -1, round = 0, slice = 0;   // the next chunk to copy
  int current, ahead = 0, skipped = 0;  // the last product whose x is asked for; chunks of later products that are copied; copies left out
  int barred = kNever;                  // of this product and later ones nothing may be copied yet, whatever `current` is
  const unsigned char* from;            // the warp's run of its first tile of the product
  int rounds, slices, chunk, step;      // sizes of the product; bytes from one of the warp's tiles to the next

  DEVICE Chain(const Lane& lane, const Layers& all, int count, int asked_for)
      : at(lane), layers(all), num_products(count), ring(lane.shared + kRings + lane.warp * SLOTS * kSlotBytes), current(asked_for) {
    next_product();
  }
  // Starts the first copies.
  DEVICE void fill() {
#pragma unroll 1
    for (int i = 0; i < SLOTS; i++) copy_next();
  }
  // Begins with the weight of a product.
  template <class M>
  DEVICE void enter(const void* weight) {
    from = static_cast<const unsigned char*>(weight) + M::run(at.warp) * M::kOwnBytes + static_cast<int64_t>(M::tile(at.warp, 0)) * M::kBytes;
    rounds = M::rounds(at.warp), slices = M::slices(at.warp), chunk = M::kChunk, step = M::kStep * M::kBytes;
  }
  // Goes on to the next product in which the warp has a tile and slices.
  DEVICE void next_product() {
    do {
      product++;
      if (product >= num_products) return;
      const LayerOperands& of = layers.of[product / kOfLayer];
      const int kind = product % kOfLayer;
      if (kind == 0) enter<Output>(of.o);
      else if (kind == 1) enter<GateUp>(of.gate_up);
      else if (kind == 2) enter<Down>(of.down);
      else enter<Qkv>(of.qkv);
    } while (rounds == 0 || slices == 0);
  }
  // Starts the copy of the next chunk into the slot that was read last, or leaves it out for `go_on` if it is too early for its product.
  DEVICE void copy_next() {
    if (product >= barred || (product > current && ahead == kAhead)) {
      skipped++;
    } else if (product < num_products) {
      ahead += product > current;
      const int left = slices - slice, bytes = (left < chunk ? left : chunk) * kUnitBytes;
      const unsigned char* const source = from + round * step + slice * kUnitBytes;
      const uint32_t to = ring + slot * kSlotBytes;
#pragma unroll
      for (int first = 0; first < kSlotBytes; first += 512) {
        const int place = first + at.lane * 16;
        cp_async16_lines(to + place, source + place, place < bytes);
      }
      if (++round == rounds) {
        round = 0, slice += chunk;
        if (slice >= slices) slice = 0, next_product();
      }
    }
    cp_async_commit();
    slot = next(slot);
  }
  // Starts the copies that were left out, now that x of the next product is asked for.
  DEVICE void go_on() {
    const int count = skipped;
    current++, ahead = 0, skipped = 0, slot -= count;
    if (slot < 0) slot += SLOTS;
#pragma unroll 1
    for (int i = 0; i < count; i++) copy_next();
  }
  DEVICE static int next(int slot) { return slot + 1 == SLOTS ? 0 : slot + 1; }
  // Waits for the next COUNT chunks and puts their addresses in shared memory into `units`.
  template <int COUNT>
  DEVICE void wait(uint32_t (&units)[COUNT]) const {
    cp_async_wait<SLOTS - COUNT>();
    __syncwarp();
    int read = slot;
#pragma unroll
    for (int i = 0; i < COUNT; i++) units[i] = ring + read * kSlotBytes, read = next(read);
  }
  // Frees COUNT chunks that the warp has read: the next copies go there.
  template <int COUNT>
  DEVICE void release() {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; i++) copy_next();
  }
};

// Adds to `out` the products of the warp's next COUNT chunks, one of each of COUNT tiles, with x. is_whole: the chunks have M::kChunk
// slices, else one.
template <class M, int COUNT>
DEVICE void multiply_chunks(Sums* out, Chain& weights, uint32_t x, const Lane& at, bool is_whole) {
  uint32_t units[COUNT];
  weights.wait(units);
  if (is_whole) multiply_row<M::kChunk>(out, units, x, at);
  else multiply_row<1>(out, units, x, at);   // the last slice of an odd number
  weights.release<COUNT>();
}

// Computes the warp's sums of a product: the slices of its run in all its tiles. `enter(slice)` returns the place of x from that slice on.
template <class M, class Enter>
DEVICE void multiply_run(Sums (&out)[M::kRounds], Chain& weights, const Lane& at, Enter enter) {
  const int rounds = M::rounds(at.warp), slices = M::slices(at.warp);
  if (rounds == 0) return;
#pragma unroll 1
  for (int slice = 0; slice < slices; slice += M::kChunk) {
    const uint32_t x = enter(slice);
    const bool is_whole = M::kOwnSlices % M::kChunk + M::kNumSlices % M::kOwnSlices == 0 || slices - slice >= M::kChunk;
#pragma unroll
    for (int round = 0; round < M::kRounds; round += 2) {
      if (round + 1 < M::kRounds && round + 1 < rounds) multiply_chunks<M, 2>(out + round, weights, x, at, is_whole);
      else if (round < rounds) multiply_chunks<M, 1>(out + round, weights, x, at, is_whole);
    }
  }
#pragma unroll
  for (int round = 0; round < M::kRounds; round++) finish_sums(out[round]);
}
