// The stream of packed weights: a ring in shared memory for each warp, which nobody else touches.
//
// From sm_90 on lane 0 copies whole chunks with the copy engine and a barrier in shared memory counts their bytes; elsewhere,
// and with PORTABLE, the lanes copy 16 bytes each. Either way a slot is filled again as soon as the warp has read it.
// With TILE_COPIES the rings of the eight warps that share a tile lie side by side, a slot after the other, and the first of
// these warps copies the chunks of all eight at once, for each round of the block.
#pragma once
#include "cluster.cuh"
#include "copy.cuh"
#include "packed_layout.cuh"
#include "packed_rows.cuh"
#include "tma.cuh"

#if __CUDA_ARCH__ >= 900 && !PORTABLE
constexpr bool kCopyEngine = true;
#else
constexpr bool kCopyEngine = false;
#endif

constexpr int kWarps = WARPS, kThreads = kWarps * 32;
constexpr int kBlockTiles = SHARED_RUN ? kWarps : kWarps / RUNS;   // tiles of a block at a time
#ifdef INNER_FEATURES
constexpr bool kHasNeighbours = true;   // whether a block takes neighbouring tiles
#else
constexpr bool kHasNeighbours = LINEAR == 4;
#endif
constexpr int kBlockSlices = SHARED_RUN ? kRunSlices : kSlices;    // slices of x that a block reads
constexpr int kOwnTiles = (kWarps + RUNS - 1) / RUNS;              // the most tiles that a block of a cluster finishes
// Outputs (lo row, hi row, token) that a block and one of its threads finish: in clusters of a round, else of a token tile.
constexpr int kPairs = CLUSTERS ? kOwnTiles * NT * 64 : KEPT_ROUNDS * kBlockTiles * 64;
constexpr int kThreadPairs = SHARED_RUN && !CLUSTERS ? 2 : (kPairs + kThreads - 1) / kThreads;

// With one row, ternary weights have larger chunks: their copies would be small otherwise.
constexpr bool kHasLargeChunks = ROWS == 1 && WEIGHT_BITS == 2 && kThreads <= 512 && kRunSlices % 8 == 0;
#ifdef SMALL_CHUNKS
constexpr int kSmallSlices = SMALL_CHUNKS;
static_assert(!kCopyEngine && (WEIGHT_BITS > 2 || ROWS > 1), "SMALL_CHUNKS is for kernels in which lanes copy");
#else
constexpr int kSmallSlices = 0;
#endif
// Slices whose products a warp has under way at a time: those of one slice depend on each other. With one row the slices share a load of x.
constexpr int kJoinedSlices = NT == 1 ? (kThreads > 512 || WEIGHT_BITS == 8 ? 2 : 4) : NT == 2 ? 2 : 1;
constexpr int kTogetherSlices = kSmallSlices > 0 && kSmallSlices < kJoinedSlices ? kSmallSlices : kJoinedSlices;
// A chunk is what a copy brings: so many slices that they are a multiple of 128 bytes, or, in 8 bits where a ring would have room for one
// chunk only, of 64 bytes.
constexpr int kCopyBytes = WEIGHT_BITS == 8 && (NT > 2 || kThreads > 512) ? 64 : 128;
constexpr int kAlignedSlices = kSmallSlices > 0 ? kSmallSlices : kUnitBytes % kCopyBytes == 0 ? 1 : kUnitBytes % (kCopyBytes / 2) == 0 ? 2 : 4;
constexpr int kWholeSlices = kHasLargeChunks ? 8 : kTogetherSlices > kAlignedSlices ? kTogetherSlices : kAlignedSlices;
constexpr int kChunkSlices = kWholeSlices < kRunSlices ? kWholeSlices : kRunSlices;
constexpr int kChunkBytes = packed_run_bytes(kChunkSlices);

