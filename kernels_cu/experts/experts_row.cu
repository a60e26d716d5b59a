// Runs a one-row step's experts in one launch: the routing, and the gate_up and down products of the chosen experts.
//
//   formula   chosen, shares and n as in route.cu; then with e = chosen[p], p = 0 .. TOP - 1:
//             inner[p, f] = round(silu(n . Wg[e, f]) * (n . Wu[e, f]));  x[c] = round(x[c] + scale * sum_p shares[p] * (inner[p] . Wd[e, c]))
//   operands  x (K) scalar_t; chosen (TOP) int32, ascending, all -1 for padding (slots has -1), which leaves x as it is; shares (TOP)
//             float; norm (K), router (EXPERTS, K) scalar_t; gate_up (2 EXPERTS INNER, K), the gates of all experts and then their ups,
//             down (EXPERTS K, INNER): scalar_t row-major, or packed as in packed_layout.cuh; next: a weight that a later kernel reads,
//             whose first next_bytes, a multiple of 16, are prefetched into the L2; slots (1) int32; exchanged uint64
//             (2 + TOP * INNER / 2 + 4 TOP K), zero before the first launch: the number of launches, an unused word, the words of
//             inner, and those of the sums that blocks send each other
//   constants IN_FEATURES: K, a multiple of 64, in 4 bits of 128. INNER: columns of down, a multiple of the same. EXPERTS: 1 to 32.
//             TOP: experts of a row, 1 to EXPERTS. ROUTE_WARPS: warps that score the row, as in route.cu. WEIGHT_BITS: 16 or 4.
//             In 4 bits RUNS: runs of the packed layout of gate_up. DOWN_RUNS: those of down. For both SCALE_GROUP: columns that
//             share a scale. ZEROS: 1 has zero points. WARPS: warps of a block, at least ROUTE_WARPS. AHEAD: turns of weights that a
//             warp has on their way.
//             PORTABLE: 1 leaves the copy engine out on sm_90 and later too
//   launch    grid ceil(TOP * INNER / 8 / WARPS), whose blocks must all run at once, block 32 * WARPS, dynamic shared memory: a ring for
//             each warp, or norm and router if they are larger; 2 K bytes for the row; 4 ROUTE_WARPS (1 + EXPERTS) + 132 bytes, rounded
//             up to 16; a quarter of a row of inner for each warp that has a job of down; 256 TOP bytes for each tile (16 rows) of down
//             that is a block's own; 8 AHEAD bytes for each warp
//   numerics  the routing's as in route.cu, the products' as in experts.cu and experts_down.cu, to the bit
//   oracle    NumpyOps.route, experts_gate_up, experts_down
//   source    original
//   layout    As in gate_up_row.cu, every block computes the routing, and each warp has a tile of gate_up, whose weights come through a
//             ring of its own. After the tile, the ring brings the weights of the warp's jobs of down; a job is a quarter of the columns
//             of 16 rows of one expert. So memory is not idle while inner goes from block to block, in words of eight bytes: two columns
//             and the number of the launch that wrote them. A reader polls a word until its number is that of this launch, so there is
//             no flag to write after the data or to read before them. Every block has the same number of whole tiles of down; the jobs
//             of the tiles left over are dealt out to the blocks, and their sums sent in such words
#if !defined(IN_FEATURES) || !defined(INNER) || !defined(EXPERTS) || !defined(TOP) || !defined(ROUTE_WARPS) || !defined(WEIGHT_BITS) || \
    (WEIGHT_BITS == 4 && !defined(RUNS)) || (WEIGHT_BITS == 4 && !defined(DOWN_RUNS)) || (WEIGHT_BITS == 4 && !defined(SCALE_GROUP)) || \
    (WEIGHT_BITS == 4 && !defined(ZEROS)) || !defined(WARPS) || !defined(AHEAD) || !defined(PORTABLE)
#error "a constant is not defined"
#endif
#define HIDDEN IN_FEATURES
#define TOKEN_TILES 1
#include "mbarrier.cuh"
#include "routed_row.cuh"
#include "tagged_words.cuh"

