// The stream of 16-bit weights of y[T,N] = epilogue(norm(x)[T,K] W[N,K]^T) for T <= 8 NT rows: how K and a block's shared memory are shared
// out, and a warp's ring of weights.
//
// A tile is 16 rows of W: rows lo .. lo+7 and hi .. hi+7, chosen by the caller. Tensor-core operand A is the tile, operand
// B eight tokens, and k is permuted inside each 32: lane (g, t) = lane / 4, lane % 4 holds k = 32 j + 8 t .. + 7 of rows lo+g and
// hi+g and of token g, 16 contiguous bytes each. So W and x stay row-major and nothing is shuffled between lanes.
// K is cut into units of 64, the units into kWarps * CLUSTER runs, one a warp: a warp streams its run of every tile of its
// group through its own ring in shared memory and nobody else touches that ring. Every lane copies exactly the bytes that
// it will read, so a ring needs no barrier at all, only the lane's own wait for its copies.
// The sums of the runs meet in shared memory and are added in order. With SPLIT_WARPS = 1 a warp has whole tiles instead and
// takes the runs one after the other: it keeps more sums, but x of a step of many rows is read once for 8 times as many tiles.
// The runs, the order of their units and the order in which runs are added depend on K and CLUSTER alone, never on T, NT, GROUP
// or SPLIT_WARPS: a row's bits are the same in every step.
#pragma once
#include "cluster.cuh"
#include "copy.cuh"
#include "mma.cuh"

constexpr int K = IN_FEATURES, NT = TOKEN_TILES;
#ifdef ROW_PITCH
constexpr int kRowPitch = ROW_PITCH;                          // elements between rows of x
#else
constexpr int kRowPitch = K;
#endif
#ifdef ONE_ROW
constexpr bool kOneRow = true;
#else
constexpr bool kOneRow = false;
#endif
#ifdef HELD_CHUNKS
constexpr bool kOneRound = true;                              // all weights of the block are asked for before x
constexpr int kHeld = HELD_CHUNKS;                            // of these, the chunks of a warp that come to registers
#else
constexpr bool kOneRound = false;
constexpr int kHeld = 0;
#endif
#ifdef ROWS_FIRST
constexpr bool kRowsFirst = true;
#else
constexpr bool kRowsFirst = false;
#endif
constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kRowWarps = kWarps / SPLIT_WARPS;               // warps with tiles of their own
constexpr int kUnits = K / 64;                                // units of 64 k in a row
constexpr int kOwners = kWarps * CLUSTER;                     // runs of K; warps that share the work on x
constexpr int kOwnUnits = (kUnits + kOwners - 1) / kOwners;   // the most units in a run, and of x that a warp copies and normalises
constexpr int kTokens = 8 * NT;
constexpr int kBlockTiles = GROUP * kRowWarps;                // tiles of a block (and its cluster) at a time
constexpr int kPairs = GROUP * 64 / CLUSTER;                  // outputs (lo row, hi row, token) of a token tile that a block finishes
constexpr int kThreadPairs = (kPairs + kThreads - 1) / kThreads;
constexpr int kUnitSplit = NT == 8 ? 2 : 1;                   // NT = 8 holds half a unit of x in registers at a time
constexpr int kChunkBytes = 2048;                             // 16 rows x 64 k
constexpr int kXUnitBytes = kOneRow ? 128 : NT * 1024 - HALF_TILE * 512;   // 8 NT tokens x 64 k, or four tokens less, or one row
constexpr int kTilePairs = kOneRow ? 8 : 64;                  // pairs of sums (lo row, hi row, token) that a warp leaves of a tile

// Shared memory: rings of weights | x | partial sums of the warps | sums of the blocks | norm weights | square sums | epilogue.
constexpr int kPartialBytes = SPLIT_WARPS > 1 ? kWarps * GROUP * kTilePairs * 8 : 0;
constexpr int kExchangeBytes = CLUSTER == 1 ? 0 : CLUSTER * NT * kPairs * 8;
constexpr int kNormBytes = NORM ? kWarps * kOwnUnits * 128 : 0;
constexpr int kSquareBytes = kOwners * kTokens * 4;
constexpr int kEpilogueBytes = kTokens * 16;
constexpr int kFixedBytes = kPartialBytes + kExchangeBytes + kNormBytes + kSquareBytes + kEpilogueBytes;
// x of the block's runs stays in shared memory for all its tiles (kResident) if that leaves the weights a quarter of the space, or each
// ring room for a run of GROUP tiles, or if a run has no more than kStreamedUnits units. Else x is streamed again for each group of
// tiles: each warp streams its run through kStreamedUnits places. Where all warps need all of x, the block streams it together, a stage
// of kWarps units at a time through two places.
constexpr int kXLimit = SMEM_BYTES * 3 / 5 / (kWarps * kXUnitBytes);
constexpr int kStreamedUnits = SPLIT_WARPS == 1 ? 2 : NT <= 2 && kXLimit >= 4 ? 4 : kXLimit >= 2 ? 2 : 1;
constexpr int kResidentRing = SMEM_BYTES - kFixedBytes - kWarps * kOwnUnits * kXUnitBytes;
constexpr bool kResident = kOwnUnits <= kStreamedUnits || kResidentRing >= SMEM_BYTES / 4 ||
                           kResidentRing >= kWarps * kOwnUnits * GROUP * kChunkBytes;