constexpr int kMaxSlots = 8;
constexpr int kPartialBytes = SHARED_RUN ? 0 : KEPT_ROUNDS * kWarps * 512;
constexpr int kSquareBytes = (kTokens * (kRowWarps + 1) * 4 + 15) / 16 * 16;
constexpr int kEpilogueBytes = kTokens * 8;
constexpr int kStages = STAGES;
// kRunWarps: without SHARED_RUN, the warps of a block that have the same run of K. kOwnRuns: whether these bring just what they read of x,
// their run of one row, so that no other warp waits for them.
constexpr int kRunWarps = SHARED_RUN ? 1 : kWarps / RUNS;
#ifdef OWN_RUNS
constexpr bool kOwnRuns = true;
static_assert(ROWS == 1 && !SHARED_RUN && !NORM && !PREPARED && OWN_RUNS == 1, "OWN_RUNS needs one row, as it is in memory");
#else
constexpr bool kOwnRuns = ROWS == 1 && !SHARED_RUN && !PREPARED && kRunWarps == 1;
#endif
constexpr int kBarrierBytes = (kWarps * kMaxSlots * 8 + kStages * 16 + 16 + 127) / 128 * 128;
constexpr int kReceivedBytes = CLUSTERS ? kOwnTiles * kFilledRuns * NT * 512 : 0;
constexpr int kFixedBytes = kBarrierBytes + (RECEIVED_APART ? kReceivedBytes : 0) + (kPartialBytes + kSquareBytes + kEpilogueBytes + 127) / 128 * 128;
constexpr bool kResident = STAGE_SLICES == 0;
constexpr int kStageSlices = kResident ? kBlockSlices : STAGE_SLICES;
constexpr int kXBytes = (kResident ? 1 : kStages) * kStageSlices * kXSliceBytes;
constexpr int kFitting = (SMEM_BYTES - kFixedBytes - kXBytes) / (kWarps * kChunkBytes);
constexpr int kSlots = kFitting < kMaxSlots ? kFitting : kMaxSlots;

constexpr int kEarlySlots = EARLY_SLOTS < kSlots ? EARLY_SLOTS : kSlots;
constexpr int kXBarrier = kWarps * kMaxSlots * 8;                     // the barriers of x, behind those of the rings; two a stage
constexpr int kSquareBarrier = kXBarrier + kStages * 16, kReceivedBarrier = kSquareBarrier + 8;   // barriers of what peers send
constexpr int kReceivedOffset = kBarrierBytes, kRingOffset = kReceivedOffset + (RECEIVED_APART ? kReceivedBytes : 0);
#ifdef TILE_COPIES
constexpr bool kTileCopies = kCopyEngine;
static_assert(!SHARED_RUN && kRunSlices == kChunkSlices, "TILE_COPIES needs runs of one chunk");
static_assert(NORM && !PREPARED && kSlots == KEPT_ROUNDS && kEarlySlots == kSlots, "TILE_COPIES asks for all weights before x");
#else
constexpr bool kTileCopies = false;
#endif
constexpr int kRingPitch = (kTileCopies ? 1 : kSlots) * kChunkBytes;    // bytes from a warp's ring to the next warp's
constexpr int kSlotPitch = (kTileCopies ? kWarps : 1) * kChunkBytes;    // and from a slot to the next
constexpr int kXOffset = kRingOffset + kWarps * kSlots * kChunkBytes;
constexpr int kReceivedEnd = kReceivedOffset + kReceivedBytes, kXEnd = kXOffset + kXBytes;
constexpr int kPartialOffset = kReceivedEnd > kXEnd ? kReceivedEnd : kXEnd;
constexpr int kSquareOffset = kPartialOffset + kPartialBytes;
constexpr int kEpilogueOffset = kSquareOffset + kSquareBytes;