constexpr int kThreads = 32 * WARPS, kAhead = AHEAD;
constexpr int kRingBytes = kAhead * kTurnBytes;   // a warp's ring
constexpr int kTiles = INNER / 8, kDownTiles = K / 16;   // tiles of an expert's gate_up and down
constexpr int kParts = 4, kDownSlices = INNER / kSliceColumns, kPartSlices = (kDownSlices + kParts - 1) / kParts;   // as in experts_down.cu
constexpr int kPartTurns = (kPartSlices + kTogether - 1) / kTogether, kPartBytes = kPartSlices * kSliceColumns * 2;
constexpr int kRowOffset = WARPS * kRingBytes > kRouteBytes ? WARPS * kRingBytes : kRouteBytes, kSumsOffset = kRowOffset + K * 2;
constexpr int kTagOffset = kSumsOffset + ROUTE_WARPS * (1 + EXPERTS) * 4, kSharesOffset = kTagOffset + 4;
constexpr int kPartOffset = (kSharesOffset + 32 * 4 + 15) / 16 * 16;
#if __CUDA_ARCH__ >= 900
constexpr bool kCopyEngine = WEIGHT_BITS == 4 && !PORTABLE;   // one lane starts a turn as one copy; rows of 16 bits do not lie together
#else
constexpr bool kCopyEngine = false;
#endif
static_assert(WARPS >= ROUTE_WARPS, "WARPS must be at least ROUTE_WARPS");
static_assert(INNER % kSliceColumns == 0, "INNER must be whole slices");

#if WEIGHT_BITS == 16
using DownCopies = TileCopies<INNER, 1>;
#else
using DownCopies = TileCopies<INNER, DOWN_RUNS>;
#endif

// How the tiles of down are shared out: each block has kOwnTiles alone; the kLeftTiles left over are dealt out job by job.
constexpr int kGrid = (TOP * kTiles + WARPS - 1) / WARPS, kOwnTiles = kDownTiles / kGrid, kLeftTiles = kDownTiles % kGrid;
constexpr int kTileJobs = TOP * kParts, kOwnJobs = kOwnTiles * kTileJobs, kLeftJobs = kLeftTiles * kTileJobs;
constexpr int kSumWords = TOP * INNER / 2;   // index of the first word of the sums
constexpr int kMostJobs = kOwnJobs + (kLeftJobs + kGrid - 1) / kGrid, kPartWarps = kMostJobs < WARPS ? kMostJobs : WARPS;
constexpr int kFoundOffset = kPartOffset + kPartWarps * kPartBytes;

// Returns the number of the block's jobs: those of its own tiles and those dealt to it.
DEVICE int num_jobs() { return kOwnJobs + (kLeftJobs + static_cast<int>(blockIdx.x)) / kGrid; }

// A job of a warp on down: a quarter of the columns of one tile (16 rows) of one expert. `index` is its number among the block's.
struct Job {
  int tile, place, begin, end;   // the expert's tile; the expert's place among those taken; slices [begin, end)
  int left;                      // the job's number among those of the tiles left over, or -1
  DEVICE explicit Job(int index) {
    const int block = blockIdx.x;
    left = index < kOwnJobs ? -1 : kGrid - 1 - block + (index - kOwnJobs) * kGrid;
    tile = left < 0 ? block + index / kTileJobs * kGrid : kOwnTiles * kGrid + left / kTileJobs;
    const int of_tile = (left < 0 ? index : left) % kTileJobs;
    place = of_tile / kParts, begin = min(of_tile % kParts * kPartSlices, kDownSlices), end = min(begin + kPartSlices, kDownSlices);
  }
};

// The place of the weights of the block's job `number`.
struct JobWeights {
  int row, begin, end;   // first row in the stacked weight; slices [begin, end), none if the block has no such job
  DEVICE JobWeights(uint32_t taken, int number) {
    const Job job(number);
    row = expert_at(taken, job.place) * K + job.tile * 16, begin = job.begin, end = number < num_jobs() ? job.end : 0;
  }
};

// The stream of a warp's weights through a ring in shared memory that no other warp uses: the turns of its tile of gate_up, then
// those of its jobs. A turn is a group of copies or, with the copy engine, a copy whose bytes the barrier of its place counts.
struct Stream {
  TileSource first;
  const void* down;
  uint32_t taken, ring, barriers;
  bool has_tile;
  JobWeights own;              // of the warp's first job
  int place = 0, parity = 0;   // in the ring, of the next turn to be read