constexpr bool kStaged = !kResident && SPLIT_WARPS == 1;
constexpr int kXSlots = kResident ? kOwnUnits : kStreamedUnits;   // units of x of each warp that are there at a time
constexpr int kXBytes = kWarps * kXSlots * kXUnitBytes;
constexpr int kSlots = (SMEM_BYTES - kFixedBytes - kXBytes) / (kWarps * kChunkBytes);
constexpr int kRingBytes = kWarps * kSlots * kChunkBytes;
constexpr int kXOffset = kRingBytes, kPartialOffset = kXOffset + kXBytes, kExchangeOffset = kPartialOffset + kPartialBytes;
constexpr int kNormOffset = kExchangeOffset + kExchangeBytes, kSquareOffset = kNormOffset + kNormBytes;
constexpr int kEpilogueOffset = kSquareOffset + kSquareBytes;

constexpr int kNoGroup = 1 << 24;                 // a group past every other, whose tile numbers still fit an int

// kPending: commit groups that may still be in flight when a chunk is read. Every chunk of weights is one commit group. A
// streamed unit of x is part of the last commit group of the unit kXSlots before it, a stage of x is part of the first commit
// group of the stage before it.
constexpr int kWeightPending = kUnitSplit == 1 ? kSlots - 1 : kSlots - GROUP;
constexpr int kXPending = kStaged ? kWarps * GROUP - 1 : (kXSlots - 1) * GROUP;
constexpr int kPending = kResident || kWeightPending < kXPending ? kWeightPending : kXPending;

static_assert(K % 64 == 0, "K must be a multiple of 64");
static_assert(!HALF_TILE || NT == 2, "only 9 to 12 rows leave half a tile out");
static_assert(NT == 1 || NT == 2 || NT == 4 || NT == 8, "NT must be 1, 2, 4 or 8");
static_assert(SPLIT_WARPS == kWarps || (SPLIT_WARPS == 1 && LINEAR >= 2 && CLUSTER == 1 && kUnits % kWarps == 0),
              "SPLIT_WARPS must be 8, or 1 for gate_up and head, CLUSTER 1 and K a multiple of 512");
static_assert(!kOneRow || (NT == 1 && SPLIT_WARPS == kWarps && kResident), "one row lies whole in shared memory, and all warps share its tiles");
static_assert(!kOneRound || (kOneRow && kSlots + kHeld >= GROUP * kOwnUnits), "each chunk of one round has a place of its own");
static_assert(CLUSTER == 1 || CLUSTER == 2, "CLUSTER must be 1 or 2");
static_assert(kSlots >= 1 && kPending >= 0 && (kUnitSplit == 1 || kSlots >= GROUP), "SMEM_BYTES is too small for GROUP and NT");

#if CLUSTER > 1
#define LINEAR_BOUNDS __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(kThreads, NT <= 2 ? 2 : 1)
#else
#define LINEAR_BOUNDS __launch_bounds__(kThreads, NT <= 2 ? 2 : 1)
#endif

// Rank, barriers and addresses among the blocks that split K: a cluster, or one block alone with its own barrier.
DEVICE int block_rank() {
  uint32_t rank = 0;
  if constexpr (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
DEVICE void group_arrive() {
  if constexpr (CLUSTER > 1) cluster_arrive();
}
DEVICE void group_announce() {
  if constexpr (CLUSTER > 1) cluster_announce();
}
DEVICE void group_wait() {
  if constexpr (CLUSTER > 1) cluster_wait(); else __syncthreads();
}
DEVICE uint32_t block_address(uint32_t address, int rank) {
  if constexpr (CLUSTER > 1) return peer_address(address, rank); else return address;
}
DEVICE void store_peer(uint32_t address, float a) {
  if constexpr (CLUSTER > 1) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(a) : "memory");
  } else {
    store_shared_float(address, a);
  }
}
DEVICE void store_peer(uint32_t address, float a, float b) {
  if constexpr (CLUSTER > 1) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
  } else {
    store_shared2(address, a, b);
  }
}

// The calling lane's place in the product.
struct Lane {
  uint32_t shared;          // start of dynamic shared memory
  int warp, lane, token, quarter;   // token = g (also the row inside a tile half), quarter = t
  int rank;                 // block of the cluster
  int first_unit, units;    // the units of K whose weights the warp reads: its run, or all
  int own_unit, own_units;  // the units of x that the warp copies and normalises
  DEVICE Lane() {
    extern __shared__ __align__(1024) unsigned char memory[];
    shared = shared_address(memory);
    warp = threadIdx.x >> 5, lane = threadIdx.x & 31, token = lane >> 2, quarter = lane & 3;
    rank = block_rank();
    own_unit = (rank * kWarps + warp) * kOwnUnits;
    // Not max(0, min(..)): with a comparison of the result NVRTC 13.0 makes that one VIMNMX with a predicate, which sm_90 refuses.
    const int owner = rank * kWarps + warp, full_owners = kUnits / kOwnUnits;
    own_units = kUnits % kOwners == 0 || owner < full_owners ? kOwnUnits : owner == full_owners ? kUnits % kOwnUnits : 0;
    first_unit = SPLIT_WARPS == 1 ? 0 : own_unit;
    units = SPLIT_WARPS == 1 ? kUnits : own_units;
  }
  // Returns the first of the warp's tiles in a group of tiles.
  DEVICE int tile(int group) const { return group * kBlockTiles + (SPLIT_WARPS == 1 ? warp * GROUP : 0); }
};