static_assert(!WGMMA_PRODUCTS || (SHARED_RUN && kWarps % 4 == 0 && NT >= 2), "WARPGROUPS needs SHARED_RUN and 16 rows");
static_assert(SHARED_RUN || (RUNS == 8 && kWarps % RUNS == 0), "without SHARED_RUN eight warps take one run each");
static_assert(KEPT_ROUNDS == 1 || (!SHARED_RUN && ROWS == 1), "KEPT_ROUNDS needs SHARED_RUN = 0 and one row");
static_assert(kResident || (SHARED_RUN && PREPARED), "x in stages is shared, and comes from prepare_rows");
static_assert(!CLUSTERS || (SHARED_RUN && RUNS == 8 && kCopyEngine), "a cluster has eight runs, and needs sm_90");
static_assert(kSlots >= 1, "SMEM_BYTES is too small");
static_assert(kEpilogueOffset + kEpilogueBytes <= SMEM_BYTES, "SMEM_BYTES is too small");

// Starts a copy of `bytes` (a multiple of 16) and arrives at `barrier`, whose phase waits for these bytes. One thread calls it.
DEVICE void copy_bulk(uint32_t shared, const void* source, int bytes, uint32_t barrier) {
  mbarrier_arrive_expect(barrier, bytes);
  copy_bytes(shared, source, bytes, barrier);
}

// A code enters the tensor cores as the highest bits of a byte: kCodeBits is a word with these bits set in its bytes, kCodeFactor the factor
// by which codes grow.
constexpr int kCodeFactor = 1 << 8 - WEIGHT_BITS;
constexpr uint32_t kCodeBits = 0x01010101u * (256 - kCodeFactor);

// The calling lane's place in the product.
struct Lane {
  uint32_t shared;                  // start of dynamic shared memory
  int warp, lane, token, quarter;   // token = g (also the row inside a tile half), quarter = t
  int run, slices;                  // the warp's run of K; the slices in it
  uint32_t code_bits;               // kCodeBits, unknown to the compiler, which would make the constant anew for every use
  DEVICE Lane() {
    asm("{\n.reg .u32 never;\nmov.u32 never, %%smid;\nshr.u32 never, never, 31;\nsub.u32 %0, %1, never;\n}" : "=r"(code_bits) : "r"(kCodeBits));
    extern __shared__ __align__(1024) unsigned char memory[];
    shared = shared_address(memory);
    warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = lane >> 2, quarter = lane & 3;
    run = SHARED_RUN ? blockIdx.x % RUNS : warp % RUNS;
    slices = run < kSlices / kRunSlices ? kRunSlices : run == kSlices / kRunSlices ? kSlices % kRunSlices : 0;
  }
  // Returns the warp's tile in a round of the grid, or the tile at `place` among the block's; past the last tile where there is none.
  DEVICE int tile(int round) const { return tile(round, SHARED_RUN ? warp : warp / RUNS); }
  DEVICE static int tile(int round, int place) {
#ifdef HEAD_ROUNDS
    return kv_head_tile(blockIdx.x % kHeadBlocks * HEAD_ROUNDS + round * kBlockTiles + place);
#endif
    const int block = SHARED_RUN ? blockIdx.x / RUNS : blockIdx.x, blocks = SHARED_RUN ? gridDim.x / RUNS : gridDim.x;
    if (kHasNeighbours) return block * (kBlockTiles * KEPT_ROUNDS) + round * kBlockTiles + place;
    return FEEDS ? (round * blocks + block) * kBlockTiles + place : (round * kBlockTiles + place) * blocks + block;
  }
};

// The part of a weight that the next product reads first: pieces of `bytes` bytes, one every `stride` bytes, both multiples of 16.
struct Ahead {
  const unsigned char* weight;
  int pieces, stride, bytes;

  // Prefetches the pieces to the L2; each warp of the grid asks for its share.
  DEVICE void fetch(const Lane& at) const {
    if (at.lane != 0) return;
    for (int piece = blockIdx.x * kWarps + at.warp; piece < pieces; piece += gridDim.x * kWarps)
      prefetch_to_l2(weight + static_cast<size_t>(piece) * stride, bytes);
  }
};

// The chunks that a warp copies before x is asked for: a constant where all warps copy equally many.
#ifdef EARLY_WARPS
#define EARLY_CHUNKS early_slots()
constexpr bool kAllAreEarly = EARLY_WARPS == kWarps;
#else
#define EARLY_CHUNKS kEarlySlots
constexpr bool kAllAreEarly = true;
#endif