  // Initialises the warp's barriers, before the first copies. A barrier of the warp must follow.
  DEVICE static void prepare(uint32_t barriers) {
    if constexpr (kCopyEngine) {
      if (threadIdx.x % 32 > 0) return;
      for (int i = 0; i < kAhead; i++) mbarrier_init(barriers + i * 8, 1);
      mbarrier_init_fence();
    }
  }
  // Starts the copies of one turn, the slices from `slice` on that are below `end`, to place `to` of the ring.
  template <class Copies>
  DEVICE void copy(const Copies& source, int slice, int end, int to) const {
    const uint32_t slot = ring + to * kTurnBytes;
    const int count = max(0, min(kTogether, end - slice));
    if constexpr (kCopyEngine) {
      mbarrier_arrive_expect(barriers + to * 8, count * kSlotBytes);
      if (count > 0) source.copy_together(slot, slice, count, barriers + to * 8);
    } else {
#pragma unroll
      for (int s = 0; s < kTogether; s++)
        if (s < count) source.copy(slot + s * kSlotBytes, slice + s);
      cp_async_commit();
    }
  }
  // Starts the copies of turn `turn` of the stream to place `to` of the ring.
  DEVICE void copy(int turn, int to) const {
    if (kCopyEngine && threadIdx.x % 32 > 0) return;
    if (turn < kTurns) return copy(first, turn * kTogether, has_tile ? kSlices : 0, to);
    const int later = turn - kTurns;
    if (later < kPartTurns) return copy(DownCopies(down, {own.row, 8}), own.begin + later * kTogether, own.end, to);
    if (kCopyEngine && kMostJobs <= WARPS) return;   // no warp has a second job
    const JobWeights job(taken, threadIdx.x / 32 + later / kPartTurns * WARPS);
    copy(DownCopies(down, {job.row, 8}), job.begin + later % kPartTurns * kTogether, job.end, to);
  }
  DEVICE void begin() const {
#pragma unroll
    for (int turn = 0; turn < kAhead; turn++) copy(turn, turn);
  }
  // Waits for turn `turn`, reads it into `held`, and starts the copies of the turn that takes its place in the ring.
  DEVICE void take(Slice (&held)[kTogether], int turn) {
    if (kCopyEngine) {
      mbarrier_wait(barriers + place * 8, parity);
    } else {
      cp_async_wait<kAhead - 1>();
      __syncwarp();
    }
#pragma unroll
    for (int s = 0; s < kTogether; s++) TileSource::read(held[s], ring + place * kTurnBytes + s * kSlotBytes);
    __syncwarp();
    copy(turn + kAhead, place);
    if (++place == kAhead) place = 0, parity ^= 1;
  }
};