// Loads 16 bytes of weights at this place in the program, not kept in L1, with a hint to bring whole lines of 128 bytes to the L2.
DEVICE uint4 load16_lines_now(const void* source) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source)
               : "memory");
  return v;
}

// A lane's part of a chunk of weights as the tensor cores take it: of rows lo + g and hi + g, 16 bytes of each half of the unit.
struct Chunk {
  uint4 lo[2], hi[2];
};

// The warp's stream of weight chunks (a tile x a unit) through its ring. The order: the groups of GROUP tiles in turn, in a group the warp's
// units, in a unit the tiles of the group.
template <class Tiles>
struct WeightStream {
  const Lane& at;
  const Tiles& tiles;
  const scalar_t* column;   // row 0 of W at this lane's first k
  uint32_t ring;
  int group, unit = 0, tile = 0;   // the next chunk to copy
  int slot = 0;                    // the next chunk to read, and where the next copy goes
  Chunk held[kHeld > 0 ? kHeld : 1];   // of one round, the chunks that have no place in the ring

  // Starts the copies that fill the ring, each in a commit group. With held chunks the blocks of several products lie side by side, and all
  // ask for weights ahead. Then a warp asks for a chunk when the one before it is there: what a product waits for, its row above all, would
  // wait behind all that is asked for at once.
  DEVICE WeightStream(const Lane& lane, const Tiles& t, const scalar_t* weight)
      : at(lane), tiles(t), column(weight + lane.first_unit * 64 + lane.quarter * 8), ring(lane.shared + lane.warp * kSlots * kChunkBytes),
        group(lane.units > 0 ? blockIdx.x / CLUSTER : kNoGroup) {
    for (int i = 0; i < kSlots; i++) {
      if (kHeld > 0 && i > 0) cp_async_wait<0>();
      copy_next();
      cp_async_commit();
    }
    if (kHeld > 0) cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < kHeld; i++) hold(held[i], (kSlots + i) / GROUP, (kSlots + i) % GROUP);
  }

  // Loads a chunk of the block's first group to registers.
  DEVICE void hold(Chunk& chunk, int of_unit, int of_tile) const {
    const int index = at.tile(blockIdx.x / CLUSTER) + of_tile;
    if (of_unit >= at.units || index >= tiles.num_tiles) return;
    const scalar_t* const lo = column + static_cast<size_t>(tiles.lo(index, at.token)) * K + of_unit * 64;
    const scalar_t* const hi = column + static_cast<size_t>(tiles.hi(index, at.token)) * K + of_unit * 64;
#pragma unroll
    for (int j = 0; j < 2; j++) chunk.lo[j] = load16_lines_now(lo + j * 32), chunk.hi[j] = load16_lines_now(hi + j * 32);
  }

  // Starts the copy of the next chunk into the slot that was read last. The caller commits.
  DEVICE void copy_next() {
    const int index = at.tile(group) + tile;
    if (group < tiles.num_groups && index < tiles.num_tiles) {
      const scalar_t* lo = column + static_cast<size_t>(tiles.lo(index, at.token)) * K + unit * 64;
      const scalar_t* hi = column + static_cast<size_t>(tiles.hi(index, at.token)) * K + unit * 64;
      const uint32_t to = ring + slot * kChunkBytes + at.lane * 16;
      cp_async16_lines(to, lo);
      cp_async16_lines(to + 512, lo + 32);
      cp_async16_lines(to + 1024, hi);
      cp_async16_lines(to + 1536, hi + 32);
    }
    if (++tile == GROUP) {
      tile = 0;
      if (++unit == at.units) unit = 0, group += gridDim.x / CLUSTER;
    }
    slot = slot + 1 == kSlots ? 0 : slot + 1;
  }

  // Returns the lane's 16 bytes of row lo + g (half 0) or hi + g (half 1), k = 32 j + 8 t .. + 7, of the chunk in slot `place`.
  DEVICE uint4 read(int place, int half, int j) const {
    return load_shared(ring + place * kChunkBytes + half * 1024 + j * 512 + at.lane * 16);
  }

  // Returns chunk `i` of one round.
  DEVICE Chunk chunk(int i) const {
    if (i >= kSlots) return held[i - kSlots];
    return {{read(i, 0, 0), read(i, 0, 1)}, {read(i, 1, 0), read(i, 1, 1)}};
  }
};