// The warp's stream of chunks through its ring: its tiles in turn, of each the slices of its run.
struct WeightStream {
  const Lane& at;
  const unsigned char* weight;
  int num_tiles;
  uint32_t ring, barriers;
  int round = 0, slice = 0;         // the next chunk to copy
  int slot = 0;                     // the next chunk to read, and where the next copy goes
  int parity = 1;                   // of the barrier phase that the slot's next chunk completes; 0 once the ring is filled

  // Prepares the barriers of the ring and starts the copies of EARLY_CHUNKS.
  DEVICE WeightStream(const Lane& lane, const void* packed, int tiles)
      : at(lane), weight(static_cast<const unsigned char*>(packed) + lane.run * kRunBytes), num_tiles(lane.slices > 0 ? tiles : 0),
        ring(lane.shared + kRingOffset + lane.warp * kRingPitch),
        barriers(lane.shared + (kTileCopies ? lane.warp - lane.run : lane.warp) * kMaxSlots * 8) {
    if constexpr (kCopyEngine) {
      if (copies())
        for (int i = 0; i < kSlots; i++) mbarrier_init(barriers + i * 8, 1);
      mbarrier_init_fence();
      __syncwarp();
    }
    for (int i = 0; i < EARLY_CHUNKS; i++) copy_next();
  }
  // Whether the calling lane starts copies with the copy engine.
  DEVICE bool copies() const { return at.lane == 0 && (!kTileCopies || at.run == 0); }
#ifdef EARLY_WARPS
  DEVICE int early_slots() const { return EARLY_WARPS == kWarps || at.warp < EARLY_WARPS ? kEarlySlots : 0; }
#endif
  // Waits, with the copy engine only, for the first chunks of `rounds` rounds, a chunk each, which were all asked for.
  DEVICE void wait_for_rounds(int rounds) const {
    for (int round = 0; round < rounds; round++)
      if (kCopyEngine && at.tile(round) < num_tiles) mbarrier_wait(barriers + round * 8, 0);
  }
  // Starts the copies of the rest of the ring, behind the loads of x.
  DEVICE void fill_ring() {
    for (int i = EARLY_CHUNKS; i < kSlots; i++) copy_next();
  }

  // Starts the copy of the next chunk into the slot that was read last.
  DEVICE void copy_next() {
    const int tile = at.tile(round);
    if (tile < num_tiles) {
      const int left = at.slices - slice;
      const int bytes = kTileCopies ? static_cast<int>(kTileBytes) : (left < kChunkSlices ? left : kChunkSlices) * kUnitBytes;
      const uint32_t places = tile * static_cast<uint32_t>(kTileBytes / 16) + slice * (kUnitBytes / 16);   // in units of 16 bytes
      const unsigned char* const from = weight + static_cast<uint64_t>(places) * 16;
      const uint32_t to = ring + slot * kSlotPitch;
      if constexpr (kCopyEngine) {
        if (copies()) copy_bulk(to, from, bytes, barriers + slot * 8);
      } else {
        for (int i = at.lane * 16; i < bytes; i += 512) cp_async16_lines(to + i, from + i);
      }
    }
    if (!kCopyEngine) cp_async_commit();
    slice += kChunkSlices;
    if (slice >= at.slices) slice = 0, round++;
    if (++slot == kSlots) slot = 0, parity ^= 1;
  }

  // Waits for the next chunk and returns its address in shared memory.
  DEVICE uint32_t wait() {
    if constexpr (kCopyEngine) {
      mbarrier_wait(barriers + slot * 8, parity);
    } else {
      cp_async_wait<kSlots - 1>();
      __syncwarp();
    }
    return ring + slot * kSlotPitch;
  }
  // Frees the chunk that the warp has read: the next copy goes there.
  DEVICE void release() {
    __syncwarp();
    copy_next();
  }
};