// Waits for the words [from, end) of inner, two columns each and at most kPartBytes / 4, and writes the columns to shared memory at
// `to`. All lanes.
DEVICE void collect(const TaggedWords& words, uint32_t to, int from, int end) {
  constexpr int kEach = (kPartBytes / 8 + 31) / 32, kBatch = kEach < 12 ? kEach : 12;   // pairs of words for each lane, in all and at a time
  const int lane = threadIdx.x % 32;
  if (from >= end) return;
  words.wait_for_any(from + (end - from) / 8 * (lane / 4));   // polls eight words only: once one is there, the others follow soon
#pragma unroll 1
  for (int first = 0; first < kEach; first += kBatch) {
    uint4 held[kBatch];
    const auto place_of = [&](int i) { return ((first + i) * 32 + lane) * 2; };
#pragma unroll
    for (int i = 0; i < kBatch; i++) held[i] = from + place_of(i) < end ? words.absent() : words.present();
    bool is_missing;
    do {
      is_missing = false;
#pragma unroll
      for (int i = 0; i < kBatch; i++)
        if (!words.has_come(held[i])) held[i] = words.load2(from + place_of(i));
#pragma unroll
      for (int i = 0; i < kBatch; i++) is_missing |= !words.has_come(held[i]);
    } while (is_missing);
#pragma unroll
    for (int i = 0; i < kBatch; i++)
      if (from + place_of(i) < end) store_shared_words(to + place_of(i) * 4, held[i].x, held[i].z);
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL(experts_row)(scalar_t* x, int* __restrict__ chosen, float* __restrict__ shares, uint64_t* exchanged,
                        const scalar_t* __restrict__ norm, const scalar_t* __restrict__ router, const void* __restrict__ gate_up,
                        const void* __restrict__ down, const void* __restrict__ next, int next_bytes, const int* slots, float eps,
                        float scale) {
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t shared = shared_address(memory), row = shared + kRowOffset;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * WARPS + warp;
  pdl_launch_dependents();
  const uint32_t barriers = shared + kFoundOffset + kOwnJobs * 64 + warp * kAhead * 8;
  Stream::prepare(barriers);
  const RouteWeights route_weights{norm, router, shared};
  route_weights.begin();
  pdl_wait();
  const bool is_padding = slots[0] < 0;
  if (threadIdx.x == kThreads - 1) store_shared_word(shared + kTagOffset, 1 + load_now(reinterpret_cast<const int*>(exchanged)));
  const float score = score_row(*reinterpret_cast<RouteSums*>(memory + kSumsOffset), route_weights, x, eps,
                                [&](int column, uint4 piece) { store_shared(row + column * 2, piece); });
  const Choice choice(score);
  const TaggedWords words{exchanged, load_shared_word(shared + kTagOffset)};

  const int place = index / kTiles, tile = index % kTiles, expert = expert_at(choice.taken, place);
  Stream stream{{gate_up, {static_cast<int64_t>(expert) * INNER + tile * 8, static_cast<int64_t>(EXPERTS) * INNER}},
                down, choice.taken, shared + warp * kRingBytes, barriers, place < TOP,
                JobWeights(choice.taken, warp)};
  if (kCopyEngine) async_proxy_fence();   // the copies overwrite norm and router, which other threads have read
  if (!is_padding) stream.begin();
  if (index == 0) choice.store(chosen, shares, score, is_padding);
  if (is_padding) return;
  if (const float share = choice.share(score); warp == 0) store_shared_float(shared + kSharesOffset + lane * 4, share);

  Slice held[kTogether];
  Sums first_sums[1] = {};
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn++) {
    stream.take(held, turn);
    if (stream.has_tile) multiply_turn<kSlices % kTogether == 0>(first_sums, held, row, turn * kTogether, 0, kSlices);
  }
  if (stream.has_tile) words.store_tile(index * 4, activated(first_sums[0]));
  // Only a part of down is still to come from memory, so the warp prefetches its share of the weight that is read next.
  constexpr int kFetches = kGrid * WARPS;
  const int own_bytes = (next_bytes / 16 + kFetches - 1) / kFetches * 16, fetched = index * own_bytes;
  if (lane == 0 && fetched < next_bytes)
    prefetch_to_l2(static_cast<const unsigned char*>(next) + fetched, min(own_bytes, next_bytes - fetched));

  const uint32_t part = shared + kPartOffset + warp * kPartBytes, found = shared + kFoundOffset;
  int turn = kTurns;
#pragma unroll 1
  for (int number = warp; number < num_jobs(); number += WARPS) {
    const Job job(number);
    const int row_words = job.place * (INNER / 2);
    collect(words, part, row_words + job.begin * (kSliceColumns / 2), row_words + job.end * (kSliceColumns / 2));
    Sums sums[1] = {};
#pragma unroll 1
    for (int slice = job.begin; slice < job.begin + kPartTurns * kTogether; slice += kTogether) {
      stream.take(held, turn++);
      multiply_turn<false>(sums, held, part, slice, job.begin, job.end);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float sum = sums[0][0][half * 2];
        if (job.left < 0) store_shared_float(found + number * 64 + half * 32 + lane, sum);
        else words.store(kSumWords + job.left * 16 + half * 8 + lane / 4, __float_as_uint(sum));
      }
    }
    __syncwarp();
  }
  const auto column_of = [&](int i) { return (blockIdx.x + i / 16 * kGrid) * 16 + i % 16; };   // the column of x that item i finishes
  const int finished = (kOwnTiles + (static_cast<int>(blockIdx.x) < kLeftTiles)) * 16;   // columns that the block finishes
  const scalar_t before = static_cast<int>(threadIdx.x) < finished ? load_now(x + column_of(threadIdx.x)) : from_float(0.0f);
  __syncthreads();
  for (int i = threadIdx.x; i < finished; i += kThreads) {
    const int local = i / 16, row_of = i % 16;
    float products[kTileJobs];
    if (local < kOwnTiles) {
#pragma unroll
      for (int job = 0; job < kTileJobs; job++) products[job] = load_shared_float(found + (local * kTileJobs + job) * 64 + row_of * 4);
    } else {
      words.wait_for(products, kSumWords + (blockIdx.x * kTileJobs) * 16 + row_of, 16);
    }
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < TOP; p++) {
      float product = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; part++) product += products[p * kParts + part];
      sum = fmaf(load_shared_float(shared + kSharesOffset + expert_at(stream.taken, p) * 4), product, sum);
    }
    x[column_of(i)] = from_float(fmaf(scale, sum, to_float(i < kThreads ? before : x[column_of(i)])));
  }
  if (index == 0 && lane == 0) words.count_launch();   // the block's tile of down took all of inner: every block has read the number
}
